"""Conversations of another run, so that one set of them trains several drafters. They are only read."""

import dataclasses
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sparkgap.catalog.identity import TargetIdentity
from sparkgap.errors import ConfigError
from sparkgap.train.config import ConversationConfig, FeatureConfig, NetworkConfig, TrainConfig
from sparkgap.train.conversations import shard_path
from sparkgap.train.features import Examples
from sparkgap.train.kept import damaged, read_kept_json, write_kept_json

_Settings = TypeVar("_Settings", ConversationConfig, FeatureConfig)

TARGET_FILE = "target.json"
"""File in `work/` that holds the identity of the target whose conversations are there."""


_NEW_CONVERSATIONS = "restore it, or leave out --conversations"


@dataclass(frozen=True)
class SharedConversations:
    """A run's conversations as another run may use them.

    Attributes:
        run: that run's directory.
        sampling: how they were sampled.
        layer_ids: captured layers.
        wanted_tokens: answer tokens that are asked for; as many shards are taken as bring them. None takes all.
    """

    run: Path
    sampling: ConversationConfig
    layer_ids: tuple[int, ...]
    wanted_tokens: int | None


def open_shared(config: TrainConfig, num_layers: int, identity: TargetIdentity) -> SharedConversations:
    """The conversations of `config.conversations`, if a run of `config` can use them.

    Args:
        config: of the run that is to use them.
        num_layers: layers of its target.
        identity: of its target.

    Raises:
        ConfigError: there are none, or they are of another target, another sampling or other layers.
    """
    run = config.conversations
    assert run is not None
    recorded = _recorded_settings(run)
    _check_target(run, recorded, config, identity)
    sampling = _merge(run, "conversation", config.conversation, recorded.get("conversation"))
    features = _merge(run, "features", config.features, recorded.get("features"), skip={"target_layer_ids"})
    wanted = config.drafter_layer_ids(num_layers)
    try:
        method = recorded.get("network", {}).get("method", NetworkConfig.method)
        network = NetworkConfig(method=method, num_layers=1, num_speculative_tokens=1)
        captured = TrainConfig(config.target, run, features=features, network=network).captured_layer_ids(num_layers)
    except ConfigError as error:
        raise damaged(run / "work" / "settings.json", str(error), _NEW_CONVERSATIONS) from error
    missing = [layer for layer in wanted if layer not in captured]
    if missing:
        raise ConfigError(
            f"the conversations of {run} have the states after layers {', '.join(map(str, captured))}, and layer "
            f"{missing[0]} is asked for"
        )
    wanted_tokens = config.conversation.answer_tokens
    usual = wanted_tokens == ConversationConfig.answer_tokens
    return SharedConversations(run, sampling, captured, None if usual else wanted_tokens)


def shared_shards(shared: SharedConversations, record: Path) -> list[Path]:
    """The shards to learn from: the same ones whenever a run is continued, however many are added later.

    Args:
        shared: conversations of another run.
        record: file that remembers how many were taken.

    Raises:
        ConfigError: there are fewer than are asked for, or than were taken before.
    """
    directory = shared.run / "work" / "conversations"
    count = _shards_taken(record) if record.exists() else None
    paths: list[Path] = []
    while (count is None or len(paths) < count) and (path := shard_path(directory, len(paths))).exists():
        paths.append(path)
    if count is not None and len(paths) < count:
        raise ConfigError(
            f"{directory} had {count} files of conversations when this run was begun, and has {len(paths)}"
        )
    if not paths:
        raise ConfigError(f"{directory} has no conversations yet")
    if count is None and shared.wanted_tokens is not None:
        paths = _enough(directory, paths, shared.wanted_tokens)
    write_kept_json(record, {"run": str(shared.run), "shards": len(paths)})
    return paths


def _shards_taken(record: Path) -> int:
    remedy = "remove it and state.pt beside it, and training begins again"
    count = read_kept_json(record, remedy).get("shards")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise damaged(record, "no number of shards", remedy)
    return count


def _enough(directory: Path, paths: list[Path], wanted_tokens: int) -> list[Path]:
    examples = Examples()
    for count, path in enumerate(paths, 1):
        examples.add(path)
        if examples.answer_tokens >= wanted_tokens:
            return paths[:count]
    raise ConfigError(f"{directory} has {examples.answer_tokens} answer tokens, and {wanted_tokens} are asked for")


def _recorded_settings(run: Path) -> dict[str, Any]:
    path = run / "work" / "settings.json"
    if not os.path.lexists(path):
        raise ConfigError(
            f"{run} is not the directory of a training run with conversations: {path} is not there or cannot be reached"
        )
    recorded = read_kept_json(path, _NEW_CONVERSATIONS)
    for name in ("conversation", "features", "network"):
        if not isinstance(recorded.get(name, {}), dict):
            raise damaged(path, f"{name} is no JSON object", _NEW_CONVERSATIONS)
    if recorded.get("conversations") is not None:
        raise ConfigError(f"{run} uses the conversations of {recorded['conversations']}; give that directory")
    return recorded


def _check_target(run: Path, recorded: dict[str, Any], config: TrainConfig, identity: TargetIdentity) -> None:
    path = run / "work" / TARGET_FILE
    if path.exists():
        same = read_kept_json(path, f"continue the run in {run}, which writes it anew") == identity.to_json()
    else:  # a run that does not say
        same = recorded.get("target") == config.target
    if not same:
        raise ConfigError(
            f"the conversations of {run} are those of target {recorded.get('target')}, and {config.target} has other "
            "weights or another name"
        )


def _merge(
    run: Path, name: str, given: _Settings, recorded: dict[str, Any] | None, skip: Collection[str] = ()
) -> _Settings:
    """That run's settings, where `given` does not contradict them: it has the default, or the same value."""
    found = {key: _from_json(value) for key, value in (recorded or {}).items()}
    values: dict[str, Any] = {}
    for field in dataclasses.fields(given):
        ours, default = getattr(given, field.name), field.default
        theirs = found.get(field.name, default)
        if field.name == "prompts":
            theirs = None if theirs is None else Path(theirs).resolve()
        if field.name not in skip and field.name != "answer_tokens" and ours not in (default, theirs):
            raise ConfigError(
                f"the conversations of {run} were made with {name}.{field.name} = {theirs!r}, and {ours!r} is asked for"
            )
        values[field.name] = theirs
    try:
        return type(given)(**values)
    except (ConfigError, TypeError) as error:
        raise damaged(run / "work" / "settings.json", f"{name}: {error}", _NEW_CONVERSATIONS) from error


def _from_json(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
