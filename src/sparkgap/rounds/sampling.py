"""Choosing tokens from rows of logits, with their log-probabilities."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from sparkgap.config import SamplingParams
from sparkgap.errors import EngineError
from sparkgap.rounds.logits import (
    SamplingRow,
    TokenHistory,
    has_penalties,
    inverse_cdf,
    mask_and_bias_,
    penalize,
    probabilities,
)
from sparkgap.rounds.random import Purpose, uniform_number
from sparkgap.rounds.sequence import SampledToken, Sequence, TokenLogprobs


class Drawn(NamedTuple):
    """What rows of logits gave.

    Attributes:
        token_ids: int64 `[rows]`.
        largest: float32 `[rows]`, the largest logit of each row; NaN when any of the row is.
    """

    token_ids: Tensor
    largest: Tensor


DrawRows = Callable[[Tensor, Seq[SamplingParams], Seq[tuple[int, int]]], Drawn]
"""Draws a token of each row from logits float32 `[rows, vocab]`, by the row's parameters, seed and position."""


class Sampler:
    """Samples rows of different sequences with different parameters; a row's result depends on that row alone.

    Attributes:
        model_name: named in errors.
        eos_token_ids: masked while a sequence has fewer than its min_tokens output tokens.

    Args:
        device_draw: draws tokens in place of torch (`rounds.drawing`).
    """

    def __init__(self, model_name: str, eos_token_ids: Seq[int], device_draw: DrawRows | None = None) -> None:
        self.model_name = model_name
        self._device_draw = device_draw
        self.eos_token_ids = tuple(eos_token_ids)
        self._histories: dict[int, TokenHistory] = {}

    def sample(self, logits: Tensor, rows: Seq[SamplingRow]) -> list[SampledToken | EngineError]:
        """The token of each row, or why it has none (its logits are not numbers, or every token is masked).

        Args:
            logits: float32 `[rows, vocab]` of the model, not changed.
            rows: what each row of logits belongs to.
        """
        processed = self.process(logits, rows)
        picks, largest = self._draw(processed, rows)
        errors = self.errors(logits, processed, largest)
        logprobs = token_logprobs(logits, picks, [row.sequence.params.logprobs for row in rows])
        return [
            error if error is not None else SampledToken(token_id, logprob)
            for error, token_id, logprob in zip(errors, picks.tolist(), logprobs, strict=True)
        ]

    def target_probabilities(self, logits: Tensor, rows: Seq[SamplingRow]) -> Tensor:
        """The distribution that each row's token is drawn from: float32 `[rows, vocab]`, one-hot where greedy."""
        return self.probabilities(self.process(logits, rows), rows)

    def probabilities(self, processed: Tensor, rows: Seq[SamplingRow]) -> Tensor:
        """The distribution of each row, float32 `[rows, vocab]`, from what `process` made of its logits."""
        return probabilities(processed, [row.sequence.params for row in rows])

    def process(self, logits: Tensor, rows: Seq[SamplingRow]) -> Tensor:
        """`logits` with masks, bias and penalties applied; `logits` themselves when no row has any."""
        if all(_is_unprocessed(row) for row in rows):
            return logits
        processed = logits.clone()
        mask_and_bias_(processed, rows, self.eos_token_ids)
        penalized = [index for index, row in enumerate(rows) if has_penalties(row.sequence.params)]
        if penalized:
            index = torch.tensor(penalized, device=logits.device)
            processed[index] = self._penalize(processed[index], [rows[i] for i in penalized])
        return processed

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._histories.pop(sequence.sequence_id, None)

    def _penalize(self, logits: Tensor, rows: Seq[SamplingRow]) -> Tensor:
        histories = [self._history(row.sequence, logits) for row in rows]
        counts = [history.output_counts(row) for history, row in zip(histories, rows, strict=True)]
        in_prompt = torch.stack([history.in_prompt for history in histories])
        return penalize(logits, [row.sequence.params for row in rows], in_prompt, torch.stack(counts))

    def _history(self, sequence: Sequence, logits: Tensor) -> TokenHistory:
        history = self._histories.get(sequence.sequence_id)
        if history is None:
            history = TokenHistory(sequence, logits.shape[-1], logits.device)
            self._histories[sequence.sequence_id] = history
        return history

    def _draw(self, logits: Tensor, rows: Seq[SamplingRow]) -> Drawn:
        params = [row.sequence.params for row in rows]
        keys = [(row.sequence.seed, row.position) for row in rows]
        return (self._device_draw or _draw)(logits, params, keys)

    def errors(self, logits: Tensor, processed: Tensor, largest: Tensor | None = None) -> list[EngineError | None]:
        """For each row, why it has no token; None where it has one.

        Args:
            logits: float32 `[rows, vocab]` of the model.
            processed: what `process` made of them.
            largest: float32 `[rows]`, the largest of each row of `processed`, where that is known.
        """
        # A row's largest value is NaN when any is.
        open_rows = (processed.amax(-1) if largest is None else largest).isfinite().tolist()
        best = open_rows if processed is logits else logits.amax(-1).isfinite().tolist()
        return [self._error(*flags) for flags in zip(best, open_rows, strict=True)]

    def not_finite(self) -> EngineError:
        """Why a row whose logits are not numbers has no token."""
        return EngineError(
            f"model {self.model_name} gave logits that are not finite numbers; its weights may be damaged, or "
            "its values may not fit its dtype: try dtype float32"
        )

    def _error(self, finite: bool, any_left: bool) -> EngineError | None:
        if not finite:
            return self.not_finite()
        if not any_left:
            return EngineError(
                f"min_tokens, stop_token_ids and logit_bias leave no token of model {self.model_name} to choose"
            )
        return None


