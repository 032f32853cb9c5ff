"""Requests in, outputs out: one step at a time."""

import functools
import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from sparkgap.config import EngineConfig, SamplingParams
from sparkgap.engine.blocks import BlockManager
from sparkgap.engine.completion import Completion
from sparkgap.engine.detokenizer import Tokenizer
from sparkgap.engine.outputs import RequestOutput
from sparkgap.engine.request import OutputKind, Request
from sparkgap.engine.scheduler import Scheduler
from sparkgap.errors import ConfigError, EngineError, PromptError
from sparkgap.rounds.pipeline.runner import PipelinedRunner
from sparkgap.rounds.random import MASK_64, derive_seed
from sparkgap.rounds.sequence import RoundOutput, Runner, Sequence

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelLimits:
    """What the engine must know of the model it serves.

    Attributes:
        name: named in errors.
        vocab_size: ids below it are tokens.
        eos_token_ids: tokens that end a sequence.
        max_model_len: most positions of a sequence.
    """

    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int


class Engine:
    """Serves requests together. Not thread-safe: its owner calls one method at a time.

    A step is a decode round of all running sequences whose prompts are computed, then one pass over prompt chunks;
    so running sequences go on while a long prompt is read.

    Args:
        runner: computes rounds.
        tokenizer: text to tokens and back.
        model: the model's limits.
        config: `max_num_seqs`, `max_num_batched_tokens`, `block_size` and `seed` are read.
        num_blocks: KV blocks that the runner's caches hold.
    """

    def __init__(
        self, runner: Runner, tokenizer: Tokenizer, model: ModelLimits, config: EngineConfig, num_blocks: int
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.model = model
        self.config = config
        self.scheduler = Scheduler(
            BlockManager(num_blocks, config.block_size),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=model.max_model_len,
            num_lookahead_tokens=runner.num_lookahead_tokens,
            num_rounds_ahead=runner.num_rounds_ahead if isinstance(runner, PipelinedRunner) else 1,
        )
        self._pipelined = runner if isinstance(runner, PipelinedRunner) else None
        self._requests: dict[str, Request] = {}
        self._owners: dict[int, tuple[Request, Completion]] = {}
        self._moved: dict[str, Request] = {}
        self._num_requests = 0
        self._num_sequences = 0

    def has_unfinished_requests(self) -> bool:
        """Whether a step has something to do."""
        return bool(self._requests or self._moved)

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
        text = prompt if isinstance(prompt, str) else None
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        params.check_vocabulary(self.model.vocab_size)
        self._check_prompt(token_ids)
        max_tokens = self._max_tokens(len(token_ids), params)
        number = self._num_requests
        self._num_requests += 1
        seed = derive_seed(self.config.seed, number) if params.seed is None else params.seed & MASK_64
        return Request(
            request_id=f"request-{number}" if request_id is None else request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            completions=[
                self._make_completion(i, token_ids, params, seed if i == 0 else derive_seed(seed, i), max_tokens)
                for i in range(params.n)
            ],
            output_kind=output_kind,
        )

    def add(self, request: Request) -> None:
        """Queue a request; its clock starts.

        Raises:
            ConfigError: a request with this id is unfinished.
        """
        if request.request_id in self._requests:
            raise ConfigError(f"request id {request.request_id} is in use; give each request its own")
        request.start_clock()
        self._requests[request.request_id] = request
        for completion in request.completions:
            self._owners[completion.sequence.sequence_id] = (request, completion)
            self.scheduler.add(completion.sequence)

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
        self._end(request)
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
        self._moved = {}
        return [output for output in outputs if output is not None]

    def _compute_step(self) -> None:
        schedule = self.scheduler.schedule(self._in_flight())
        for sequence in schedule.preempted:
            self.runner.release(sequence)
            self._owners[sequence.sequence_id][0].num_preemptions += 1
        decodes = self._submit(schedule.decodes)
        self._compute(decodes, lambda: self.runner.decode(decodes))
        self._consume()
        # A failed round may have ended requests that have another completion among the prompts.
        chunks = [chunk for chunk in schedule.chunks if chunk.sequence.sequence_id in self._owners]
        self._compute([chunk.sequence for chunk in chunks], lambda: self.runner.prefill(chunks))

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

    def _consume(self) -> None:
        """Hand out what the oldest round in flight gave, while the one behind it runs."""
        runner = self._pipelined
        if runner is not None and (sequences := runner.oldest):
            self._compute(list(sequences), runner.consume)
            self.scheduler.free_retired(runner.in_flight())

    def _restart(self) -> None:
        """Forget all that is computed but not the tokens; nobody knows how far an interrupted step came."""
        if self._pipelined is not None:
            self._pipelined.reset()
        for request, completion in list(self._owners.values()):
            self.runner.release(completion.sequence)
            if completion.finished:
                del self._owners[completion.sequence.sequence_id]
                if request.finished:
                    self._requests.pop(request.request_id, None)
        self.scheduler.restart(completion.sequence for _, completion in self._owners.values())

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise PromptError("the prompt is empty: it has no tokens")
        for token_id in token_ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise PromptError(f"the prompt has {token_id!r} where a token id must be")
            if not 0 <= token_id < self.model.vocab_size:
                raise PromptError(
                    f"the prompt has token id {token_id}, outside {self.model.name}'s vocabulary of "
                    f"{self.model.vocab_size} tokens"
                )

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Most output tokens, within the context."""
        context = self.model.max_model_len
        if num_prompt_tokens >= context:
            raise PromptError(
                f"the prompt has {num_prompt_tokens} tokens and max_model_len is {context}, which must leave room "
                "for output; shorten the prompt or raise max_model_len"
            )
        room = context - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > max_tokens:
            raise ConfigError(
                f"min_tokens is {params.min_tokens}, and after a prompt of {num_prompt_tokens} tokens "
                f"max_model_len {context} leaves room for {room}"
            )
        blocks = self.scheduler.blocks
        needed = self.scheduler.most_blocks(num_prompt_tokens + max_tokens)
        if needed > blocks.num_blocks:
            raise PromptError(
                f"a prompt of {num_prompt_tokens} tokens with {max_tokens} output tokens needs {needed} KV blocks "
                f"of {blocks.block_size} positions, and the cache has {blocks.num_blocks}; lower max_tokens or "
                "raise kv_cache_memory_bytes"
            )
        return max_tokens

    def _make_completion(
        self, index: int, prompt_token_ids: list[int], params: SamplingParams, seed: int, max_tokens: int
    ) -> Completion:
        sequence = Sequence(self._num_sequences, params, seed, prompt_token_ids, max_output_tokens=max_tokens)
        self._num_sequences += 1
        return Completion(index, sequence, max_tokens, self.tokenizer, self.model.eos_token_ids)

    def _compute(self, sequences: list[Sequence], run: Callable[[], Seq[RoundOutput | None]]) -> None:
        """Run a pass over `sequences` and hand out what it gave."""
        if not sequences:
            return
        for sequence, output in zip(sequences, self._guarded(run, len(sequences)), strict=True):
            # A sequence whose request failed within this pass has no owner any more.
            owner = self._owners.get(sequence.sequence_id)
            if owner is None or output is None:
                continue
            request, completion = owner
            self._moved[request.request_id] = request
            if output.error is not None:
                request.error = output.error
                self._end(request)
                continue
            request.append(completion, output)
            if completion.finished:
                self._forget(sequence)
                if request.finished:
                    del self._requests[request.request_id]

    def _guarded(self, run: Callable[[], Seq[RoundOutput | None]], num_sequences: int) -> Seq[RoundOutput | None]:
        try:
            return run()
        except Exception as error:
            _logger.debug("a pass over %d sequences failed", num_sequences, exc_info=True)
            reason = str(error).strip().split("\n", maxsplit=1)[0]
            failure = EngineError(f"computing with model {self.model.name} failed: {type(error).__name__}: {reason}")
            failure.__cause__ = error
            return [RoundOutput(error=failure)] * num_sequences

    def _end(self, request: Request) -> None:
        """Take a request out before its time."""
        for completion in request.completions:
            if not completion.finished:
                completion.finish("abort")
                self._forget(completion.sequence)
        del self._requests[request.request_id]

    def _forget(self, sequence: Sequence) -> None:
        if self._in_flight().get(sequence.sequence_id):
            self.scheduler.retire(sequence)
        else:
            self.scheduler.remove(sequence)
        self.runner.release(sequence)
        del self._owners[sequence.sequence_id]
