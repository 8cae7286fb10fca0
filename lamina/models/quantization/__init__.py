"""Formats in which checkpoints store weights with few bits. Each entry of the table is a module of this package.

A module has ``open_format(settings)``, which takes the configuration's ``quantization_config``. Only names, shapes and
bytes of a checkpoint are read: nothing in it chooses code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from lamina.config.engine_config import METHODS, ONLINE
from lamina.models.errors import ModelError, UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor

    from lamina.models.checkpoint import StoredWeight

    from .grouped_codes import GroupedCodes

# quant_method -> module of this package with a function open_format(settings); imported when first used
FORMATS: dict[str, str] = {
    "awq": "awq",
    "compressed-tensors": "compressed_tensors",
    "fp8": "fp8",
    "gptq": "gptq",
    "modelopt": "modelopt",
    "modelopt_fp4": "modelopt",
    "mxfp4": "mxfp4",
}
_INSTEAD = "a checkpoint of compressed-tensors, AWQ, GPTQ, modelopt, fp8, MXFP4 or GGUF, or one in bfloat16"
_REFUSED = {
    "bitsandbytes", "exl2", "exl3", "aqlm", "hqq", "quip", "vptq", "spqr", "higgs",
    "torchao", "quanto", "eetq",
}  # fmt: skip

# Scales of stored K and V, which Lamina stores in the format that --kv-cache-dtype names.
CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point")

# The ends of names of tensors that say which input belongs to which group.
INPUT_GROUPS = ("g_idx",)
# Returns the stored tensor of a name. A plan gets tensors on the meta device, but for INPUT_GROUPS.
Read = Callable[[str], "Tensor"]


@dataclass(frozen=True)
class QuantizedTensor:
    """A weight of a model that several stored tensors describe. ``name``: of the weight that they stand for. ``parts``:
    the names of all of them, those included that are not needed.

    ``packed`` reads them as codes with scales; None if they are no such codes, or no 2-D weight. ``experts`` does so
    with a weight of three dimensions: it yields [N, K] of each expert, or None if its parts have several forms.
    ``values`` returns what the format defines, in fp32. All raise ModelError that names the stored tensor at fault.
    ``int8_inputs``: the checkpoint says that rows which the weight multiplies are int8, as in W8A8.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    values: Callable[[Read], Tensor]
    packed: Callable[[Read], GroupedCodes] | None = None
    experts: Callable[[Read], Iterator[GroupedCodes | None]] | None = None
    int8_inputs: bool = False

    def computed(self, compute: str) -> QuantizedTensor:
        """Return the weight as ``compute``, of --quantization-compute, has it multiplied."""
        packed, experts = self.packed, self.experts
        if not (compute == "int8" or (compute == "auto" and self.int8_inputs)):
            return self

        def with_int8(codes: GroupedCodes) -> GroupedCodes:
            return replace(codes, int8_inputs=True)

        return replace(
            self,
            packed=packed and (lambda read: with_int8(packed(read))),
            experts=experts and (lambda read: (codes and with_int8(codes) for codes in experts(read))),
        )


class StoredFormat(Protocol):
    """The layout of one checkpoint's quantised weights.

    Contract, the same for every entry (tests/contract/test_stored_formats.py): ``find`` takes the headers of all stored
    tensors, and reads no tensor. Tensors that no result names are plain weights, but for CACHE_SCALES. Layers that the
    checkpoint leaves out have plain weights, whatever the configuration says of them. Raises ModelError for tensors
    that do not fit together.
    """

    def find(self, stored: Mapping[str, StoredWeight]) -> Iterator[QuantizedTensor]:
        """Yield the quantised weights of a checkpoint."""
        ...


def check_agrees(where: str, method: str, asked: str, compute: str = "auto") -> None:
    """Raise ModelError unless ``asked``, of --quantization, and ``compute``, of --quantization-compute, suit the model
    ``where``. ``method``: its quant_method, "gguf", or "" for floats, which may be rounded while they are loaded.
    """
    if compute == "int8" and not method and asked not in ONLINE:
        raise ModelError(
            f"--quantization-compute int8: {where} is not quantised: have it rounded to {' or '.join(ONLINE)}"
        )
    if asked in ONLINE and method:
        raise ModelError(f"--quantization {asked} rounds floats, and {where} is stored as {method}: leave it out")
    if asked in METHODS and not method:
        raise ModelError(
            f"--quantization {asked}: {where} is not quantised: use {' or '.join(ONLINE)}, or leave it out"
        )
    if asked in METHODS and _module_of(asked) != _module_of(method):
        raise ModelError(f"--quantization {asked}: {where} is stored as {method}: leave it out")


def _module_of(method: str) -> str:
    name = method.removesuffix("_marlin")  # vLLM's kernels for the same format
    return FORMATS.get(name, name)


def open_format(where: str, settings: Any) -> StoredFormat:
    """Return the format that ``settings``, the quantization_config of the model ``where``, describes. Raises
    UnsupportedModelError.
    """
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if not isinstance(settings, dict) or not isinstance(method, str) or method not in FORMATS:
        known = f"is quantised by {method}" if str(method) in _REFUSED else f"has an unknown quantisation ({method})"
        raise UnsupportedModelError(f"{where} {known}, which is not read: use {_INSTEAD}")
    opened: StoredFormat = import_module(f"{__name__}.{FORMATS[method]}").open_format(settings)
    return opened
