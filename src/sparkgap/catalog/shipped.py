"""Drafters that come with Sparkgap, as package data.

A target has a directory of its name for its drafter, and may have one with `-mtp` behind the name for an MTP drafter,
which is used where that method is asked for.
"""

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

_MTP_SUFFIX = "-mtp"
"""Of the directory of a target's MTP drafter."""


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
        return f"{self.path.name} (shipped)"

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
        directory = file.parent
        settings = read_settings(read_json(file), f"{directory.name} (shipped)")
        target = directory.name.removesuffix(_MTP_SUFFIX) if settings.method == "mtp" else directory.name
        yield ShippedDrafter(target, directory, settings)


def match_shipped(target: Checkpoint, method: str | None = None) -> ShippedMatch:
    """The shipped drafter for an opened model, whatever name or path it was opened by.

    It is the one whose recorded identity is the model's: architecture, sizes and fingerprints of its weights. A drafter
    made for the same model in another precision is taken too, which costs some acceptance and is noted.

    Args:
        target: the model.
        method: what is asked for. Another drafter is taken only if there is none of this method, and an MTP drafter
            only if there is no other.

    Raises:
        CheckpointError, UnsupportedModelError: a drafter is damaged, or the model's tensors cannot be read.
    """
    sizes = target_sizes(target.config)
    candidates = list(shipped_drafters())
    fitting = [d for d in candidates if d.settings.made_for is not None and d.settings.made_for.sizes == sizes]
    identity = identify_target(target.config, target.weights) if fitting else None
    # MTP last: where nothing is said, what drafts a whole block in one pass comes first.
    wanted = [d for d in fitting if d.settings.method == method]
    blocks = [d for d in fitting if d.settings.method != "mtp"]
    for drafters in (wanted, blocks, fitting):
        exact = next((d for d in drafters if d.settings.made_for == identity), None)
        if exact is not None:
            return ShippedMatch(exact)
        other = next((d for d in drafters if identity is not None and _model(d) == identity.model), None)
        if other is not None:
            return ShippedMatch(
                other,
                f"drafter {other.name} was made for {other.target} in another precision than {target.path.name}, "
                "and may have less accepted; the output is the same",
            )
    if any(drafter.target == target.name.lower() for drafter in candidates):
        return ShippedMatch(
            note=f"drafter {target.name.lower()} (shipped) was not made for the weights in {target.path.name}, so "
            "decoding is plain; `sparkgap train` makes a drafter for them"
        )
    return ShippedMatch()


def _model(drafter: ShippedDrafter) -> str | None:
    """Fingerprint of the model that a drafter was made for, whatever its precision."""
    made_for = drafter.settings.made_for
    return None if made_for is None else made_for.model
