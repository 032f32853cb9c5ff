"""The program as a process: version, help without torch, closed pipes, reports of `info` and `pull`."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import sparkgap as package
from sparkgap.cli.console import format_bytes
from sparkgap.cli.options import parse_bytes
from sparkgap.errors import ConfigError


def test_version(sparkgap: Callable[..., Any]) -> None:
    result = sparkgap("--version")
    assert (result.status, result.out) == (0, f"sparkgap {package.__version__}\n")
    assert package.__version__ == version("sparkgap")


@pytest.mark.parametrize("command", [[], ["generate"], ["chat"], ["pull"], ["info"]])
def test_help_and_bad_input_import_no_torch(command: list[str]) -> None:
    code = (
        "import sys\n"
        "from sparkgap.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    print('torch' in sys.modules, file=sys.stderr)\n"
    )
    for option, status in (("--help", 0), ("--bogus", 2)):
        result = subprocess.run(
            [sys.executable, "-c", code, *command, option], capture_output=True, text=True, check=False
        )
        assert result.returncode == status
        assert result.stderr.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    "command", [[], ["generate"], ["check"], ["serve"], ["quantize"], ["bench"], ["bench", "serve"]]
)
def test_help_has_types_beside_values_only_and_fills_its_paragraphs(
    sparkgap: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = sparkgap(*command, "--help").out
    assert "bool" not in text
    assert re.search(r"--help +-h +Show this message and exit\.", text)
    head = text.split("╭")[0]
    assert all(re.search(r"[.:]$", line.rstrip()) for line in head.splitlines()[3:] if 0 < len(line.strip()) < 150)


@pytest.mark.parametrize("arguments", [["--help"], ["info"], ["info", "--json"]])
def test_a_reader_that_leaves_is_no_error(arguments: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "sparkgap", *arguments], stdout=write_end, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(write_end)
    assert (result.returncode, result.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("redirection", "message"),
    [
        (">/dev/full", "standard output: No space left"),
        (">&-", "standard output is closed"),
    ],
)
@pytest.mark.parametrize("arguments", ["--help", "info --json"])
def test_output_that_cannot_be_written(arguments: str, redirection: str, message: str) -> None:
    command = f"{sys.executable} -m sparkgap {arguments} {redirection}"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("sparkgap: error: ")
    assert message in result.stderr or "No space left" in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_interrupt_during_imports_ends_the_program_without_a_word(tmp_path: Path) -> None:
    """Some imports swallow the exception that Ctrl-C raises; a module that does so stands in for them."""
    package = tmp_path / "typer"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    result = subprocess.run(
        [sys.executable, "-m", "sparkgap", "--version"], env=environment, capture_output=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, b"", b"")


def test_interrupts_are_exceptions_again_after_imports(sparkgap: Callable[..., Any]) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert sparkgap("info", "--json").status == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_standard_streams_that_are_closed() -> None:
    def run(rest: str) -> subprocess.CompletedProcess[str]:
        command = f"{sys.executable} -m sparkgap {rest}"
        return subprocess.run(command, shell=True, capture_output=True, text=True, check=False)

    result = run("generate - <&-")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("sparkgap: error: standard input is closed")
    result = run("generate hi --temperature -1 2>&-")
    assert (result.returncode, result.stdout) == (2, "")


@pytest.mark.parametrize("cache", ["~no-such-user/x", "/tmp/" + "x" * 5000], ids=["user", "long"])
def test_a_cache_that_cannot_be(sparkgap: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    monkeypatch.setenv("SPARKGAP_CACHE", cache)
    for arguments in (["info"], ["info", "--json"], ["generate", "hi", "--offline"], ["pull", "smollm2-135m"]):
        result = sparkgap(*arguments)
        assert (result.status, result.out) == (2, "")
        assert "SPARKGAP_CACHE" in result.err
        assert result.err.count("\n") == 1


def test_info(sparkgap: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARKGAP_CACHE", str(tmp_path))
    result = sparkgap("info", "--json")
    assert result.status == 0
    facts = json.loads(result.out)
    assert facts["version"] == package.__version__
    assert facts["torch"] == version("torch")
    assert 1 <= facts["cores"]["usable"] <= facts["cores"]["total"]
    assert 0 < facts["memory"]["available_bytes"] < facts["memory"]["total_bytes"]
    assert facts["cache_directory"] == str(tmp_path)
    assert facts["models"] == []
    text = sparkgap("info").out
    assert str(tmp_path) in text
    assert "sparkgap pull" in text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("512M", 2**29),
        ("512mb", 2**29),
        ("2G", 2**31),
        ("1.5 GiB", 3 * 2**29),
        ("64k", 2**16),
        ("1T", 2**40),
    ],
)
def test_parse_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "1e9", "0.4", "1P", "nan", "1 2", "٣", "9" * 400])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match="512M"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (98362432, "93.8 MiB"), (2**50, "1024.0 TiB")],
)
def test_format_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text
