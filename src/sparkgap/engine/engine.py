"""Requests in, outputs out: one step at a time."""

import functools
import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from sparkgap.config import EngineConfig, FinishReason, SamplingParams
from sparkgap.engine.blocks import BlockManager
from sparkgap.engine.completion import Completion
from sparkgap.engine.detokenizer import Tokenizer
from sparkgap.engine.intake import Intake, ModelLimits
from sparkgap.engine.outputs import RequestOutput
from sparkgap.engine.pacing import PrefillPacer
from sparkgap.engine.prefix import PrefixCache
from sparkgap.engine.request import OutputKind, Request
from sparkgap.engine.scheduler import Schedule, Scheduler
from sparkgap.engine.stats import EngineCounters, EngineStats
from sparkgap.errors import ConfigError, EngineError, QueueFullError
from sparkgap.graphs.captured import CHUNK_ROWS
from sparkgap.rounds.pipeline.runner import PipelinedRunner
from sparkgap.rounds.sequence import RoundOutput, Runner, Sequence

_logger = logging.getLogger(__name__)


class Engine:
    """Serves requests together. Not thread-safe: its owner calls one method at a time; `stats` is for any thread.

    A step is a decode round of all running sequences whose prompts are computed, then one pass over prompt chunks;
    so running sequences go on while a long prompt is read.

    Args:
        runner: computes rounds.
        tokenizer: text to tokens and back.
        model: the model's limits.
        config: limits and sizes of requests, batches and blocks, and the seed are read.
        num_blocks: KV blocks that the runner's caches hold.
        reads_ahead: whether a position's KV is made of the token after it, too (`DraftNetwork.reads_ahead`).
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        model: ModelLimits,
        config: EngineConfig,
        num_blocks: int,
        *,
        reads_ahead: bool = False,
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.model = model
        self.config = config
        blocks = BlockManager(num_blocks, config.block_size)
        self._prefixes = PrefixCache(blocks, enabled=config.enable_prefix_caching, reads_ahead=reads_ahead)
        self._pacer = PrefillPacer(
            config.max_num_batched_tokens,
            config.max_decode_stretch,
            config.prefill_tokens_beside_decodes,
            multiple=CHUNK_ROWS[0],
        )
        self.scheduler = Scheduler(
            blocks,
            self._prefixes,
            self._pacer,
            max_num_seqs=config.max_num_seqs,
            max_model_len=model.max_model_len,
            num_lookahead_tokens=runner.num_lookahead_tokens,
            num_rounds_ahead=runner.num_rounds_ahead if isinstance(runner, PipelinedRunner) else 1,
        )
        self._pipelined = runner if isinstance(runner, PipelinedRunner) else None
        self._intake = Intake(tokenizer, model, self.scheduler, config.seed)
        self._requests: dict[str, Request] = {}
        self._owners: dict[int, tuple[Request, Completion]] = {}
        self._moved: dict[str, Request] = {}
        self._deadlines: dict[str, float] = {}
        self._num_queued = 0
        self._counters = EngineCounters()
        self._stats = self._snapshot()

    @property
    def stats(self) -> EngineStats:
        """The engine after its last step or change of requests."""
        return self._stats

    def has_unfinished_requests(self) -> bool:
        """Whether a step has something to do."""
        return bool(self._requests or self._moved)

    def has_rounds_in_flight(self) -> bool:
        """Whether a step would free blocks, though their requests have ended."""
        return bool(self._in_flight())

    def make_request(
        self,
        prompt: str | Seq[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        output_kind: OutputKind = "delta",
    ) -> Request:
        """Check a prompt (text or token ids) and its parameters; nothing is queued yet.

        Raises:
            PromptError: the prompt is empty, too long, or has ids that are no tokens.
            ConfigError: a parameter does not fit the model.
        """
        return self._intake.make_request(prompt, params, request_id=request_id, output_kind=output_kind)

    def add(self, request: Request) -> None:
        """Queue a request; its clock starts.

        Raises:
            ConfigError: a request with this id is unfinished.
            QueueFullError: `max_queued_requests` wait already.
        """
        if request.request_id in self._requests:
            raise ConfigError(f"request id {request.request_id} is in use; give each request its own")
        self._check_queue()
        request.start_clock()
        self._requests[request.request_id] = request
        self._num_queued += 1
        if request.deadline_s is not None:
            self._deadlines[request.request_id] = request.deadline_s
        for completion in request.completions:
            self._owners[completion.sequence.sequence_id] = (request, completion)
            self.scheduler.add(completion.sequence)
        self._stats = self._snapshot()

    def add_request(
        self,
        prompt: str | Seq[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        output_kind: OutputKind = "delta",
    ) -> str:
        """Check and queue a request; its id. Raises what `make_request` and `add` raise."""
        request = self.make_request(prompt, params, request_id=request_id, output_kind=output_kind)
        self.add(request)
        return request.request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and free all it holds; its last output, None if it is not in the engine."""
        self._moved.pop(request_id, None)
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._end(request, "abort")
        self._stats = self._snapshot()
        return request.output()

    def step(self) -> list[RequestOutput]:
        """Compute one step; outputs of requests that moved on. A failure in computing ends its requests only.

        After an interrupt (Ctrl-C) while it schedules or computes, which is where nearly all of its time goes, the
        next step computes anew what was left half done, and no other request loses anything.
        """
        try:
            self._compute_step()
            outputs = [request.output() for request in self._moved.values()]
        except BaseException:
            self._restart()
            raise
        finally:
            self._stats = self._snapshot()
        self._moved = {}
        return [output for output in outputs if output is not None]

    def _compute_step(self) -> None:
        self._end_expired()
        schedule = self.scheduler.schedule(self._in_flight())
        for sequence in schedule.preempted:
            self.runner.release(sequence)
            self._owners[sequence.sequence_id][0].num_preemptions += 1
            self._counters.num_preemptions += 1
        for sequence, num_cached_tokens in schedule.admitted:
            self._start(self._owners[sequence.sequence_id][0], num_cached_tokens)
        started_s = time.perf_counter()
        has_decoded = self._decode(schedule.decodes)
        num_prompt_tokens = self._prefill(schedule)
        if has_decoded and schedule.decodes:
            self._pacer.add_step(len(schedule.decodes), num_prompt_tokens, time.perf_counter() - started_s)

    def _decode(self, sequences: list[Sequence]) -> bool:
        """One round of each sequence: carried by the host, or through the pipeline, whose results come a round late.

        Returns:
            Whether a round has given its results.
        """
        direct = self._submit(sequences)
        if direct:
            self._compute(direct, lambda: self.runner.decode(direct))
        has_decoded = self._consume() or bool(direct)
        self._counters.num_decode_rounds += has_decoded
        return has_decoded

    def _prefill(self, schedule: Schedule) -> int:
        """One pass over prompt chunks, if there are any; how many tokens they have."""
        # A failed round may have ended requests that have another completion among the prompts.
        chunks = [chunk for chunk in schedule.chunks if chunk.sequence.sequence_id in self._owners]
        if not chunks:
            return 0
        num_tokens = sum(chunk.end - chunk.sequence.num_computed_tokens for chunk in chunks)
        self._compute([chunk.sequence for chunk in chunks], lambda: self.runner.prefill(chunks))
        self._counters.num_prefill_passes += 1
        return num_tokens

    def _start(self, request: Request, num_cached_tokens: int) -> None:
        if not request.is_started:
            request.start(num_cached_tokens)
            self._num_queued -= 1

    def _end_expired(self) -> None:
        """End the requests whose deadlines have passed."""
        if not self._deadlines:
            return
        now = time.perf_counter()
        for request_id in [name for name, deadline_s in self._deadlines.items() if deadline_s <= now]:
            request = self._requests[request_id]
            self._moved[request_id] = request
            self._end(request, "timeout")

    def _in_flight(self) -> Mapping[int, int]:
        """Rounds of each sequence that are submitted and not consumed, by its id."""
        return {} if self._pipelined is None else self._pipelined.in_flight()

    def _submit(self, decodes: list[Sequence]) -> list[Sequence]:
        """Give the pipeline the rounds that it takes, as many as fit; the sequences that decode without it."""
        runner = self._pipelined
        if runner is None:
            return decodes
        pipelined, direct = runner.split(decodes)
        while batch := runner.next_round(pipelined):
            self._compute(batch, functools.partial(runner.submit, batch))
            pipelined = [sequence for sequence in pipelined if sequence.sequence_id in self._owners]
        return [sequence for sequence in direct if sequence.sequence_id in self._owners]

    def _consume(self) -> bool:
        """Hand out what the oldest round in flight gave, while the one behind it runs; whether there was one."""
        runner = self._pipelined
        if runner is None or not (sequences := runner.oldest):
            return False
        self._compute(list(sequences), runner.consume)
        self.scheduler.free_retired(runner.in_flight())
        return True

    def _restart(self) -> None:
        """Forget all that is computed but not the tokens; nobody knows how far an interrupted step came."""
        if self._pipelined is not None:
            self._pipelined.reset()
        for request, completion in list(self._owners.values()):
            self.runner.release(completion.sequence)
            if completion.finished:
                del self._owners[completion.sequence.sequence_id]
                if request.finished:
                    self._drop(request)
        self.scheduler.restart(completion.sequence for _, completion in self._owners.values())

    def _check_queue(self) -> None:
        limit = self.config.max_queued_requests
        if limit is None:
            return
        # Requests that arrive between two steps are in the queue though there may be a place for them.
        places = max(self.config.max_num_seqs - self.scheduler.num_running, 0)
        if self._num_queued >= limit + places:
            raise QueueFullError(
                f"{self._num_queued} requests wait, and max_queued_requests is {limit}; try again later"
            )

    def _compute(self, sequences: list[Sequence], run: Callable[[], Seq[RoundOutput | None]]) -> None:
        """Run a pass over `sequences`, if any, and hand out what it gave."""
        if not sequences:
            return
        outputs = self._guarded(run, len(sequences))
        ended_s = time.perf_counter()
        for sequence, output in zip(sequences, outputs, strict=True):
            # A sequence whose request failed within this pass has no owner any more.
            owner = self._owners.get(sequence.sequence_id)
            if owner is None:
                continue
            if output is None:
                self._counters.last_progress_s = ended_s
                self._prefixes.publish(sequence)
                continue
            request, completion = owner
            self._moved[request.request_id] = request
            if output.error is not None:
                request.error = output.error
                self._end(request, "abort")
                continue
            self._counters.last_progress_s = ended_s
            self._append(request, completion, output)

    def _append(self, request: Request, completion: Completion, output: RoundOutput) -> None:
        sequence, counters = completion.sequence, self._counters
        if not request.has_tokens:
            counters.num_prompt_tokens += len(request.prompt_token_ids)
        before = len(sequence.output_token_ids)
        request.append(completion, output)
        counters.num_generated_tokens += len(sequence.output_token_ids) - before
        counters.speculation.add(output)
        self._prefixes.publish(sequence)
        if completion.finished:
            assert completion.finish_reason is not None
            counters.finished[completion.finish_reason] += 1
            self._forget(sequence)
            if request.finished:
                self._drop(request)

    def _guarded(self, run: Callable[[], Seq[RoundOutput | None]], num_sequences: int) -> Seq[RoundOutput | None]:
        try:
            return run()
        except Exception as error:
            _logger.debug("a pass over %d sequences failed", num_sequences, exc_info=True)
            reason = str(error).strip().split("\n", maxsplit=1)[0]
            failure = EngineError(f"computing with model {self.model.name} failed: {type(error).__name__}: {reason}")
            failure.__cause__ = error
            return [RoundOutput(error=failure)] * num_sequences

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Take a request out before its time."""
        for completion in request.completions:
            if not completion.finished:
                completion.finish(reason)
                self._counters.finished[reason if request.error is None else "error"] += 1
                self._forget(completion.sequence)
        self._drop(request)

    def _forget(self, sequence: Sequence) -> None:
        if self._in_flight().get(sequence.sequence_id):
            self.scheduler.retire(sequence)
        else:
            self.scheduler.remove(sequence)
        self.runner.release(sequence)
        del self._owners[sequence.sequence_id]

    def _drop(self, request: Request) -> None:
        if self._requests.pop(request.request_id, None) is not None and not request.is_started:
            self._num_queued -= 1
        self._deadlines.pop(request.request_id, None)

    def _snapshot(self) -> EngineStats:
        scheduler, blocks, counters = self.scheduler, self.scheduler.blocks, self._counters
        speculation = counters.speculation
        return EngineStats(
            num_running_sequences=scheduler.num_running,
            num_waiting_sequences=scheduler.num_waiting,
            num_requests=len(self._requests),
            num_queued_requests=self._num_queued,
            num_blocks=blocks.num_blocks,
            num_used_blocks=blocks.num_blocks - blocks.num_free_blocks,
            num_reusable_blocks=blocks.num_reusable_blocks,
            prefix_cache_queried_tokens=self._prefixes.num_queried_tokens,
            prefix_cache_hit_tokens=self._prefixes.num_hit_tokens,
            num_preemptions=counters.num_preemptions,
            num_decode_rounds=counters.num_decode_rounds,
            num_prefill_passes=counters.num_prefill_passes,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_generated_tokens=counters.num_generated_tokens,
            num_finished=dict(counters.finished),
            num_draft_rounds=speculation.rounds,
            drafted_by_position=tuple(speculation.verified),
            accepted_by_position=tuple(speculation.accepted),
            num_not_speculated=dict(speculation.not_speculated),
            last_progress_s=counters.last_progress_s,
        )
