"""What is read from a config.json, and what is refused."""

import math

import pytest
import torch
from tiny_models import CONFIGS

from sparkgap.errors import CheckpointError, UnsupportedModelError
from sparkgap.models.config import SUPPORTED_ARCHITECTURES, ModelConfig
from sparkgap.models.rope import RopeConfig, inverse_frequencies, rotary_table

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
QWEN3 = BASE | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize("family", CONFIGS)
def test_keys_left_out_have_the_defaults_of_transformers(family):
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    required = {
        "vocab_size": 64,
        "hidden_size": 256,
        "intermediate_size": 32,
        "num_hidden_layers": 30,
        "num_attention_heads": 32,
    }
    reference = CONFIGS[family](**required)
    config = ModelConfig.from_hf(required | {"architectures": [f"{names[family]}ForCausalLM"]})
    head_dim = getattr(reference, "head_dim", None) or 256 // 32
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.head_dim == head_dim
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.max_position_embeddings == reference.max_position_embeddings
    assert config.tie_word_embeddings == reference.tie_word_embeddings
    assert config.rope.theta == reference.rope_parameters["rope_theta"]
    window = reference.sliding_window if family == "mistral" else None
    assert config.layer_windows == (window,) * 30


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "max_window_layers": 0},
        {"sliding_window": 8, "max_window_layers": 0},
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ],
)
def test_windows_by_layer_are_those_of_transformers(changes):
    reference = CONFIGS["qwen3"](**(QWEN3 | changes))
    expected = [reference.sliding_window if kind == "sliding_attention" else None for kind in reference.layer_types]
    assert list(ModelConfig.from_hf(QWEN3 | changes).layer_windows) == expected


def test_llama_has_no_windows_whatever_its_config_says():
    assert ModelConfig.from_hf(BASE | {"sliding_window": 8}).layer_windows == (None,) * 4


def test_biases_by_family():
    def biases(name: str, **changes: bool) -> tuple[bool, bool, bool]:
        config = ModelConfig.from_hf(BASE | {"architectures": [f"{name}ForCausalLM"]} | changes)
        return config.attention_bias, config.attention_output_bias, config.mlp_bias

    assert biases("Llama") == (False, False, False)
    assert biases("Llama", attention_bias=True, mlp_bias=True) == (True, True, True)
    assert biases("Mistral", attention_bias=True, mlp_bias=True) == (False, False, False)
    assert biases("Qwen2") == (True, False, False)
    assert biases("Qwen3", attention_bias=True, mlp_bias=True) == (True, True, False)


def test_architecture_from_model_type_alone():
    config = {key: value for key, value in BASE.items() if key != "architectures"}
    assert ModelConfig.from_hf(config | {"model_type": "qwen2"}).architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize("config", [{"architectures": ["Gemma3ForCausalLM"]}, {"model_type": "gemma3"}, {}])
def test_unknown_architecture_lists_the_supported(config):
    with pytest.raises(UnsupportedModelError) as error:
        ModelConfig.from_hf(config)
    named = config.get("architectures", [config.get("model_type", "None")])[0]
    assert named in str(error.value)
    assert all(name in str(error.value) for name in SUPPORTED_ARCHITECTURES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu_pytorch_tanh"}, "gelu_pytorch_tanh"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "longrope"),
        ({"rope_scaling": {"type": "mrope"}}, "mrope"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    ],
)
def test_unsupported_kinds_are_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_hf(BASE | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 3}, "8 attention heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'factor' is missing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "'factor' must be"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 1}},
            "high_freq_factor",
        ),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    ],
)
def test_values_out_of_range_are_named(changes, message):
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(BASE | changes)


def test_layer_types_that_do_not_fit():
    windowed = QWEN3 | {"use_sliding_window": True}
    with pytest.raises(CheckpointError, match="layer_types"):
        ModelConfig.from_hf(windowed | {"layer_types": ["full_attention"]})
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        ModelConfig.from_hf(windowed | {"layer_types": ["linear_attention"] * 4})
    with pytest.raises(CheckpointError, match="no sliding window"):
        ModelConfig.from_hf(QWEN3 | {"layer_types": ["sliding_attention"] * 4})


@pytest.mark.parametrize(
    "parameters", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}, YARN, {"type": "yarn"} | YARN]
)
def test_old_and_new_rope_keys_read_alike(parameters):
    old = {("type" if key == "rope_type" else key): value for key, value in parameters.items()}
    new = BASE | {"rope_parameters": parameters | {"rope_theta": 5000.0}}
    assert RopeConfig.from_hf(BASE | {"rope_scaling": old, "rope_theta": 5000.0}) == RopeConfig.from_hf(new)
    assert RopeConfig.from_hf(new).theta == 5000.0


