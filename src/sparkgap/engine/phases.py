"""What the phases of a round cost, each run by itself."""

import time
from collections.abc import Callable

import torch

from sparkgap.config import SamplingParams
from sparkgap.engine.loading import LoadedEngine
from sparkgap.errors import ConfigError, EngineError
from sparkgap.rounds.batching import RowSpan, block_tables, forward_batch
from sparkgap.rounds.pipeline.runner import PipelinedRunner
from sparkgap.rounds.sequence import Runner, Sequence

DECODE = "decode"
"""A target pass of 1 row."""

VERIFY = "verify"
"""A target pass of N + 1 rows."""

DRAFT = "draft"
"""A draft pass with its sequential heads."""

CONTEXT = "context"
"""A context update of accepted rows."""

ROUND = "round"
"""A whole round, with what the host does; in the task pipeline one of several that are chained."""

_CHAINED_ROUNDS = 8
"""Rounds that are chained to measure one; fewer where the context ends before."""


@torch.inference_mode()
def time_phases(loaded: LoadedEngine, context_tokens: int, accepted_rows: int) -> dict[str, float]:
    """Run each phase of one sequence's round once, and measure it.

    The sequence lies in free KV blocks, over whatever they hold: no phase takes a time that depends on values, but for
    a whole round's context update, which computes what the round happens to accept.

    Args:
        loaded: an engine without unfinished requests.
        context_tokens: positions before the round's, at least 1.
        accepted_rows: rows of the context update, from 1 to N + 1.

    Returns:
        Milliseconds: `DECODE` and `ROUND`, and of an engine with a drafter `VERIFY`, `DRAFT` and `CONTEXT` too.

    Raises:
        EngineError: requests are running.
        ConfigError: the model, its KV cache or the drafter has no room for so many positions.
    """
    engine = loaded.engine
    if engine.has_unfinished_requests():
        raise EngineError("phases can be timed only while no request is running")
    runner, chosen = engine.runner, loaded.speculation
    width, last = runner.num_lookahead_tokens, engine.model.max_model_len
    longest = last if chosen is None else chosen.drafter.max_context_length
    rounds = max(1, min(_CHAINED_ROUNDS, (min(longest, last) - context_tokens) // width))
    end = context_tokens + (rounds if isinstance(runner, PipelinedRunner) else 1) * width
    blocks = engine.scheduler.blocks
    sequence = Sequence(-1, SamplingParams(temperature=0), 0, [0] * context_tokens, [0], context_tokens)
    if context_tokens > longest or end > last or not blocks.extend(sequence.block_table, end):
        raise ConfigError(f"there is no room for a round after {context_tokens} tokens; take a shorter prompt")
    try:
        times = {name: _time_ms(run) for name, run in _phases(loaded, sequence, accepted_rows).items()}
        return times | {ROUND: _round_ms(runner, sequence, rounds)}
    finally:
        engine.runner.release(sequence)
        blocks.free(sequence.block_table)


def _phases(loaded: LoadedEngine, sequence: Sequence, accepted_rows: int) -> dict[str, Callable[[], object]]:
    passes, device, start = loaded.passes, loaded.target.device, sequence.num_computed_tokens
    block_size = loaded.caches[0].block_size
    one = forward_batch([RowSpan(sequence, start, [0])], block_size, device)

    phases: dict[str, Callable[[], object]] = {DECODE: lambda: passes.decode(one)}
    if passes.drafting is not None:
        rows = passes.drafting.num_speculative_tokens + 1
        wide = forward_batch([RowSpan(sequence, start, [0] * rows)], block_size, device)
        rejected = torch.arange(rows, device=device) >= accepted_rows
        slots = wide.slots.masked_fill(rejected, -1)
        anchors = torch.zeros(1, dtype=torch.int64, device=device)
        lengths = torch.full_like(anchors, start)
        tables = block_tables([sequence.block_table], start, block_size, device)
        output = passes.decode(wide)
        phases |= {
            VERIFY: lambda: passes.decode(wide),
            CONTEXT: lambda: passes.update_context(output, wide.attention.positions, slots),
            DRAFT: lambda: passes.propose(anchors, lengths, tables, start),
        }
    return phases


def _round_ms(runner: Runner, sequence: Sequence, rounds: int) -> float:
    """Milliseconds of a round, in a pipeline the mean of `rounds` that follow each other."""
    start = sequence.num_computed_tokens

    def chained() -> None:
        assert isinstance(runner, PipelinedRunner)
        for _ in range(rounds):
            if runner.pipeline.is_full:
                runner.consume()
            runner.submit([sequence])
        while runner.oldest:
            runner.consume()

    try:
        if isinstance(runner, PipelinedRunner):
            return _time_ms(chained) / rounds
        return _time_ms(lambda: runner.decode([sequence]))
    finally:
        sequence.num_computed_tokens = start


def _time_ms(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return (time.perf_counter() - started) * 1e3
