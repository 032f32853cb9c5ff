"""Bad input that only a model can tell: exit status 2 and one clear line, in every command that opens it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_model import CONTEXT, VOCAB_SIZE, write_tiny_model


def truncate_weights(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def garble_weights(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\x00" * 1000)


def remove_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def remove_config(model: Path) -> None:
    (model / "config.json").unlink()


def garble_config(model: Path) -> None:
    (model / "config.json").write_text('{"architectures": [')


def remove_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def replace_weights_by_a_directory(model: Path) -> None:
    remove_weights(model)
    (model / "model.safetensors").mkdir()


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        file = model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


BROKEN = [
    (truncate_weights, "model.safetensors"),
    (garble_weights, "model.safetensors"),
    (remove_weights, "safetensors"),
    (remove_config, "config.json"),
    (garble_config, "config.json"),
    (remove_tokenizer, "tokenizer.json"),
    (change_config(architectures=["GPT2LMHeadModel"], model_type="gpt2"), "GPT2LMHeadModel"),
    (change_config(rope_scaling="linear"), "'rope_scaling' must be an object"),
    (replace_weights_by_a_directory, "model.safetensors: Is a directory"),
]


def check_one_line(result: Any, message: str) -> None:
    assert result.status == 2
    assert result.out == ""
    assert result.err.startswith("sparkgap: error: ")
    assert message in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"], ["info"]], ids=lambda command: command[0])
@pytest.mark.parametrize(("damage", "message"), BROKEN)
def test_broken_models(
    sparkgap: Callable[..., Any],
    tmp_path: Path,
    command: list[str],
    damage: Callable[[Path], None],
    message: str,
) -> None:
    model = write_tiny_model(tmp_path / "model")
    damage(model)
    check_one_line(sparkgap(*command, "--model", str(model)), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "layers.2"),
        ({"hidden_size": 48}, "shape"),
        ({"vocab_size": 300}, "embed_tokens"),
        ({"max_position_embeddings": 2**31 - 1}, "lower max_model_len"),
    ],
)
def test_weights_that_do_not_fit_the_configuration(
    sparkgap: Callable[..., Any], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    model = write_tiny_model(tmp_path / "model", **changes)
    check_one_line(sparkgap("generate", "hi", "--model", str(model)), message)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_weights_of_a_dtype_that_needs_scales(sparkgap: Callable[..., Any], tmp_path: Path, dtype: torch.dtype) -> None:
    model = write_tiny_model(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(weights | {name: weights[name].to(dtype)}, model / "model.safetensors")
    check_one_line(sparkgap("generate", "hi", "--model", str(model)), f"{name} is stored as")


def test_truncated_gguf(sparkgap: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    for data in (b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, b"not a model at all"):
        file.write_bytes(data)
        check_one_line(sparkgap("generate", "hi", "--model", str(file)), "model.gguf")


@pytest.mark.parametrize("option", ["--model", "--draft"])
def test_links_to_nothing(sparkgap: Callable[..., Any], model: str, tmp_path: Path, option: str) -> None:
    link = tmp_path / "link"
    link.symlink_to("gone")
    given = ["--model", model] if option == "--draft" else []
    missing = tmp_path.resolve() / "gone"
    message = f"{link} is a link to {missing}, which is missing"
    check_one_line(sparkgap("generate", "hi", *given, option, str(link)), message)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x" * CONTEXT], str(CONTEXT)),
        (["--raw", "x" * CONTEXT], str(CONTEXT)),
        (["hi", "--logit-bias", f"{VOCAB_SIZE}=1"], f"token id {VOCAB_SIZE}, outside the vocabulary"),
        (["hi", "--stop-token-ids", "99999"], "token id 99999, outside the vocabulary"),
        (["hi", "--max-model-len", str(CONTEXT + 1)], "max_model_len"),
        (["hi", "--kv-cache-memory", "1K"], "kv_cache_memory"),
        (["hi", "--kv-cache-memory", "1000T"], "of memory are available; lower it"),
        (["hi", "--device", "nonsense"], "device"),
    ],
)
@pytest.mark.parametrize("extra", [[], ["--json"]], ids=["stream", "json"])
def test_requests_the_model_cannot_serve(
    sparkgap: Callable[..., Any], model: str, arguments: list[str], message: str, extra: list[str]
) -> None:
    check_one_line(sparkgap("generate", *arguments, "--model", model, *extra), message)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only one role') }}", "only one role"),
        ("{% for %}", "template"),
        ("{{ messages.nothing.here }}", "template"),
        ("{{ ().__class__.__base__ }}", "template"),
    ],
)
def test_chat_templates_that_fail(sparkgap: Callable[..., Any], tmp_path: Path, template: str, message: str) -> None:
    model = str(write_tiny_model(tmp_path / "model", template=template))
    check_one_line(sparkgap("generate", "hi", "--model", model), message)
    check_one_line(sparkgap("chat", "--model", model, stdin=b"hi\n"), message)
    assert sparkgap("generate", "--raw", "hi", "--model", model, "--max-tokens", "2").status == 0


def test_a_whole_answer(sparkgap: Callable[..., Any], model: str) -> None:
    greedy = ["generate", "hi", "--model", model, "--max-tokens", "12", "--ignore-eos"]
    report = json.loads(sparkgap(*greedy, "--json").out)
    assert len(report["token_ids"]) == 12
    assert report["finish_reason"] == "length"
    assert report["usage"] == {"prompt_tokens": len("user: hi" + "assistant:") + 3, "completion_tokens": 12}
    assert sparkgap(*greedy).out == report["text"] + "\n"
    assert sparkgap(*greedy, "--no-stream").out == report["text"] + "\n"
    several = json.loads(sparkgap(*greedy, "--json", "-n", "3", "--temperature", "1", "--logprobs", "2").out)
    assert len({tuple(choice["token_ids"]) for choice in several["choices"]}) == 3
    assert all(len(choice["logprobs"]) == 12 for choice in several["choices"])
