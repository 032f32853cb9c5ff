"""A target's own next-token distribution, computed beside the engine that serves."""

from collections.abc import Sequence as Seq
from itertools import accumulate, pairwise

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
def next_token_probabilities(loaded: LoadedEngine, prompts: Seq[Seq[int]], params: SamplingParams) -> Tensor:
    """The distribution that the token after each prompt is drawn from, without speculation: float32 `[prompts, vocab]`.

    All tokens are computed in one pass over a KV cache of its own.
    """
    target = loaded.target
    config = target.config
    needed = [-(-len(prompt) // _BLOCK_SIZE) for prompt in prompts]
    starts = list(accumulate(needed, initial=0))
    caches = allocate_caches(
        config.num_layers, config.num_kv_heads, config.head_dim, starts[-1], _BLOCK_SIZE, target.dtype, target.device
    )
    sequences = [
        Sequence(number, params, 0, list(prompt), block_table=list(range(start, end)))
        for number, (prompt, (start, end)) in enumerate(zip(prompts, pairwise(starts), strict=True))
    ]
    spans = [RowSpan(sequence, 0, sequence.prompt_token_ids) for sequence in sequences]
    batch = forward_batch(spans, _BLOCK_SIZE, target.device)
    last_rows = batch.attention.row_starts[1:].long() - 1
    logits = target.logits(target.forward(batch, caches).hidden[last_rows])
    sampler = Sampler(loaded.checkpoint.name, loaded.engine.model.eos_token_ids)
    return sampler.target_probabilities(logits, [SamplingRow(sequence) for sequence in sequences])
