"""Drafters that come with Sparkgap, as package data: one directory for each target, named like it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sparkgap.catalog.checkpoint import Checkpoint
from sparkgap.catalog.drafter_settings import DrafterSettings, read_settings
from sparkgap.catalog.drafters import DrafterCheckpoint, read_drafter
from sparkgap.catalog.identity import identify_target, target_sizes
from sparkgap.catalog.json_files import read_json, readable
from sparkgap.catalog.safetensors_files import SafetensorsSource

SHIPPED_DRAFTERS = Path(__file__).resolve().parent.parent / "drafters"
"""Where they are."""


@dataclass(frozen=True)
class ShippedDrafter:
    """A drafter that comes with Sparkgap.

    Attributes:
        target: name of the model it was made for.
        path: its directory.
        settings: its configuration.
    """

    target: str
    path: Path
    settings: DrafterSettings

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.target} (shipped)"

    def open(self) -> DrafterCheckpoint:
        """Its checkpoint.

        Raises:
            CheckpointError, UnsupportedModelError: as `read_drafter`.
        """
        with readable(self.path):
            return read_drafter(read_json(self.path / "config.json"), SafetensorsSource(self.path), self.name)


@dataclass(frozen=True)
class ShippedMatch:
    """Which shipped drafter belongs to a target.

    Attributes:
        drafter: the one to use; None when there is none.
        note: what a user should know: that a drafter of the target's name does not belong to it, or that it was made
            for another precision of the same model. None when there is nothing to say.
    """

    drafter: ShippedDrafter | None = None
    note: str | None = None


def shipped_drafters() -> Iterator[ShippedDrafter]:
    """All drafters that come with Sparkgap, by name.

    Raises:
        CheckpointError, UnsupportedModelError: one is damaged.
    """
    for file in sorted(SHIPPED_DRAFTERS.glob("*/config.json")):
        target = file.parent.name
        yield ShippedDrafter(target, file.parent, read_settings(read_json(file), f"{target} (shipped)"))


def match_shipped(target: Checkpoint) -> ShippedMatch:
    """The shipped drafter for an opened model, whatever name or path it was opened by.

    It is the one whose recorded identity is the model's: architecture, sizes and fingerprints of its weights. A drafter
    made for the same model in another precision is taken too, which costs some acceptance and is noted.

    Raises:
        CheckpointError, UnsupportedModelError: a drafter is damaged, or the model's tensors cannot be read.
    """
    sizes = target_sizes(target.config)
    candidates = list(shipped_drafters())
    fitting = [d for d in candidates if d.settings.made_for is not None and d.settings.made_for.sizes == sizes]
    identity = identify_target(target.config, target.weights) if fitting else None
    same_model = None
    for drafter in fitting:
        made_for = drafter.settings.made_for
        assert made_for is not None
        if made_for == identity:
            return ShippedMatch(drafter)
        if identity is not None and made_for.model == identity.model:
            same_model = drafter
    if same_model is not None:
        return ShippedMatch(
            same_model,
            f"drafter {same_model.name} was made for {same_model.target} in another precision than {target.path.name}, "
            "and may have less accepted; the output is the same",
        )
    if any(drafter.target == target.name.lower() for drafter in candidates):
        return ShippedMatch(
            note=f"drafter {target.name.lower()} (shipped) was not made for the weights in {target.path.name}, so "
            "decoding is plain; `sparkgap train` makes a drafter for them"
        )
    return ShippedMatch()
