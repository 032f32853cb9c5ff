"""Settings of drafter training, with all their validation. Imports no torch."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparkgap.config import DEFAULT_MTP_TOKENS, MOST_MTP_TOKENS
from sparkgap.errors import ConfigError

Method = Literal["dspark", "dflash", "mtp"]
HeadType = Literal["vanilla", "gated", "rnn"]
METHODS: tuple[Method, ...] = ("dspark", "dflash", "mtp")
"""Drafters that can be trained."""

HEAD_TYPES: tuple[HeadType, ...] = ("vanilla", "gated", "rnn")
"""Markov heads that can be trained."""

_SHORT_BLOCK_TOKENS = 2


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class ConversationConfig:
    """Stage 1: how conversations are sampled from the target.

    Attributes:
        answer_tokens: answer tokens to collect.
        lanes: conversations that are decoded together by one worker.
        shard_conversations: conversations in one file, the unit of resuming.
        max_positions: longest conversation, template included.
        max_user_tokens: longest user turn that is kept.
        min_answer_tokens: shorter answers are dropped.
        user_temperatures: temperatures of user turns, drawn evenly.
        answer_temperatures: temperatures of answers, drawn evenly; a repeated value is drawn more often.
        opener_share: share of the user turns that begin with an opener (`train.openers`) and are continued by the
            target; the others it writes from the empty turn.
        top_p: nucleus of the tokens that are sampled at temperatures above 0.
        prompts: a file of user turns, `.jsonl` with `prompt` or one a line; None samples them.
        only_prompts: use the file's turns alone.

    Raises:
        ConfigError: a value is out of its range.
    """

    answer_tokens: int = 300_000
    lanes: int = 64
    shard_conversations: int = 128
    max_positions: int = 512
    max_user_tokens: int = 224
    min_answer_tokens: int = 12
    user_temperatures: tuple[float, ...] = (0.7, 0.85, 1.0)
    answer_temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.7)
    opener_share: float = 0.85
    top_p: float = 0.95
    prompts: Path | None = None
    only_prompts: bool = False

    def __post_init__(self) -> None:
        for name in (
            "answer_tokens", "lanes", "shard_conversations", "max_positions", "max_user_tokens",
            "min_answer_tokens",
        ):  # fmt: skip
            value = getattr(self, name)
            _check(_is_integer(value) and value >= 1, f"{name} must be an integer of at least 1, got {value!r}")
        for name in ("user_temperatures", "answer_temperatures"):
            values = getattr(self, name)
            _check(
                bool(values) and all(_is_finite(value) and value >= 0 for value in values),
                f"{name} must be finite numbers of at least 0, got {values!r}",
            )
        _check(_is_finite(self.top_p) and 0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p!r}")
        _check(
            _is_finite(self.opener_share) and 0 <= self.opener_share <= 1,
            f"opener_share must be in [0, 1], got {self.opener_share!r}",
        )
        _check(
            not self.only_prompts or self.prompts is not None,
            "only_prompts needs a prompts file: give --prompts, or leave the target to write the user turns",
        )


@dataclass(frozen=True)
class FeatureConfig:
    """What is kept of each position of the target's pass.

    Attributes:
        target_layer_ids: captured layers; id `k` is the stream after layer `k`. None chooses by depth.
        top_k: most probable tokens whose probabilities are kept.
    """

    target_layer_ids: tuple[int, ...] | None = None
    top_k: int = 32

    def __post_init__(self) -> None:
        _check(
            _is_integer(self.top_k) and self.top_k >= 1,
            f"top_k must be an integer of at least 1, got {self.top_k!r}",
        )
        ids = self.target_layer_ids
        _check(
            ids is None or (bool(ids) and len(set(ids)) == len(ids) and all(_is_integer(i) and i >= 0 for i in ids)),
            f"target_layer_ids must be different layer ids of at least 0, got {ids!r}",
        )

    def layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """The layers that a block drafter reads of a target of `num_layers` layers.

        Raises:
            ConfigError: an id is not a layer below the last, whose stream a block drafter must not read.
        """
        if self.target_layer_ids is None:
            chosen = {round(share * (num_layers - 1)) for share in (0.14, 0.41, 0.69)} | {num_layers - 2}
            return tuple(sorted(i for i in chosen if 0 <= i <= max(num_layers - 2, 0)))
        for layer in self.target_layer_ids:
            _check(
                layer < num_layers - 1,
                f"target layer {layer} cannot be captured: the target has {num_layers} layers, and the last one's "
                f"stream must not be read, so ids go from 0 to {num_layers - 2}",
            )
        return self.target_layer_ids


@dataclass(frozen=True)
class NetworkConfig:
    """What the drafter looks like.

    Attributes:
        method: `dspark`, `dflash` without sequential heads, or `mtp`, one layer that is applied again for each token.
        num_layers: draft layers; 1 for `mtp`.
        num_speculative_tokens: tokens that a block predicts, or that `mtp` is trained to draft (N).
        draft_vocab_size: tokens that can be drafted.
        markov_rank: rank of the Markov head; of `dspark` alone.
        intermediate_size: of the feed-forward; None takes the target's.
        num_kv_heads: key and value heads; None takes the target's.
        markov_head_type: kind of the Markov head; of `dspark` alone.
    """

    method: Method = "dspark"
    num_layers: int = 2
    num_speculative_tokens: int = 7
    draft_vocab_size: int = 8192
    markov_rank: int = 64
    intermediate_size: int | None = None
    num_kv_heads: int | None = None
    markov_head_type: HeadType = "vanilla"

    def __post_init__(self) -> None:
        _check(self.method in METHODS, f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        _check(
            self.markov_head_type in HEAD_TYPES,
            f"markov_head_type must be one of {', '.join(HEAD_TYPES)}, got {self.markov_head_type!r}",
        )
        for name in ("num_layers", "num_speculative_tokens", "draft_vocab_size", "markov_rank"):
            value = getattr(self, name)
            _check(_is_integer(value) and value >= 1, f"{name} must be an integer of at least 1, got {value!r}")
        if self.method == "mtp":
            _check(self.num_layers == 1, f"an mtp drafter has 1 layer, got num_layers {self.num_layers}")
            _check(
                self.num_speculative_tokens <= MOST_MTP_TOKENS,
                f"an mtp drafter drafts at most {MOST_MTP_TOKENS} tokens, got {self.num_speculative_tokens}",
            )
        for name in ("intermediate_size", "num_kv_heads"):
            value = getattr(self, name)
            _check(
                value is None or (_is_integer(value) and value >= 1),
                f"{name} must be an integer of at least 1, got {value!r}",
            )

    @classmethod
    def for_method(cls, method: str) -> "NetworkConfig":
        """The usual drafter of a method.

        Raises:
            ConfigError: no such method.
        """
        if method == "mtp":
            return cls("mtp", num_layers=1, num_speculative_tokens=DEFAULT_MTP_TOKENS)
        return cls(method)  # type: ignore[arg-type]


@dataclass(frozen=True)
class LossConfig:
    """The loss (arXiv 2607.05147).

    Attributes:
        cross_entropy, total_variation, confidence: weights of its terms.
        gamma: weight of the k-th token of a block is `exp(-(k - 1) / gamma)`.
    """

    cross_entropy: float = 0.1
    total_variation: float = 0.9
    confidence: float = 1.0
    gamma: float = 4.0

    def __post_init__(self) -> None:
        for name in ("cross_entropy", "total_variation", "confidence"):
            value = getattr(self, name)
            _check(_is_finite(value) and value >= 0, f"loss weight {name} must be at least 0, got {value!r}")
        _check(
            self.cross_entropy + self.total_variation > 0,
            "loss weights of cross-entropy and total variation are both 0: nothing would be learned",
        )
        _check(_is_finite(self.gamma) and self.gamma > 0, f"gamma must be above 0, got {self.gamma!r}")


@dataclass(frozen=True)
class OptimizationConfig:
    """Stage 2: how the drafter is trained.

    Attributes:
        steps: optimizer steps.
        anchors_per_step: blocks that a step learns from, about.
        anchors_per_conversation: most blocks of one conversation in a step.
        short_share: share of the steps, at the start, in which blocks are only `short_tokens` long: the first
            tokens gate all others, and a short block costs a fraction of a long one.
        short_tokens: tokens that a short block predicts.
        matrix_learning_rate: of Muon, for the matrices of the draft layers and `fc`.
        learning_rate: of AdamW, for norms and heads.
        warmup_steps: steps over which the learning rates rise.
        decay_share: share of the steps, at the end, over which they fall to 2%.
        held_out_conversations: greedy conversations that are never trained on.
        evaluation_interval: steps between evaluations on a part of those.
        checkpoint_interval_s: seconds between checkpoints.
    """

    steps: int = 1000
    anchors_per_step: int = 512
    anchors_per_conversation: int = 64
    short_share: float = 0.5
    short_tokens: int = _SHORT_BLOCK_TOKENS
    matrix_learning_rate: float = 0.02
    learning_rate: float = 2e-3
    warmup_steps: int = 10
    decay_share: float = 0.4
    held_out_conversations: int = 48
    evaluation_interval: int = 100
    checkpoint_interval_s: float = 60.0

    def __post_init__(self) -> None:
        for name in (
            "steps", "anchors_per_step", "anchors_per_conversation", "short_tokens", "held_out_conversations",
            "evaluation_interval",
        ):  # fmt: skip
            value = getattr(self, name)
            _check(_is_integer(value) and value >= 1, f"{name} must be an integer of at least 1, got {value!r}")
        _check(
            _is_integer(self.warmup_steps) and self.warmup_steps >= 0,
            f"warmup_steps must be an integer of at least 0, got {self.warmup_steps!r}",
        )
        for name in ("short_share", "decay_share"):
            value = getattr(self, name)
            _check(_is_finite(value) and 0 <= value <= 1, f"{name} must be in [0, 1], got {value!r}")
        for name in ("matrix_learning_rate", "learning_rate", "checkpoint_interval_s"):
            value = getattr(self, name)
            _check(_is_finite(value) and value > 0, f"{name} must be above 0, got {value!r}")

    def learning_rate_factor(self, step: int) -> float:
        """Share of the full learning rates at `step` (from 0)."""
        warm = min((step + 1) / (self.warmup_steps + 1), 1.0)
        left = (self.steps - step) / self.steps
        return warm * (max(left / self.decay_share, 0.02) if left < self.decay_share else 1.0)

    def tokens_at(self, step: int, num_speculative_tokens: int) -> int:
        """Tokens that a block predicts at `step`."""
        short = step < self.short_share * self.steps
        return min(self.short_tokens, num_speculative_tokens) if short else num_speculative_tokens


@dataclass(frozen=True)
class TrainConfig:
    """One run of `sparkgap train`.

    Attributes:
        target: the model that the drafter is for.
        out: directory of the drafter, the report, and `work/`.
        device: `auto`, `cpu`, or an accelerator's torch name.
        threads: compute threads; None takes torch's choice.
        workers: conversations files and parts of a step that run side by side, each with its share of the threads;
            None takes one for each thread on a CPU, and one on an accelerator.
        seed: of everything random.
        evaluation_prompts: a file of user turns to measure on at the end; never trained on.
        conversations: directory (`out`) of another run whose conversations are used instead of own ones. What
            `conversation` and `features` leave at its default is as that run has it.
        start_from: directory of a drafter of the same sizes whose weights training starts from; its draft
            vocabulary may be another. None starts as `train.start` does.
        conversation, features, network, loss, optimization: the stages' settings.
    """

    target: str
    out: Path
    device: str = "auto"
    threads: int | None = None
    workers: int | None = None
    seed: int = 0
    evaluation_prompts: Path | None = None
    conversations: Path | None = None
    start_from: Path | None = None
    conversation: ConversationConfig = ConversationConfig()
    features: FeatureConfig = FeatureConfig()
    network: NetworkConfig = NetworkConfig()
    loss: LossConfig = LossConfig()
    optimization: OptimizationConfig = OptimizationConfig()

    def __post_init__(self) -> None:
        _check(bool(self.target), "target must not be empty")
        _check(
            _is_integer(self.seed) and -(2**63) <= self.seed < 2**64,
            f"seed must be a 64-bit integer, got {self.seed!r}",
        )
        for name in ("threads", "workers"):
            value = getattr(self, name)
            _check(
                value is None or (_is_integer(value) and value >= 1),
                f"{name} must be an integer of at least 1, got {value!r}",
            )
        ids = self.features.target_layer_ids
        _check(
            self.network.method != "mtp" or ids is None or len(ids) == 1,
            f"an mtp drafter reads one target layer, got {ids!r}",
        )
        _check(not self.out.exists() or self.out.is_dir(), f"out must be a directory, and {self.out} is a file")

    def drafter_layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """The layers that the drafter reads of a target of `num_layers` layers; see `FeatureConfig.layer_ids`.

        An MTP drafter reads one, the deepest of the usual ones unless another is named; that may be the last.
        """
        if self.network.method != "mtp":
            return self.features.layer_ids(num_layers)
        if self.features.target_layer_ids is None:
            return FeatureConfig().layer_ids(num_layers)[-1:]
        (layer,) = self.features.target_layer_ids
        _check(layer < num_layers, f"target layer {layer} cannot be captured: the target has {num_layers} layers")
        return (layer,)

    def captured_layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """The layers that are kept of conversations: the drafter's, and for MTP the usual ones of other methods."""
        ids = self.drafter_layer_ids(num_layers)
        if self.network.method != "mtp":
            return ids
        return tuple(sorted({*ids, *FeatureConfig().layer_ids(num_layers)}))
