"""`sparkgap chat`: a conversation on the terminal, or with messages from a pipe, one a line."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from sparkgap.cli import loading
from sparkgap.cli.console import print_error, print_note, use_utf8_output, write_text
from sparkgap.cli.conversation import Conversation
from sparkgap.cli.options import EngineOptions, ModelArgument, SamplingOptions, with_model_argument
from sparkgap.cli.report import footer
from sparkgap.cli.streaming import Answer, show_stream
from sparkgap.config import SamplingParams
from sparkgap.errors import PromptError, SparkgapError

if TYPE_CHECKING:
    from sparkgap.api import LLM

_HELP = """\
/system TEXT  set the system message; /system alone shows it, /system - removes it
/clear        forget the conversation
/help         show this list
/bye          leave, as do /exit, /quit and Ctrl-D
Ctrl-C stops an answer. A message of several lines starts and ends with \"\"\"."""


def chat(
    context: typer.Context,
    engine: EngineOptions,
    sampling: SamplingOptions,
    model_argument: ModelArgument = None,
    system: Annotated[str | None, typer.Option("--system", help="System message of the conversation.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the speed of each answer.")] = False,
) -> None:
    """Talk with a model.

    Decoding is greedy unless --temperature says otherwise.
    """
    use_utf8_output()
    config = with_model_argument(context, engine, model_argument).config()
    params = sampling.params()
    llm = loading.load_llm(config)
    if llm.tokenizer.chat_template is None:
        raise PromptError(f"model {config.model} has no chat template; use sparkgap generate --raw with it")
    if sys.stdin is None:
        raise PromptError("standard input is closed; chat reads its messages there")
    interactive = sys.stdin.isatty()
    session = ChatSession(llm, params, system=system, verbose=verbose, interactive=interactive)
    session.run(_TypedMessages() if interactive else _piped_messages())


class ChatSession:
    """One conversation: takes messages and commands, writes answers.

    Args:
        llm: the model.
        params: of every answer.
        system: system message, if any.
        verbose: write the speed after each answer.
        interactive: go on after an error instead of ending with it.
    """

    def __init__(
        self, llm: "LLM", params: SamplingParams, *, system: str | None, verbose: bool, interactive: bool
    ) -> None:
        self.llm = llm
        self.params = params
        self.conversation = Conversation(system)
        self.verbose = verbose
        self.interactive = interactive

    def run(self, messages: Iterator[str]) -> None:
        """Serve messages until they end or `/bye`.

        Raises:
            SparkgapError: a message cannot be served and the session is not interactive.
        """
        if self.interactive:
            print_note(f"{self.llm.config.model}; /help shows the commands, Ctrl-D leaves")
        while True:
            try:
                message = next(messages, None)
                if message is None or message.strip() in ("/bye", "/exit", "/quit"):
                    return
                if message.strip():
                    self._serve(message)
            except SparkgapError as error:
                if not self.interactive:
                    raise
                print_error(str(error))

    def _serve(self, message: str) -> None:
        command, _, argument = message.strip().partition(" ")
        if command == "/help":
            print_note(_HELP)
        elif command == "/clear":
            self.conversation.clear()
            print_note("the conversation is forgotten")
        elif command == "/system":
            self._set_system(argument.strip())
        elif command.startswith("/") and command[1:].isalpha():
            raise PromptError(f"unknown command {command}; /help shows the commands")
        else:
            self.answer(message)

    def _set_system(self, text: str) -> None:
        if text:
            self.conversation.system = None if text == "-" else text
        print_note(f"system message: {self.conversation.system or '(none)'}")

    def answer(self, message: str) -> None:
        """Answer one message and remember both; a message that cannot be answered is forgotten.

        Raises:
            PromptError: it alone is longer than the context, or the chat template refuses it.
        """
        limit = self.llm.info()["max_model_len"]
        messages, dropped = self.conversation.fit(message, self.llm.tokenizer, limit, self.params.max_tokens or limit)
        if dropped:
            print_note(
                f"the conversation is longer than the context of {limit} tokens: its {dropped} oldest "
                f"{'exchange was' if dropped == 1 else 'exchanges were'} dropped; /clear starts afresh, "
                "a larger --max-model-len holds more"
            )
        with _interrupt_flag() as interrupted:
            answer = show_stream(self.llm.stream_chat(messages, self.params), lambda: bool(interrupted))
        if answer.text:
            self.conversation.add(message, answer.text)
        self._note_end(answer)

    def _note_end(self, answer: Answer) -> None:
        if answer.stopped:
            print_note("stopped")
        elif answer.last is not None and self.verbose:
            print_note(footer(answer.last, answer.num_tokens))
        elif answer.last is not None and answer.last.outputs[0].finish_reason == "length":
            print_note("the answer reached its limit of tokens; see --max-tokens and --max-model-len")


@contextmanager
def _interrupt_flag() -> Iterator[list[int]]:
    """A list that becomes non-empty at the first Ctrl-C, so that it ends an answer between two steps of the engine
    and not inside one. The second Ctrl-C interrupts as usual."""
    caught: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, previous)


def _piped_messages() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise PromptError(f"line {number} of standard input is not valid UTF-8; convert it to UTF-8") from error


class _TypedMessages:
    """Messages typed on a terminal, with line editing and a history."""

    def __init__(self) -> None:
        import readline  # noqa: F401 - gives input() its line editing

    def __iter__(self) -> "_TypedMessages":
        return self

    def __next__(self) -> str:
        while True:
            try:
                return self._read()
            except EOFError:
                write_text("\n")
                raise StopIteration from None
            except KeyboardInterrupt:
                write_text("\n")
                print_note("Ctrl-D or /bye leaves")
            except UnicodeError:
                raise PromptError("that is not valid UTF-8; check the terminal's encoding") from None

    def _read(self) -> str:
        message = input(">>> ")
        if message.startswith('"""'):
            message = message[3:]
            while not message.rstrip().endswith('"""'):
                message += "\n" + input("... ")
            message = message.rstrip()[:-3]
        message.encode()  # undecodable input arrives as lone surrogates
        return message
