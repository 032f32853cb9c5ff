"""Tiny models on disk: GGUF files and their safetensors twins, tokenizers."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import save_file

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS, VOCAB = 256, 4, 2, 64, 256, 2, 300

_LAYER = {
    "input_layernorm": ("attn_norm", (HIDDEN,)),
    "self_attn.q_proj": ("attn_q", (HEADS * HEAD_DIM, HIDDEN)),
    "self_attn.k_proj": ("attn_k", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "self_attn.v_proj": ("attn_v", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "self_attn.o_proj": ("attn_output", (HIDDEN, HEADS * HEAD_DIM)),
    "post_attention_layernorm": ("ffn_norm", (HIDDEN,)),
    "mlp.gate_proj": ("ffn_gate", (INTERMEDIATE, HIDDEN)),
    "mlp.up_proj": ("ffn_up", (INTERMEDIATE, HIDDEN)),
    "mlp.down_proj": ("ffn_down", (HIDDEN, INTERMEDIATE)),
}


def byte_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def random_weights(*, tied: bool, biases: bool = False, qk_norm: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = {"model.embed_tokens.weight": make(VOCAB, HIDDEN), "model.norm.weight": make(HIDDEN)}
    if not tied:
        weights["lm_head.weight"] = make(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        for name, (_, shape) in _LAYER.items():
            weights[f"model.layers.{layer}.{name}.weight"] = make(*shape)
        for name in "qkv" if biases else "":
            rows = _LAYER[f"self_attn.{name}_proj"][1][0]
            weights[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = make(rows)
        for name in "qk" if qk_norm else "":
            weights[f"model.layers.{layer}.self_attn.{name}_norm.weight"] = make(HEAD_DIM)
    return weights


def gguf_name(name: str) -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    norms = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
    return f"blk.{layer}.{norms.get(module) or _LAYER[module][0]}.{kind}"


def permute(values: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key rows: pairs (i, i + half) become neighbours."""
    rows = values.shape[0]
    half = rows // heads // 2
    order = [head * 2 * half + side * half + pair for head in range(heads) for pair in range(half) for side in (0, 1)]
    return values[np.array(order)]


def write_gguf(
    path: Path,
    weights: dict[str, torch.Tensor],
    *,
    architecture: str = "llama",
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    tokenizer: bool = True,
) -> dict[str, torch.Tensor]:
    """Write a GGUF file; returns the values a reader must find, by Hugging Face name."""
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if tokenizer:
        tokens = [*byte_alphabet(), "ab"]
        tokens = tokens + [f"<|pad{i}|>" for i in range(VOCAB - len(tokens))]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([1] * 257 + [3] * (VOCAB - 257))
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(VOCAB - 1)
    for key, value in (metadata or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    expected = {}
    for name, tensor in weights.items():
        values = tensor.numpy()
        if architecture == "llama" and ".q_proj." in name:
            stored = permute(values, HEADS)
        elif architecture == "llama" and ".k_proj." in name:
            stored = permute(values, KV_HEADS)
        else:
            stored = values
        tensor_kind = kind if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), quants.quantize(stored, tensor_kind), raw_dtype=tensor_kind)
        # Quantization is by rows, so quantizing the unpermuted rows gives the same rows.
        expected[name] = torch.from_numpy(
            np.array(quants.dequantize(quants.quantize(values, tensor_kind), tensor_kind))
        ).reshape(values.shape)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def write_safetensors(directory: Path, weights: dict[str, torch.Tensor], shards: int = 1) -> None:
    import json

    directory.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(weights, directory / "model.safetensors")
        return
    names = sorted(weights)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, directory / file)
        weight_map.update(dict.fromkeys(part, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
