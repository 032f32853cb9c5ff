"""Weights in a GGUF file, by their Hugging Face names and layouts."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from sparkgap.catalog.gguf_container import GgufContainer, GgufTensor, open_container
from sparkgap.catalog.gguf_metadata import ROPE_FACTORS_TENSOR, Metadata, architecture_of, config_from_gguf
from sparkgap.errors import CheckpointError, UnsupportedModelError

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_IGNORED = re.compile(r"blk\.\d+\.attn_rot_embd(\.weight)?")
_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
}
_BLOCKS_AT_ONCE = 8192
"""Quantized blocks expanded together: their intermediate arrays stay in the processor's cache."""


class GgufSource:
    """A WeightSource over one GGUF file: Hugging Face names, query and key rows in Hugging Face's order.

    llama.cpp's converter reorders the query and key rows of the `llama` architecture so that rotary pairs are
    neighbours; `get` undoes it (weights and biases). Quantized tensors are expanded to float32, one at a time.

    Attributes:
        path: the file.
        config: Hugging Face config keys (see `config_from_gguf`).
        metadata: the file's other metadata.

    Raises:
        CheckpointError: the file is truncated, damaged or inconsistent.
        UnsupportedModelError: an architecture, tensor or tensor type that is not supported; the message names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._container = open_container(path)
        self.metadata = Metadata(self._container)
        self._permuted = architecture_of(self._container) == "llama"
        self.config = config_from_gguf(self._container, self._rope_factors())
        self._tensors = {_hf_name(name, path): tensor for name, tensor in _named_tensors(self._container)}
        for name, tensor in self._tensors.items():
            _check_type(name, tensor, path)
            self._check_heads(name, tensor)

    def names(self) -> Iterable[str]:
        """All tensor names, Hugging Face's."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape.

        Raises:
            CheckpointError: no such tensor.
        """
        return self._require(name).shape

    def get(self, name: str) -> Tensor:
        """A tensor: float32 if quantized, else a copy-on-write view of the mapped file in its stored dtype.

        Raises:
            CheckpointError: no such tensor.
        """
        tensor = self._require(name)
        values = _values(self._container, tensor)
        heads = self._permuted_heads(name)
        return values if heads is None else _unpermute(values, heads)

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return len(self._container.data)

    def _require(self, name: str) -> GgufTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.path} has no tensor {name}; its weights do not fit its metadata")
        return tensor

    def _rope_factors(self) -> list[float] | None:
        tensor = self._container.tensors.get(ROPE_FACTORS_TENSOR)
        if tensor is None:
            return None
        _check_type(ROPE_FACTORS_TENSOR, tensor, self.path)
        return [float(value) for value in _values(self._container, tensor).flatten()]

    def _permuted_heads(self, name: str) -> int | None:
        """Number of heads of a tensor whose rows are reordered, else None."""
        if not self._permuted:
            return None
        if ".self_attn.q_proj." in name:
            return int(self.config["num_attention_heads"])
        return int(self.config["num_key_value_heads"]) if ".self_attn.k_proj." in name else None

    def _check_heads(self, name: str, tensor: GgufTensor) -> None:
        heads = self._permuted_heads(name)
        if heads is not None and tensor.shape[0] % (2 * heads):
            raise CheckpointError(f"{self.path}: {name} has {tensor.shape[0]} rows for {heads} heads; convert it again")


def _named_tensors(container: GgufContainer) -> Iterable[tuple[str, GgufTensor]]:
    skipped = (ROPE_FACTORS_TENSOR,)
    return ((n, t) for n, t in container.tensors.items() if n not in skipped and not _IGNORED.fullmatch(n))


def _hf_name(name: str, path: Path) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise UnsupportedModelError(f"{path} has a tensor {name!r} that its supported architecture does not have")
    return f"model.layers.{int(match[1])}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def _check_type(name: str, tensor: GgufTensor, path: Path) -> None:
    if tensor.kind not in _PLAIN and _quantization(tensor.kind) is None:
        raise UnsupportedModelError(
            f"{path}: tensor {name} has type {tensor.kind.name}, which the gguf package cannot expand; "
            "quantize the model another way"
        )


def _quantization(kind: GGMLQuantizationType) -> Any:
    """The gguf package's class for a quantization type, None if it has none."""
    found = getattr(quants, kind.name, None)
    return found if isinstance(found, type) and hasattr(found, "dequantize_blocks") else None


def _values(container: GgufContainer, tensor: GgufTensor) -> Tensor:
    raw = container.raw(tensor)
    dtype = _PLAIN.get(tensor.kind)
    if dtype is not None:
        if tensor.offset % dtype.itemsize:
            raw = raw.copy()
        return torch.from_numpy(raw).view(dtype).reshape(tensor.shape)
    return torch.from_numpy(_dequantize(raw, tensor.kind)).reshape(tensor.shape)


def _dequantize(raw: "np.ndarray[Any, np.dtype[np.uint8]]", kind: GGMLQuantizationType) -> "np.ndarray[Any, Any]":
    """Blocks `[blocks * type_size]` to float32 `[blocks, block_size]`.

    `gguf.dequantize` gives the same values in groups of 16 rows, which costs four times as long on small rows.
    """
    quantization = _quantization(kind)
    quantization.init_grid()
    blocks = raw.reshape(-1, quantization.type_size)
    values = np.empty((len(blocks), quantization.block_size), np.float32)
    # A damaged scale can be infinite; the model's own checks see the values, numpy need not warn.
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
            chunk = slice(start, start + _BLOCKS_AT_ONCE)
            values[chunk] = quantization.dequantize_blocks(blocks[chunk])
    return values


def _unpermute(values: Tensor, heads: int) -> Tensor:
    """Rows from (head, pair, half) to (head, half, pair) order."""
    rows, rest = values.shape[0], values.shape[1:]
    return values.reshape(heads, rows // heads // 2, 2, *rest).transpose(1, 2).reshape(rows, *rest)
