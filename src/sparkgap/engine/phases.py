"""What the phases of a round cost, each run by itself."""

import time
from collections.abc import Callable

import torch

from sparkgap.config import SamplingParams
from sparkgap.engine.loading import LoadedEngine
from sparkgap.errors import ConfigError, EngineError
from sparkgap.rounds.batching import RowSpan, block_tables, forward_batch
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
"""A whole round, with what the host does."""


@torch.inference_mode()
def time_phases(loaded: LoadedEngine, context_tokens: int, accepted_rows: int) -> dict[str, float]:
    """Run each phase of one sequence's round once, and measure it.

    The sequence lies in free KV blocks, over whatever they hold: no phase takes a time that depends on values.

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
    blocks, end = engine.scheduler.blocks, context_tokens + engine.runner.num_lookahead_tokens
    chosen = loaded.speculation
    longest = engine.model.max_model_len if chosen is None else chosen.drafter.max_context_length
    sequence = Sequence(-1, SamplingParams(temperature=0), 0, [0] * context_tokens, [0], context_tokens)
    if context_tokens > longest or end > engine.model.max_model_len or not blocks.extend(sequence.block_table, end):
        raise ConfigError(f"there is no room for a round after {context_tokens} tokens; take a shorter prompt")
    try:
        return {name: _time_ms(run) for name, run in _phases(loaded, sequence, accepted_rows).items()}
    finally:
        engine.runner.release(sequence)
        blocks.free(sequence.block_table)


def _phases(loaded: LoadedEngine, sequence: Sequence, accepted_rows: int) -> dict[str, Callable[[], object]]:
    passes, device, start = loaded.passes, loaded.target.device, sequence.num_computed_tokens
    block_size = loaded.caches[0].block_size
    one = forward_batch([RowSpan(sequence, start, [0])], block_size, device)

    def whole_round() -> None:
        loaded.engine.runner.decode([sequence])
        sequence.num_computed_tokens = start

    phases: dict[str, Callable[[], object]] = {DECODE: lambda: passes.decode(one)}
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
            VERIFY: lambda: passes.decode(wide),
            CONTEXT: lambda: passes.update_context(output, wide.attention.positions, slots, following),
            DRAFT: lambda: passes.propose(anchors, lengths, tables, start),
        }
    return phases | {ROUND: whole_round}


def _time_ms(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return (time.perf_counter() - started) * 1e3
