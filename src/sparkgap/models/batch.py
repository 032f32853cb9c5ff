"""What one forward pass of a target model takes and gives."""

from dataclasses import dataclass

from torch import Tensor

from sparkgap.ops.operands import AttentionRows


@dataclass(frozen=True)
class ForwardBatch:
    """Rows of one forward pass.

    Attributes:
        token_ids: int64 `[rows]`.
        slots: int64 `[rows]`, KV slot of each row; -1 writes nothing.
        attention: positions and sequence layout of the rows.
    """

    token_ids: Tensor
    slots: Tensor
    attention: AttentionRows


@dataclass(frozen=True)
class ForwardResult:
    """What a target's pass over a `ForwardBatch` gives.

    Attributes:
        hidden: `[rows, hidden_size]` after the final norm; `Target.logits` takes rows of it.
        captured: `[rows, m * hidden_size]`, the residual stream after each captured layer, in the order the
            layers were asked for; None when none were. Layer id `k` means the stream after layer `k`
            (`hidden_states[k + 1]` in Hugging Face terms) everywhere inside this engine.
    """

    hidden: Tensor
    captured: Tensor | None
