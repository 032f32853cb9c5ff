"""The program in this process, on a model that needs no network: commands are about text and errors."""

import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from sparkgap.cli import loading, main
from sparkgap.config import EngineConfig, FinishReason, SamplingParams
from sparkgap.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from sparkgap.errors import PromptError


class FakeTokenizer:
    """One token a word."""

    chat_template: str | None = "some template"

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if any(message["content"] == "forbidden" for message in messages):
            raise PromptError("the chat template failed: no such word")
        return list(range(sum(len(message["content"].split()) for message in messages)))

    def id_to_token(self, token_id: int) -> str | None:
        return f"<{token_id}>"


@dataclass
class FakeLLM:
    """Answers with its own words, one token each, and remembers what it was asked."""

    config: EngineConfig = field(default_factory=EngineConfig)
    words: tuple[str, ...] = ("one", " two", " three")
    finish_reason: FinishReason = "stop"
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    max_model_len: int = 64
    requests: list[Any] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    before_word: Callable[[int], None] = lambda index: None
    streams_closed: int = 0
    drafts: dict[str, Any] = field(default_factory=dict)

    def info(self) -> dict[str, Any]:
        return {"max_model_len": self.max_model_len}

    def graph_counts(self) -> dict[str, Any]:
        return {
            "captures_at_startup": 5,
            "captures_since_startup": 0,
            "replays": {"target": 3, "draft": 0, "context": 0},
            "eager": {"too many": 2},
        }

    def generate(self, prompts: Sequence[Any], params: SamplingParams) -> list[RequestOutput]:
        return [self._output(prompt, params, self.words) for prompt in prompts]

    def chat(self, messages: Any, params: SamplingParams) -> list[RequestOutput]:
        return [self._output(messages, params, self.words)]

    def stream(self, request: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        try:
            for index, word in enumerate(self.words):
                self.before_word(index)
                yield self._output(request, params, (word,), finished=index + 1 == len(self.words))
        finally:
            self.streams_closed += 1

    stream_chat = stream

    def _output(
        self, request: Any, params: SamplingParams, words: Sequence[str], finished: bool = True
    ) -> RequestOutput:
        if finished:
            self.requests.append(request)
            self.params.append(params)
        token_ids = list(range(len(words)))
        outputs = [
            CompletionOutput(
                index,
                "".join(words),
                token_ids,
                logprobs=None if params.logprobs is None else [self._table(token_id) for token_id in token_ids],
                finish_reason=self.finish_reason if finished else None,
            )
            for index in range(params.n)
        ]
        metrics = None
        if finished:
            metrics = RequestMetrics(12.0, 12.5, 37.0, 80.5, 2, params.n * len(self.words), **self.drafts)
        return RequestOutput("request-0", None, [1, 2], outputs, finished, metrics)

    @staticmethod
    def _table(token_id: int) -> dict[int, Logprob]:
        return {token_id: Logprob(-1.5, 2, "chosen"), 99: Logprob(-0.5, 1, "best")}


class Result(NamedTuple):
    """What a run of the program left."""

    status: int
    out: str
    err: str


class Program:
    """Runs `sparkgap ARGUMENTS` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str, stdin: bytes = b"") -> Result:
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        captured = self._capsys.readouterr()
        assert isinstance(exit_info.value.code, int)
        return Result(exit_info.value.code, captured.out, captured.err)


@pytest.fixture
def sparkgap(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(monkeypatch, capsys)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()

    def load(config: EngineConfig) -> FakeLLM:
        fake.config = config
        return fake

    monkeypatch.setattr(loading, "load_llm", load)
    return fake
