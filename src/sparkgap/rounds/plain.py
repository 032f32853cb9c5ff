"""Plain decoding: prompts in chunks, then one token a sequence and round."""

import math
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from sparkgap.errors import EngineError
from sparkgap.graphs.passes import Passes, TargetOutput
from sparkgap.models.batch import ForwardBatch
from sparkgap.models.interfaces import Target
from sparkgap.ops.operands import KVCache
from sparkgap.rounds.batching import RowSpan, forward_batch
from sparkgap.rounds.logits import SamplingRow
from sparkgap.rounds.sampling import Sampler, token_logprobs
from sparkgap.rounds.sequence import PrefillChunk, RoundOutput, Sequence, TokenLogprobs

_ROWS_OF_LOGITS = 64
"""Rows whose logits are computed at once for a prompt's log-probabilities: a vocabulary of float32 each."""


class PlainRunner:
    """Runs a target without speculation.

    Attributes:
        target: the network.
        sampler: chooses tokens.
        passes: computes the network; None in the constructor computes it eagerly.
    """

    num_lookahead_tokens = 1

    def __init__(self, target: Target, caches: Seq[KVCache], sampler: Sampler, passes: Passes | None = None) -> None:
        self.target = target
        self.sampler = sampler
        self.passes = Passes(target, caches) if passes is None else passes
        self._block_size = caches[0].block_size

    @torch.inference_mode()
    def prefill(self, chunks: Seq[PrefillChunk]) -> list[RoundOutput | None]:
        """Compute chunks of different sequences in one pass: one token where a chunk is its sequence's last."""
        spans = [_span(chunk.sequence, chunk.end) for chunk in chunks]
        batch = forward_batch(spans, self._block_size, self.target.device)
        output = self.passes.prefill(batch)
        failures = self._note_prompt_logprobs(output.hidden, spans)
        wanted = [chunk.end == chunk.sequence.num_tokens for chunk in chunks]
        sampled = iter(self._sample_last_rows(output.hidden, spans, wanted) if any(wanted) else [])
        given = [next(sampled) if is_wanted else None for is_wanted in wanted]
        outputs = [failure or output for failure, output in zip(failures, given, strict=True)]
        self._after_pass(output, batch, spans, outputs)
        _advance(spans)
        return outputs

    @torch.inference_mode()
    def decode(self, sequences: Seq[Sequence]) -> list[RoundOutput]:
        """The next token of each sequence."""
        spans = [_span(sequence, sequence.num_tokens) for sequence in sequences]
        batch = forward_batch(spans, self._block_size, self.target.device)
        output = self.passes.decode(batch)
        assert output.logits is not None
        outputs = self._sample(output.logits, [SamplingRow(sequence) for sequence in sequences])
        self._after_pass(output, batch, spans, outputs)
        _advance(spans)
        return outputs

    def release(self, sequence: Sequence) -> None:
        """Forget what sampling keeps of a sequence."""
        self.sampler.release(sequence)

    def drafter_not_finite(self) -> EngineError:
        """Why a sequence whose draft's logits are not numbers cannot go on."""
        raise NotImplementedError("a runner without a drafter drafts nothing")

    def _after_pass(
        self, output: TargetOutput, batch: ForwardBatch, spans: Seq[RowSpan], outputs: Seq[RoundOutput | None]
    ) -> None:
        """What is to be done after a pass over `spans`, all of whose rows are committed, and what it gave them."""

    def _note_prompt_logprobs(self, hidden: Tensor, spans: Seq[RowSpan]) -> list[RoundOutput | None]:
        """Give sequences that want them the log-probabilities of the prompt tokens that follow each row.

        Returns:
            For each sequence, its end where a row's logits are not numbers; None for all others.
        """
        failures: list[RoundOutput | None] = [None] * len(spans)
        first_row = 0
        for number, span in enumerate(spans):
            sequence = span.sequence
            if sequence.prompt_logprobs is not None and sequence.lacks_prompt_logprobs:
                # A sequence that is recomputed has those of its first rows.
                start = max(span.start, len(sequence.prompt_logprobs))
                tokens = sequence.prompt_token_ids[start + 1 : span.end + 1]
                row = first_row + start - span.start
                rows = hidden[row : row + len(tokens)]
                found = self._logprobs_of(rows, tokens, sequence.params.prompt_logprobs)
                if any(math.isnan(logprobs.chosen) for logprobs in found):
                    failures[number] = RoundOutput(error=self.sampler.not_finite())
                sequence.prompt_logprobs += found
            first_row += len(span.token_ids)
        return failures

    def _logprobs_of(self, hidden: Tensor, tokens: Seq[int], number: int | None) -> list[TokenLogprobs]:
        """Log-probabilities of a token after each row, with `number` alternatives."""
        found: list[TokenLogprobs] = []
        for start in range(0, len(tokens), _ROWS_OF_LOGITS):
            part = tokens[start : start + _ROWS_OF_LOGITS]
            logits = self.target.logits(hidden[start : start + len(part)])
            picks = torch.tensor(part, device=logits.device)
            found += [row for row in token_logprobs(logits, picks, [number] * len(part)) if row is not None]
        return found

    def _sample_last_rows(self, hidden: Tensor, spans: Seq[RowSpan], wanted: Seq[bool]) -> list[RoundOutput]:
        rows, last_rows, end = [], [], 0
        for span, is_wanted in zip(spans, wanted, strict=True):
            end += len(span.token_ids)
            if is_wanted:
                rows.append(SamplingRow(span.sequence))
                last_rows.append(end - 1)
        if len(last_rows) < len(hidden):
            hidden = hidden[torch.tensor(last_rows, device=hidden.device)]
        return self._sample(self.target.logits(hidden), rows)

    def _sample(self, logits: Tensor, rows: Seq[SamplingRow]) -> list[RoundOutput]:
        return [
            RoundOutput(error=token) if isinstance(token, EngineError) else RoundOutput([token])
            for token in self.sampler.sample(logits, rows)
        ]


def _advance(spans: Seq[RowSpan]) -> None:
    for span in spans:
        span.sequence.num_computed_tokens = span.end


def _span(sequence: Sequence, end: int) -> RowSpan:
    start = sequence.num_computed_tokens
    return RowSpan(sequence, start, sequence.token_ids(start, end))
