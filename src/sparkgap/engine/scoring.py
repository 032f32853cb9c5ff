"""What a target computes for a text, beside the engine that serves."""

from collections.abc import Sequence as Seq
from itertools import accumulate, pairwise

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
def next_token_probabilities(loaded: LoadedEngine, prompts: Seq[Seq[int]], params: SamplingParams) -> Tensor:
    """The distribution that the token after each prompt is drawn from, without speculation: float32 `[prompts, vocab]`.

    All tokens are computed in one pass over a KV cache of its own.
    """
    hidden, starts = _forward(loaded.target, prompts)
    logits = loaded.target.logits(hidden[starts[1:] - 1])
    sampler = Sampler(loaded.checkpoint.name, loaded.engine.model.eos_token_ids)
    rows = [SamplingRow(Sequence(number, params, 0, list(prompt))) for number, prompt in enumerate(prompts)]
    return sampler.target_probabilities(logits, rows)


@torch.inference_mode()
def hidden_states(target: Decoder, token_ids: list[int]) -> Tensor:
    """What `Decoder.logits` takes, of each token of a text: `[tokens, hidden_size]`.

    All tokens are computed in one pass over a KV cache of its own.
    """
    return _forward(target, [token_ids])[0]


def _forward(target: Decoder, texts: Seq[Seq[int]]) -> tuple[Tensor, Tensor]:
    """Hidden states of all tokens, and int64 `[texts + 1]` row starts."""
    config = target.config
    blocks = [-(-len(text) // _BLOCK_SIZE) for text in texts]
    starts = list(accumulate(blocks, initial=0))
    caches = allocate_caches(
        config.num_layers, config.num_kv_heads, config.head_dim, starts[-1], _BLOCK_SIZE, target.dtype, target.device
    )
    spans = [
        RowSpan(Sequence(number, SamplingParams(), 0, list(text), block_table=list(range(*place))), 0, list(text))
        for number, (text, place) in enumerate(zip(texts, pairwise(starts), strict=True))
    ]
    batch = forward_batch(spans, _BLOCK_SIZE, target.device)
    return target.forward(batch, caches).hidden, batch.attention.row_starts.long()
