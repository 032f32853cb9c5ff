"""Drafters that come with the package, by the model they were trained for."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from sparkgap.catalog.registry import MODELS, HubRepository

_DIRECTORY = Path(__file__).resolve().parent.parent / "drafters"

SHIPPED_DRAFTERS: Mapping[str, str] = MappingProxyType({"smollm2-135m": "smollm2-135m-dspark"})
"""Name of a catalog model -> folder of its drafter in the package."""


def shipped_drafter(model: str) -> Path | None:
    """The directory of the drafter that is shipped for a model, named as a user names it; None if there is none.

    A model is known by its catalog name or by the hub repository that the name stands for: a directory or file may
    hold other weights.
    """
    for name, folder in SHIPPED_DRAFTERS.items():
        repositories = [f"hf:{source.repo_id}" for source in MODELS[name].sources if isinstance(source, HubRepository)]
        if model.lower() in {name, *(repository.lower() for repository in repositories)}:
            directory = _DIRECTORY / folder
            return directory if directory.is_dir() else None
    return None
