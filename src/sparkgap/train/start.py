"""Where a drafter's training starts: the circuit that repeats what followed the same token before.

Much of what a model writes stands in its context already, but attention that finds it comes late when it must be
learned from random weights. Linear maps from the captured states to a position's token, to the one before it, and to
the one that the target predicts there can be fitted at once; the context's features are these three codes. The first
draft layer then attends from the anchor to positions with the same token, and adds the code of what followed.
"""

import torch
from torch import Tensor

from sparkgap.train.features import Example, Examples
from sparkgap.train.network import DraftNetwork, Layer

_POSITIONS = 30_000
"""Positions that the maps are fitted on, about."""

_FIRST_POSITIONS = 4
"""Positions at a conversation's start that are left out: their states are unlike all others."""

_RIDGE = 0.01
"""Weight of the ridge penalty, in units of the mean square of a scaled captured dimension."""

_CLIP = 20.0
"""Largest scaled captured value that counts in a fit."""

_BACKGROUND = 0.1
"""Size of the random weights beside the circuit's, in units of the usual initial ones."""

_LOUDNESS = 6.0
"""Size of what the circuit writes, in units of the embedding's values, beside which it must be heard."""


@torch.no_grad()
def start(network: DraftNetwork, examples: Examples, learned: list[Example], seed: int) -> None:
    """Set `fc` and the attention of an untrained network; the same for the same arguments.

    Args:
        network: on any device; needs at least one draft layer.
        examples: where the captured states are.
        learned: conversations to fit on.
        seed: of the projections and of the positions.
    """
    generator = torch.Generator().manual_seed(seed)
    taps, tokens = _sample(examples, learned, generator)
    device = network.head.device
    inputs = (taps.to(device).float() * network.tap_scale).clamp(-_CLIP, _CLIP)
    tokens = tokens.to(device)
    unit, mean = _unit_embedding(network, tokens[0])
    outputs = _output_directions(network, unit, mean)
    width = network.shape.hidden_size // 3
    identity = _orthonormal(width, unit.shape[1], generator).to(device)
    following = outputs[tokens[2]]
    basis = torch.linalg.eigh(following.T @ following)[1][:, -width:].T
    codes = [(unit[tokens[k]] - mean) @ identity.T for k in (0, 1)] + [following @ basis.T]
    maps = _ridge(inputs, torch.cat(codes, dim=1))
    maps = maps / (inputs @ maps).view(-1, 3, width).std((0, 2)).repeat_interleave(width)
    network.fc.weight.zero_()
    network.fc.weight[: 3 * width] = maps.T
    center = torch.eye(unit.shape[1], device=device) - torch.outer(mean, mean) / mean.square().sum()
    for index, layer in enumerate(network.layers):
        assert isinstance(layer, Layer)
        _set_keys_and_values(layer, width, index, generator)
    first = network.layers[0]
    assert isinstance(first, Layer)
    _match_anchor(first, width, identity @ center, generator)
    usual = network.embedding.float()[tokens[2]].square().mean().sqrt()
    _write_what_followed(first, width, basis, _LOUDNESS * usual)


