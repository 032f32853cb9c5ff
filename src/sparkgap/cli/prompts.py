"""Where a prompt comes from: an argument, a file or standard input."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sparkgap.errors import ConfigError, PromptError


@dataclass(frozen=True)
class PromptSource:
    """The one prompt of a command, and how the model is asked."""

    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads standard input.", show_default=False)] = None
    prompt_file: Annotated[Path | None, typer.Option("--prompt-file", help="Read the prompt from a file.")] = None
    system: Annotated[str | None, typer.Option("--system", help="System message before the prompt.")] = None
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the model's chat template.")
    ] = False

    def read(self) -> str:
        """The prompt's text. Raises what `read_prompt` raises."""
        return read_prompt(self.prompt, self.prompt_file)

    def check(self) -> None:
        """Raises ConfigError when the options contradict each other."""
        if self.raw and self.system is not None:
            raise ConfigError("--system needs the chat template that --raw turns off; use one of them")


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt's text. One line break at the end of a file or of standard input is not part of it.

    Args:
        argument: the prompt itself, or `-` for standard input.
        file: a file that holds the prompt, or `-` for standard input.

    Raises:
        PromptError: no prompt or two, an unreadable file, not UTF-8, or empty.
    """
    if (argument is None) == (file is None):
        have = "no prompt" if argument is None else "two prompts"
        raise PromptError(f"{have}: give one as an argument, with --prompt-file FILE, or - to read standard input")
    if argument == "-" or file == Path("-"):
        text = _decode(_read_standard_input(), "standard input").removesuffix("\n").removesuffix("\r")
    elif file is not None:
        text = _decode(_read_file(file), f"prompt file {file}").removesuffix("\n").removesuffix("\r")
    else:
        text = argument or ""
        _check_argument(text)
    if not text:
        raise PromptError("the prompt is empty; give some text")
    return text


def _read_standard_input() -> bytes:
    if sys.stdin is None:
        raise PromptError("standard input is closed; give the prompt as an argument or with --prompt-file FILE")
    return sys.stdin.buffer.read()


def _read_file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise PromptError(f"cannot read prompt file {file}: {reason}; check the path") from error


def _decode(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{what} is not valid UTF-8 at byte {error.start}; convert it to UTF-8") from error


def _check_argument(text: str) -> None:
    """Python hands on bytes of the command line that are no text as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError("the prompt on the command line is not valid UTF-8; convert it to UTF-8") from error
