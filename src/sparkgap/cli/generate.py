"""`sparkgap generate`: answer one prompt."""

from collections.abc import Generator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkgap.cli import loading
from sparkgap.cli.console import print_json, print_note, use_utf8_output, write_text
from sparkgap.cli.options import EngineOptions, SamplingOptions
from sparkgap.cli.prompts import PromptSource
from sparkgap.cli.report import footer, generation_report
from sparkgap.cli.streaming import show_stream
from sparkgap.config import SamplingParams
from sparkgap.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from sparkgap.api import LLM
    from sparkgap.engine.outputs import RequestOutput


def generate(
    engine: EngineOptions,
    sampling: SamplingOptions,
    asked: PromptSource,
    n: Annotated[int, typer.Option("-n", help="Number of answers.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", help="Most probable tokens to report a position; needs --json.")
    ] = None,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Print the answer when it is complete.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Report as one JSON object.")] = False,
) -> None:
    """Answer one prompt.

    The prompt is one user message of the model's chat template, if it has one; --raw continues the text as it is.
    Decoding is greedy unless --temperature says otherwise.
    """
    use_utf8_output()
    text = asked.read()
    config = engine.config()
    params = sampling.params(n=n, logprobs=logprobs)
    asked.check()
    if logprobs is not None and not as_json:
        raise ConfigError("--logprobs are part of the JSON report; add --json")
    llm = loading.load_llm(config)
    request = make_request(llm, text, system=asked.system, raw=asked.raw)
    if as_json:
        output = complete(llm, request, params)
        print_json(generation_report(output, params, llm.graph_counts()))
    elif no_stream or n > 1:
        _print_complete(complete(llm, request, params))
    else:
        _print_stream(_stream(llm, request, params))


def make_request(llm: "LLM", text: str, *, system: str | None, raw: bool) -> str | list[dict[str, str]]:
    """The prompt as text to continue, or as the messages of a chat."""
    if raw or llm.tokenizer.chat_template is None:
        if system is not None:
            raise PromptError(f"model {llm.config.model} has no chat template, so it takes no --system message")
        return text
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": text}]


def complete(llm: "LLM", request: Any, params: SamplingParams) -> "RequestOutput":
    """The whole answer to what `make_request` gave."""
    outputs = llm.generate([request], params) if isinstance(request, str) else llm.chat(request, params)
    return outputs[0]


def _stream(llm: "LLM", request: Any, params: SamplingParams) -> Generator["RequestOutput", None, None]:
    return llm.stream(request, params) if isinstance(request, str) else llm.stream_chat(request, params)


def _print_complete(output: "RequestOutput") -> None:
    several = len(output.outputs) > 1
    for completion in output.outputs:
        if several:
            print_note(f"answer {completion.index + 1}")
        write_text(completion.text + "\n")
    print_note(footer(output, sum(len(completion.token_ids) for completion in output.outputs)))


def _print_stream(stream: Generator["RequestOutput", None, None]) -> None:
    answer = show_stream(stream)
    if answer.last is not None:
        print_note(footer(answer.last, answer.num_tokens))
