"""The Python face for asyncio: `AsyncLLM`, whose answers are read with `async for`."""

import asyncio
import itertools
import threading
import weakref
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from sparkgap.api import LLM
from sparkgap.catalog.progress import ProgressReporter
from sparkgap.catalog.tokenizer import Tokenizer
from sparkgap.config import DEFAULT_MODEL, EngineConfig, SamplingParams
from sparkgap.engine.outputs import RequestOutput
from sparkgap.engine.request import OutputKind, Request
from sparkgap.engine.stats import EngineStats
from sparkgap.engine.thread import EngineThread
from sparkgap.errors import ConfigError, EngineClosedError, EngineDeadError
from sparkgap.prompts import Message, Prompt, prompt_content

_LONG_PROMPT_CHARACTERS = 4096
"""Longer texts are encoded in another thread, so that the event loop goes on."""

_POLL_S = 0.01


class AsyncLLM:
    """A loaded model that generates text for coroutines; it computes in a thread of its own.

    Requests run together. A request ends when its iterator is closed, or when the task that reads it is cancelled.

    Args:
        model: catalog name, directory, `.gguf` file or `hf:owner/name`.
        progress: told of downloads.
        **settings: the other fields of `EngineConfig`.

    Raises:
        ConfigError: a setting is unknown, out of range, or does not fit the model or the machine.
        ModelNotFoundError, DownloadError, CheckpointError, UnsupportedModelError: the model cannot be had.
    """

    def __init__(
        self, model: str = DEFAULT_MODEL, *, progress: ProgressReporter | None = None, **settings: Any
    ) -> None:
        self._start(LLM(model, progress=progress, **settings))

    @classmethod
    def from_llm(cls, llm: LLM) -> "AsyncLLM":
        """Take over a model that is loaded already; `llm` itself generates nothing any more."""
        made = cls.__new__(cls)
        made._start(llm)
        return made

    def _start(self, llm: LLM) -> None:
        self._llm = llm
        self._engine = llm.engine
        self._making = threading.Lock()
        self._numbers = itertools.count()
        self._is_draining = False
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="sparkgap-encode")
        self._readers = _Readers()
        readers = self._readers
        self._thread = EngineThread(llm.engine, deliver=readers.deliver, refuse=readers.refuse, fail=readers.fail)
        self._stop = weakref.finalize(self, _stop, self._thread, self._encoder)

    @property
    def config(self) -> EngineConfig:
        """The settings."""
        return self._llm.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, with its chat template."""
        return self._llm.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most positions of a sequence."""
        return self._engine.model.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._engine.model.vocab_size

    @property
    def num_unfinished_seqs(self) -> int:
        """Sequences of started requests that have not ended."""
        return self._readers.num_sequences

    @property
    def stats(self) -> EngineStats:
        """What the engine has done and holds: a snapshot, which waits for no step."""
        return self._engine.stats

    @property
    def error(self) -> EngineDeadError | None:
        """Why no request can be served any more, None while they can."""
        return self._thread.error

    def stalled_for_s(self) -> float:
        """Seconds in which requests were there and no token was computed, of a prompt or an answer; 0 when idle."""
        return self._thread.stalled_for_s()

    def info(self) -> dict[str, Any]:
        """What is loaded; as `LLM.info`."""
        return self._llm.info()

    def graph_counts(self) -> dict[str, Any]:
        """Counters of captured passes; as `LLM.graph_counts`."""
        return self._llm.graph_counts()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        output_kind: OutputKind = "delta",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt; an output for each step with what is new, or (`final`) one with everything.

        Args:
            prompt: text, token ids or a mapping with `prompt` or `prompt_token_ids`.
            sampling_params: None has vLLM's defaults.
            request_id: unique among the requests that run; None makes one.
            output_kind: `delta` or `final`.

        Raises:
            PromptError: the prompt is empty, too long or not a prompt.
            ConfigError: the parameters do not fit the model, or the id is in use.
            QueueFullError: `max_queued_requests` wait already.
            EngineError: computing failed; EngineDeadError when it will go on failing.
        """
        request = await self.prepare(prompt, sampling_params, request_id=request_id, output_kind=output_kind)
        stream = self.start(request)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def chat(
        self,
        messages: Seq[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        output_kind: OutputKind = "delta",
        **template_variables: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation, rendered by the model's chat template; as `generate`.

        Args:
            messages: objects with `role` and `content`.
            sampling_params, request_id, output_kind: as for `generate`.
            **template_variables: passed to the template.
        """
        token_ids = await self.encode_chat(messages, **template_variables)
        outputs = self.generate(token_ids, sampling_params, request_id=request_id, output_kind=output_kind)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises PromptError, and EngineClosedError where a thread of the engine is needed."""
        if len(text) <= _LONG_PROMPT_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens)
        self._thread.check_process()
        loop = asyncio.get_running_loop()
        try:
            encoding = loop.run_in_executor(self._encoder, self.tokenizer.encode, text, add_special_tokens)
        except RuntimeError as error:  # the executor takes nothing more after `close`
            raise EngineClosedError("the engine is shutting down and takes no requests") from error
        return await encoding

    async def encode_chat(self, messages: Seq[Message], /, **template_variables: Any) -> list[int]:
        """Token ids of a chat's prompt. Raises PromptError."""
        text = self.tokenizer.render_chat(messages, **template_variables)
        return await self.encode(text, add_special_tokens=False)

    async def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        output_kind: OutputKind = "delta",
    ) -> Request:
        """Check a prompt and its parameters, for `start`. Arguments and errors are those of `generate`."""
        self._thread.check_process()
        content = prompt_content(prompt)
        text = content if isinstance(content, str) else None
        token_ids = await self.encode(content) if isinstance(content, str) else content
        with self._making:
            request = self._engine.make_request(
                token_ids,
                SamplingParams() if sampling_params is None else sampling_params,
                request_id=f"async-{next(self._numbers)}" if request_id is None else request_id,
                output_kind=output_kind,
            )
        request.prompt = text
        return request

    def start(self, *requests: Request) -> "RequestStream":
        """Let prepared requests run, all at once; their outputs, until the last of them has ended.

        Raises:
            ConfigError: a request's id is in use.
            EngineDeadError, EngineClosedError: the engine takes no requests any more.
        """
        if self._is_draining:
            raise EngineClosedError("the engine is shutting down and takes no requests")
        stream = RequestStream(requests, self._readers, self._thread)
        try:
            for request in requests:
                self._readers.open(request, stream)
                self._add(request)
        except BaseException:
            stream.close()
            raise
        return stream

    def _add(self, request: Request) -> None:
        try:
            self._thread.add(request)
        except BaseException:
            self._readers.forget(request.request_id)
            raise

    def abort(self, request_id: str) -> None:
        """End a request; its last output has the finish reason `abort`. Nothing if there is none of this id."""
        self._thread.abort(request_id)

    async def drain(self) -> None:
        """Take no new requests (`EngineClosedError`) and wait until those that run have ended."""
        self._is_draining = True
        while len(self._readers):
            await asyncio.sleep(_POLL_S)

    def close(self, timeout_s: float | None = None) -> bool:
        """End all requests and the thread that computes them.

        Returns:
            Whether the thread has ended; False when it still computed a step after `timeout_s`.
        """
        self._is_draining = True
        self._readers.fail(EngineClosedError("the engine was closed before the request ended"))
        self._stop.detach()
        self._encoder.shutdown(wait=False)
        return self._thread.stop(timeout_s)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)


