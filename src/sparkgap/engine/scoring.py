"""A target's own next-token distribution, computed beside the engine that serves."""

import torch
from torch import Tensor

from sparkgap.config import SamplingParams
from sparkgap.engine.loading import LoadedEngine
from sparkgap.models.cache import allocate_caches
from sparkgap.rounds.batching import RowSpan, forward_batch
from sparkgap.rounds.logits import SamplingRow
from sparkgap.rounds.sampling import Sampler
from sparkgap.rounds.sequence import Sequence

_BLOCK_SIZE = 16


@torch.inference_mode()
def next_token_probabilities(loaded: LoadedEngine, token_ids: list[int], params: SamplingParams) -> Tensor:
    """The distribution that the token after `token_ids` is drawn from, without speculation: float32 `[vocab]`.

    All tokens are computed in one pass over a KV cache of its own.
    """
    target = loaded.target
    config = target.config
    blocks = -(-len(token_ids) // _BLOCK_SIZE)
    caches = allocate_caches(
        config.num_layers, config.num_kv_heads, config.head_dim, blocks, _BLOCK_SIZE, target.dtype, target.device
    )
    sequence = Sequence(0, params, 0, token_ids, block_table=list(range(blocks)))
    batch = forward_batch([RowSpan(sequence, 0, token_ids)], _BLOCK_SIZE, target.device)
    logits = target.logits(target.forward(batch, caches).hidden[-1:])
    sampler = Sampler(loaded.checkpoint.name, loaded.engine.model.eos_token_ids)
    return sampler.target_probabilities(logits, [SamplingRow(sequence)])[0]
