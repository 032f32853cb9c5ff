"""Plain decoding: prompts in chunks, then one token a sequence and round."""

from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from sparkgap.errors import EngineError
from sparkgap.models.batch import ForwardBatch, ForwardResult
from sparkgap.ops.kernels import KVCache
from sparkgap.rounds.batching import RowSpan, forward_batch
from sparkgap.rounds.logits import SamplingRow
from sparkgap.rounds.sampling import Sampler
from sparkgap.rounds.sequence import PrefillChunk, RoundOutput, Sequence


class Target(Protocol):
    """What a round needs of a target network (`models.decoder.Decoder`)."""

    device: torch.device
    """Where its rows are computed."""

    def forward(
        self, batch: ForwardBatch, caches: Seq[KVCache], captured_layers: tuple[int, ...] = ()
    ) -> ForwardResult:
        """One pass over rows."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 `[rows, vocab]` of rows of hidden states."""
        ...


class PlainRunner:
    """Runs a target without speculation.

    Attributes:
        target: the network.
        caches: its KV caches, one a layer.
        sampler: chooses tokens.
    """

    num_lookahead_tokens = 1

    def __init__(self, target: Target, caches: Seq[KVCache], sampler: Sampler) -> None:
        self.target = target
        self.caches = caches
        self.sampler = sampler
        self._block_size = caches[0].block_size

    @torch.inference_mode()
    def prefill(self, chunks: Seq[PrefillChunk]) -> list[RoundOutput | None]:
        """Compute chunks of different sequences in one pass: one token where a chunk is its sequence's last."""
        spans = [_span(chunk.sequence, chunk.end) for chunk in chunks]
        last = [chunk.end == chunk.sequence.num_tokens for chunk in chunks]
        outputs = iter(self._compute(spans, last))
        return [next(outputs) if is_last else None for is_last in last]

    @torch.inference_mode()
    def decode(self, sequences: Seq[Sequence]) -> list[RoundOutput]:
        """The next token of each sequence."""
        spans = [_span(sequence, sequence.num_tokens) for sequence in sequences]
        return self._compute(spans, [True] * len(spans))

    def release(self, sequence: Sequence) -> None:
        """Forget what sampling keeps of a sequence."""
        self.sampler.release(sequence)

    def _compute(self, spans: Seq[RowSpan], wanted: Seq[bool]) -> list[RoundOutput]:
        """Run `spans`; the token after each span that is wanted."""
        batch = forward_batch(spans, self._block_size, self.target.device)
        hidden = self._forward(batch)
        outputs = self._sample_last_rows(hidden, spans, wanted) if any(wanted) else []
        for span in spans:
            span.sequence.num_computed_tokens = span.end
        return outputs

    def _forward(self, batch: ForwardBatch) -> Tensor:
        """Compute rows whose tokens are all committed; their hidden states `[rows, hidden_size]`."""
        return self.target.forward(batch, self.caches).hidden

    def _sample_last_rows(self, hidden: Tensor, spans: Seq[RowSpan], wanted: Seq[bool]) -> list[RoundOutput]:
        rows, last_rows, end = [], [], 0
        for span, is_wanted in zip(spans, wanted, strict=True):
            end += len(span.token_ids)
            if is_wanted:
                rows.append(SamplingRow(span.sequence))
                last_rows.append(end - 1)
        if len(last_rows) < len(hidden):
            hidden = hidden[torch.tensor(last_rows, device=hidden.device)]
        tokens = self.sampler.sample(self.target.logits(hidden), rows)
        return [
            RoundOutput(error=token) if isinstance(token, EngineError) else RoundOutput([token]) for token in tokens
        ]


def _span(sequence: Sequence, end: int) -> RowSpan:
    start = sequence.num_computed_tokens
    return RowSpan(sequence, start, sequence.token_ids(start, end))
