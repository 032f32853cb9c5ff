"""The settings that a run was begun with, and whether it may go on with those it is given now."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from sparkgap.catalog.resolve import absolute_model
from sparkgap.errors import ConfigError
from sparkgap.train.config import TrainConfig
from sparkgap.train.kept import read_kept_json

_MAY_CHANGE = {
    "out", "threads", "evaluation_prompts", "conversation.answer_tokens", "optimization.steps",
    "optimization.evaluation_interval", "optimization.checkpoint_interval_s",
}  # fmt: skip
"""Settings that a run may be continued with other values of."""


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """Settings whose inputs are found from every directory, so that a run may be continued from another one.

    Paths to nothing stay as they are: the errors about them show what was given.
    """
    prompts = config.conversation.prompts
    return dataclasses.replace(
        config,
        conversations=_absolute(config.conversations),
        start_from=_absolute(config.start_from),
        conversation=dataclasses.replace(config.conversation, prompts=_absolute(prompts)),
    )


def _absolute(path: Path | None) -> Path | None:
    return path if path is None or not os.path.exists(path) else path.resolve()


def settings_to_record(config: TrainConfig) -> dict[str, Any]:
    """What is kept of settings with absolute paths.

    Raises:
        ModelNotFoundError: the target is a path to nothing.
    """
    return plain(config) | {"target": absolute_model(config.target)}


def plain(config: TrainConfig) -> dict[str, Any]:
    """Settings in JSON's types."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    return values


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def check_settings(path: Path, now: dict[str, Any], given: TrainConfig) -> None:
    """Refuse to continue a run with other settings than it was begun with, which would mix two runs.

    Args:
        path: where the settings of the run's beginning are, if it was begun.
        now: what would be kept of those given now.
        given: they themselves: earlier versions kept paths as they were given.

    Raises:
        ConfigError: naming the setting, its value then and now.
    """
    if not path.exists():
        return
    # A run may be older than a setting: it was then begun with what is now the setting's default.
    defaults = _flat(plain(TrainConfig(given.target, given.out)))
    remedy = "use another directory, or remove the file and give the settings that the run was begun with"
    before = defaults | _flat(read_kept_json(path, remedy))
    as_given = _flat(plain(given))
    for key, value in _flat(now).items():
        if key not in _MAY_CHANGE and before[key] not in (value, as_given[key]):
            raise ConfigError(
                f"{path.parent.parent} was begun with {key} = {before[key]!r}, and is now given {value!r}"
                "; use the same settings to continue it, or another directory"
            )
