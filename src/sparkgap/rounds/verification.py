"""Which draft tokens a round accepts, and the token that follows them.

Two methods, both lossless. *Exact match* draws the target's own token at every row, with the random number that
plain decoding would use there, and accepts draft tokens as long as they are the same: that is greedy verification,
and for sampled requests it is rejection sampling of one-hot drafts, coupled so that the output equals plain decoding
token by token. *Rejection* accepts draft token `d` with probability `min(1, p(d) / q(d))` and draws the correction from
`max(p - q, 0)`; it accepts more of a drafter that samples (Leviathan et al., arXiv 2211.17192).
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from sparkgap.errors import EngineError
from sparkgap.rounds.logits import SamplingRow
from sparkgap.rounds.random import Purpose, uniform_number
from sparkgap.rounds.sampling import Sampler, draw, token_logprobs
from sparkgap.rounds.sequence import SampledToken, Sequence


class Drafted(NamedTuple):
    """A sequence and the draft tokens that were verified for it."""

    sequence: Sequence
    token_ids: tuple[int, ...]

    @property
    def rows(self) -> list[SamplingRow]:
        """The verified rows: row `i` sees draft tokens 1 ... i."""
        return [SamplingRow(self.sequence, self.token_ids[:i]) for i in range(len(self.token_ids) + 1)]


class Settlement(NamedTuple):
    """What verification decided for one sequence.

    Attributes:
        tokens: accepted draft tokens, then the target's own; empty with `error`.
        num_accepted: draft tokens among them.
        error: the target's logits gave no token at a row that was reached.
    """

    tokens: list[SampledToken]
    num_accepted: int
    error: EngineError | None = None


def exact_match(sampler: Sampler, logits: Tensor, drafted: Seq[Drafted]) -> list[Settlement]:
    """Accept draft tokens that the target itself takes.

    Args:
        sampler: takes the target's tokens.
        logits: float32 `[sequences * W, vocab]`, W rows for each sequence.
        drafted: W - 1 draft tokens of each sequence.
    """
    taken = iter(sampler.sample(logits, [row for draft in drafted for row in draft.rows]))
    return [_settle(draft, [next(taken) for _ in draft.rows]) for draft in drafted]


def _settle(draft: Drafted, taken: Seq[SampledToken | EngineError]) -> Settlement:
    tokens: list[SampledToken] = []
    for number, token in enumerate(taken):
        if isinstance(token, EngineError):
            return Settlement([], 0, token)
        tokens.append(token)
        if number == len(draft.token_ids) or token.token_id != draft.token_ids[number]:
            break
    return Settlement(tokens, len(tokens) - 1)


def rejection(sampler: Sampler, logits: Tensor, drafted: Seq[Drafted], draft_probabilities: Tensor) -> list[Settlement]:
    """Accept draft tokens by their probability under target and drafter.

    Args:
        sampler: gives the target's distributions.
        logits: float32 `[sequences * W, vocab]`, W rows for each sequence.
        drafted: W - 1 draft tokens of each sequence, drawn from `draft_probabilities`.
        draft_probabilities: float32 `[sequences, W - 1, vocab]`, the drafter's, over the target's vocabulary.
    """
    rows = [row for draft in drafted for row in draft.rows]
    processed = sampler.process(logits, rows)
    errors = sampler.errors(logits, processed)
    target = sampler.probabilities(processed, rows).view(len(drafted), -1, logits.shape[-1])
    width = target.shape[1]
    picks = [_accept(draft, target[index], draft_probabilities[index]) for index, draft in enumerate(drafted)]
    chosen = [number * width + row for number, ids in enumerate(picks) for row in range(len(ids))]
    flat = torch.tensor([token_id for ids in picks for token_id in ids], device=logits.device)
    wanted = [rows[row].sequence.params.logprobs for row in chosen]
    if any(number is not None for number in wanted):
        logprobs = token_logprobs(logits[torch.tensor(chosen, device=logits.device)], flat, wanted)
    else:
        logprobs = [None] * len(chosen)
    following = iter(logprobs)
    settlements = []
    for number, ids in enumerate(picks):
        tokens = [SampledToken(token_id, next(following)) for token_id in ids]
        reached = [error for error in errors[number * width : number * width + len(ids)] if error is not None]
        settlements.append(Settlement([], 0, reached[0]) if reached else Settlement(tokens, len(ids) - 1))
    return settlements


def _accept(draft: Drafted, target: Tensor, drafter: Tensor) -> list[int]:
    """Accepted token ids of one sequence and the one that follows them.

    Args:
        draft: the draft tokens.
        target: float32 `[W, vocab]`.
        drafter: float32 `[W - 1, vocab]`.
    """
    seed, first_position = draft.sequence.seed, draft.sequence.num_tokens
    token_ids = torch.tensor(draft.token_ids, device=target.device)[:, None]
    ours = target[:-1].gather(1, token_ids)[:, 0].tolist()
    theirs = drafter.gather(1, token_ids)[:, 0].tolist()
    for number, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        position = first_position + number
        # Strict: a token the target never takes is rejected even when the uniform number is 0.
        if uniform_number(seed, position, Purpose.ACCEPT) * q < p:
            continue
        residual = (target[number] - drafter[number]).clamp_(min=0.0)
        if not bool(residual.sum() > 0):
            # p and q are equal up to rounding, which leaves a rejection with probability 0 in exact arithmetic.
            residual = target[number]
        return [*draft.token_ids[:number], int(draw(residual[None], [(seed, position)], Purpose.RESIDUAL))]
    bonus = draw(target[-1:], [(seed, first_position + len(draft.token_ids))], Purpose.TARGET)
    return [*draft.token_ids, int(bonus)]
