"""Tiny random models of the supported families, and ways to run the engine's network on them."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor

from sparkgap.errors import CheckpointError
from sparkgap.models.batch import ForwardBatch, ForwardResult
from sparkgap.models.cache import allocate_caches
from sparkgap.models.decoder import Decoder
from sparkgap.models.loading import load_target
from sparkgap.ops import AttentionRows, Kernels, KVCache, TorchKernels

CPU = torch.device("cpu")
CONFIGS = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}


class Tensors:
    """A `WeightSource` over tensors in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.get(name).shape)

    def get(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise CheckpointError(f"tensor {name} is missing")
        return self.tensors[name]


def read_safetensors(directory: Path) -> Tensors:
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return Tensors(tensors)


def tiny_model(family: str, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    """A random model whose logits and attention are far from uniform."""
    settings: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "pad_token_id": None,
    } | changes
    config = CONFIGS[family](**settings)
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(1.0 + 0.3 * noise)
            else:
                parameter.copy_(noise * 1.5 * parameter.shape[1] ** -0.5)
    return model


def load_saved(
    model: transformers.PreTrainedModel, directory: Path, kernels: Kernels | None = None, **options: Any
) -> Decoder:
    """Save as transformers does, read back as the engine does."""
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    options = {"dtype": torch.float32, "device": CPU} | options
    return load_target(config, read_safetensors(directory), kernels=kernels or TorchKernels(), **options)


class Session:
    """Sequences with their paged cache, advanced some rows at a time. Blocks are handed out in shuffled order."""

    def __init__(
        self, decoder: Decoder, sequences: int, max_length: int = 256, block_size: int = 16, seed: int = 0
    ) -> None:
        config = decoder.config
        self.decoder = decoder
        self.block_size = block_size
        blocks = -(-max_length // block_size)
        self.caches: list[KVCache] = allocate_caches(
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            sequences * blocks + 1,
            block_size,
            decoder.dtype,
            CPU,
        )
        for cache in self.caches:
            cache.keys.fill_(torch.nan)  # nothing may be read that was not written
            cache.values.fill_(torch.nan)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(sequences * blocks, generator=generator) + 1
        self.block_tables = order.view(sequences, blocks).to(torch.int32)
        self.lengths = [0] * sequences

    def batch(self, chunks: dict[int, list[int]]) -> ForwardBatch:
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for sequence, tokens in chunks.items():
            for position in range(self.lengths[sequence], self.lengths[sequence] + len(tokens)):
                block = int(self.block_tables[sequence, position // self.block_size])
                positions.append(position)
                slots.append(block * self.block_size + position % self.block_size)
            starts.append(len(positions))
        rows = AttentionRows(
            positions=torch.tensor(positions),
            row_starts=torch.tensor(starts, dtype=torch.int32),
            block_tables=self.block_tables[list(chunks)],
            max_rows=max(len(tokens) for tokens in chunks.values()),
            max_length=max(positions) + 1,
        )
        token_ids = [token for tokens in chunks.values() for token in tokens]
        return ForwardBatch(torch.tensor(token_ids), torch.tensor(slots), rows)

    def forward(self, chunks: dict[int, list[int]], captured_layers: tuple[int, ...] = ()) -> ForwardResult:
        batch = self.batch(chunks)
        with torch.inference_mode():
            result = self.decoder.forward(batch, self.caches, captured_layers)
        for sequence, tokens in chunks.items():
            self.lengths[sequence] += len(tokens)
        return result

    def logits(self, chunks: dict[int, list[int]]) -> Tensor:
        with torch.inference_mode():
            return self.decoder.logits(self.forward(chunks).hidden)


def random_tokens(count: int, seed: int = 0, vocab_size: int = 97) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()


def reference_logits(model: transformers.PreTrainedModel, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]
