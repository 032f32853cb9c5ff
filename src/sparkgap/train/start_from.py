"""A training run that starts from the weights of an earlier drafter."""

import torch
from torch import Tensor

from sparkgap.catalog.drafters import DrafterCheckpoint, target_ids
from sparkgap.errors import ConfigError
from sparkgap.models.config import ModelConfig
from sparkgap.train.batches import DraftVocabulary
from sparkgap.train.config import TrainConfig
from sparkgap.train.mtp_network import MtpNetwork
from sparkgap.train.network import MARKOV_STD, DraftNetwork

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def check_sizes(drafter: DrafterCheckpoint, config: TrainConfig, target: ModelConfig) -> None:
    """Refuse a drafter that a run cannot start from, before anything is sampled.

    Args:
        drafter: where training is to start.
        config: of the run.
        target: what is drafted for.

    Raises:
        ConfigError: another method, head, size or other target layers; the message names it.
    """
    wanted, given = config.network, drafter.settings
    dspark = wanted.method == "dspark"
    asked: dict[str, object] = {
        "method": wanted.method,
        "num_layers": wanted.num_layers,
        "target_layer_ids": config.drafter_layer_ids(target.num_layers),
        "markov_rank": wanted.markov_rank if dspark else 0,
        "markov_head_type": wanted.markov_head_type if dspark else given.markov_head_type,
        "hidden_size": target.hidden_size,
        "intermediate_size": wanted.intermediate_size or target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": wanted.num_kv_heads or target.num_kv_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab_size,
    }
    found: dict[str, object] = {key: given.transformer.get(key) for key in (*_SIZES, "vocab_size")}
    found |= {
        "method": given.method,
        "num_layers": given.transformer.get("num_hidden_layers"),
        "target_layer_ids": given.target_layer_ids,
        "markov_rank": given.markov_rank,
        "markov_head_type": given.markov_head_type,
    }
    for name, value in asked.items():
        # A size that is left out is a default of the format; the tensors' shapes tell later.
        if found[name] is not None and found[name] != value:
            raise ConfigError(
                f"drafter {drafter.name} has {name} {_shown(found[name])}, and the drafter to be trained has "
                f"{_shown(value)}; give the options that it was trained with"
            )


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@torch.no_grad()
def copy_weights(drafter: DrafterCheckpoint, network: DraftNetwork | MtpNetwork, vocabulary: DraftVocabulary) -> None:
    """Set a network's weights to those of a drafter; what belongs to a token goes to the same token.

    Tokens that the drafter could not draft start without a Markov bias, as all do in training from the start, and so do
    tokens whose row of W1 it never trained.

    Args:
        drafter: a checkpoint of the same method and sizes; its draft vocabulary may be another.
        network: on any device.
        vocabulary: the network's draft vocabulary.

    Raises:
        ConfigError: another size, head or method; the message names it.
    """
    source = drafter.weights
    names = set(source.names())

    def tensor(name: str) -> Tensor:
        if name not in names:
            raise ConfigError(f"drafter {drafter.name} has no {name}: it is of another kind than the one to be trained")
        return source.get(name).float()

    def copy(parameter: Tensor, name: str, value: Tensor) -> None:
        if parameter.shape != value.shape:
            raise ConfigError(
                f"drafter {drafter.name}: {name} has shape {list(value.shape)}, and the drafter to be trained needs "
                f"{list(parameter.shape)}; give the options that it was trained with"
            )
        parameter.copy_(value.to(parameter.device))

    # What is served has the scale of the captured dimensions folded in.
    if isinstance(network, MtpNetwork):
        for name, parameter in network.named_parameters():
            value = tensor(name)
            copy(parameter, name, value / network.hnorm.scale.cpu() if name == "hnorm.weight" else value)
        return
    for name, parameter in network.named_parameters():
        if name.startswith(("layers.", "hidden_norm.", "norm.")):
            copy(parameter, name, tensor(name))
    copy(network.fc.weight, "fc.weight", tensor("fc.weight") / network.tap_scale.cpu())
    if not network.shape.markov_rank:
        return
    seen = network.markov_rows.nonzero()[:, 0].cpu()
    w1 = tensor("markov_head.markov_w1.weight")[seen]
    untrained = ~w1.any(-1)
    w1[untrained] = torch.randn(int(untrained.sum()), w1.shape[1]) * MARKOV_STD
    copy(network.markov_w1[1:], "markov_head.markov_w1.weight", w1)
    w2, ids = tensor("markov_head.markov_w2.weight"), target_ids(drafter)
    draft_ids = vocabulary.draft_ids.cpu()[torch.arange(w2.shape[0]) if ids is None else ids]
    wanted = torch.zeros(network.markov_w2.shape[0], w2.shape[1])
    wanted[draft_ids[draft_ids >= 0]] = w2[draft_ids >= 0]
    copy(network.markov_w2, "markov_head.markov_w2.weight", wanted)
    copy(network.confidence.weight, "confidence_head.proj.weight", tensor("confidence_head.proj.weight"))
    if network.shape.markov_head_type == "gated":
        copy(network.markov_gate.weight, "markov_head.gate_proj.weight", tensor("markov_head.gate_proj.weight"))
    elif network.shape.markov_head_type == "rnn":
        copy(network.markov_joint.weight, "markov_head.joint_proj.weight", tensor("markov_head.joint_proj.weight"))
