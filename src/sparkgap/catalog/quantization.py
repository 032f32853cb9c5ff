"""How a checkpoint says that its weights are quantized: `quantization_config` of config.json.

Read and written is W8A8 in the format of compressed-tensors, as llm-compressor writes it and vLLM reads it: int8
weights with a scale for each output channel, int8 activations with a scale for each token (dynamic) or one calibrated
scale for each product (static), all symmetric. Tensors of a quantized module: `weight` int8 `[out, in]`,
`weight_scale` `[out, 1]` and, when static, `input_scale` `[1]`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkgap.catalog.keys import Keys, shown
from sparkgap.errors import CheckpointError, UnsupportedModelError

_METHOD = "compressed-tensors"
_FORMAT = "int-quantized"
_REGEX = "re:"


@dataclass(frozen=True)
class CheckpointQuantization:
    """What is quantized in a checkpoint, and how.

    Attributes:
        is_static: activations have calibrated scales in the checkpoint; otherwise each token has its own.
        ignore: modules that are not quantized: names, or regular expressions after `re:`.
    """

    is_static: bool
    ignore: tuple[str, ...] = ("lm_head",)

    def covers(self, module: str) -> bool:
        """Whether a linear module such as `model.layers.0.mlp.up_proj` is quantized."""
        return not any(
            re.match(name.removeprefix(_REGEX), module) if name.startswith(_REGEX) else name == module
            for name in self.ignore
        )

    def config(self) -> dict[str, Any]:
        """The value of `quantization_config`."""
        common = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "actorder": None}
        return {
            "config_groups": {
                "group_0": {
                    "input_activations": {
                        **common,
                        "dynamic": not self.is_static,
                        "strategy": "tensor" if self.is_static else "token",
                        "observer": "minmax" if self.is_static else None,
                    },
                    "output_activations": None,
                    "targets": ["Linear"],
                    "weights": {**common, "dynamic": False, "strategy": "channel", "observer": "minmax"},
                }
            },
            "format": _FORMAT,
            "ignore": list(self.ignore),
            "kv_cache_scheme": None,
            "quant_method": _METHOD,
            "quantization_status": "compressed",
        }


def read_quantization(config: Mapping[str, Any]) -> CheckpointQuantization | None:
    """What config.json says of the weights' quantization; None when they are not quantized.

    Raises:
        UnsupportedModelError: a method or scheme that this engine does not run; the message names it.
        CheckpointError: a key is of a wrong type.
    """
    settings = Keys(config).mapping("quantization_config")
    if not settings:
        return None
    method = settings.get("quant_method", "unknown")
    if method != _METHOD:
        raise UnsupportedModelError(
            f"weights quantized by {shown(method)} are not supported; use the unquantized checkpoint or a GGUF file"
        )
    keys = Keys(settings, "config: quantization_config '{key}'")
    _require("format", settings.get("format"), (_FORMAT,))
    for key in ("kv_cache_scheme", "sparsity_config"):
        _require(key, settings.get(key) or None, (None,))
    groups = list((keys.mapping("config_groups") or {}).values())
    if len(groups) != 1 or not isinstance(groups[0], Mapping):
        raise _unsupported(f"{len(groups)} config_groups", "one group for all modules")
    group: Mapping[str, Any] = groups[0]
    _require("targets", group.get("targets"), (["Linear"],))
    _require("output_activations", group.get("output_activations"), (None,))
    _check_int8("weights", group.get("weights"), "channel", is_dynamic=False)
    activations = group.get("input_activations")
    is_static = isinstance(activations, Mapping) and not activations.get("dynamic")
    _check_int8("input_activations", activations, "tensor" if is_static else "token", is_dynamic=not is_static)
    ignore = tuple(keys.strings("ignore") or ())
    for name in ignore:
        if name.startswith(_REGEX):
            _check_pattern(name)
    return CheckpointQuantization(is_static, ignore)


def _check_pattern(name: str) -> None:
    try:
        re.compile(name.removeprefix(_REGEX))
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"config: quantization_config ignores {shown(name)}, no regular expression") from error


def _check_int8(part: str, scheme: Any, strategy: str, *, is_dynamic: bool) -> None:
    if not isinstance(scheme, Mapping):
        raise _unsupported(f"{part} {shown(scheme)}", "int8")
    wanted = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": is_dynamic}
    for key, value in wanted.items():
        _require(f"{part}.{key}", scheme.get(key, False if key == "dynamic" else None), (value,))


def _require(key: str, found: Any, accepted: Sequence[Any]) -> None:
    if found not in accepted:
        raise _unsupported(f"{key} {shown(found)}", " or ".join(str(value) for value in accepted))


def _unsupported(found: str, wanted: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"quantization_config has {found}, and {wanted} is what is supported (compressed-tensors W8A8); "
        "use the unquantized checkpoint or a GGUF file"
    )
