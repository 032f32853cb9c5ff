"""The Python face: `LLM`, with the names and habits that vLLM's users expect."""

import difflib
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from sparkgap.catalog.checkpoint import Checkpoint
from sparkgap.catalog.progress import ProgressReporter
from sparkgap.catalog.tokenizer import Tokenizer
from sparkgap.config import DEFAULT_MODEL, EngineConfig, SamplingParams
from sparkgap.engine.description import describe
from sparkgap.engine.engine import Engine
from sparkgap.engine.home import HomeProcess
from sparkgap.engine.loading import load_engine
from sparkgap.engine.outputs import RequestOutput
from sparkgap.engine.phases import time_phases
from sparkgap.engine.request import Request
from sparkgap.engine.scoring import hidden_states, next_token_probabilities
from sparkgap.engine.stats import EngineStats
from sparkgap.engine.tracing import Recording, record
from sparkgap.errors import ConfigError, EngineError, PromptError
from sparkgap.prompts import Message, Prompt, as_params, as_prompts, prompt_content


class LLM:
    """A loaded model that generates text.

    Methods may be called from several threads; their requests are then served together. In a process that was forked
    from this one they raise EngineClosedError: load the model there, or start processes by `spawn`.

    Args:
        model: catalog name, directory, `.gguf` file or `hf:owner/name`.
        progress: told of downloads.
        **settings: the other fields of `EngineConfig`.

    Attributes:
        config: the settings.

    Raises:
        ConfigError: a setting is unknown, out of range, or does not fit the model or the machine.
        ModelNotFoundError, DownloadError, CheckpointError, UnsupportedModelError: the model cannot be had.
    """

    def __init__(
        self, model: str = DEFAULT_MODEL, *, progress: ProgressReporter | None = None, **settings: Any
    ) -> None:
        _check_names(settings)
        self.config = EngineConfig(model=model, **settings)
        self._loaded = load_engine(self.config, progress)
        self._engine = self._loaded.engine
        self._home = HomeProcess()
        self._engine_lock = threading.RLock()
        self._outputs: dict[str, deque[RequestOutput]] = {}
        self._is_stepping = False
        self._dropped: list[str] = []

    @property
    def engine(self) -> Engine:
        """What computes the requests, for an owner that steps it itself and uses no other method of this object."""
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, with its chat template."""
        return self._loaded.checkpoint.tokenizer

    @property
    def checkpoint(self) -> Checkpoint:
        """The model's files."""
        return self._loaded.checkpoint

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self._loaded.target.device

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete one prompt or many.

        Args:
            prompts: text, token ids or a mapping with `prompt` or `prompt_token_ids`; or a list of them.
            sampling_params: for all prompts, or one for each.
            use_progress: show a progress bar on a terminal.

        Returns:
            One output a prompt, in order.

        Raises:
            PromptError: a prompt is empty, too long or not a prompt; nothing was computed.
            ConfigError: the parameters do not fit the model or the number of prompts.
            EngineError: computing failed.
        """
        listed = as_prompts(prompts)
        params = as_params(sampling_params, len(listed))
        with self._lock:
            requests = [
                self._engine.make_request(prompt_content(prompt), p, output_kind="final")
                for prompt, p in zip(listed, params, strict=True)
            ]
        return self._run(requests, use_progress)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_progress: bool = False,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, each rendered by the model's chat template.

        Args:
            messages: a conversation (messages with `role` and `content`), or a list of them.
            sampling_params, use_progress: as for `generate`.
            **template_variables: passed to the template.

        Raises:
            PromptError: the template refuses a conversation, or the model has none; and as `generate`.
        """
        if isinstance(messages, str | Mapping) or not isinstance(messages, Seq):
            raise PromptError(f"messages must be a list of objects with role and content, got {messages!r}")
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        prompts = [self._render(conversation, template_variables) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_progress=use_progress)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Complete one prompt, giving what is new as it comes; the last output has `finished` and `metrics`.

        The prompt is checked at once; the request starts with the first item asked for. Closing the iterator, or
        dropping it, ends the request.

        Raises:
            PromptError, ConfigError: as `generate`.
            EngineError: computing failed (raised by the iterator).
        """
        with self._lock:
            request = self._engine.make_request(prompt_content(prompt), *as_params(sampling_params, 1))
        return self._iterate(request)

    def stream_chat(
        self, messages: Seq[Message], sampling_params: SamplingParams | None = None, **template_variables: Any
    ) -> Generator[RequestOutput, None, None]:
        """Answer one conversation, giving what is new as it comes; as `stream`."""
        return self.stream(self._render(messages, template_variables), sampling_params)

    def next_token_probabilities(self, prompts: Seq[Seq[int]], sampling_params: SamplingParams) -> Tensor:
        """The distribution that the token after each prompt (token ids) is drawn from, without speculation.

        Returns:
            float32 `[prompts, vocab]`.
        """
        with self._lock:
            return next_token_probabilities(self._loaded, prompts, sampling_params)

    def time_phases(self, context_tokens: int, accepted_rows: int = 1) -> dict[str, float]:
        """Milliseconds of each phase of one sequence's round, run by itself: `engine.phases.time_phases`."""
        with self._lock:
            return time_phases(self._loaded, context_tokens, accepted_rows)

    @contextmanager
    def trace(self, *, torch_operations: bool = False) -> Iterator[Recording]:
        """Record what the engine does for the requests that this thread gives it inside the block.

        Other threads' requests wait until its end. `bench.trace` makes reports and trace files of a recording.

        Args:
            torch_operations: see `engine.tracing.record`.

        Raises:
            ConfigError: torch computes the passes, so that there is nothing to record.
            EngineError: another recording is under way in this process.
        """
        with self._lock, record(self._loaded, torch_operations=torch_operations) as recording:
            yield recording

    def hidden_states(self, token_ids: Seq[int]) -> Tensor:
        """What `logits` takes, of each token of a text, computed in one pass beside the engine.

        Returns:
            `[tokens, hidden_size]`.

        Raises:
            PromptError: no tokens, more than `max_model_len`, or one outside the vocabulary.
        """
        limits = self._engine.model
        if not 0 < len(token_ids) <= limits.max_model_len:
            raise PromptError(f"a text of {len(token_ids)} tokens must have 1 to {limits.max_model_len}")
        if not all(0 <= token_id < limits.vocab_size for token_id in token_ids):
            raise PromptError(f"a text has a token id outside the vocabulary of {limits.vocab_size} tokens")
        with self._lock:
            return hidden_states(self._loaded.target, list(token_ids))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the token after each of `hidden_states`' rows: float32 `[rows, vocab]`."""
        with self._lock, torch.inference_mode():
            return self._loaded.target.logits(hidden)

    def info(self) -> dict[str, Any]:
        """What is loaded: model, settings as resolved, sizes in bytes."""
        return describe(self._loaded, self.config)

    def graph_counts(self) -> dict[str, Any]:
        """Counters of captured passes since the model was loaded.

        Returns:
            `captures_at_startup`, `captures_since_startup`, `replays` (by family: target, draft, context) and `eager`
            (decode passes outside a declared capacity, by reason).
        """
        with self._lock:
            return self._loaded.graph_counters.report()

    @property
    def stats(self) -> EngineStats:
        """What the engine has done and holds: a snapshot, which waits for no step."""
        return self._engine.stats

    @property
    def _lock(self) -> threading.RLock:
        """Who holds it may use the engine.

        Raises:
            EngineClosedError: this is a forked process, whose copy of the lock may never be released.
        """
        self._home.check()
        return self._engine_lock

    def _render(self, messages: Seq[Message], variables: Mapping[str, Any]) -> dict[str, list[int]]:
        return {"prompt_token_ids": self.tokenizer.encode_chat(messages, **variables)}

    def _run(self, requests: list[Request], use_progress: bool) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        try:
            with self._lock:
                for request in requests:
                    self._add(request)
            with _progress_bar(len(requests), use_progress) as advance:
                for request in requests:
                    finished[request.request_id] = self._next_output(request.request_id)
                    advance(finished[request.request_id])
        finally:
            for request in requests:
                self._drop(request.request_id)
        return [finished[request.request_id] for request in requests]

    def _iterate(self, request: Request) -> Generator[RequestOutput, None, None]:
        try:
            with self._lock:
                self._add(request)
            finished = False
            while not finished:
                output = self._next_output(request.request_id)
                finished = output.finished
                yield output
        finally:
            self._drop(request.request_id)

    def _add(self, request: Request) -> None:
        self._engine.add(request)
        self._outputs[request.request_id] = deque()

    def _next_output(self, request_id: str) -> RequestOutput:
        """The request's next output; steps the engine for everybody until there is one.

        Raises:
            EngineError: computing failed, or the request's last output was lost to an interrupt.
        """
        while True:
            with self._lock:
                waiting = self._outputs[request_id]
                if not waiting:
                    if not self._engine.has_unfinished_requests():
                        raise EngineError(f"{request_id} was interrupted; give it again")
                    self._step()
                if waiting:
                    output = waiting.popleft()
                    break
        if output.error is not None:
            raise output.error
        return output

    def _step(self) -> None:
        self._is_stepping = True
        try:
            for output in self._engine.step():
                self._outputs[output.request_id].append(output)
        finally:
            self._is_stepping = False
            while self._dropped:
                self._drop(self._dropped.pop())

    def _drop(self, request_id: str) -> None:
        """Forget a request, ending it if it still runs."""
        if not self._home.is_here:
            return
        with self._lock:
            if self._is_stepping:
                # The garbage collector may close a stream in the middle of a step, which holds this very lock.
                self._dropped.append(request_id)
                return
            self._engine.abort(request_id)
            self._outputs.pop(request_id, None)
            # The last round in flight would hold blocks for as long as nobody asks for anything.
            while not self._outputs and self._engine.has_rounds_in_flight():
                self._step()


class _Advance:
    """Moves a progress bar by one finished request."""

    def __init__(self, bar: Any = None, task: Any = None) -> None:
        self._bar = bar
        self._task = task
        self._num_tokens = 0

    def __call__(self, output: RequestOutput) -> None:
        if self._bar is not None and output.metrics is not None:
            self._num_tokens += output.metrics.completion_tokens
            self._bar.update(self._task, advance=1, tokens=self._num_tokens)


class _BarOfRequests(AbstractContextManager[_Advance]):
    """A rich progress bar over requests."""

    def __init__(self, num_requests: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"))
        self._bar = Progress(TextColumn("Generating"), *columns, TimeElapsedColumn())
        self._num_requests = num_requests

    def __enter__(self) -> _Advance:
        self._bar.start()
        return _Advance(self._bar, self._bar.add_task("", total=self._num_requests, tokens=0))

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _progress_bar(num_requests: int, wanted: bool) -> AbstractContextManager[_Advance]:
    return _BarOfRequests(num_requests) if wanted else nullcontext(_Advance())


def _check_names(settings: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(EngineConfig)]
    for name in settings:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise ConfigError(f"LLM has no setting {name!r}; {hint}")
