"""Draft checkpoints of both formats: what is read, what is refused, and what is written."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparkgap.catalog.drafter_settings import (
    DrafterSettings,
    layer_ids_from_speculators,
    layer_ids_to_speculators,
    parse_method,
    read_settings,
)
from sparkgap.catalog.drafters import (
    DrafterCheckpoint,
    open_drafter,
    read_drafter,
    target_ids,
    tensor_shapes,
    vocabulary_tensors,
    write_speculators,
    write_speculators_config,
)
from sparkgap.catalog.identity import TargetIdentity
from sparkgap.errors import CheckpointError, UnsupportedModelError

LAYERS: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}

DEEPSPEC: dict[str, Any] = {
    **LAYERS,
    "architectures": ["Qwen3DSparkModel"],
    "num_target_layers": 12,
    "block_size": 7,
    "layer_types": ["full_attention", "full_attention"],
    "mask_token_id": 39,
    "target_layer_ids": [1, 5, 9],
    "num_anchors": 512,
    "markov_rank": 4,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "tie_word_embeddings": False,
}

Z_LAB: dict[str, Any] = {
    **LAYERS,
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "num_target_layers": 12,
    "dflash_config": {"mask_token_id": 39, "target_layer_ids": [1, 5, 9]},
}

SPECULATORS: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
    "speculators_version": "0.5.0",
    "speculators_config": {
        "algorithm": "dspark",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 8}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "target", "architectures": ["Qwen3ForCausalLM"]},
    },
    "transformer_layer_config": {**LAYERS, "layer_types": ["full_attention"] * 2, "sliding_window": None},
    "draft_vocab_size": 20,
    "aux_hidden_state_layer_ids": [2, 6, 10],
    "block_size": 8,
    "mask_token_id": 39,
    "sample_from_anchor": True,
    "markov_rank": 4,
    "markov_head_type": "gated",
    "enable_confidence_head": True,
    "confidence_head_with_markov": False,
    "target_hidden_size": None,
}

MTP: dict[str, Any] = {
    "architectures": ["MTPDraftModel"],
    "speculators_model_type": "mtp",
    "speculators_config": {
        "algorithm": "mtp",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "target", "architectures": ["Qwen3ForCausalLM"]},
    },
    "transformer_layer_config": {**LAYERS, "num_hidden_layers": 1},
    "draft_vocab_size": 20,
    "target_hidden_size": 16,
    "aux_hidden_state_layer_ids": [11],
    "num_target_layers": 12,
}


@dataclass
class DictWeights:
    tensors: Mapping[str, Tensor]

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def get(self, name: str) -> Tensor:
        return self.tensors[name]


def tensors_of(settings: DrafterSettings, *, optional: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    required, others = tensor_shapes(settings)
    shapes = required | {k: v for k, v in others.items() if optional and k not in ("d2t", "t2d")}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    vocab = settings.transformer["vocab_size"]
    if settings.draft_vocab_size < vocab:
        ids = torch.randperm(vocab, generator=generator)[: settings.draft_vocab_size].sort().values
        tensors |= vocabulary_tensors(ids, vocab)
    return tensors


def without(config: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def sliding(config: Mapping[str, Any], window: int = 32, **changes: Any) -> dict[str, Any]:
    """`config` with its first layer sliding."""
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window}
    if "transformer_layer_config" in config:
        return {**config, "transformer_layer_config": {**config["transformer_layer_config"], **layers}, **changes}
    return {**config, **layers, **changes}


def test_reads_deepspec() -> None:
    settings = read_settings(DEEPSPEC, "d")
    assert settings.method == "dspark"
    assert settings.target_layer_ids == (1, 5, 9)
    assert (settings.block_size, settings.sample_from_anchor, settings.mask_token_id) == (7, True, 39)
    assert (settings.markov_rank, settings.markov_head_type) == (4, "vanilla")
    assert (settings.confidence_head, settings.confidence_head_with_markov) == (True, True)
    assert (settings.draft_vocab_size, settings.target_hidden_size, settings.num_target_layers) == (40, 16, 12)
    assert settings.layer_windows == (None, None)
    assert settings.layer_causal == (False, False)
    assert settings.transformer["rope_parameters"] == LAYERS["rope_parameters"]
    assert "block_size" not in settings.transformer


def test_reads_z_lab_dflash() -> None:
    settings = read_settings(Z_LAB, "d")
    assert settings.method == "dflash"
    assert settings.target_layer_ids == (1, 5, 9)
    assert (settings.block_size, settings.sample_from_anchor, settings.mask_token_id) == (16, False, 39)
    assert (settings.markov_rank, settings.confidence_head) == (0, False)


def test_reads_dflash_of_deepspec_as_predicting_from_the_anchor() -> None:
    settings = read_settings(
        {**without(DEEPSPEC, "markov_head_type"), "markov_rank": 0, "enable_confidence_head": False}, "d"
    )
    assert settings.sample_from_anchor
    assert settings.markov_rank == 0


def test_reads_speculators() -> None:
    settings = read_settings(SPECULATORS, "d")
    assert settings.method == "dspark"
    assert settings.target_layer_ids == (1, 5, 9)
    assert (settings.draft_vocab_size, settings.target_hidden_size) == (20, 16)
    assert (settings.markov_head_type, settings.confidence_head_with_markov) == ("gated", False)
    assert settings.sample_from_anchor


def test_both_formats_name_the_same_layers() -> None:
    """DeepSpec id k is `hidden_states[k + 1]`, speculators id k is `hidden_states[k]`."""
    assert read_settings(DEEPSPEC, "d").target_layer_ids == read_settings(SPECULATORS, "d").target_layer_ids


def test_reads_mtp() -> None:
    settings = read_settings(MTP, "d")
    assert settings.method == "mtp"
    assert settings.target_layer_ids == (10,)
    assert (settings.draft_vocab_size, settings.target_hidden_size, settings.num_target_layers) == (20, 16, 12)
    assert (settings.markov_rank, settings.confidence_head) == (0, False)
    assert (settings.usual_speculative_tokens, settings.max_speculative_tokens) == (3, 16)


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, 1), (5, 5), (16, 16), (17, 3), (0, 3), ("many", 3), (None, 3), (True, 3)]
)
def test_tokens_of_an_mtp_drafter_by_default(tokens: object, expected: int) -> None:
    config = {**MTP, "speculators_config": {"proposal_methods": [{"speculative_tokens": tokens}]}}
    assert read_settings(config, "d").usual_speculative_tokens == expected


@given(st.lists(st.integers(-1, 200), min_size=1, unique=True))
def test_layer_ids_return(ids: list[int]) -> None:
    assert layer_ids_from_speculators(layer_ids_to_speculators(tuple(ids))) == tuple(ids)


@pytest.mark.parametrize("method", ["dspark", "DSpark", "DFLASH", "DFlash", "MTP", "mtp"])
def test_methods_are_read_in_any_case(method: str) -> None:
    assert parse_method(method, "d") == method.lower()
    parts = MTP if method.lower() == "mtp" else without(SPECULATORS, "markov_rank", "enable_confidence_head")
    config = {**parts, "speculators_model_type": method}
    assert read_settings(config, "d").method == method.lower()


@pytest.mark.parametrize(
    ("method", "tokens", "expected"),
    [
        ("dspark", 8, True),
        ("dspark", 7, False),
        ("dspark", None, True),
        ("dflash", 7, False),
        ("dflash", None, False),
    ],
)
def test_layout_of_checkpoints_without_the_key(method: str, tokens: int | None, expected: bool) -> None:
    config = {**without(SPECULATORS, "sample_from_anchor"), "speculators_model_type": method}
    config["speculators_config"] = {
        "proposal_methods": [] if tokens is None else [{"proposal_type": "greedy", "speculative_tokens": tokens}]
    }
    assert read_settings(config, "d").sample_from_anchor is expected


@pytest.mark.parametrize(
    ("config", "causal"),
    [
        (sliding(SPECULATORS), (False, False)),
        (sliding(SPECULATORS, sliding_window_non_causal=True), (False, False)),
        (sliding(SPECULATORS, sliding_window_non_causal=False), (True, False)),
        (sliding(DEEPSPEC), (False, False)),
        (sliding(Z_LAB), (True, False)),
        (sliding(Z_LAB, is_causal=False), (False, False)),
        (sliding(Z_LAB, is_causal=True), (True, True)),
        (sliding(Z_LAB, dflash_config={**Z_LAB["dflash_config"], "causal": False}), (False, False)),
    ],
)
def test_sliding_layers(config: dict[str, Any], causal: tuple[bool, bool]) -> None:
    settings = read_settings(config, "d")
    assert settings.layer_windows == (32, None)
    assert settings.layer_causal == causal


def test_windows_of_all_layers_from_the_dflash_config() -> None:
    nested = {**Z_LAB["dflash_config"], "use_swa": True, "swa_window_size": 12}
    settings = read_settings({**Z_LAB, "dflash_config": nested}, "d")
    assert settings.layer_windows == (12, 12)
    assert settings.layer_causal == (False, False)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({**SPECULATORS, "speculators_model_type": "eagle3"}, UnsupportedModelError, "'eagle3' is not supported"),
        ({**SPECULATORS, "markov_head_type": "gru"}, UnsupportedModelError, "markov_head_type 'gru'"),
        ({**SPECULATORS, "projector_type": "domino"}, UnsupportedModelError, "projector_type 'domino'"),
        ({**SPECULATORS, "speculators_model_type": "eagle3"}, UnsupportedModelError, "dspark, dflash and mtp"),
        ({**MTP, "aux_hidden_state_layer_ids": [4, 11]}, CheckpointError, "reads one layer of the target"),
        ({**MTP, "aux_hidden_state_layer_ids": None}, CheckpointError, "aux_hidden_state_layer_ids must be"),
        ({**MTP, "transformer_layer_config": LAYERS}, UnsupportedModelError, "mtp draft model of 2 layers"),
        ({**MTP, "transformer_layer_config": None}, CheckpointError, "no transformer_layer_config"),
        ({**MTP, "target_hidden_size": 32}, CheckpointError, "hidden_size 16 must be its target_hidden_size 32"),
        ({**MTP, "embedding_scale": 2.0}, UnsupportedModelError, "embedding_scale = 2.0"),
        (without(SPECULATORS, "mask_token_id"), CheckpointError, "no mask_token_id"),
        ({**SPECULATORS, "mask_token_id": None}, CheckpointError, "no mask_token_id"),
        (without(SPECULATORS, "block_size"), CheckpointError, "no block_size"),
        ({**SPECULATORS, "block_size": 0}, CheckpointError, "block_size must be a positive integer, got 0"),
        (without(SPECULATORS, "transformer_layer_config"), CheckpointError, "no transformer_layer_config"),
        (
            without(SPECULATORS, "aux_hidden_state_layer_ids"),
            CheckpointError,
            "aux_hidden_state_layer_ids must be",
        ),
        ({**SPECULATORS, "aux_hidden_state_layer_ids": [2, 2]}, CheckpointError, "names a layer twice"),
        (
            {**SPECULATORS, "markov_rank": 0, "confidence_head_with_markov": True},
            CheckpointError,
            "needs a Markov head",
        ),
        (sliding(SPECULATORS, window=0), CheckpointError, "sliding_window 0"),
        ({**DEEPSPEC, "layer_types": ["full_attention"]}, CheckpointError, "layer_types must name 2 layers"),
        ({**DEEPSPEC, "layer_types": ["linear_attention"] * 2}, UnsupportedModelError, "'linear_attention'"),
        (
            {**DEEPSPEC, "architectures": ["LlamaForCausalLM"]},
            UnsupportedModelError,
            "'LlamaForCausalLM' is not a",
        ),
        ({**DEEPSPEC, "final_logit_softcapping": 30.0}, UnsupportedModelError, "final_logit_softcapping = 30.0"),
        ({**DEEPSPEC, "is_neox_style": False}, UnsupportedModelError, "is_neox_style"),
        ({**DEEPSPEC, "hidden_act": "gelu"}, UnsupportedModelError, "hidden_act"),
        ({**DEEPSPEC, "quantization_config": {"bits": 4}}, UnsupportedModelError, "quantization_config"),
        (without(Z_LAB, "dflash_config"), CheckpointError, "target_layer_ids must be"),
        (
            {**Z_LAB, "dflash_config": {**Z_LAB["dflash_config"], "attention_sink_bias": True}},
            UnsupportedModelError,
            "attention_sink_bias",
        ),
    ],
)
def test_refuses_what_it_cannot_run(config: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        read_settings(config, "my/drafter")
    assert "my/drafter" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tensors_are_checked_against_the_configuration() -> None:
    settings = read_settings(SPECULATORS, "d")
    good = tensors_of(settings, optional=True)
    assert read_drafter(SPECULATORS, DictWeights(good), "d").format == "speculators"
    with pytest.raises(CheckpointError, match=r"no tensor layers.1.self_attn.k_norm.weight"):
        read_drafter(SPECULATORS, DictWeights(without(good, "layers.1.self_attn.k_norm.weight")), "d")
    with pytest.raises(CheckpointError, match=r"fc.weight has shape \[16, 32\], and config.json asks for \[16, 48\]"):
        read_drafter(SPECULATORS, DictWeights({**good, "fc.weight": torch.zeros(16, 32)}), "d")
    with pytest.raises(CheckpointError, match=r"lm_head.weight has shape \[40, 16\]"):
        read_drafter(SPECULATORS, DictWeights({**good, "lm_head.weight": torch.zeros(40, 16)}), "d")
    with pytest.raises(CheckpointError, match=r"tensor selector\.weight belongs to no part"):
        read_drafter(SPECULATORS, DictWeights({**good, "selector.weight": torch.zeros(2)}), "d")


def test_tensors_of_mtp_are_checked_against_the_configuration() -> None:
    good = tensors_of(read_settings(MTP, "d"), optional=True)
    assert read_drafter(MTP, DictWeights(good), "d").settings.method == "mtp"
    assert good["eh_proj.weight"].shape == (16, 32)
    for key in ("enorm.weight", "hnorm.weight", "eh_proj.weight", "norm.weight", "layers.0.mlp.up_proj.weight"):
        with pytest.raises(CheckpointError, match=f"has no tensor {key}"):
            read_drafter(MTP, DictWeights(without(good, key)), "d")
    with pytest.raises(CheckpointError, match=r"eh_proj.weight has shape \[16, 16\]"):
        read_drafter(MTP, DictWeights({**good, "eh_proj.weight": torch.zeros(16, 16)}), "d")
    with pytest.raises(CheckpointError, match=r"tensor fc\.weight belongs to no part of a mtp draft model"):
        read_drafter(MTP, DictWeights({**good, "fc.weight": torch.zeros(16, 16)}), "d")


def test_tensors_that_serving_does_not_read_are_ignored() -> None:
    extra = {"verifier_norm.weight": torch.zeros(16), "mask_embedding": torch.zeros(16)}
    read_drafter(SPECULATORS, DictWeights(tensors_of(read_settings(SPECULATORS, "d")) | extra), "d")
    with pytest.raises(CheckpointError, match="mask_embedding belongs to no part"):
        read_drafter(Z_LAB, DictWeights(tensors_of(read_settings(Z_LAB, "d")) | extra), "d")


def test_a_configured_confidence_head_without_weights_is_none() -> None:
    tensors = {k: v for k, v in tensors_of(read_settings(DEEPSPEC, "d")).items() if "confidence" not in k}
    settings = read_drafter(DEEPSPEC, DictWeights(tensors), "d").settings
    assert not settings.confidence_head
    assert not settings.confidence_head_with_markov


def with_vocabulary(draft_vocab: int, **tensors: Tensor) -> DrafterCheckpoint:
    settings = replace(read_settings(SPECULATORS, "my-drafter"), draft_vocab_size=draft_vocab)
    return DrafterCheckpoint("my-drafter", "speculators", settings, DictWeights(tensors))


@given(st.sets(st.integers(0, 39), min_size=1, max_size=39))
def test_vocabulary_tensors_give_back_the_ids(chosen: set[int]) -> None:
    ids = torch.tensor(sorted(chosen))
    tensors = vocabulary_tensors(ids, 40)
    assert tensors["t2d"].dtype == torch.bool
    for names in (("d2t", "t2d"), ("d2t",), ("t2d",)):
        found = target_ids(with_vocabulary(len(chosen), **{name: tensors[name] for name in names}))
        assert found is not None
        assert torch.equal(found, ids)


def test_a_full_vocabulary_needs_no_map() -> None:
    assert target_ids(with_vocabulary(40)) is None
    assert target_ids(with_vocabulary(40, **vocabulary_tensors(torch.arange(40), 40))) is None


def test_maps_that_contradict_each_other_are_named() -> None:
    good = vocabulary_tensors(torch.tensor([3, 8, 9]), 40)
    moved = good["t2d"].clone()
    moved[3], moved[4] = False, True
    cases = [
        (4, {"t2d": good["t2d"], "d2t": torch.tensor([3, 7, 7, 7])}, "t2d and d2t disagree"),
        (3, {**good, "t2d": moved}, "t2d and d2t disagree: t2d marks 3 target tokens, d2t leads to 2"),
        (3, {"d2t": torch.tensor([0, 0, 40])}, "d2t leads outside the target's 40 tokens"),
        (3, {"d2t": torch.tensor([-1, 0, 0])}, "d2t leads outside"),
        (3, {"d2t": torch.tensor([1, 0, 5])}, "d2t maps two draft tokens"),
        (3, {}, "neither d2t nor t2d"),
        (41, {}, "larger than its target's of 40"),
    ]
    for draft_vocab, tensors, message in cases:
        with pytest.raises(CheckpointError, match=message) as caught:
            target_ids(with_vocabulary(draft_vocab, **tensors))
        assert "my-drafter" in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        SPECULATORS,
        DEEPSPEC,
        Z_LAB,
        {**SPECULATORS, "markov_head_type": "rnn", "sample_from_anchor": False},
        sliding(SPECULATORS, sliding_window_non_causal=False),
        sliding(SPECULATORS, sliding_window_non_causal=True),
        {**SPECULATORS, "target_hidden_size": 48},
        MTP,
    ],
    ids=["speculators", "deepspec", "z-lab", "fill-in", "causal", "bidirectional", "wide-target", "mtp"],
)
def test_writes_what_it_reads(config: dict[str, Any], tmp_path: Path) -> None:
    settings = read_settings(config, "d")
    tensors = tensors_of(settings, optional=True)
    write_speculators(
        tmp_path / "out", settings, tensors, verifier="org/target", verifier_architectures=["LlamaForCausalLM"]
    )
    found = open_drafter(str(tmp_path / "out"))
    assert found.format == "speculators"
    ignored = {"layer_types", "sliding_window", "use_sliding_window"}
    assert without(found.settings.transformer, *ignored) == without(settings.transformer, *ignored)
    assert replace(found.settings, transformer={}) == replace(settings, transformer={})
    assert set(found.weights.names()) == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found.weights.get(name), tensor), name
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_writes_the_keys_that_other_engines_read(tmp_path: Path) -> None:
    settings = read_settings(SPECULATORS, "d")
    write_speculators(
        tmp_path,
        settings,
        tensors_of(settings, optional=True),
        verifier="org/target",
        verifier_architectures=["X"],
    )
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DSparkDraftModel"]
    assert config["speculators_model_type"] == "dspark"
    assert config["aux_hidden_state_layer_ids"] == [2, 6, 10]
    assert config["speculators_config"] == {
        "algorithm": "dspark",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 8}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "org/target", "architectures": ["X"]},
    }
    assert config["transformer_layer_config"]["model_type"] == "qwen3"
    assert config["transformer_layer_config"]["vocab_size"] == 40
    assert config["sample_from_anchor"] is True
    assert config["sliding_window_non_causal"] is True
    settings = read_settings(MTP, "d")
    write_speculators_config(tmp_path, settings, verifier="org/target")
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["MTPDraftModel"]
    assert written["speculators_config"]["algorithm"] == "mtp"
    assert not {"block_size", "mask_token_id", "markov_rank", "sample_from_anchor"} & written.keys()
    tensors = load_file(tmp_path / "model.safetensors")
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)


def test_what_only_this_engine_reads_comes_back(tmp_path: Path) -> None:
    identity = TargetIdentity("LlamaForCausalLM", 12, 16, 40, "ab12", "cd34")
    settings = replace(
        read_settings(SPECULATORS, "d"),
        default_speculative_tokens=3,
        confidence_scaling=tuple((1.0 + place, place - 2.5) for place in range(8)),
        made_for=identity,
    )
    write_speculators(tmp_path, settings, tensors_of(settings, optional=True), verifier="t")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["block_size"] == 8
    found = read_settings(config, "d")
    assert replace(found, transformer={}) == replace(settings, transformer={})
    later = replace(settings, default_speculative_tokens=None, confidence_scaling=())
    write_speculators_config(tmp_path, later, verifier="t")
    rewritten = read_settings(json.loads((tmp_path / "config.json").read_text()), "d")
    assert replace(rewritten, transformer={}) == replace(later, transformer={})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("tokens", [0, -1, 8, 9, True, "3", None, 2.5])
def test_a_default_that_is_no_part_of_a_block_is_the_whole_block(tokens: Any) -> None:
    proposals = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}]}
    settings = read_settings({**SPECULATORS, "speculators_config": proposals}, "d")
    assert (settings.default_speculative_tokens, settings.max_speculative_tokens) == (None, 8)


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        (3, "sparkgap.confidence_calibration must be an object"),
        ({"temperatures": [1.0] * 7, "offsets": [0.0] * 8}, "temperatures must be 8 numbers above 0"),
        ({"temperatures": [1.0] * 7 + [0.0], "offsets": [0.0] * 8}, "temperatures must be 8 numbers above 0"),
        ({"temperatures": [1.0] * 8}, "offsets must be 8 finite numbers"),
        ({"temperatures": [1.0] * 8, "offsets": [0.0] * 7 + [math.inf]}, "offsets must be 8 finite numbers"),
        ({"temperatures": "12345678", "offsets": [0.0] * 8}, "temperatures must be 8 numbers above 0"),
    ],
)
def test_a_damaged_calibration_is_refused(calibration: Any, message: str) -> None:
    config = {**SPECULATORS, "sparkgap": {"confidence_calibration": calibration}}
    with pytest.raises(CheckpointError, match=message):
        read_settings(config, "d")
    without_head = {**config, "enable_confidence_head": False}
    assert read_settings(without_head, "d").confidence_scaling == ()


def test_refuses_to_write_what_others_cannot_read(tmp_path: Path) -> None:
    settings = read_settings(SPECULATORS, "d")
    tensors = tensors_of(settings, optional=True)
    two_windows = replace(settings, layer_windows=(4, 8))
    full_causal = replace(settings, layer_causal=(True, False))
    cases = [
        (settings, without(tensors, "lm_head.weight"), "lm_head.weight, which is missing"),
        (settings, without(tensors, "d2t"), "d2t, which is missing"),
        (settings, without(tensors, "norm.weight"), "no tensor norm.weight"),
        (two_windows, tensors, "one window and one causality"),
        (full_causal, tensors, "one window and one causality"),
        (replace(settings, method="dflash"), tensors, "dflash drafter has no Markov"),
    ]
    for wanted, given_tensors, message in cases:
        with pytest.raises(CheckpointError, match=message):
            write_speculators(tmp_path / "out", wanted, given_tensors, verifier="t")
        assert not (tmp_path / "out").exists()


def test_opens_a_deepspec_directory(tmp_path: Path) -> None:
    tensors = tensors_of(read_settings(DEEPSPEC, "d"))
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(DEEPSPEC))
    found = open_drafter(str(tmp_path))
    assert found.format == "deepspec"
    assert target_ids(found) is None


def test_a_gguf_file_is_no_drafter(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedModelError, match=r"model.gguf is no directory"):
        open_drafter(str(tmp_path / "model.gguf"))


def check_line(message: str) -> None:
    assert "\n" not in message
    assert len(message) < 300


@pytest.mark.parametrize("config", [SPECULATORS, DEEPSPEC, Z_LAB], ids=["speculators", "deepspec", "z-lab"])
def test_values_of_every_kind_are_read_or_refused(config: dict[str, Any]) -> None:
    values: list[Any] = ["abc", "4", "", -1, 0, 2.5, True, None, [], [1], {}, {"a": 1}, 10**12, 10**400, math.nan]
    values += [{"proposal_methods": [5]}, {"proposal_methods": {"a": 1}}, {"use_swa": 1}]
    keys = {*SPECULATORS, *DEEPSPEC, "dflash_config", "sparkgap", "is_causal", "sliding_window_non_causal"}
    for key in sorted(keys):
        for value in values:
            changed = {**without(config, "sample_from_anchor"), key: value}
            try:
                settings = read_settings(changed, "my/drafter")
                tensor_shapes(settings)
            except (CheckpointError, UnsupportedModelError) as error:
                check_line(str(error))
            else:
                sizes = (settings.target_hidden_size, settings.draft_vocab_size, settings.block_size)
                assert all(type(size) is int and size > 0 for size in sizes)
                assert all(type(flag) is bool for flag in (settings.sample_from_anchor, *settings.layer_causal))
