"""How an engine speculates."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sparkgap.config.checks import check, is_integer

SPECULATIVE_METHODS = ("dspark", "dflash", "mtp", "ngram")
"""Values of `SpeculativeConfig.method`, written in any case; `ngram` needs no drafter."""

MOST_MTP_TOKENS = 16
"""Most draft tokens a round of an MTP drafter; each is one more pass of its layer."""

DEFAULT_MTP_TOKENS = 3
"""Draft tokens a round of an MTP drafter whose checkpoint does not say, and those that one is trained for."""

NGRAM_TOKENS = 7
"""Draft tokens a round of method `ngram`, if nothing else is said."""

DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")
"""Values of `SpeculativeConfig.draft_sample_method`."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """How an engine speculates. Names are vLLM's.

    Attributes:
        method: one of `SPECULATIVE_METHODS`, in any case; None takes what the drafter is.
        model: the drafter, a directory or `hf:owner/name`; None takes the one that comes with Sparkgap for the target.
        num_speculative_tokens: draft tokens a round; None takes the drafter's own default, which is as many as it was
            trained for unless its configuration says otherwise.
        draft_sample_method: how draft tokens of sampled requests are chosen. `greedy` takes the most probable and
            keeps the output the one without speculation; `probabilistic` samples them.
        adaptive_length: verify only as many draft tokens in a round as pay, by measured times and recent acceptance,
            down to a plain round. Changes no token; not with `draft_sample_method` `probabilistic`.
        prefix_scheduling: let the device verify only as many draft tokens in a round as pay, by the confidences that
            the drafter gives them and by what passes were measured to take at startup. None does where rounds are in
            the task pipeline, the drafter has a confidence head and the CPU reads its weights from memory. One draft
            token a round leaves no choice. What is looked up is judged by how many last tokens stood there before, also
            with method `ngram`. Changes no token; not with `adaptive_length`.
        disable_by_batch_size: most sequences that are decoded together with drafts; rounds of more are plain, because
            drafting and verifying many rows takes longer than it saves. None draws the line where it was measured on
            CPUs (2 sequences with 5 draft tokens, 3 with prefix scheduling), and none elsewhere. Changes no token; not
            with `draft_sample_method` `probabilistic`, nor with `adaptive_length`, which finds out by itself.
        prompt_lookup_max: most last tokens that are looked up in the sequence's own past; what followed them there is
            drafted instead of what a drafter proposes. 0 looks nothing up; None is 4, or 0 with `draft_sample_method`
            `probabilistic`, which cannot verify what was not sampled.
        prompt_lookup_min: fewest last tokens that must have stood there before.

    Raises:
        ConfigError: a value is out of its range; the message names the setting.
    """

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    draft_sample_method: str = "greedy"
    adaptive_length: bool = False
    prefix_scheduling: bool | None = None
    disable_by_batch_size: int | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int = 2

    @property
    def needs_drafter(self) -> bool:
        """Whether a drafter proposes tokens."""
        return self.method != "ngram"

    @property
    def limits_batches(self) -> bool:
        """Whether the number of sequences may decide if a round drafts, and the line is not drawn here."""
        by_itself = self.adaptive_length or self.draft_sample_method != "greedy"
        return self.needs_drafter and not by_itself and self.disable_by_batch_size is None

    @property
    def lookup_tokens(self) -> int:
        """Draft tokens a round where they are only looked up; 0 with a drafter."""
        return 0 if self.needs_drafter else self.num_speculative_tokens or NGRAM_TOKENS

    @property
    def lookup_lengths(self) -> tuple[int, int] | None:
        """Fewest and most last tokens that are looked up; None when nothing is."""
        longest = self.prompt_lookup_max
        if longest is None:
            longest = max(4, self.prompt_lookup_min) if self.draft_sample_method == "greedy" else 0
        return (self.prompt_lookup_min, longest) if longest else None

    def __post_init__(self) -> None:
        if self.method is not None:
            lowered = self.method.lower() if isinstance(self.method, str) else self.method
            check(
                lowered in SPECULATIVE_METHODS,
                f"speculative method must be one of {', '.join(SPECULATIVE_METHODS)}, got {self.method!r}",
            )
            object.__setattr__(self, "method", lowered)
        check(
            self.model is None or (isinstance(self.model, str) and bool(self.model)),
            f"the speculative model must be a directory or hf:owner/name, got {self.model!r}",
        )
        check(
            self.num_speculative_tokens is None
            or (is_integer(self.num_speculative_tokens) and self.num_speculative_tokens >= 1),
            f"num_speculative_tokens must be an integer of at least 1, got {self.num_speculative_tokens!r}",
        )
        check(
            self.draft_sample_method in DRAFT_SAMPLE_METHODS,
            f"draft_sample_method must be one of {', '.join(DRAFT_SAMPLE_METHODS)}, got {self.draft_sample_method!r}",
        )
        check(
            isinstance(self.adaptive_length, bool),
            f"adaptive_length must be True or False, got {self.adaptive_length!r}",
        )
        check(
            not self.adaptive_length or self.draft_sample_method == "greedy",
            "adaptive_length needs draft_sample_method greedy: with probabilistic, a seeded request's tokens would "
            "depend on the lengths",
        )
        self._check_prefix_scheduling()
        self._check_batch_size()
        self._check_lookup()

    def _check_prefix_scheduling(self) -> None:
        wanted = self.prefix_scheduling
        check(
            wanted is None or isinstance(wanted, bool),
            f"prefix_scheduling must be True, False or None, got {wanted!r}",
        )
        check(
            not (wanted and self.adaptive_length),
            "prefix_scheduling and adaptive_length both say how many draft tokens are verified; use one of them",
        )

    def _check_batch_size(self) -> None:
        most = self.disable_by_batch_size
        check(
            most is None or (is_integer(most) and most >= 1),
            f"disable_by_batch_size must be an integer of at least 1, got {most!r}",
        )
        check(
            most is None or self.draft_sample_method == "greedy",
            "disable_by_batch_size needs draft_sample_method greedy: with probabilistic, a seeded request's tokens "
            "would depend on how many requests run",
        )
        check(
            most is None or not self.adaptive_length,
            "disable_by_batch_size and adaptive_length both say when to draft; use one of them",
        )

    def _check_lookup(self) -> None:
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        check(
            is_integer(shortest) and shortest >= 1,
            f"prompt_lookup_min must be an integer of at least 1, got {shortest!r}",
        )
        check(
            longest is None or longest == 0 or (is_integer(longest) and longest >= shortest),
            f"prompt_lookup_max must be 0 or an integer of at least prompt_lookup_min ({shortest}), got {longest!r}",
        )
        check(
            self.lookup_lengths is None or self.draft_sample_method == "greedy",
            "looking tokens up needs draft_sample_method greedy: they are not drawn from a distribution",
        )
        if self.needs_drafter:
            return
        check(
            self.model is None,
            f"speculative method ngram needs no drafter, and {self.model!r} is one; leave out the model or the method",
        )
        check(longest != 0, "speculative method ngram looks tokens up: prompt_lookup_max must be at least 1")
        check(not self.adaptive_length, "adaptive_length needs a drafter; method ngram drafts only what it finds")
        check(
            self.disable_by_batch_size is None,
            "disable_by_batch_size needs a drafter; method ngram drafts only what it finds",
        )

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> "SpeculativeConfig":
        """The configuration that a mapping such as vLLM's `speculative_config` describes.

        Raises:
            ConfigError: not a mapping, an unknown key, or a value out of its range.
        """
        check(isinstance(settings, Mapping), f"speculative_config must be a mapping, got {settings!r}")
        known = [field.name for field in fields(cls)]
        for name in settings:
            check(name in known, f"speculative_config has no setting {name!r}; there are {', '.join(known)}")
        return cls(**settings)