def _stop(thread: EngineThread, encoder: ThreadPoolExecutor) -> None:
    thread.stop()
    encoder.shutdown(wait=False)


class RequestStream:
    """Outputs of running requests as they come, read with `async for` in the event loop that started them.

    An output tells its request by `request_id`; the last of each request has `finished` and `metrics`. Reading raises
    EngineError when computing a request failed, which ends the others of the stream as well.
    """

    def __init__(self, requests: Seq[Request], readers: "_Readers", thread: EngineThread) -> None:
        self.loop = asyncio.get_running_loop()
        self._readers = readers
        self._thread = thread
        self._unread = {request.request_id for request in requests}
        self._items: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._unread:
            raise StopAsyncIteration
        item = await self._items.get()
        error = item if isinstance(item, Exception) else item.error
        if error is not None:
            self.close()
            raise error
        assert not isinstance(item, Exception)
        if item.finished:
            self._unread.discard(item.request_id)
        return item

    def close(self) -> None:
        """End the requests that still run; nothing more can be read."""
        for request_id in self._unread:
            if self._readers.leave(request_id, self):
                self._thread.abort(request_id)
        self._unread.clear()

    def put(self, item: RequestOutput | Exception) -> None:
        """Add an output, or what reading is to raise; called in the event loop's thread."""
        if not isinstance(item, Exception) and item.finished:
            self._readers.forget(item.request_id)
        self._items.put_nowait(item)


