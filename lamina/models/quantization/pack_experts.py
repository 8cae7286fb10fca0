"""Replaces the weights of experts by packed ones, where the backend takes the codes that a checkpoint has."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lamina.models.attention_routing import WeightShard
from lamina.models.errors import ModelError, UnsupportedModelError
from lamina.models.tensor_parallel_shard import ShardedDim, ShardPlan
from lamina.ops.gemm import LinearBackend
from lamina.ops.gemm.quantized import QuantizedWeight

from . import QuantizedTensor, Read
from .grouped_codes import GroupedCodes, joined
from .quantized_experts import ExpertWeights, is_experts, use_packed, weight_names

log = logging.getLogger(__name__)
# Conversions after which an expert's weight is those of its parts, one after the other.
_JOINS = {"MergeModulelist", "Concatenate"}
_EXPERT = re.compile(r"\.(\d+)\.")

OneByOne = Callable[[Read], Iterator[GroupedCodes | None]]  # the weight of each expert; None if its parts do not fit


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
        orders = list[Tensor]()

        def weights() -> Iterator[QuantizedWeight]:
            for codes in self.one_by_one(read):
                weight = _for_kernels(codes)
                if codes is None or weight is None:
                    raise ModelError(
                        f"{min(self.stored)}: experts of one layer have several forms of codes: fetch the model again"
                    )
                orders.extend([] if codes.order is None else [codes.order])
                yield weight

        data, form = backend.pack_quantized_experts(weights(), len(self.layer.data))
        if form != self.layer.form or len(orders) != (0 if self.layer.orders is None else len(data)):
            raise ModelError(f"{min(self.stored)} and the other experts are packed in several ways: fetch them again")
        self.layer.data, self.layer.orders = data, torch.stack(orders) if orders else None


def replace_experts(
    model: nn.Module,
    by_target: Mapping[str, Sequence[Source]],
    shard: ShardPlan,
    read: Read,
    backend: LinearBackend,
) -> list[PackedExperts]:
    """Replace the weights of experts of ``model``, on the meta device, which ``shard`` has shrunk. ``by_target``:
    stored weights of few bits, by what they become. ``read``: of tensors on the meta device.
    """
    replaced, left = list[PackedExperts](), list[str]()
    for name, module in list(model.named_modules()):
        if not is_experts(module):
            continue
        sources = {key: by_target.get(f"{name}.{key}", []) for key in weight_names(module)}
        parts = {
            key: _Part(module, key, shard.sharded_dims.get(f"{name}.{key}"), shard.weight_shard) for key in sources
        }
        layers = {key: _packed(parts[key], each, read, backend) for key, each in sources.items()}
        own = {key: layer for key, layer in layers.items() if layer is not None}
        if len(own) == len(layers):
            use_packed(module, {key: packed.layer for key, packed in own.items()})
            replaced += own.values()
        elif any(sources.values()):
            left.append(name)
    if left:
        log.warning("experts are not packed, but become numbers of --dtype: %s and others", left[0])
    return replaced


class _Part(NamedTuple):
    """A rank's part of the weight ``key`` of the experts ``module``."""

    module: Any
    key: str
    cut: ShardedDim | None
    shard: WeightShard

    def of(self, codes: GroupedCodes | None) -> GroupedCodes | None:
        """Return the rank's part of an expert's weight [N, K]; None if groups cannot be cut so."""
        if codes is None or self.cut is None:
            return codes
        by_column = (self.cut.dim == -1) == self.module.is_transposed
        if not by_column and codes.int8_inputs:
            raise UnsupportedModelError(
                f"--tensor-parallel-size {self.shard.size} cuts inputs of experts, which become int8: use one rank, or "
                f"leave activations floats"
            )
        spans = self.cut.spans(self.shard, codes.codes.shape[0 if by_column else 1])
        return codes.columns(spans) if by_column else codes.inputs(spans)


def _packed(part: _Part, sources: Sequence[Source], read: Read, backend: LinearBackend) -> PackedExperts | None:
    whole, module = _one_by_one(part.module, sources), part.module
    if whole is None:
        return None

    def one_by_one(read: Read) -> Iterator[GroupedCodes | None]:
        return map(part.of, whole(read))

    first = next(one_by_one(read), None)
    weight, has_orders = _for_kernels(first), first is not None and first.order is not None
    if weight is None or (has_orders and any(codes is None for codes in one_by_one(read))):
        return None
    (data, form), count = backend.pack_quantized(weight), module.num_experts
    orders = data.new_empty(count, weight.codes.shape[1], dtype=torch.int64) if has_orders else None
    layer = ExpertWeights(data.expand(count, -1), form, is_transposed=module.is_transposed, orders=orders)
    if layer.plain_shape != getattr(module, part.key).shape:
        return None
    return PackedExperts(layer, frozenset(source.weight.name for source in sources), one_by_one)


def _one_by_one(module: Any, sources: Sequence[Source]) -> OneByOne | None:
    """Return how to read each expert's weight [N, K]; None if stored weights cannot be joined without their numbers."""
    if len(sources) == 1 and sources[0].converter is None:
        return sources[0].weight.experts
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

    def one_by_one(read: Read) -> Iterator[GroupedCodes | None]:
        for number in range(len(experts)):
            yield joined([each.packed(read) for _, each in sorted(experts[number].items()) if each.packed])

    return one_by_one


def _place(patterns: Sequence[str], name: str) -> int | None:
    matches = (re.search(re.escape(pattern).replace(r"\*", r"\d+"), name) for pattern in patterns)
    return next((place for place, match in enumerate(matches) if match), None)


def _for_kernels(codes: GroupedCodes | None) -> QuantizedWeight | None:
    return None if codes is None else codes.for_kernels()
