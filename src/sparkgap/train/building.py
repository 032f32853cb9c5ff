"""Untrained networks for a target: their sizes, frozen parts and tokens."""

import torch
from torch import Tensor

from sparkgap.catalog.checkpoint import Checkpoint
from sparkgap.errors import ConfigError
from sparkgap.models.decoder import Decoder
from sparkgap.train.batches import DraftVocabulary
from sparkgap.train.config import TrainConfig
from sparkgap.train.mtp_network import MtpNetwork
from sparkgap.train.network import DraftNetwork, NetworkShape
from sparkgap.train.template import TurnTemplate


def mask_token(checkpoint: Checkpoint, template: TurnTemplate, vocabulary: DraftVocabulary) -> int:
    """A token for the rows after the anchor: a special one that conversations do not use, if there is one."""
    used = {*template.opening, *template.middle, *template.end_tokens}
    free = sorted(t for t in checkpoint.tokenizer.special_token_ids if t not in used)
    if free:
        return free[0]
    outside = (vocabulary.draft_ids < 0).nonzero()[:, 0]
    return int(outside[-1]) if outside.numel() else 0


def head_rows(checkpoint: Checkpoint, target: Decoder, ids: Tensor) -> Tensor:
    """Rows `ids` of the target's LM head from its checkpoint: kernels may keep no copy that can be read."""
    if target.config.tie_word_embeddings:
        return target.embedding[ids.to(target.device)]
    return checkpoint.weights.get("lm_head.weight")[ids].to(target.device, target.dtype)


def build_network(
    config: TrainConfig,
    target: Decoder,
    head: Tensor,
    vocabulary: DraftVocabulary,
    scale: Tensor,
    markov_rows: Tensor,
    mask_token_id: int,
) -> DraftNetwork:
    """An untrained block drafter for `target`, on its device; the same for the same seed.

    Args:
        config: the drafter's sizes.
        target: what it drafts for.
        head: `[draft_vocab, hidden]`, as `head_rows`.
        vocabulary: draft vocabulary.
        scale: of the captured dimensions, as `tap_scale`.
        markov_rows: row of W1 that each target token trains.
        mask_token_id: token of the rows after the anchor.
    """
    wanted = config.network
    shape = _shape(
        config,
        target,
        vocabulary,
        markov_rank=wanted.markov_rank if wanted.method == "dspark" else 0,
        markov_tokens=int(markov_rows.max()) + 1,
        lead_rows=0 if wanted.method == "dspark" else 1,
    )
    torch.manual_seed(config.seed)
    network = DraftNetwork(
        shape,
        target.embedding,
        head,
        mask_token_id,
        scale.to(target.device),
        markov_rows.to(target.device),
        target.dtype,
    )
    with torch.no_grad():
        network.norm.weight.copy_(target.final_norm)
    return network.to(target.device)


def build_mtp_network(
    config: TrainConfig, target: Decoder, head: Tensor, vocabulary: DraftVocabulary, scale: Tensor
) -> MtpNetwork:
    """An untrained multi-token prediction module for `target`, on its device; the same for the same seed.

    It starts from the captured state, in the basis that the head reads, and a random projection of the embedding; the
    layer adds nothing yet.

    Args:
        config: the drafter's sizes.
        target: what it drafts for.
        head: `[draft_vocab, hidden]`, as `head_rows`.
        vocabulary: draft vocabulary.
        scale: of the normed captured dimensions, as `normed_tap_scale`.
    """
    shape = _shape(config, target, vocabulary, markov_rank=0, markov_tokens=0, lead_rows=0)
    torch.manual_seed(config.seed)
    device = target.device
    network = MtpNetwork(shape, target.embedding, head, vocabulary.ids.to(device), scale.to(device), target.dtype)
    with torch.no_grad():
        network.norm.weight.copy_(target.final_norm)
        network.eh_proj.weight[:, shape.hidden_size :] = torch.eye(shape.hidden_size)
    return network.to(device)


def _shape(
    config: TrainConfig,
    target: Decoder,
    vocabulary: DraftVocabulary,
    *,
    markov_rank: int,
    markov_tokens: int,
    lead_rows: int,
) -> NetworkShape:
    model, wanted = target.config, config.network
    shape = NetworkShape(
        hidden_size=model.hidden_size,
        target_hidden_size=model.hidden_size,
        intermediate_size=wanted.intermediate_size or model.intermediate_size,
        num_layers=wanted.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=wanted.num_kv_heads or model.num_kv_heads,
        head_dim=model.head_dim,
        num_taps=len(config.drafter_layer_ids(model.num_layers)),
        vocab_size=model.vocab_size,
        draft_vocab_size=vocabulary.ids.shape[0],
        markov_rank=markov_rank,
        markov_tokens=markov_tokens,
        lead_rows=lead_rows,
        rms_norm_eps=model.rms_norm_eps,
        rope_theta=model.rope.theta,
        markov_head_type=wanted.markov_head_type,
    )
    if shape.num_heads % shape.num_kv_heads:
        raise ConfigError(f"num_kv_heads must divide {shape.num_heads} heads, got {shape.num_kv_heads}")
    return shape