class _Readers:
    """Requests that the engine has not finished, and who reads them.

    The engine gives one last output of each request that was added, also of one that nobody reads any more. Until then
    a request counts, and its id is in use.
    """

    def __init__(self) -> None:
        self._streams: dict[str, tuple[RequestStream | None, int]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def num_sequences(self) -> int:
        """Sequences of all requests that have not ended."""
        return sum(number for _, number in list(self._streams.values()))

    def open(self, request: Request, stream: RequestStream) -> None:
        """`stream` reads a request from now on.

        Raises:
            ConfigError: a request of that id has not ended.
        """
        if request.request_id in self._streams:
            raise ConfigError(f"request id {request.request_id} is in use; give each request its own")
        self._streams[request.request_id] = (stream, request.params.n)

    def leave(self, request_id: str, stream: RequestStream) -> bool:
        """`stream` reads a request no more; whether it runs and so must be ended."""
        reader, number = self._streams.get(request_id, (None, 0))
        if reader is not stream:
            return False
        self._streams[request_id] = (None, number)
        return True

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._streams.pop(request_id, None)

    def deliver(self, outputs: Seq[RequestOutput]) -> None:
        """Called in the engine's thread: one wake-up of each event loop a step."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, RequestOutput | Exception]]] = {}
        for output in outputs:
            stream, _ = self._streams.get(output.request_id, (None, 0))
            if stream is not None:
                batches.setdefault(stream.loop, []).append((stream, output))
            elif output.finished:
                self.forget(output.request_id)
        for loop, batch in batches.items():
            if not _put_in(loop, batch):
                for _, item in batch:
                    if not isinstance(item, Exception) and item.finished:
                        self.forget(item.request_id)

    def refuse(self, request_id: str, error: Exception) -> None:
        """Called in the engine's thread: a request was not taken, and whoever reads it raises `error`."""
        stream, _ = self._streams.pop(request_id, (None, 0))
        if stream is not None:
            _put_in(stream.loop, [(stream, error)])

    def fail(self, error: Exception) -> None:
        """Called in any thread: every request has ended, and whoever reads one raises `error`."""
        streams = {stream for stream, _ in list(self._streams.values()) if stream is not None}
        self._streams.clear()
        for stream in streams:
            _put_in(stream.loop, [(stream, error)])


def _put_in(loop: asyncio.AbstractEventLoop, batch: Seq[tuple[RequestStream, RequestOutput | Exception]]) -> bool:
    """Put outputs in their streams; False when the loop is closed, so that nobody is left to read them."""

    def put() -> None:
        """Hand the batch out, in the event loop's thread."""
        for stream, item in batch:
            stream.put(item)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:
        return False
    return True
