"""compressed-tensors, as llm-compressor writes it: integers and floats of 4 and 8 bits, by group, channel or tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.models.errors import ModelError, UnsupportedModelError

from . import QuantizedTensor, Read
from .grouped_codes import E2M1, GroupedCodes, by_groups, check_scales, powers_of_two, unpack_int32, unpack_nibbles
from .scaled_floats import FP8, scaled_float

if TYPE_CHECKING:
    from lamina.models.checkpoint import StoredWeight

WEIGHT_FORMATS = {
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized",
    "nvfp4-pack-quantized", "mixed-precision", "dense",
}  # fmt: skip
# Tensors that describe a layer's weight or activations; plain weights have none of these names.
_ABOUT = (
    "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale",
    "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point",
)  # fmt: skip


def open_format(settings: dict[str, Any]) -> CompressedTensors:
    """Return the format of a quantization_config. Raises UnsupportedModelError."""
    return CompressedTensors(settings)


class CompressedTensors:
    """The StoredFormat of compressed-tensors."""

    def __init__(self, settings: dict[str, Any]) -> None:
        groups = settings.get("config_groups")
        schemes = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
        names = {str(each["format"]) for each in (settings, *schemes) if each.get("format") is not None}
        if strange := sorted(names - WEIGHT_FORMATS):
            raise UnsupportedModelError(
                f"compressed-tensors: the format {strange[0]} is not read: use pack-quantized, int-quantized, "
                f"float-quantized, or one of MXFP4 or NVFP4"
            )
        sparse = settings.get("sparsity_config") or {}
        if not isinstance(sparse, dict) or sparse.get("format", "dense") != "dense":
            raise UnsupportedModelError("compressed-tensors: sparse weights are not read: use a dense checkpoint")
        if settings.get("transform_config"):
            raise UnsupportedModelError("compressed-tensors: weights with transforms are not read: use one without")
        weights = [w for group in schemes if isinstance(w := group.get("weights"), dict)]
        for name, value in [(name, w.get(name)) for w in weights for name in ("num_bits", "group_size")]:
            if value is not None and type(value) is not int:
                raise ModelError(f"compressed-tensors: {name} of config.json is {value!r}: it must be a whole number")
        self._schemes = {(w.get("num_bits"), w.get("group_size"), bool(w.get("symmetric", True))) for w in weights}
        self._int8_inputs = {w["num_bits"]: True for w in weights if w.get("num_bits") is not None}
        for group in schemes:
            if isinstance(w := group.get("weights"), dict) and not _is_int8(group.get("input_activations")):
                self._int8_inputs[w.get("num_bits")] = False

    def find(self, stored: Mapping[str, StoredWeight]) -> Iterator[QuantizedTensor]:
        for name in stored:
            base, _, kind = name.rpartition(".")
            parts = tuple(part for about in _ABOUT if (part := f"{base}.{about}") in stored)
            if kind == "weight_packed":
                yield self._packed(base, parts, stored)
            elif kind == "weight" and f"{base}.weight_scale" in stored:
                yield self._plain(base, (name, *parts), stored)

    def _packed(self, base: str, parts: tuple[str, ...], stored: Mapping[str, StoredWeight]) -> QuantizedTensor:
        packed, scale = stored[f"{base}.weight_packed"], stored.get(f"{base}.weight_scale")
        if scale is None:
            raise ModelError(f"{base}.weight_packed has no {base}.weight_scale: fetch the model again")
        if packed.dtype == "U8" and len(packed.shape) == 2:
            return _fp4(base, parts, stored)
        if packed.dtype != "I32" or len(packed.shape) != 2:
            raise ModelError(f"{packed.name} is {packed.dtype} {list(packed.shape)}, not int32 [N, words]")
        columns, words = packed.shape
        groups = scale.shape[-1] if len(scale.shape) == 2 else 1
        bits, size = self._scheme_of(base, words, groups, f"{base}.weight_zero_point" in stored)
        return replace(_integers(base, parts, (columns, size), bits), int8_inputs=self._int8_inputs.get(bits, False))

    def _scheme_of(self, base: str, words: int, groups: int, has_zeros: bool) -> tuple[int, int]:
        """Return the bits of a code and K, by the scheme of the configuration that the shapes agree with."""
        for bits, group, symmetric in sorted(self._schemes, key=str):
            if bits not in (4, 8) or symmetric == has_zeros:
                continue
            size = words * 32 // bits if group in (None, -1) else groups * group
            if ceil(size * bits / 32) == words and size and (groups == 1 or group not in (None, -1)):
                return bits, size
        known = ", ".join(f"{bits} bits by {group or 'channel'}" for bits, group, _ in sorted(self._schemes, key=str))
        raise UnsupportedModelError(
            f"{base}.weight_packed has {words} words and {groups} groups in a row, which no scheme of config.json has "
            f"({known or 'it has none'}): weights of 4 and 8 bits whose groups divide a row are read"
        )

    def _plain(self, base: str, parts: tuple[str, ...], stored: Mapping[str, StoredWeight]) -> QuantizedTensor:
        weight = stored[f"{base}.weight"]
        if weight.dtype == FP8:
            return scaled_float(base, parts, stored, "weight_scale")
        if weight.dtype != "I8" or len(weight.shape) != 2:
            raise ModelError(
                f"{weight.name} is {weight.dtype} {list(weight.shape)} with a scale: int8 and fp8 are read"
            )

        def codes(read: Read) -> GroupedCodes:
            scales = _scales_of(base, weight.shape, read)
            scales = scales.expand(weight.shape[0], scales.shape[1])
            zeros = f"{base}.weight_zero_point"
            offsets = None
            if zeros in stored:
                zero = _column(read(zeros))
                if zero.shape != scales.shape and zero.numel() != 1:
                    raise ModelError(f"{zeros} {list(zero.shape)} does not fit {list(scales.shape)} scales")
                offsets = -scales.float() * zero.float()
                scales = scales.float()
            return GroupedCodes(read(weight.name), scales.contiguous(), offsets)

        int8 = self._int8_inputs.get(8, False)
        values = lambda read: codes(read).dequantized()  # noqa: E731
        return QuantizedTensor(weight.name, weight.shape, parts, values, codes, int8_inputs=int8)


def _is_int8(activations: Any) -> bool:
    """Return whether activations of a scheme are symmetric int8."""
    return (
        isinstance(activations, dict)
        and activations.get("num_bits") == 8
        and activations.get("type", "int") == "int"
        and bool(activations.get("symmetric", True))
    )


def _column(x: Tensor) -> Tensor:
    """Return x [N], [1] or [N, G] with two dimensions."""
    return x.reshape(-1, 1) if x.dim() < 2 else x


def _scales_of(base: str, shape: tuple[int, ...], read: Read) -> Tensor:
    """Return the scales [N or 1, G] of a weight [N, K]. Raises ModelError for others."""
    scales = _column(check_scales(f"{base}.weight_scale", read(f"{base}.weight_scale")))
    if (
        scales.dim() > 2
        or len(scales) not in (1, shape[0])
        or not all((*shape, *scales.shape))
        or shape[1] % scales.shape[1]
    ):
        raise ModelError(f"{base}.weight_scale {list(scales.shape)} does not fit a weight {list(shape)}")
    return scales


def _integers(base: str, parts: tuple[str, ...], shape: tuple[int, int], bits: int) -> QuantizedTensor:
    def codes(read: Read) -> GroupedCodes:
        columns, size = shape
        named = f"{base}.weight_shape"
        if named in parts and not (given := read(named)).is_meta and given.tolist() != [columns, size]:
            raise ModelError(f"{named} is {given.tolist()}, and the packed weight is {[columns, size]}")
        scales = _scales_of(base, shape, read)
        if len(scales) != columns:
            raise ModelError(f"{base}.weight_scale {list(scales.shape)} does not fit a weight {[columns, size]}")
        numbers = unpack_int32(read(f"{base}.weight_packed"), bits)[:, :size]
        q = numbers if bits == 4 else (numbers.to(torch.int16) - 128).to(torch.int8)
        zeros, offsets = f"{base}.weight_zero_point", None
        if zeros in parts:
            stored = read(zeros)
            if stored.shape != (ceil(columns * bits / 32), scales.shape[1]) or stored.dtype != torch.int32:
                raise ModelError(
                    f"{zeros} {stored.dtype} {list(stored.shape)} does not fit {list(scales.shape)} scales"
                )
            zero = unpack_int32(stored.T, bits).T[:columns].float() - (1 << (bits - 1))
            scales = scales.float()
            offsets = -scales * zero
        plain, order = GroupedCodes(q, scales, offsets), f"{base}.weight_g_idx"
        return by_groups(order, _groups_of(read(order), plain), plain) if order in parts else plain

    return QuantizedTensor(f"{base}.weight", shape, parts, lambda read: codes(read).dequantized(), codes)


def _groups_of(stored: Tensor, plain: GroupedCodes) -> Tensor:
    """Return the group of each input. A library that has put none in order stores -1 for all."""
    is_unset = bool((stored == -1).all())
    return torch.arange(plain.codes.shape[1]) // plain.group if is_unset else stored


def _fp4(base: str, parts: tuple[str, ...], stored: Mapping[str, StoredWeight]) -> QuantizedTensor:
    packed, scale = stored[f"{base}.weight_packed"], stored[f"{base}.weight_scale"]
    columns, size, whole = packed.shape[0], 2 * packed.shape[1], f"{base}.weight_global_scale"
    group = 32 if scale.dtype == "U8" else 16
    if scale.shape != (columns, size // group) or size % group or (group == 16 and whole not in stored):
        raise ModelError(f"{scale.name} {list(scale.shape)} does not fit {packed.name} {list(packed.shape)}")

    def codes(read: Read) -> GroupedCodes:
        if group == 32:
            scales = powers_of_two(scale.name, read(scale.name))
        else:
            divisor = check_scales(whole, read(whole))
            if divisor.numel() != 1:
                raise ModelError(f"{whole} {list(divisor.shape)} must be one number")
            by = read(scale.name)
            scales = check_scales(scale.name, by.float() if scale.dtype == FP8 else by, zero=True).float()
            scales = scales / divisor.float().reshape(())
        return GroupedCodes(unpack_nibbles(read(packed.name)), scales, values=E2M1)

    return QuantizedTensor(f"{base}.weight", (columns, size), parts, lambda read: codes(read).dequantized(), codes)
