"""A target is known by its tensors, whatever file and dtype they are stored in."""

import json

import pytest
from safetensors.torch import load_file, save_file

from sparkgap.catalog.checkpoint import open_checkpoint
from sparkgap.catalog.identity import TargetIdentity, identify_target, read_identity
from sparkgap.errors import CheckpointError
from tests.tiny_model import write_tiny_model


@pytest.fixture
def model(tmp_path):
    return write_tiny_model(tmp_path / "model")


def identity(directory):
    checkpoint = open_checkpoint(str(directory))
    return identify_target(checkpoint.config, checkpoint.weights)


def change(directory, function):
    weights = load_file(directory / "model.safetensors")
    save_file({name: function(name, tensor) for name, tensor in weights.items()}, directory / "model.safetensors")


def test_sizes_and_fingerprints(model):
    found = identity(model)
    assert found.sizes == ("LlamaForCausalLM", 2, 32, 264)
    assert found.model != found.weights
    assert len(found.model) == len(found.weights) == 32
    assert identity(model) == found


def test_the_dtype_of_the_file_does_not_matter(model):
    before = identity(model)
    change(model, lambda _, tensor: tensor.bfloat16())
    assert identity(model) == before


def test_another_precision_changes_the_weights_alone(model):
    before = identity(model)
    change(model, lambda name, tensor: (tensor * 16).round() / 16 if tensor.ndim == 2 else tensor)
    after = identity(model)
    assert (after.sizes, after.model) == (before.sizes, before.model)
    assert after.weights != before.weights


@pytest.mark.parametrize("part", ["model.norm", "layers.0.input_layernorm", "layers.1.post_attention_layernorm"])
def test_further_training_changes_the_model(model, part):
    before = identity(model)
    change(model, lambda name, tensor: tensor * 1.02 if part in name else tensor)
    assert identity(model).model != before.model


def test_json_round_trip():
    wanted = TargetIdentity("A", 2, 32, 260, "abc", "def")
    assert read_identity(json.loads(json.dumps(wanted.to_json())), "{key}") == wanted
    with pytest.raises(CheckpointError, match="hidden_size must be a positive integer"):
        read_identity(wanted.to_json() | {"hidden_size": "many"}, "{key}")
