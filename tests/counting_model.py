"""A target that counts, and a drafter that is always right where it sees the right context.

A token is a number and a letter. The next token has the next number, which follows from the last token alone, and
the letter of the token `PERIOD` places before, which attention finds by its distance. The drafter's Markov head knows
how to count; letters it must read from the context that the target's hidden states left in its cache, at one position
each.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sparkgap.catalog.drafters import tensor_shapes, write_speculators
from sparkgap.models.config import ModelConfig
from sparkgap.models.loading import expected_shapes

from .speculating_model import BLOCK_SIZE, settings
from .tiny_model import CONFIG, write_tiny_model

NUMBERS, LETTERS = 8, 4
PERIOD = 6
"""Distance of the letters: the least at which a block of `BLOCK_SIZE` finds all of them in its context."""

HIDDEN, HEAD_DIM, MASK = 32, 16, 40
SHARPNESS = 60.0
"""Of attention: what is one place beside the right one has e^-30 of its weight."""

# Places in the residual stream: a constant, the token's letter, the next token's letter, the token's number.
CONSTANT = 0
LETTER = slice(1, 1 + LETTERS)
NEXT_LETTER = slice(1 + LETTERS, 1 + 2 * LETTERS)
NUMBER = slice(1 + 2 * LETTERS, 1 + 2 * LETTERS + NUMBERS)


assert PERIOD == BLOCK_SIZE + 1


def token(number: int, letter: int) -> int:
    """The token with this number and letter."""
    return number % NUMBERS * LETTERS + letter


def prompt_of(length: int, seed: int) -> list[int]:
    """Random letters, and counted numbers, of at least `PERIOD` tokens."""
    assert length >= PERIOD
    generator = torch.Generator().manual_seed(seed)
    letters = torch.randint(0, LETTERS, (PERIOD,), generator=generator).tolist()
    return [token(seed + place, letters[place % PERIOD]) for place in range(length)]


def answer_to(prompt: list[int], length: int) -> list[int]:
    """What the target says after `prompt`, computed from its definition."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(token(tokens[-1] // LETTERS + 1, tokens[-PERIOD] % LETTERS))
    return tokens[len(prompt) :]


def write_counting_pair(directory: Path, *, max_model_len: int, max_context: int | None = None) -> tuple[Path, Path]:
    """Model and drafter.

    Args:
        directory: they are made in it.
        max_model_len: positions of the target.
        max_context: positions of the drafter; as many when None.
    """
    model = write_tiny_model(directory / "target")
    changes: dict[str, Any] = {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": max_model_len,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    }
    config = CONFIG | changes
    (model / "config.json").write_text(json.dumps(config))
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.zeros(shape)
        for name, shape in expected_shapes(ModelConfig.from_hf(config)).items()
    }
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embedding[:, CONSTANT] = 1
    for number in range(NUMBERS):
        for letter in range(LETTERS):
            row = token(number, letter)
            embedding[row, LETTER][letter] = embedding[row, NUMBER][number] = 1
            head[row, NEXT_LETTER][letter] = head[row, NUMBER][(number - 1) % NUMBERS] = 1
    # A drafter reads the stream before the last layer: the first one leaves it as it is.
    layer = "model.layers.1.self_attn."
    _fill_attention({name.removeprefix(layer): w for name, w in weights.items() if name.startswith(layer)})
    save_file(weights, model / "model.safetensors", {"format": "pt"})

    shape = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": HEAD_DIM}
    wanted = settings(
        transformer=settings(max_position_embeddings=max_context or max_model_len).transformer | shape,
        layer_windows=(None,),
        layer_causal=(False,),
        markov_rank=NUMBERS,
        mask_token_id=MASK,
    )
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.zeros(shape)
        for name, shape in tensor_shapes(wanted)[0].items()
    }
    tensors["fc.weight"] = torch.eye(HIDDEN)
    layer = "layers.0.self_attn."
    _fill_attention({name.removeprefix(layer): w for name, w in tensors.items() if name.startswith(layer)})
    tensors["markov_head.markov_w1.weight"] = embedding[:, NUMBER].clone()
    tensors["markov_head.markov_w2.weight"] = 4 * head[:, NUMBER]
    write_speculators(directory / "drafter", wanted, tensors, verifier="counting")
    return model, directory / "drafter"


def _fill_attention(weights: dict[str, torch.Tensor]) -> None:
    """Every row looks `PERIOD - 1` places back, and takes the letter there as the next token's."""
    half = HEAD_DIM // 2
    for place in range(half):
        angle = 10000.0 ** (-place / half) * (PERIOD - 1)
        weights["q_proj.weight"][place, CONSTANT] = 1.0
        weights["k_proj.weight"][place, CONSTANT] = math.cos(angle)
        weights["k_proj.weight"][place + half, CONSTANT] = math.sin(angle)
    for letter in range(LETTERS):
        weights["v_proj.weight"][letter, LETTER.start + letter] = 1.0
        weights["o_proj.weight"][NEXT_LETTER.start + letter, letter] = 1.0
    if "q_norm.weight" in weights:
        weights["q_norm.weight"].fill_(SHARPNESS * HEAD_DIM**0.5 / 2)
        return
    # Rows have the same norm, and there are three ones in each.
    weights["q_proj.weight"] *= SHARPNESS * HEAD_DIM**0.5 * 3 / HIDDEN
