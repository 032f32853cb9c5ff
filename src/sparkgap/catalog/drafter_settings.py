"""What a draft checkpoint says about itself, read from the two formats that exist into one meaning."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sparkgap.catalog.identity import TargetIdentity, read_identity
from sparkgap.catalog.keys import LARGEST_INTEGER, Keys, shown
from sparkgap.config import DEFAULT_MTP_TOKENS, MOST_MTP_TOKENS, is_finite
from sparkgap.errors import CheckpointError, UnsupportedModelError

DraftMethod = Literal["dspark", "dflash", "mtp"]
"""`dspark` has sequential heads, `dflash` is the same block drafter without them; `mtp` is one layer that is applied
again to what it gave (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

MarkovHeadType = Literal["vanilla", "gated", "rnn"]
"""How the token before changes the logits of a draft token (arXiv 2607.05147, section 3)."""

BLOCK_METHODS: tuple[DraftMethod, ...] = ("dspark", "dflash")
DRAFT_METHODS: tuple[DraftMethod, ...] = (*BLOCK_METHODS, "mtp")
MARKOV_HEAD_TYPES: tuple[MarkovHeadType, ...] = ("vanilla", "gated", "rnn")

_EMBEDDING_OUTPUT = -1
"""Engine layer id of the stream before the first layer."""

_SLIDING = "sliding_attention"

_LARGEST_BLOCK = 1024
_MOST_LAYERS = 1000
"""Far above any drafter; damaged numbers must not cost memory."""

OWN_KEY = "sparkgap"
"""Key of config.json for what no other engine writes; others ignore it."""

_HEAD_KEYS = frozenset(
    {
        "architectures", "auto_map", "block_size", "mask_token_id", "target_layer_ids", "num_target_layers",
        "target_hidden_size", "num_anchors", "draft_vocab_size", "sample_from_anchor", "markov_rank",
        "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "dflash_config", "is_causal",
        OWN_KEY, "speculators_config",
    }
)  # fmt: skip
"""Top-level keys of a DeepSpec config that are not the transformer's."""

_BLOCK_KEYS = frozenset({"markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"})
"""Keys of parts that an MTP drafter does not have."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "logit_scale": (1.0,),
    "embedding_scale": (1.0,),
    "final_logit_softcapping": (),
    "is_neox_style": (True,),
    "quantization_config": (),
    "shift_label": (False,),
    "use_aux_hidden_state": (True,),
    "hidden_act": ("silu", "swish"),
}
"""Settings that change what a drafter computes, with the values this engine computes (None is always one)."""


@dataclass(frozen=True)
class DrafterSettings:
    """A draft checkpoint's configuration, whatever its format.

    Attributes:
        method: `dspark`, `dflash` or `mtp`.
        transformer: the draft layers in Hugging Face keys of Qwen3 (`hidden_size`, `num_hidden_layers`, ...,
            `vocab_size` is the target's).
        layer_windows: sliding window of each draft layer, None where it sees its whole context.
        layer_causal: for each draft layer, whether a block row sees only itself and the rows before it in the
            block; False is the bidirectional block.
        target_hidden_size: size of one captured hidden state of the target.
        target_layer_ids: captured layers; id `k` is the residual stream *after* layer `k`, -1 the embedding's
            output, as everywhere in this engine. An MTP drafter has one.
        draft_vocab_size: size of the draft vocabulary.
        block_size: rows of a block in training, the anchor's included; 0 for MTP, which has no blocks.
        mask_token_id: token of the rows that follow the anchor; 0 for MTP, which has none.
        sample_from_anchor: the anchor's row predicts the first draft token; when False only mask rows predict,
            each the token at its own position.
        markov_rank: rank of the Markov head, 0 for none.
        markov_head_type: kind of the Markov head.
        confidence_head: whether the checkpoint has one.
        confidence_head_with_markov: whether its input has the embedding of the token before.
        num_target_layers: layers of the target it was trained for, when the checkpoint says so.
        default_speculative_tokens: draft tokens a round unless the user says otherwise, where that is not a whole
            block: `speculative_tokens` of the first proposal method in the speculators format, as in vLLM.
        confidence_scaling: for each token of a block the temperature that its confidence's logit is divided by and the
            offset that is then added; empty without calibration.
        made_for: the target it was trained for, when the checkpoint says so.
    """

    method: DraftMethod
    transformer: Mapping[str, Any]
    layer_windows: tuple[int | None, ...]
    layer_causal: tuple[bool, ...]
    target_hidden_size: int
    target_layer_ids: tuple[int, ...]
    draft_vocab_size: int
    block_size: int = 0
    mask_token_id: int = 0
    sample_from_anchor: bool = True
    markov_rank: int = 0
    markov_head_type: MarkovHeadType = "vanilla"
    confidence_head: bool = False
    confidence_head_with_markov: bool = False
    num_target_layers: int | None = None
    default_speculative_tokens: int | None = None
    confidence_scaling: tuple[tuple[float, float], ...] = ()
    made_for: TargetIdentity | None = None

    @property
    def max_speculative_tokens(self) -> int:
        """Most tokens one draft has: a whole block, or what MTP is limited to."""
        if self.method == "mtp":
            return MOST_MTP_TOKENS
        return self.block_size - (0 if self.sample_from_anchor else 1)

    @property
    def usual_speculative_tokens(self) -> int:
        """Draft tokens a round unless the user says otherwise."""
        whole = DEFAULT_MTP_TOKENS if self.method == "mtp" else self.max_speculative_tokens
        return self.default_speculative_tokens or whole


def parse_method(method: object, name: str) -> DraftMethod:
    """The draft method that `method` names in any case.

    Raises:
        UnsupportedModelError: another method; the message names it and those that run.
    """
    for candidate in DRAFT_METHODS:
        if isinstance(method, str) and method.lower() == candidate:
            return candidate
    known = f"{', '.join(DRAFT_METHODS[:-1])} and {DRAFT_METHODS[-1]}"
    raise UnsupportedModelError(f"drafter {name}: method {shown(method)} is not supported; this engine runs {known}")


def layer_ids_from_speculators(layer_ids: list[int]) -> tuple[int, ...]:
    """Engine layer ids of speculators ids: speculators (and vLLM) id `k` is `hidden_states[k]`, the stream
    after layer `k - 1`; 0 is the embedding's output."""
    return tuple(k - 1 for k in layer_ids)


def layer_ids_to_speculators(layer_ids: tuple[int, ...]) -> list[int]:
    """Speculators ids of engine layer ids; the inverse of `layer_ids_from_speculators`."""
    return [k + 1 for k in layer_ids]


def read_settings(config: Mapping[str, Any], name: str) -> DrafterSettings:
    """The settings in a draft checkpoint's `config.json`, of either format.

    Args:
        config: the file's content.
        name: what error messages call the drafter.

    Raises:
        CheckpointError: a key is missing or has a value of the wrong kind; the message names it.
        UnsupportedModelError: a method, head type or feature that this engine does not run.
    """
    if "speculators_model_type" in config:
        return _read_speculators(config, name)
    return _read_deepspec(config, name)


def _read_speculators(config: Mapping[str, Any], name: str) -> DrafterSettings:
    method = parse_method(config["speculators_model_type"], name)
    transformer = config.get("transformer_layer_config")
    if not isinstance(transformer, Mapping):
        raise CheckpointError(f"drafter {name}: config.json has no transformer_layer_config")
    _refuse_unknown_features(config, name)
    _refuse_unknown_features(transformer, name)
    target_layer_ids = layer_ids_from_speculators(_layer_ids(config, "aux_hidden_state_layer_ids", name))
    if method == "mtp":
        return _read_mtp(config, name, transformer, target_layer_ids)
    if (projector := config.get("projector_type", "dflash")) != "dflash":
        raise UnsupportedModelError(f"drafter {name}: projector_type {shown(projector)} is not supported")
    block_size = _integer(config, "block_size", name, minimum=1, maximum=_LARGEST_BLOCK)
    keys = _keys(config, name)
    sample_from_anchor = keys.flag("sample_from_anchor") if "sample_from_anchor" in keys else None
    if sample_from_anchor is None:
        sample_from_anchor = _layout_from_proposals(config, name, block_size, method)
    # Absent means bidirectional: published checkpoints from before the key were trained that way.
    causal_when_sliding = not keys.flag("sliding_window_non_causal", True)
    windows = _windows(transformer, transformer.get("layer_types"), transformer.get("sliding_window"), name)
    return _settings(
        config,
        name,
        method=method,
        transformer=transformer,
        layer_windows=windows,
        layer_causal=tuple(causal_when_sliding and window is not None for window in windows),
        target_layer_ids=target_layer_ids,
        block_size=block_size,
        mask_token_id=_integer(config, "mask_token_id", name),
        sample_from_anchor=sample_from_anchor,
    )


def _read_mtp(
    config: Mapping[str, Any], name: str, transformer: Mapping[str, Any], target_layer_ids: tuple[int, ...]
) -> DrafterSettings:
    """One layer, which reads one hidden state of the target and gives one of the same size."""
    if len(target_layer_ids) != 1:
        raise CheckpointError(
            f"drafter {name}: an mtp draft model reads one layer of the target, and aux_hidden_state_layer_ids has "
            f"{len(target_layer_ids)}"
        )
    if _integer(transformer, "num_hidden_layers", name, minimum=1, maximum=_MOST_LAYERS) != 1:
        raise UnsupportedModelError(
            f"drafter {name}: an mtp draft model of {transformer['num_hidden_layers']} layers is not supported; this "
            "engine applies one layer again and again"
        )
    settings = _settings(
        {key: value for key, value in config.items() if key not in _BLOCK_KEYS},
        name,
        method="mtp",
        transformer=transformer,
        layer_windows=_windows(transformer, transformer.get("layer_types"), transformer.get("sliding_window"), name),
        layer_causal=(True,),
        target_layer_ids=target_layer_ids,
    )
    hidden_size = transformer["hidden_size"]
    if settings.target_hidden_size != hidden_size:
        raise CheckpointError(
            f"drafter {name}: an mtp draft model's hidden_size {hidden_size} must be its target_hidden_size "
            f"{settings.target_hidden_size}: what the layer gives is read in place of the target's hidden state"
        )
    return settings


def _layout_from_proposals(config: Mapping[str, Any], name: str, block_size: int, method: DraftMethod) -> bool:
    """Whether the anchor predicts, for checkpoints written before the format had a key for it: as many
    speculative tokens as block rows mean that it does, one fewer that it does not."""
    tokens = _proposed_tokens(config, name)
    if tokens in (block_size, block_size - 1):
        return bool(tokens == block_size)
    return method == "dspark"


def _proposed_tokens(config: Mapping[str, Any], name: str) -> object:
    """`speculative_tokens` of the first proposal method."""
    proposals = (_keys(config, name).mapping("speculators_config") or {}).get("proposal_methods")
    first = proposals[0] if isinstance(proposals, list) and proposals else None
    return first.get("speculative_tokens") if isinstance(first, Mapping) else None


def _default_tokens(config: Mapping[str, Any], name: str, most: int) -> int | None:
    """Draft tokens a round that the checkpoint asks for; None where that is a whole block, or nothing usable."""
    tokens = _proposed_tokens(config, name)
    return tokens if isinstance(tokens, int) and not isinstance(tokens, bool) and 1 <= tokens < most else None


def _confidence_scaling(own: Keys, label: str, tokens: int) -> tuple[tuple[float, float], ...]:
    values = own.mapping("confidence_calibration")
    if values is None:
        return ()
    keys = Keys(values, label)
    for key in ("temperatures", "offsets"):
        numbers = values.get(key)
        above = 0 if key == "temperatures" else -math.inf
        if (
            not isinstance(numbers, list | tuple)
            or len(numbers) != tokens
            or not all(is_finite(number) and number > above for number in numbers)
        ):
            kind = "numbers above 0" if key == "temperatures" else "finite numbers"
            raise keys.wrong(key, f"{tokens} {kind}, one for each token of a block", numbers)
    pairs = zip(values["temperatures"], values["offsets"], strict=True)
    return tuple((float(temperature), float(offset)) for temperature, offset in pairs)


def _read_deepspec(config: Mapping[str, Any], name: str) -> DrafterSettings:
    nested = _keys(config, name).mapping("dflash_config") or {}
    merged: dict[str, Any] = {**nested, **{key: value for key, value in config.items() if value is not None}}
    _refuse_unknown_features(merged, name)
    architecture = next(iter(_keys(config, name).strings("architectures") or ()), "")
    projector = nested.get("projector_type", "dflash")
    if projector not in BLOCK_METHODS:
        raise UnsupportedModelError(f"drafter {name}: projector_type {shown(projector)} is not supported")
    if "dspark" not in architecture.lower() and "dflash" not in architecture.lower():
        raise UnsupportedModelError(
            f"drafter {name}: architecture {shown(architecture)} is not a DSpark or DFlash draft model, and "
            "config.json has no speculators_model_type"
        )
    keys, nested_keys = _keys(merged, name), _keys(nested, name)
    dspark = "dspark" in architecture.lower() or projector == "dspark" or keys.integer("markov_rank", 0, minimum=0) > 0
    layer_types = keys.strings("layer_types")
    if nested_keys.flag("use_swa") and _SLIDING not in (layer_types or ()):
        layer_types = [_SLIDING] * _integer(merged, "num_hidden_layers", name, minimum=1, maximum=_MOST_LAYERS)
        sliding_means_causal = False
    else:
        sliding_means_causal = not dspark
    window = nested.get("swa_window_size", merged.get("sliding_window"))
    windows = _windows(merged, layer_types, window, name)
    explicit = nested_keys.flag("causal") if "causal" in nested_keys else None
    explicit = keys.flag("is_causal") if "is_causal" in keys else explicit
    causal = tuple(
        explicit if explicit is not None else (sliding_means_causal and window is not None) for window in windows
    )
    return _settings(
        merged,
        name,
        method="dspark" if dspark else "dflash",
        transformer={key: value for key, value in config.items() if key not in _HEAD_KEYS},
        layer_windows=windows,
        layer_causal=causal,
        target_layer_ids=tuple(_layer_ids(merged, "target_layer_ids", name)),
        block_size=_integer(merged, "block_size", name, minimum=1, maximum=_LARGEST_BLOCK),
        mask_token_id=_integer(merged, "mask_token_id", name),
        sample_from_anchor=keys.flag("sample_from_anchor", "dspark" in architecture.lower()),
    )


def _settings(
    config: Mapping[str, Any],
    name: str,
    *,
    method: DraftMethod,
    transformer: Mapping[str, Any],
    layer_windows: tuple[int | None, ...],
    layer_causal: tuple[bool, ...],
    target_layer_ids: tuple[int, ...],
    block_size: int = 0,
    mask_token_id: int = 0,
    sample_from_anchor: bool = True,
) -> DrafterSettings:
    """The settings both formats spell alike, with the ones given."""
    vocab_size = _integer(transformer, "vocab_size", name, minimum=1)
    hidden_size = _integer(transformer, "hidden_size", name, minimum=1)
    keys = _keys(config, name)
    markov_rank = keys.integer("markov_rank", 0, minimum=0)
    head_type = keys.text("markov_head_type", "vanilla").lower()
    if markov_rank and head_type not in MARKOV_HEAD_TYPES:
        raise UnsupportedModelError(
            f"drafter {name}: markov_head_type {shown(head_type)} is not supported; this engine runs "
            f"{', '.join(MARKOV_HEAD_TYPES)}"
        )
    confidence_head = keys.flag("enable_confidence_head")
    with_markov = confidence_head and keys.flag("confidence_head_with_markov")
    if with_markov and not markov_rank:
        raise CheckpointError(
            f"drafter {name}: confidence_head_with_markov needs a Markov head, and markov_rank is {markov_rank}"
        )
    max_tokens = block_size - (0 if sample_from_anchor else 1)
    most_by_default = MOST_MTP_TOKENS + 1 if method == "mtp" else max_tokens
    own = Keys(keys.mapping(OWN_KEY) or {}, _label(name, f"{OWN_KEY}.{{key}}"))
    made_for = own.mapping("target")
    calibration = _label(name, f"{OWN_KEY}.confidence_calibration.{{key}}")
    return DrafterSettings(
        method=method,
        transformer=dict(transformer),
        layer_windows=layer_windows,
        layer_causal=layer_causal,
        target_hidden_size=keys.integer("target_hidden_size", hidden_size),
        target_layer_ids=target_layer_ids,
        block_size=block_size,
        mask_token_id=mask_token_id,
        sample_from_anchor=sample_from_anchor,
        draft_vocab_size=keys.integer("draft_vocab_size", vocab_size),
        markov_rank=markov_rank,
        markov_head_type=head_type if markov_rank else "vanilla",  # type: ignore[arg-type]
        confidence_head=confidence_head,
        confidence_head_with_markov=with_markov,
        num_target_layers=keys.optional_integer("num_target_layers"),
        default_speculative_tokens=_default_tokens(config, name, most_by_default),
        confidence_scaling=_confidence_scaling(own, calibration, max_tokens) if confidence_head else (),
        made_for=None if made_for is None else read_identity(made_for, _label(name, f"{OWN_KEY}.target.{{key}}")),
    )


def _keys(config: Mapping[str, Any], name: str) -> Keys:
    return Keys(config, _label(name, "{key}"))


def _label(name: str, key: str) -> str:
    """How messages name a key, with `{key}` in `key` for it."""
    return f"drafter {name.replace('{', '{{').replace('}', '}}')}: {key}"


def _integer(config: Mapping[str, Any], key: str, name: str, minimum: int = 0, maximum: int = LARGEST_INTEGER) -> int:
    if config.get(key) is None:
        raise CheckpointError(f"drafter {name}: config.json has no {key}")
    return _keys(config, name).integer(key, minimum=minimum, maximum=maximum)


def _layer_ids(config: Mapping[str, Any], key: str, name: str) -> list[int]:
    ids = config.get(key)
    if not isinstance(ids, list | tuple) or not ids or not all(type(i) is int for i in ids):
        raise CheckpointError(f"drafter {name}: {key} must be a list of layer ids, got {shown(ids)}")
    if len(set(ids)) != len(ids):
        raise CheckpointError(f"drafter {name}: {key} names a layer twice: {list(ids)}")
    return list(ids)


def _windows(transformer: Mapping[str, Any], layer_types: object, window: object, name: str) -> tuple[int | None, ...]:
    """Sliding window of each layer from `layer_types`; without them every layer sees its whole context."""
    layers = _integer(transformer, "num_hidden_layers", name, minimum=1, maximum=_MOST_LAYERS)
    if layer_types is None:
        return (None,) * layers
    known = ("full_attention", _SLIDING)
    if not isinstance(layer_types, list | tuple) or len(layer_types) != layers:
        raise CheckpointError(f"drafter {name}: layer_types must name {layers} layers, got {shown(layer_types)}")
    for kind in layer_types:
        if kind not in known:
            raise UnsupportedModelError(f"drafter {name}: layer type {shown(kind)} is not supported")
    if _SLIDING not in layer_types:
        return (None,) * layers
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise CheckpointError(
            f"drafter {name}: it has sliding-window layers, and sliding_window {shown(window)} is no positive number"
        )
    return tuple(window if kind == _SLIDING else None for kind in layer_types)


def _refuse_unknown_features(config: Mapping[str, Any], name: str) -> None:
    for key, neutral in _NEUTRAL.items():
        value = config.get(key)
        if value is not None and value not in neutral:
            raise UnsupportedModelError(f"drafter {name}: {key} = {shown(value)} is not supported")
