"""The state a round reads and writes, and the interface the engine drives rounds through."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from sparkgap.config import SamplingParams
from sparkgap.errors import EngineError


@dataclass(eq=False)
class Sequence:
    """One running sequence; two are equal only if they are the same object.

    Attributes:
        sequence_id: unique number in the engine.
        params: how tokens are chosen.
        seed: 64-bit key of this sequence's random numbers.
        prompt_token_ids: the prompt.
        output_token_ids: tokens produced so far; the last one is the anchor (not yet in the KV cache).
        num_computed_tokens: positions whose target KV is valid (P in the design).
        block_table: KV blocks of positions `i * block_size ...`.
        max_output_tokens: the sequence ends with so many at the latest; None where that is not known.
        prompt_logprobs: of the prompt's tokens from the second on, as far as they are computed; None where they are not
            wanted.
    """

    sequence_id: int
    params: SamplingParams
    seed: int
    prompt_token_ids: list[int]
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    max_output_tokens: int | None = None
    prompt_logprobs: "list[TokenLogprobs] | None" = None

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are wanted, and not all of them are computed."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_token_ids) - 1

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens together."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_ids(self, start: int, end: int) -> list[int]:
        """Tokens at positions `start ... end - 1`, of prompt and output as one text."""
        prompt = len(self.prompt_token_ids)
        if end <= prompt:
            return self.prompt_token_ids[start:end]
        head = self.prompt_token_ids[start:] if start < prompt else []
        return head + self.output_token_ids[max(start - prompt, 0) : end - prompt]


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, from the model's logits before any processing.

    Attributes:
        chosen: of the token that was taken.
        rank: 1 for the most probable token, and so on.
        top: `(token id, log-probability)` of the most probable tokens, best first.
    """

    chosen: float
    rank: int
    top: list[tuple[int, float]]


class SampledToken(NamedTuple):
    """One new token, with its log-probabilities when the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class RoundOutput:
    """What one pass or round gave one sequence.

    Attributes:
        tokens: new tokens in order; empty only with `error`.
        num_draft_tokens: draft tokens that were verified in this round; 0 without speculation.
        num_accepted_tokens: how many of them are in `tokens` (which has one more, the correction or bonus token).
        not_speculated: why a runner that speculates gave this sequence a plain round, None where it did not.
        error: why this sequence cannot go on; the others of the round are not affected.
    """

    tokens: list[SampledToken] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    not_speculated: str | None = None
    error: EngineError | None = None


class PrefillChunk(NamedTuple):
    """Tokens of `sequence` at positions `num_computed_tokens ... end - 1` are to be computed.

    When `end` reaches all tokens of the sequence, the chunk's last row gives its next token.
    """

    sequence: Sequence
    end: int


class Runner(Protocol):
    """Computes prompts and decode rounds. The engine owns requests and blocks; a runner owns models and caches.

    A runner advances `num_computed_tokens` of the sequences it is given and appends nothing to
    `output_token_ids`: the engine does, after it has looked for stop conditions.
    """

    num_lookahead_tokens: int
    """Most positions from `num_computed_tokens` on that one decode round writes.

    Blocks of those positions exist when `decode` is called, except of positions from `max_model_len` on, which a
    round must not write.
    """

    def prefill(self, chunks: Seq[PrefillChunk]) -> list[RoundOutput | None]:
        """Compute chunks of different sequences in one pass: one token where a chunk is its sequence's last."""
        ...

    def decode(self, sequences: Seq[Sequence]) -> list[RoundOutput]:
        """One round for each sequence, all of whose tokens but the last are computed: one or more tokens each."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Forget what the runner keeps for a sequence that has ended or is to be recomputed."""
        ...
