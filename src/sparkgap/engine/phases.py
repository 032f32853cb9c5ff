"""What the phases of a round cost, each run by itself."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparkgap.config import SamplingParams
from sparkgap.engine.loading import LoadedEngine
from sparkgap.errors import ConfigError, EngineError
from sparkgap.rounds.batching import RowSpan, block_tables, forward_batch
from sparkgap.rounds.pipeline.pipeline import Pipeline
from sparkgap.rounds.sequence import Sequence

DECODE = "decode"
"""A target pass of 1 row."""

VERIFY = "verify"
"""A target pass of N + 1 rows."""

DRAFT = "draft"
"""A draft pass with its sequential heads."""

CONTEXT = "context"
"""A context update of accepted rows."""

ROUND = "round"
"""A whole round, with what the host does: of the task pipeline where it is on, from results to results of the next."""


@dataclass(frozen=True)
class _Phase:
    """What is timed, and what comes before and after it."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    end: Callable[[], object] = lambda: None


@torch.inference_mode()
def time_phases(loaded: LoadedEngine, context_tokens: int, accepted_rows: int) -> dict[str, float]:
    """Run each phase of one sequence's round once, and measure it.

    The sequence lies in free KV blocks, over whatever they hold: no phase takes a time that depends on values. Passes
    are given to the device by the host one by one, in every execution mode.

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
    while engine.has_rounds_in_flight():
        engine.step()
    blocks, end = engine.scheduler.blocks, context_tokens + engine.runner.num_lookahead_tokens
    chosen = loaded.speculation
    longest = engine.model.max_model_len if chosen is None else chosen.drafter.max_context_length
    sequence = Sequence(-1, SamplingParams(temperature=0), 0, [0] * context_tokens, [0], context_tokens)
    if context_tokens > longest or end > engine.model.max_model_len or not blocks.extend(sequence.block_table, end):
        raise ConfigError(f"there is no room for a round after {context_tokens} tokens; take a shorter prompt")
    try:
        return {name: _time_ms(phase) for name, phase in _phases(loaded, sequence, accepted_rows).items()}
    finally:
        engine.runner.release(sequence)
        blocks.free(sequence.block_table)


def _phases(loaded: LoadedEngine, sequence: Sequence, accepted_rows: int) -> dict[str, _Phase]:
    passes, device, start = loaded.passes, loaded.target.device, sequence.num_computed_tokens
    block_size = loaded.caches[0].block_size
    one = forward_batch([RowSpan(sequence, start, [0])], block_size, device)

    def whole_round() -> None:
        loaded.engine.runner.decode([sequence])
        sequence.num_computed_tokens = start

    phases = {DECODE: _Phase(lambda: passes.decode(one))}
    if passes.drafting is not None:
        rows = passes.drafting.num_speculative_tokens + 1
        wide = forward_batch([RowSpan(sequence, start, [0] * rows)], block_size, device)
        rejected = torch.arange(rows, device=device) >= accepted_rows
        slots = wide.slots.masked_fill(rejected, -1)
        anchors = torch.zeros(1, dtype=torch.int64, device=device)
        lengths = torch.full_like(anchors, start)
        tables = block_tables([sequence.block_table], start + rows, block_size, device)
        following = torch.zeros_like(slots)
        output = passes.decode(wide)
        phases |= {
            VERIFY: _Phase(lambda: passes.decode(wide)),
            CONTEXT: _Phase(lambda: passes.update_context(output, wide.attention.positions, slots, following)),
            DRAFT: _Phase(lambda: passes.propose(anchors, lengths, tables, start)),
        }
    pipelined = loaded.pipeline
    return phases | {
        ROUND: _Phase(whole_round) if pipelined is None else _pipelined_round(pipelined.pipeline, sequence)
    }


def _pipelined_round(pipeline: Pipeline, sequence: Sequence) -> _Phase:
    """A round that runs behind another one, and while the host takes in and gives away others.

    Two sequences take turns in the same blocks, so that each round begins at the same position.
    """
    other = Sequence(-2, sequence.params, 0, sequence.prompt_token_ids, sequence.output_token_ids)
    other.block_table = sequence.block_table
    other.num_computed_tokens = sequence.num_computed_tokens

    def prepare() -> None:
        pipeline.submit([sequence])
        pipeline.submit([other])
        pipeline.consume()

    def run() -> None:
        pipeline.submit([sequence])
        pipeline.consume()

    def end() -> None:
        pipeline.reset()
        pipeline.forget(other)

    return _Phase(run, prepare, end)


def _time_ms(phase: _Phase) -> float:
    try:
        phase.prepare()
        started = time.perf_counter()
        phase.run()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return (time.perf_counter() - started) * 1e3
    finally:
        phase.end()