def _sample(examples: Examples, learned: list[Example], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Captured states `[positions, m * hidden]`, and int64 `[3, positions]`: tokens there, one before, one after."""
    each = max(_POSITIONS // len(learned), 64)
    taps: list[Tensor] = []
    tokens: list[Tensor] = []
    for example in learned[: -(-_POSITIONS // each)]:
        places = torch.randperm(max(example.computed - _FIRST_POSITIONS, 0), generator=generator)[:each]
        places = places + _FIRST_POSITIONS
        taps.append(examples.taps(example)[places])
        tokens.append(torch.stack([example.token_ids[places + offset] for offset in (0, -1, 1)]))
    return torch.cat(taps), torch.cat(tokens, dim=1)


def _unit_embedding(network: DraftNetwork, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The embedding's rows as the first layer's norm leaves them, and their mean over `tokens`."""
    table = network.embedding.float()
    unit = table / table.square().mean(1, keepdim=True).add(network.shape.rms_norm_eps).sqrt()
    return unit, unit[tokens].mean(0)


def _output_directions(network: DraftNetwork, unit: Tensor, mean: Tensor) -> Tensor:
    """For each token a residual stream that the final norm and a tied head turn towards it: `[vocab, hidden]`."""
    weight = network.norm.weight.float()
    weight = torch.where(weight.abs() < 0.5, 0.5, weight)
    directions = (unit - mean) / weight
    return directions / directions.square().mean(1, keepdim=True).sqrt()


def _ridge(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Least squares with a ridge penalty: `[input, output]`."""
    gram = inputs.T @ inputs
    gram.diagonal().add_(_RIDGE * float(gram.diagonal().mean()) + 1e-6)
    solved: Tensor = torch.cholesky_solve(inputs.T @ outputs, torch.linalg.cholesky(gram))
    return solved


def _orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """`rows` random orthonormal rows of `columns`, as far as there are as many."""
    square = torch.randn(columns, max(rows, 1), generator=generator)
    columns_first: Tensor = torch.linalg.qr(square)[0]
    return columns_first.T[:rows]


def _slow_dimensions(head_dim: int) -> Tensor:
    """Dimensions of a head that RoPE turns slowly: two thirds of its pairs, whose match survives distance."""
    half = head_dim // 2
    pairs = torch.arange(half // 3, half)
    return torch.cat([pairs, pairs + half])


def _set_keys_and_values(layer: Layer, width: int, index: int, generator: torch.Generator) -> None:
    """Keys: the code of the token (in later layers, of every other head, of the one before); values: what followed."""
    attention = layer.self_attn
    head_dim = attention.shape.head_dim
    keys, values = (
        projection.weight.view(-1, head_dim, attention.shape.hidden_size)
        for projection in (attention.k_proj, attention.v_proj)
    )
    slow = _slow_dimensions(head_dim)
    for head in range(keys.shape[0]):
        block = head % 2 if index else 0
        keys[head] *= _BACKGROUND
        selected = _orthonormal(min(len(slow), width), width, generator).to(keys.device)
        keys[head, slow[: selected.shape[0]], block * width : (block + 1) * width] += selected
        share = _value_share(head, head_dim, keys.shape[0], width)
        values[head, : len(share)] = 0
        values[head, torch.arange(len(share)), 2 * width + torch.tensor(share)] = 1


def _value_share(head: int, head_dim: int, heads: int, width: int) -> range:
    """The part of the following token's code that a key and value head carries."""
    size = min(-(-width // heads), head_dim)
    return range(min(head * size, width), min((head + 1) * size, width))


def _match_anchor(layer: Layer, width: int, identity: Tensor, generator: torch.Generator) -> None:
    """Queries of the first head of each group ask for the anchor's own token."""
    attention = layer.self_attn
    shape = attention.shape
    groups = shape.num_heads // shape.num_kv_heads
    slow = _slow_dimensions(shape.head_dim)
    queries = attention.q_proj.weight.view(-1, shape.head_dim, shape.hidden_size)
    keys = attention.k_proj.weight.view(-1, shape.head_dim, shape.hidden_size)
    for head in range(shape.num_kv_heads):
        queries[head * groups] *= _BACKGROUND
        queries[head * groups, slow] += keys[head, slow, :width] @ identity


def _write_what_followed(layer: Layer, width: int, basis: Tensor, size: Tensor) -> None:
    """Those heads add the code that they found to the residual stream, `size` large."""
    attention = layer.self_attn
    shape = attention.shape
    groups = shape.num_heads // shape.num_kv_heads
    outputs = attention.o_proj.weight.view(shape.hidden_size, -1, shape.head_dim)
    for head in range(shape.num_kv_heads):
        share = _value_share(head, shape.head_dim, shape.num_kv_heads, width)
        outputs[:, head * groups, : len(share)] = basis[share.start : share.stop].T * size
