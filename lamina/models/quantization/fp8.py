"""fp8 as DeepSeek and Qwen publish it: ``weight`` with ``weight_scale_inv``, which multiplies it, by block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lamina.models.errors import ModelError

from . import QuantizedTensor
from .scaled_floats import FP8, scaled_float

if TYPE_CHECKING:
    from lamina.models.checkpoint import StoredWeight

_SCALES = ("weight_scale_inv", "weight_scale")
_ACTIVATIONS = ("input_scale", "activation_scale")


def open_format(settings: dict[str, Any]) -> BlockFloats:
    """Return the format of a quantization_config. Raises ModelError."""
    return BlockFloats(settings.get("weight_block_size") or [128, 128])


class BlockFloats:
    """The StoredFormat of fp8 by block, channel or tensor."""

    def __init__(self, block: Any) -> None:
        if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
            raise ModelError(f"weight_block_size of config.json is {block!r}: it must be two numbers, as [128, 128]")
        self._block = block[0], block[1]

    def find(self, stored: Mapping[str, StoredWeight]) -> Iterator[QuantizedTensor]:
        for name, weight in stored.items():
            base, _, kind = name.rpartition(".")
            if kind == "weight" and weight.dtype == FP8:
                scale = next((s for s in _SCALES if f"{base}.{s}" in stored), None)
                if scale is None:
                    raise ModelError(f"{name} is fp8 and has no {base}.{_SCALES[0]}: fetch the model again")
                known = (name, f"{base}.{scale}", *(f"{base}.{s}" for s in _ACTIVATIONS))
                parts = tuple(part for part in known if part in stored)
                yield scaled_float(base, parts, stored, scale, self._block)
