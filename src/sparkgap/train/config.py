"""Settings of drafter training, with all their validation. Imports no torch."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from sparkgap.config import DEFAULT_MODEL
from sparkgap.errors import ConfigError

METHODS = ("dspark", "dflash")
"""Drafters that can be trained."""


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
        top_p: nucleus of the tokens that are sampled at temperatures above 0.
        prompts: a file of user turns, `.jsonl` with `prompt` or one a line; None samples them.
        only_prompts: use the file's turns alone.

    Raises:
        ConfigError: a value is out of its range.
    """

    answer_tokens: int = 300_000
    lanes: int = 64
    shard_conversations: int = 256
    max_positions: int = 512
    max_user_tokens: int = 160
    min_answer_tokens: int = 12
    user_temperatures: tuple[float, ...] = (0.7, 0.85, 1.0)
    answer_temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.7)
    top_p: float = 0.95
    prompts: Path | None = None
    only_prompts: bool = False

    def __post_init__(self) -> None:
        for name in (
            "answer_tokens", "lanes", "shard_conversations", "max_positions", "max_user_tokens", "min_answer_tokens"
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
            not self.only_prompts or self.prompts is not None,
            "only_prompts needs a prompts file: give --prompts, or leave the target to write the user turns",
        )


@dataclass(frozen=True)
class FeatureConfig:
    """What is kept of each position of the target's pass.

    Attributes:
        target_layer_ids: captured layers; id `k` is the stream after layer `k`. None chooses by the target's depth.
        top_k: most probable tokens whose probabilities are kept.
    """

    target_layer_ids: tuple[int, ...] | None = None
    top_k: int = 32

    def __post_init__(self) -> None:
        _check(_is_integer(self.top_k) and self.top_k >= 1, f"top_k must be an integer of at least 1, got {self.top_k!r}")
        ids = self.target_layer_ids
        _check(
            ids is None or (bool(ids) and len(set(ids)) == len(ids) and all(_is_integer(i) and i >= 0 for i in ids)),
            f"target_layer_ids must be different layer ids of at least 0, got {ids!r}",
        )

    def layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """The layers captured from a target of `num_layers` layers.

        Raises:
            ConfigError: an id is not a layer below the last, whose stream a drafter must not read.
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