@pytest.mark.parametrize("scaling", [None, {}])
def test_no_scaling(scaling):
    assert RopeConfig.from_hf({"rope_scaling": scaling, "rope_theta": 7.0}) == RopeConfig(theta=7.0)
    assert RopeConfig.from_hf({}) == RopeConfig(theta=10000.0)


def test_yarn_factor_from_the_two_lengths():
    config = BASE | {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 128}}
    assert RopeConfig.from_hf(config).factor == 4.0


def test_trained_length_falls_back_to_the_model_s():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert RopeConfig.from_hf(BASE | {"rope_scaling": scaling}).original_max_position_embeddings == 512


def test_frequency_factors_divide():
    plain = RopeConfig(theta=1000.0)
    factors = (1.0, 2.0, 4.0, 8.0)
    scaled = RopeConfig.from_hf({"rope_theta": 1000.0, "rope_freq_factors": list(factors)})
    expected = inverse_frequencies(plain, 8) / torch.tensor(factors)
    torch.testing.assert_close(inverse_frequencies(scaled, 8), expected)
    with pytest.raises(CheckpointError, match=r"4 values.*need 8"):
        inverse_frequencies(scaled, 16)


def test_llama3_frequency_factors_of_gguf_equal_the_llama3_variant():
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = {"rope_theta": 500000.0, "original_max_position_embeddings": 8192}
    llama3 = inverse_frequencies(RopeConfig.from_hf(config | {"rope_scaling": scaling}), 64)
    plain = inverse_frequencies(RopeConfig.from_hf(config), 64)
    by_factors = RopeConfig.from_hf(config | {"rope_freq_factors": (plain / llama3).tolist()})
    torch.testing.assert_close(inverse_frequencies(by_factors, 64), llama3)


def test_table_of_a_partial_rotation():
    rope = RopeConfig.from_hf({"partial_rotary_factor": 0.5, "rope_theta": 100.0})
    table = rotary_table(rope, 16, 10, torch.device("cpu"))
    assert table.cos.shape == table.sin.shape == (10, 4)
    assert table.cos.dtype == torch.float32
    for position in range(10):
        for pair in range(4):
            angle = position * 100.0 ** (-2 * pair / 8)
            assert table.cos[position, pair].item() == pytest.approx(math.cos(angle), abs=1e-5)
            assert table.sin[position, pair].item() == pytest.approx(math.sin(angle), abs=1e-5)


ODD_VALUES = ["abc", "", -1, 0, 1, 2.5, True, None, [], [1], [None], {}, {"a": 1}, 10**12, 10**400, math.nan, math.inf]
ROPE_KEYS = (
    *("rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings", "low_freq_factor"),
    *("high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
)
CONFIG_KEYS = (
    *BASE,
    *("head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "layer_types"),
    *("max_window_layers", "use_sliding_window", "partial_rotary_factor", "hidden_act", "quantization_config"),
    *("attention_bias", "mlp_bias", "tie_word_embeddings", "rope_freq_factors", "original_max_position_embeddings"),
)


def check_line(message):
    assert "\n" not in message
    assert len(message) < 300


def read_or_refuse(config):
    """Either an error that names what is wrong in one line, or a configuration that a table can be made of."""
    try:
        read = ModelConfig.from_hf(config)
        table = rotary_table(read.rope, read.head_dim, 4, torch.device("cpu"))
    except (CheckpointError, UnsupportedModelError) as error:
        check_line(str(error))
    else:
        assert table.cos.isfinite().all()
        assert math.isfinite(read.rms_norm_eps)
        assert read.num_layers <= 10_000


@pytest.mark.parametrize("key", CONFIG_KEYS)
@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_keys_of_every_kind_are_read_or_refused(architecture, key):
    windows = {"use_sliding_window": True} if key in ("sliding_window", "layer_types", "max_window_layers") else {}
    for value in ODD_VALUES:
        read_or_refuse(BASE | {"architectures": [architecture]} | windows | {key: value})


@pytest.mark.parametrize("key", ROPE_KEYS)
@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_rope_parameters_of_every_kind_are_read_or_refused(kind, key):
    parameters = YARN | {"rope_type": kind, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for value in ODD_VALUES:
        other = {"mscale": 0.7, "mscale_all_dim": 0.7} if "mscale" in key else {}
        read_or_refuse(BASE | {"rope_scaling": parameters | other | {key: value}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": math.nan}, "'rms_norm_eps' must be a finite number"),
        ({"tie_word_embeddings": "false"}, "'tie_word_embeddings' must be true or false, got 'false'"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' must be an integer of at most"),
        ({"architectures": "LlamaForCausalLM"}, "'architectures' must be a list of strings"),
        ({"rope_scaling": YARN, "rope_theta": 1}, "rope_theta"),
    ],
)
def test_silent_mistakes_are_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(BASE | changes)
