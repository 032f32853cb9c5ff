"""From a model's logits to the distribution a token is drawn from: penalties, temperature, truncation.

Order and meaning are vLLM's: min_tokens mask, logit bias, repetition, frequency and presence penalty, temperature,
min_p, top_k, top_p.
"""

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from sparkgap.config import SamplingParams
from sparkgap.rounds.sequence import Sequence

_TOP_P_CANDIDATES = 1024
_SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny
_LARGEST_TEMPERATURE = torch.finfo(torch.float32).max


class SamplingRow(NamedTuple):
    """One row of logits: the token after `sequence`'s tokens and `draft_token_ids`.

    Verification gives a sequence several rows: the first without draft tokens, row `i` with draft tokens 1 ... i.
    """

    sequence: Sequence
    draft_token_ids: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """Position that the row's token will occupy."""
        return self.sequence.num_tokens + len(self.draft_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens after the prompt that the row sees."""
        return len(self.sequence.output_token_ids) + len(self.draft_token_ids)


def has_penalties(params: SamplingParams) -> bool:
    """Whether tokens seen so far change the logits."""
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


class TokenHistory:
    """Which tokens a sequence has in its prompt, and how often each in its output; kept on the device.

    Attributes:
        in_prompt: bool `[vocab]`.
    """

    def __init__(self, sequence: Sequence, vocab_size: int, device: torch.device) -> None:
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.in_prompt[torch.tensor(sequence.prompt_token_ids, device=device)] = True
        self._counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self._num_counted = 0

    def output_counts(self, row: SamplingRow) -> Tensor:
        """Occurrences of each token in what `row` sees of the output: float32 `[vocab]`, not to be written."""
        output = row.sequence.output_token_ids
        self._add(self._counts, output[self._num_counted :])
        self._num_counted = len(output)
        if not row.draft_token_ids:
            return self._counts
        counts = self._counts.clone()
        self._add(counts, row.draft_token_ids)
        return counts

    def _add(self, counts: Tensor, token_ids: Seq[int]) -> None:
        if token_ids:
            index = torch.tensor(token_ids, device=counts.device)
            counts.index_add_(0, index, torch.ones(len(token_ids), device=counts.device))


def mask_and_bias_(logits: Tensor, rows: Seq[SamplingRow], eos_token_ids: Seq[int]) -> None:
    """Apply min_tokens (end-of-sequence and stop tokens) and logit_bias to float32 `[rows, vocab]`, in place."""
    for index, row in enumerate(rows):
        params = row.sequence.params
        if row.num_output_tokens < params.min_tokens:
            stops = [*eos_token_ids, *(params.stop_token_ids or ())]
            logits[index, torch.tensor(stops, dtype=torch.int64, device=logits.device)] = -math.inf
        if params.logit_bias:
            token_ids = torch.tensor(list(params.logit_bias), device=logits.device)
            bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=logits.device)
            logits[index, token_ids] += bias


def penalize(logits: Tensor, params: Seq[SamplingParams], in_prompt: Tensor, output_counts: Tensor) -> Tensor:
    """Repetition penalty over prompt and output, then frequency and presence penalty over the output.

    Args:
        logits: float32 `[rows, vocab]`.
        params: one for each row.
        in_prompt: bool `[rows, vocab]`.
        output_counts: float32 `[rows, vocab]`.
    """
    repetition = _column([p.repetition_penalty for p in params], logits)
    frequency = _column([p.frequency_penalty for p in params], logits)
    presence = _column([p.presence_penalty for p in params], logits)
    in_output = output_counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalized = torch.where(in_prompt | in_output, repeated, logits)
    return penalized - frequency * output_counts - presence * in_output


def probabilities(logits: Tensor, params: Seq[SamplingParams]) -> Tensor:
    """The distribution after temperature, min_p, top_k and top_p; all mass on the first best token when greedy.

    Args:
        logits: float32 `[rows, vocab]` after bias and penalties; a row's largest must be finite.
        params: one for each row.

    Returns:
        float32 `[rows, vocab]`, each row summing to 1.
    """
    vocab_size = logits.shape[-1]
    temperature = [min(max(p.temperature, _SMALLEST_TEMPERATURE), _LARGEST_TEMPERATURE) for p in params]
    scaled = (logits - logits.amax(-1, keepdim=True)) / _column(temperature, logits)
    if any(p.min_p > 0 for p in params):
        # The best token's scaled logit is 0, so a share of its probability is a bound on the others' logits.
        log_min_p = _column([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params], logits)
        scaled = scaled.masked_fill(scaled < log_min_p, -math.inf)
    scaled = _keep_top_k(scaled, [p.top_k if 0 < p.top_k < vocab_size else 0 for p in params])
    result = _keep_top_p(scaled.softmax(-1), [p.top_p for p in params])
    greedy = [index for index, p in enumerate(params) if p.greedy]
    if greedy:
        index = torch.tensor(greedy, device=logits.device)
        one_hot = torch.zeros(len(greedy), vocab_size, device=logits.device)
        result[index] = one_hot.scatter_(1, logits[index].argmax(-1, keepdim=True), 1.0)
    return result


def _keep_top_k(scaled: Tensor, top_k: Seq[int]) -> Tensor:
    """Mask what is below each row's k-th largest; ties of the k-th stay, and k = 0 keeps the row."""
    chosen = [index for index, k in enumerate(top_k) if k > 0]
    if not chosen:
        return scaled
    index = torch.tensor(chosen, device=scaled.device)
    k = torch.tensor([top_k[i] for i in chosen], device=scaled.device)
    part = scaled[index]
    bound = part.topk(max(top_k), dim=-1).values.gather(1, k[:, None] - 1)
    return scaled.index_copy(0, index, part.masked_fill(part < bound, -math.inf))


def _keep_top_p(probs: Tensor, top_p: Seq[float]) -> Tensor:
    """Keep each row's smallest set of most probable tokens that reaches `top_p`, and scale it to sum to 1.

    Of equally probable tokens at the edge of the set, those with the smallest ids stay.
    """
    chosen = [index for index, p in enumerate(top_p) if p < 1]
    if not chosen:
        return probs
    index = torch.tensor(chosen, device=probs.device)
    bound = _column([top_p[i] for i in chosen], probs, torch.float64)
    part = probs[index]
    largest = _largest_reaching(part, bound)
    cumulative = largest.cumsum(-1, dtype=torch.float64)
    before = torch.cat((torch.zeros_like(bound), cumulative[:, :-1]), dim=-1)
    num_kept = (before < bound).sum(-1, keepdim=True)
    edge = largest.gather(1, num_kept - 1)
    above, at_edge = part > edge, part == edge
    kept_at_edge = at_edge & (at_edge.cumsum(-1) <= num_kept - above.sum(-1, keepdim=True))
    kept = part.masked_fill(~(above | kept_at_edge), 0.0)
    return probs.index_copy(0, index, kept / kept.sum(-1, keepdim=True))


def _largest_reaching(probs: Tensor, bound: Tensor) -> Tensor:
    """Probabilities in falling order, at least as many as it takes to reach `bound` in every row.

    Sorting a whole vocabulary costs 20 times as much as finding a thousand candidates, which nearly always do.
    """
    vocab_size = probs.shape[-1]
    if vocab_size > _TOP_P_CANDIDATES:
        candidates = probs.topk(_TOP_P_CANDIDATES, dim=-1).values
        if bool((candidates.sum(-1, keepdim=True, dtype=torch.float64) >= bound).all()):
            return candidates
    return probs.sort(dim=-1, descending=True).values


def inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from each row with one uniform number; a token of probability 0 is never drawn.

    Args:
        probs: float32 `[rows, vocab]`, need not sum to exactly 1.
        uniforms: float64 `[rows]` in [0, 1).

    Returns:
        int64 `[rows]`.
    """
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # u * total may round up to total, which no token's cumulative probability exceeds.
    bound = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, bound, right=True)[:, 0]


def _column(values: Seq[float], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]