def _is_unprocessed(row: SamplingRow) -> bool:
    params = row.sequence.params
    return row.num_output_tokens >= params.min_tokens and not params.logit_bias and not has_penalties(params)


def _draw(logits: Tensor, params: Seq[SamplingParams], keys: Seq[tuple[int, int]]) -> Drawn:
    picks = logits.argmax(-1)
    drawn = [index for index, row_params in enumerate(params) if not row_params.greedy]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        weights = probabilities(logits[index], [params[i] for i in drawn])
        picks[index] = draw(weights, [keys[i] for i in drawn], Purpose.TARGET)
    return Drawn(picks, logits.amax(-1))


def draw(weights: Tensor, keys: Seq[tuple[int, int]], purpose: Purpose) -> Tensor:
    """A token of each row, by the random number of its seed, position and purpose: int64 `[rows]`.

    Args:
        weights: float32 `[rows, vocab]`, need not sum to 1. A row without finite weights draws any token: its caller
            reports it, and it must not fail the others.
        keys: seed, and position that the token will occupy, of each row.
        purpose: what the numbers are for.
    """
    numbers = [uniform_number(seed, position, purpose) for seed, position in keys]
    uniforms = torch.tensor(numbers, dtype=torch.float64, device=weights.device)
    return inverse_cdf(weights.nan_to_num(0.0), uniforms).clamp(max=weights.shape[-1] - 1)


def token_logprobs(logits: Tensor, picks: Tensor, wanted: Seq[int | None]) -> list[TokenLogprobs | None]:
    """Log-softmax of the model's own logits, for the rows that want some alternatives (0: the chosen only).

    Args:
        logits: float32 `[rows, vocab]` of the model.
        picks: int64 `[rows]`, the chosen tokens.
        wanted: number of alternatives of each row; None for no log-probabilities.
    """
    result: list[TokenLogprobs | None] = [None] * len(wanted)
    chosen_rows = [index for index, number in enumerate(wanted) if number is not None]
    if not chosen_rows:
        return result
    index = torch.tensor(chosen_rows, device=logits.device)
    logprobs = logits[index].log_softmax(-1)
    chosen = logprobs.gather(1, picks[index][:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    most = min(max(number or 0 for number in wanted), logits.shape[-1])
    top = logprobs.topk(most, dim=-1)
    columns = (chosen[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist())
    for row, value, rank, token_ids, values in zip(chosen_rows, *columns, strict=True):
        result[row] = TokenLogprobs(value, rank, list(zip(token_ids, values, strict=True))[: wanted[row]])
    return result
