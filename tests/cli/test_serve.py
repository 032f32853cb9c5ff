"""Options of `sparkgap serve`: their three sources, what `--dry-run` prints, and the table in the documentation."""

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from sparkgap.cli.app import app

Run = Callable[..., Any]
DOCUMENT = Path(__file__).parents[2] / "docs" / "serving.md"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOST", "PORT", "API_KEY", "MAX_NUM_SEQS", "CONFIG"):
        monkeypatch.delenv(f"SPARKGAP_{name}", raising=False)


def sources(text: str) -> dict[str, tuple[str, str]]:
    """Value and origin by option."""
    lines = [re.fullmatch(r"(\S+) = (.+?) +# (.+)", line) for line in text.splitlines()]
    return {match[1]: (match[2], match[3]) for match in lines if match}


def test_the_command_line_wins_over_the_environment_over_the_file(
    sparkgap: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        'port = 1001\nhost = "::1"\nmax_num_seqs = 3\nseed = 7\nlog-prompts = true\nrequest-timeout = 2.5\n'
    )
    monkeypatch.setenv("SPARKGAP_PORT", "1002")
    monkeypatch.setenv("SPARKGAP_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("SPARKGAP_NO_SPECULATION", "true")
    result = sparkgap("serve", "--dry-run", "--config", str(file), "--port", "1003")
    assert (result.status, result.err) == (0, "")
    found = sources(result.out)
    assert found["port"] == ("1003", "from --port")
    assert found["max-num-seqs"] == ("5", "from SPARKGAP_MAX_NUM_SEQS")
    assert found["no-speculation"] == ("true", "from SPARKGAP_NO_SPECULATION")
    assert found["host"] == ('"::1"', "from the file")
    assert found["log-prompts"] == ("true", "from the file")
    assert found["request-timeout"] == ("2.5", "from the file")
    assert found["max-queued-seqs"] == ("128", "default")


def test_the_model_may_be_named_without_its_option(
    sparkgap: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('model = "filed"\n')
    monkeypatch.setenv("SPARKGAP_MODEL", "surrounding")
    for arguments in (["named"], ["named", "--config", str(file)], ["named", "--model", "named"]):
        found = sources(sparkgap("serve", "--dry-run", *arguments).out)
        assert found["model"] == ('"named"', "from the command line")
        assert "model-argument" not in found
    assert sources(sparkgap("serve", "--dry-run").out)["model"] == ('"surrounding"', "from SPARKGAP_MODEL")
    for command in ("serve", "chat"):
        result = sparkgap(command, "one", "--model", "other")
        assert (result.status, result.out) == (2, "")
        assert result.err == "sparkgap: error: two models are named, one and --model other; leave one out\n"


def test_the_file_can_be_named_in_the_environment(
    sparkgap: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('cors-origin = ["https://a.example", "https://b.example"]\n[speculative-config]\nmodel = "x"\n')
    monkeypatch.setenv("SPARKGAP_CONFIG", str(file))
    found = sources(sparkgap("serve", "--dry-run").out)
    assert found["cors-origin"] == ('["https://a.example", "https://b.example"]', "from the file")
    assert "model" in found["speculative-config"][0]


def test_what_is_printed_is_a_configuration_file(sparkgap: Run, tmp_path: Path) -> None:
    first = sparkgap(
        "serve", "--dry-run", "--port", "99", "--cors-origin", "https://a.example", "--max-body-size", "2M"
    )
    file = tmp_path / "again.toml"
    file.write_text(first.out)
    assert tomllib.loads(first.out)["port"] == 99
    again = sparkgap("serve", "--dry-run", "--config", str(file))
    assert tomllib.loads(again.out) == tomllib.loads(first.out)


@pytest.mark.parametrize("name", ["\U0001f600\u00e9\u2028\x7f\x01", 'a"b\\ # c', "tab\tand\nline"])
def test_any_text_is_printed_as_toml(sparkgap: Run, tmp_path: Path, name: str) -> None:
    first = sparkgap("serve", "--dry-run", "--served-model-name", name)
    assert tomllib.loads(first.out)["served-model-name"] == name
    file = tmp_path / "again.toml"
    file.write_text(first.out, encoding="utf-8")
    again = sparkgap("serve", "--dry-run", "--config", str(file))
    assert tomllib.loads(again.out) == tomllib.loads(first.out)


def test_bytes_that_are_no_text_are_left_out_of_the_file(sparkgap: Run) -> None:
    result = sparkgap("serve", "--dry-run", "--draft", "\udcff")
    assert result.status == 0
    assert "draft" not in tomllib.loads(result.out)
    assert "# draft is set and no text that TOML can hold" in result.out


def test_one_text_is_a_list_of_one(sparkgap: Run, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('cors-origin = "https://a.example"\n')
    found = sources(sparkgap("serve", "--dry-run", "--config", str(file)).out)
    assert found["cors-origin"] == ('["https://a.example"]', "from the file")


def test_the_api_key_is_not_shown(sparkgap: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKGAP_API_KEY", "hidden-word")
    result = sparkgap("serve", "--dry-run")
    assert "hidden-word" not in result.out
    assert "# api-key is set and not shown" in result.out


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("prot = 1", "unknown key 'prot'; did you mean port"),
        ("zzzzz = 1", "unknown key 'zzzzz'; there are "),
        ("dry-run = true", "unknown key 'dry-run'"),
        ("port = ", "not valid TOML"),
        ("port = 1.5", "Invalid value for '--port'"),
        ("port = 2020-01-01", "port must be text, a number"),
        ("port = [1]", "port must be text, a number"),
        ('model = ["a", "b"]', "model must be text, a number"),
        ("cors-origin = [1]", "cors-origin must be a list of texts"),
        ("speculative-config = {model = 2020-01-01}", "speculative-config has a date"),
        ("max-num-seqs = 1\nmax_num_seqs = 2", "both max-num-seqs and max_num_seqs"),
        ("port = 70000", "port must be from 0 to 65535"),
        ('max-body-size = "much"', "max-body-size must be a size"),
        ("max-num-seqs = 0", "max_num_seqs"),
        ("log-prompts = 5", "log-prompts"),
    ],
)
def test_files_that_are_refused(sparkgap: Run, tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    result = sparkgap("serve", "--dry-run", "--config", str(file))
    assert (result.status, result.out) == (2, "")
    assert match in result.err
    assert result.err.count("\n") == 1


def test_a_file_that_is_not_there(sparkgap: Run, tmp_path: Path) -> None:
    result = sparkgap("serve", "--config", str(tmp_path / "none.toml"))
    assert (result.status, result.err.count("\n")) == (2, 1)
    assert "none.toml" in result.err


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn", "prometheus_client"])
def test_without_the_extra(sparkgap: Run, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    result = sparkgap("serve")
    assert result.status == 2
    assert f"needs {missing}; install the extra: pip install 'sparkgap[server]'" in result.err


def test_the_document_has_every_option() -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {name for parameter in command.params for name in parameter.opts if name.startswith("--")} - {"--help"}
    rows = re.findall(r"^\| `(--[a-z-]+)` \| (.+?) \| (.+?) \|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert {row[0] for row in rows} == options
    assert len(rows) == len(options)
    defaults = {row[0]: row[1] for row in rows}
    for parameter in command.params:
        name = parameter.opts[0]
        if name in defaults:
            default = parameter.default
            shown = "none" if default is None else "off" if default is False else str(default)
            assert defaults[name] == (shown.removesuffix(".0") if isinstance(default, float) else shown), name


def test_help_needs_no_http_library() -> None:
    import subprocess

    code = (
        "import sys\nfrom sparkgap.cli import main\ntry:\n    main(['serve', '--dry-run'])\n"
        "finally:\n    print({'fastapi', 'uvicorn', 'torch'} & set(sys.modules), file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr.splitlines()[-1]) == (0, "set()")


def test_a_model_that_is_not_there(sparkgap: Run, tmp_path: Path, plain_logging: None) -> None:
    result = sparkgap("serve", "--port", "0", "--model", str(tmp_path / "none"), "--log-level", "error")
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("sparkgap: error: ")
    assert "none" in result.err
    assert result.err.count("\n") == 1
