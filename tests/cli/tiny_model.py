"""A model directory of a few kilobytes, with random weights and one token a byte."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sparkgap.models.config import ModelConfig
from sparkgap.models.loading import expected_shapes

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
VOCAB_SIZE = 260
CONTEXT = 64
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
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "torch_dtype": "float32",
}


def write_tiny_model(directory: Path, *, template: str | None = TEMPLATE, **config_changes: Any) -> Path:
    """Write the model; `config_changes` replace keys of config.json after the weights are made."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    shapes = expected_shapes(ModelConfig.from_hf(CONFIG))
    weights = {name: torch.randn(*shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    save_file(weights, directory / "model.safetensors")
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
