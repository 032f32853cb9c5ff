"""A tiny random model as a directory that the engine and transformers both read."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sparkgap.models.config import ModelConfig
from sparkgap.models.loading import expected_shapes

CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
VOCAB_SIZE = 264
EOS = 257
CONTEXT = 128
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}


def write_tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    std: float | None = None,
    template: str | None = CHAT_TEMPLATE,
    **config_changes: Any,
) -> Path:
    """Two Llama layers over single bytes; logits far from uniform, end of sequence as likely as any token.

    Weights are random with standard deviation `std`; None scales them by their inputs, and norms are near 1.
    `config_changes` replace keys of config.json after the weights are made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: _random(shape, generator, std) for name, shape in expected_shapes(ModelConfig.from_hf(CONFIG)).items()
    }
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG | config_changes))
    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<a>", "<b>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>"} | ({} if template is None else {"chat_template": template})
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def _random(shape: tuple[int, ...], generator: torch.Generator, std: float | None) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if std is not None:
        return std * noise
    return 1 + 0.3 * noise if len(shape) == 1 else noise * 1.5 * shape[-1] ** -0.5
