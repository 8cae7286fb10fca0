"""Replaces the weights of experts by packed ones, where the backend takes the codes that a checkpoint has."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lamina.models.errors import ModelError
from lamina.ops.gemm import LinearBackend
from lamina.ops.gemm.quantized import QuantizedWeight

from . import QuantizedTensor, Read
from .grouped_codes import GroupedCodes
from .quantized_experts import ExpertWeights, is_experts, use_packed, weight_names

log = logging.getLogger(__name__)
# Conversions after which an expert's weight is those of its parts, one after the other.
_JOINS = {"MergeModulelist", "Concatenate"}
_EXPERT = re.compile(r"\.(\d+)\.")

OneByOne = Callable[[Read], Iterator[GroupedCodes]]  # the weight of each expert


class Source(NamedTuple):
    """A stored weight, and the conversion of transformers by which it is a part of the model's weight."""

    weight: QuantizedTensor
    converter: Any


class PackedExperts(NamedTuple):
    """The weights of a layer of experts: where they go, the names of the stored ones, and how to read each expert's."""

    layer: ExpertWeights
    stored: frozenset[str]
    one_by_one: OneByOne

    def fill(self, read: Read, backend: LinearBackend) -> None:
        """Pack all experts, one after the other. Raises ModelError."""
        weights = (_for_kernels(codes) for codes in self.one_by_one(read))
        data, form = backend.pack_quantized_experts(_checked(weights, min(self.stored)), len(self.layer.data))
        if form != self.layer.form:
            raise ModelError(f"{min(self.stored)} and the other experts are packed in several ways: fetch them again")
        self.layer.data = data


def replace_experts(
    model: nn.Module, by_target: Mapping[str, Sequence[Source]], read: Read, backend: LinearBackend
) -> list[PackedExperts]:
    """Replace the weights of experts of ``model``, on the meta device. ``by_target``: stored weights of few bits, by
    what they become. ``read``: of tensors on the meta device.
    """
    replaced, left = list[PackedExperts](), list[str]()
    for name, module in list(model.named_modules()):
        if not is_experts(module):
            continue
        sources = {key: by_target.get(f"{name}.{key}", []) for key in weight_names(module)}
        layers = {key: _packed(module, each, read, backend) for key, each in sources.items()}
        own = {key: layer for key, layer in layers.items() if layer is not None}
        if len(own) == len(layers):
            use_packed(module, {key: packed.layer for key, packed in own.items()})
            replaced += own.values()
        elif any(sources.values()):
            left.append(name)
    if left:
        log.warning("experts are not packed, but become numbers of --dtype: %s and others", left[0])
    return replaced


def _packed(module: Any, sources: Sequence[Source], read: Read, backend: LinearBackend) -> PackedExperts | None:
    one_by_one = _one_by_one(module, sources)
    if one_by_one is None:
        return None
    first = next(one_by_one(read), None)
    weight = None if first is None or first.order is not None else first.for_kernels()
    if weight is None:
        return None
    data, form = backend.pack_quantized(weight)
    count = module.num_experts
    layer = ExpertWeights(data.expand(count, -1), form, is_transposed=module.is_transposed)
    return PackedExperts(layer, frozenset(source.weight.name for source in sources), one_by_one)


def _one_by_one(module: Any, sources: Sequence[Source]) -> OneByOne | None:
    """Return how to read each expert's weight [N, K]; None if stored weights cannot be joined without their numbers."""
    if len(sources) == 1 and sources[0].converter is None:
        is_whole = module.is_transposed and len(sources[0].weight.shape) == 3
        return sources[0].weight.experts if is_whole else None
    experts: dict[int, dict[int, QuantizedTensor]] = {}
    for weight, converter in sources:
        joins = converter is not None and {type(op).__name__ for op in converter.operations} <= _JOINS
        numbers = _EXPERT.findall(weight.name)
        place = _place(converter.source_patterns, weight.name) if joins else None
        if place is None or not numbers or weight.packed is None or module.is_transposed:
            return None
        experts.setdefault(int(numbers[-1]), {})[place] = weight
    parts = {tuple(sorted(each)) for each in experts.values()}
    if sorted(experts) != list(range(module.num_experts)) or parts != {tuple(range(len(min(parts))))}:
        return None

    def one_by_one(read: Read) -> Iterator[GroupedCodes]:
        for number in range(len(experts)):
            yield _joined([each.packed(read) for _, each in sorted(experts[number].items()) if each.packed])

    return one_by_one


def _place(patterns: Sequence[str], name: str) -> int | None:
    matches = (re.search(re.escape(pattern).replace(r"\*", r"\d+"), name) for pattern in patterns)
    return next((place for place, match in enumerate(matches) if match), None)


def _joined(parts: Sequence[GroupedCodes]) -> GroupedCodes:
    """Return the rows of several weights, one after the other. Its ``order`` says that they cannot be joined."""
    first = parts[0]

    def facts(x: GroupedCodes) -> tuple[Any, ...]:
        return x.codes.dtype, x.group, x.scales.dtype, x.offsets is None, x.values

    if any(facts(each) != facts(first) or each.order is not None for each in parts):
        return GroupedCodes(first.codes, first.scales, order=torch.empty(0, dtype=torch.int64))

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))

    offsets = [each.offsets for each in parts if each.offsets is not None]
    return GroupedCodes(
        joined([each.codes for each in parts]),
        joined([each.scales for each in parts]),
        joined(offsets) if offsets else None,
        first.values,
    )


def _for_kernels(codes: GroupedCodes) -> QuantizedWeight | None:
    return None if codes.order is not None else codes.for_kernels()


def _checked(weights: Iterator[QuantizedWeight | None], name: str) -> Iterator[QuantizedWeight]:
    for weight in weights:
        if weight is None:
            raise ModelError(f"{name}: experts of one layer have several forms of codes: fetch the model again")
        yield weight
