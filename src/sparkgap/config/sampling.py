"""How one request's tokens are chosen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sparkgap.config.checks import check, is_finite, is_integer, is_unicode

MAX_LOGPROBS = 20
"""Largest number of alternatives a request may ask for at each position (vLLM's limit)."""

MAX_COMPLETIONS = 16384
"""Most completions of one prompt (vLLM's limit)."""

REPETITION_PENALTIES = (1e-3, 1e3)
"""Range of `SamplingParams.repetition_penalty`: beyond it logits leave what float32 holds."""

FinishReason = Literal["stop", "length", "abort", "timeout"]
"""Why a request ended: `stop` (end of sequence, stop string or stop token), `length`, `abort`, or `timeout` (its
`deadline_s` passed)."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Names and meanings are vLLM's.

    Attributes:
        n: number of completions of the prompt.
        temperature: 0 is greedy.
        top_p: smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: number of most probable tokens kept; 0 or -1 keeps all.
        min_p: tokens below this share of the most probable token's probability are dropped, in [0, 1].
        seed: key of the counter-based random numbers; None draws one from the engine's seed.
        max_tokens: most output tokens; None runs to the end of the context.
        min_tokens: output tokens before end of sequence, stop tokens and stop strings can end the request.
        stop: strings that end the request; not part of the text unless `include_stop_str_in_output`.
        stop_token_ids: token ids that end the request.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
        logprobs: number of most probable alternatives reported at each position; None reports none, 0 only
            the chosen token. They are log-softmax of the model's logits before any processing.
        prompt_logprobs: the same for the prompt's own tokens. The whole prompt is computed then, as with
            `skip_reading_prefix_cache`.
        presence_penalty, frequency_penalty: subtracted from logits of tokens in the output, in [-2, 2].
        repetition_penalty: divides (multiplies, when negative) logits of tokens in prompt and output; within
            `REPETITION_PENALTIES`.
        logit_bias: token id -> value in [-100, 100] added to its logit.
        skip_special_tokens: leave special tokens out of the text.
        speculation: whether an engine that speculates does so for this request.
        skip_reading_prefix_cache: compute the whole prompt, also where its KV is known already.
        deadline_s: seconds after its arrival at which the request ends with what it has, and finish reason `timeout`;
            None lets it run.

    Raises:
        ConfigError: a value is out of its range; the message names the parameter.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    skip_special_tokens: bool = True
    speculation: bool = True
    skip_reading_prefix_cache: bool = False
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        check(is_integer(self.n) and self.n >= 1, f"n must be an integer of at least 1, got {self.n!r}")
        check(self.n <= MAX_COMPLETIONS, f"n must be at most {MAX_COMPLETIONS}, got {self.n}")
        check(
            is_finite(self.temperature) and self.temperature >= 0,
            f"temperature must be a finite number of at least 0, got {self.temperature!r}",
        )
        check(is_finite(self.top_p) and 0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p!r}")
        check(
            is_integer(self.top_k) and self.top_k >= -1,
            f"top_k must be an integer of at least 1, or 0 or -1 for all tokens, got {self.top_k!r}",
        )
        check(is_finite(self.min_p) and 0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p!r}")
        check(
            self.seed is None or (is_integer(self.seed) and -(2**63) <= self.seed < 2**64),
            f"seed must be a 64-bit integer, got {self.seed!r}",
        )
        check(
            self.max_tokens is None or (is_integer(self.max_tokens) and self.max_tokens >= 1),
            f"max_tokens must be an integer of at least 1, got {self.max_tokens!r}",
        )
        check(
            is_integer(self.min_tokens)
            and self.min_tokens >= 0
            and (self.max_tokens is None or self.min_tokens <= self.max_tokens),
            f"min_tokens must be an integer from 0 to max_tokens ({self.max_tokens}), got {self.min_tokens!r}",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            check(
                value is None or (is_integer(value) and 0 <= value <= MAX_LOGPROBS),
                f"{name} must be an integer from 0 to {MAX_LOGPROBS}, got {value!r}",
            )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            check(is_finite(value) and -2 <= value <= 2, f"{name} must be in [-2, 2], got {value!r}")
        smallest, largest = REPETITION_PENALTIES
        check(
            is_finite(self.repetition_penalty) and smallest <= self.repetition_penalty <= largest,
            f"repetition_penalty must be above 0, from {smallest:g} to {largest:g}, got {self.repetition_penalty!r}",
        )
        check(
            self.deadline_s is None or (is_finite(self.deadline_s) and self.deadline_s > 0),
            f"deadline_s must be a number of seconds above 0, got {self.deadline_s!r}",
        )
        self._check_stop()
        self._check_logit_bias()

    def _check_stop(self) -> None:
        listed = self.stop is None or isinstance(self.stop, str | Sequence)
        check(
            listed and all(isinstance(s, str) for s in self.stop_strings),
            f"stop must be a string or strings, got {self.stop!r}",
        )
        check(all(self.stop_strings), "stop must not contain an empty string")
        check(all(map(is_unicode, self.stop_strings)), f"stop has a string that is not valid Unicode: {self.stop!r}")
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        check(
            isinstance(ids, Sequence) and all(is_integer(i) and i >= 0 for i in ids),
            f"stop_token_ids must be token ids of at least 0, got {self.stop_token_ids!r}",
        )

    def _check_logit_bias(self) -> None:
        check(
            self.logit_bias is None or isinstance(self.logit_bias, Mapping),
            f"logit_bias must map token ids to numbers, got {self.logit_bias!r}",
        )
        for token_id, bias in (self.logit_bias or {}).items():
            check(
                is_integer(token_id) and token_id >= 0,
                f"logit_bias keys must be token ids of at least 0, got {token_id!r}",
            )
            check(
                is_finite(bias) and -100 <= bias <= 100,
                f"logit_bias values must be in [-100, 100], got {bias!r} for token {token_id}",
            )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check token ids against a model's vocabulary.

        Raises:
            ConfigError: a `logit_bias` or `stop_token_ids` id is not below `vocab_size`.
        """
        for name, ids in (
            ("logit_bias", self.logit_bias or {}),
            ("stop_token_ids", self.stop_token_ids or ()),
        ):
            for token_id in ids:
                check(
                    token_id < vocab_size,
                    f"{name} has token id {token_id}, outside the vocabulary of {vocab_size} tokens",
                )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty when there is none."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """True when the most probable token is always taken."""
        return self.temperature == 0
