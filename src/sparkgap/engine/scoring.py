"""What a target computes for a text, beside the engine that serves."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from sparkgap.config import SamplingParams
from sparkgap.engine.loading import LoadedEngine
from sparkgap.models.cache import allocate_caches
from sparkgap.models.decoder import Decoder
from sparkgap.rounds.batching import RowSpan, forward_batch
from sparkgap.rounds.logits import SamplingRow
from sparkgap.rounds.sampling import Sampler
from sparkgap.rounds.sequence import Sequence

_BLOCK_SIZE = 16


def windows_of(token_ids: Seq[int], length: int) -> list[list[int]]:
    """A text's tokens in pieces of `length`, each to be read on its own; a last piece of one token is left out."""
    pieces = [list(token_ids[start : start + length]) for start in range(0, len(token_ids), length)]
    return [piece for piece in pieces if len(piece) > 1]


@torch.inference_mode()
def next_token_probabilities(loaded: LoadedEngine, token_ids: list[int], params: SamplingParams) -> Tensor:
    """The distribution that the token after `token_ids` is drawn from, without speculation: float32 `[vocab]`.

    All tokens are computed in one pass over a KV cache of its own.
    """
    hidden = hidden_states(loaded.target, token_ids)
    logits = loaded.target.logits(hidden[-1:])
    sequence = Sequence(0, params, 0, token_ids)
    sampler = Sampler(loaded.checkpoint.name, loaded.engine.model.eos_token_ids)
    return sampler.target_probabilities(logits, [SamplingRow(sequence)])[0]


@torch.inference_mode()
def hidden_states(target: Decoder, token_ids: list[int]) -> Tensor:
    """What `Decoder.logits` takes, of each token of a text: `[tokens, hidden_size]`.

    All tokens are computed in one pass over a KV cache of its own.
    """
    config = target.config
    blocks = -(-len(token_ids) // _BLOCK_SIZE)
    caches = allocate_caches(
        config.num_layers, config.num_kv_heads, config.head_dim, blocks, _BLOCK_SIZE, target.dtype, target.device
    )
    sequence = Sequence(0, SamplingParams(), 0, token_ids, block_table=list(range(blocks)))
    batch = forward_batch([RowSpan(sequence, 0, token_ids)], _BLOCK_SIZE, target.device)
    return target.forward(batch, caches).hidden
