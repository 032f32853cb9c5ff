"""The decoder against transformers, on tiny random models of every family in float32."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import Session, load_saved, random_tokens, reference_logits, tiny_model

from sparkgap.ops import TorchKernels

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-biased": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-derived-head-dim": ("llama", {"head_dim": None, "num_key_value_heads": None}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1, "head_dim": 10}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": (
        "llama",
        {"rope_parameters": YARN | {"mscale": 1.5, "mscale_all_dim": 0.7, "beta_fast": 20.0, "beta_slow": 2.0}},
    ),
    "llama-yarn-factor": ("llama", {"rope_parameters": YARN | {"attention_factor": 1.3, "truncate": False}}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral-null-window": ("mistral", {"sliding_window": None}),
    "mistral-tied": ("mistral", {"sliding_window": 16, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"sliding_window": 5}),
    "qwen2-window-from-layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-biased-yarn": ("qwen3", {"attention_bias": True, "rope_parameters": YARN}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
    ),
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    family, changes = VARIANTS[request.param]
    model = tiny_model(family, **changes)
    return model, load_saved(model, tmp_path_factory.mktemp("model"))


def assert_logits_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_logits_of_one_pass(pair):
    model, decoder = pair
    tokens = random_tokens(150)
    assert_logits_close(Session(decoder, 1).logits({0: tokens}), reference_logits(model, tokens))


def test_decoding_one_row_at_a_time(pair):
    model, decoder = pair
    tokens = random_tokens(40, seed=1)
    session = Session(decoder, 1)
    found = torch.cat([session.logits({0: [token]}) for token in tokens])
    assert_logits_close(found, reference_logits(model, tokens))


@pytest.mark.parametrize("chunk", [2, 8, 16, 33])
def test_chunks_equal_one_pass(pair, chunk):
    model, decoder = pair
    tokens = random_tokens(70, seed=2)
    session = Session(decoder, 1)
    found = [session.logits({0: tokens[start : start + chunk]}) for start in range(0, len(tokens), chunk)]
    assert_logits_close(torch.cat(found), reference_logits(model, tokens))


def test_batches_of_unequal_lengths(pair):
    model, decoder = pair
    prompts = [random_tokens(count, seed=count) for count in (1, 37, 16, 64)]
    session = Session(decoder, len(prompts))
    found = session.logits(dict(enumerate(prompts)))
    expected = torch.cat([reference_logits(model, prompt) for prompt in prompts])
    assert_logits_close(found, expected)
    following = {sequence: random_tokens(8, seed=90 + sequence) for sequence in range(len(prompts))}
    found = session.logits(following)
    expected = torch.cat([reference_logits(model, prompts[i] + following[i])[-8:] for i in range(len(prompts))])
    assert_logits_close(found, expected)
    alone = session.logits({3: [5], 1: [6]})
    expected = torch.stack(
        [
            reference_logits(model, prompts[3] + following[3] + [5])[-1],
            reference_logits(model, prompts[1] + following[1] + [6])[-1],
        ]
    )
    assert_logits_close(alone, expected)


def test_captured_layers_are_hidden_states(pair):
    model, decoder = pair
    tokens = random_tokens(50, seed=3)
    before_final_norm = []
    handle = model.model.norm.register_forward_pre_hook(lambda _, inputs: before_final_norm.append(inputs[0]))
    with torch.inference_mode():
        output = model.model(torch.tensor([tokens]), output_hidden_states=True)
    handle.remove()
    result = Session(decoder, 1).forward({0: tokens}, captured_layers=(2, 0, 1))
    expected = [before_final_norm[0][0], output.hidden_states[1][0], output.hidden_states[2][0]]
    assert_logits_close(result.captured, torch.cat(expected, dim=1))
    assert_logits_close(result.hidden, output.last_hidden_state[0])
    assert Session(decoder, 1).forward({0: tokens}).captured is None


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, 59), max_size=6, unique=True), block_size=st.sampled_from([1, 4, 16, 64]))
def test_any_cut_into_chunks_and_blocks(decoder_with_windows, cuts, block_size):
    model, decoder = decoder_with_windows
    tokens = random_tokens(60, seed=4)
    session = Session(decoder, 1, block_size=block_size)
    bounds = [0, *sorted(cuts), len(tokens)]
    found = [session.logits({0: tokens[a:b]}) for a, b in pairwise(bounds)]
    assert_logits_close(torch.cat(found), reference_logits(model, tokens))


@pytest.fixture(scope="module")
def decoder_with_windows(tmp_path_factory):
    model = tiny_model("qwen3", use_sliding_window=True, sliding_window=6, max_window_layers=2)
    return model, load_saved(model, tmp_path_factory.mktemp("model"))


def test_masked_slots_leave_the_cache_as_it_was(pair):
    _, decoder = pair
    session = Session(decoder, 1)
    session.forward({0: random_tokens(20)})
    before = [(cache.keys.clone(), cache.values.clone()) for cache in session.caches]
    batch = session.batch({0: [1, 2, 3]})
    batch.slots.fill_(-1)
    # Masked rows attend to places that nobody wrote; what they give is not looked at.
    decoder.forward(batch, session.caches)
    for cache, (keys, values) in zip(session.caches, before, strict=True):
        assert torch.equal(cache.keys.nan_to_num(7.0), keys.nan_to_num(7.0))
        assert torch.equal(cache.values.nan_to_num(7.0), values.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(tmp_path, dtype):
    model = tiny_model("qwen3")
    tokens = random_tokens(100, seed=5)
    expected = reference_logits(model, tokens).log_softmax(-1)
    decoder = load_saved(model, tmp_path, dtype=dtype)
    logits = Session(decoder, 1).logits({0: tokens})
    assert logits.dtype == torch.float32
    divergence = (expected.exp() * (expected - logits.log_softmax(-1))).sum(-1)
    assert divergence.mean() < 2e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tiled_products_make_verification_equal_decoding_to_the_last_bit(tmp_path, family, dtype):
    decoder = load_saved(tiny_model(family), tmp_path, TorchKernels(linear_tile_rows=8), dtype=dtype)
    prompts = [random_tokens(count, seed=count) for count in (17, 40)]
    following = [random_tokens(8, seed=70 + i) for i in range(2)]
    verified, decoded = Session(decoder, 2), Session(decoder, 2)
    for session in (verified, decoded):
        for sequence in range(2):
            session.forward({sequence: prompts[sequence]})
    together = verified.logits(dict(enumerate(following))).view(2, 8, -1)
    for row in range(8):
        for sequence in range(2):
            alone = decoded.logits({sequence: [following[sequence][row]]})[0]
            assert torch.equal(alone, together[sequence, row])
