"""Weights of matrix products, packed for the native kernels."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from sparkgap import _native
from sparkgap.errors import CheckpointError
from sparkgap.ops.native_base import NativeOperations
from sparkgap.ops.network_kernels import NetworkKernels
from sparkgap.ops.operands import LinearWeight, PackedForm, QuantizedWeight
from sparkgap.ops.w8a8 import Quantization

ValueForm = Literal["int8", "bfloat16", "float32"]


@dataclass(frozen=True)
class NativeLinearWeight(LinearWeight):
    """A weight packed for the native kernels.

    Attributes:
        weight: on the `meta` device: the shape of the original, without its values.
        packed: the values, in the native module's own memory.
        form: what the values are packed as.
    """

    packed: _native.PackedWeight = field(kw_only=True)
    form: ValueForm = field(kw_only=True)

    @property
    def nbytes(self) -> int:
        """See `LinearWeight.nbytes`; int8 has a scale and an offset of 4 bytes for each output channel."""
        values = self.in_features * _PACKED_BYTES[self.form]
        channel = values + (8 if self.form == "int8" else 0) + (0 if self.bias is None else 4)
        return self.out_features * channel + (0 if self.multipliers is None else self.multipliers.nbytes)


class NativeWeightKernels(NativeOperations, NetworkKernels):
    """Packing, and what is kept of packed weights.

    Attributes:
        quantization: `w8a8` packs weights as int8 with a scale for each output channel; None keeps their dtype.
    """

    quantization: Quantization | None

    def prepare_linear(self, weight: Tensor, bias: Tensor | None = None, quantize: bool = True) -> NativeLinearWeight:
        """Pack a copy of `weight` `[out_features, in_features]`; the original is not kept.

        Raises:
            CheckpointError: the weight has infinities or NaN and is to be quantized.
        """
        is_int8 = quantize and self.quantization == "w8a8"
        form: ValueForm = "int8" if is_int8 else _PACKED_FORMS.get(weight.dtype, "float32")
        source = weight.detach() if weight.dtype in _PACKED_FORMS else weight.detach().to(torch.float32)
        if bias is not None:
            bias = bias.detach().to(torch.float32).contiguous()
        packed = self.executor.pack_linear(source.contiguous(), bias, form)
        if form == "int8" and not torch.tensor(packed.scales()).isfinite().all():
            raise CheckpointError(
                f"a weight of shape {list(weight.shape)} has infinities or NaN: it cannot be quantized"
            )
        return NativeLinearWeight(
            torch.empty(weight.shape, dtype=weight.dtype, device="meta"), bias, packed=packed, form=form
        )

    def prepare_quantized(self, weight: QuantizedWeight, bias: Tensor | None = None) -> NativeLinearWeight:
        """See `Kernels.prepare_quantized`; packed as `prepare_linear` packs what it quantizes itself."""
        out_features, in_features = weight.values.shape
        if bias is not None:
            bias = bias.detach().to(torch.float32).contiguous()
        packed = self.executor.blank_weight(
            out_features, in_features, "int8", bias is not None, weight.input_scale or 0.0
        )
        parts = packed.parts()
        blocks, groups = -(-out_features // 16), -(-in_features // 4)
        padded = functional.pad(weight.values, (0, groups * 4 - in_features, 0, blocks * 16 - out_features))
        pairs, paired = blocks // 2, blocks // 2 * 2 * 64 * groups
        rows = padded[: pairs * 32].view(pairs, 2, 16, groups, 4)
        parts["packed"][:paired].view(pairs, groups, 2, 16, 4).copy_(rows.permute(0, 3, 1, 2, 4))
        last = padded[pairs * 32 :].view(blocks % 2, 16, groups, 4)
        parts["packed"][paired:].view(blocks % 2, groups, 16, 4).copy_(last.transpose(1, 2))
        parts["offsets"].copy_(padded.sum(1, dtype=torch.int32).mul_(-128))
        parts["scales"][:out_features] = weight.scales
        if bias is not None:
            parts["bias"][:out_features] = bias
        shape = torch.empty(weight.values.shape, dtype=torch.int8, device="meta")
        return NativeLinearWeight(shape, bias, packed=packed, form="int8")

    def packed_form(self, weight: LinearWeight) -> PackedForm | None:
        """See `Kernels.packed_form`."""
        if not isinstance(weight, NativeLinearWeight):
            raise TypeError("the weight was not prepared by NativeKernels")
        if weight.multipliers is not None:
            return None
        facts = {
            "out_features": weight.out_features,
            "in_features": weight.in_features,
            "form": weight.form,
            "dtype": str(weight.weight.dtype).removeprefix("torch."),
            "bias": weight.bias is not None,
            "input_scale": weight.packed.input_scale,
        }
        return PackedForm(facts, weight.packed.parts())

    def blank_packed(self, facts: Mapping[str, Any]) -> tuple[NativeLinearWeight, dict[str, Tensor]]:
        """See `Kernels.blank_packed`."""
        try:
            form, shape = facts["form"], (facts["out_features"], facts["in_features"])
            packed = self.executor.blank_weight(*shape, form, facts["bias"], facts["input_scale"])
            dtype = _DTYPES[facts["dtype"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"no packed weight has these facts: {dict(facts)}") from error
        parts = packed.parts()
        bias = parts["bias"][: shape[0]] if "bias" in parts else None
        meta = torch.empty(shape, dtype=dtype, device="meta")
        return NativeLinearWeight(meta, bias, packed=packed, form=form), parts


_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64", "int8")}

_PACKED_FORMS: Mapping[torch.dtype, ValueForm] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_PACKED_BYTES: Mapping[ValueForm, int] = {"int8": 1, "bfloat16": 2, "float32": 4}
