"""A rank's part of a model: its pieces of the weights, and the collectives that make results whole again.

All of it follows from the model's own plan (transformers' ``base_model_tp_plan`` and ``_tp_plan``), which names a style
for each module or weight. Weights that no plan names are whole on every rank. There are two exceptions to a plan. A
rank keeps its part of the logits; if a plan makes Q, K and V whole, the rank continues with its own heads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.ops.collective.op import ALL_GATHER_OP, ALL_REDUCE_OP

from .attention_routing import DecodeStep, WeightShard, routed_attention
from .errors import UnsupportedModelError
from .quantization.quantized_embedding import QuantizedEmbedding
from .quantization.quantized_linear import QuantizedLinear
from .recurrent.captured_cuts import LinearCuts, Ranges, capture_step
from .recurrent.mixer_routing import routed_mixers

MAX_REPLICATED_SHARE = 1.1  # largest share of the weights on a rank, relative to an equal share
_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")  # plans have an asterisk here

Forward = Callable[..., Any]
MakeForward = Callable[[Any, WeightShard], Forward]  # of a module


class ShardedDim(NamedTuple):
    """A dimension ``dim`` (from the end) of a weight, which is divided among the ranks. ``pieces``: how many adjacent
    pieces it has, each of which is divided. ``ranges``: of each rank, which may share some; empty for equal parts.
    """

    dim: int
    pieces: int = 1
    ranges: tuple[Ranges, ...] = ()

    @property
    def is_scattered(self) -> bool:
        """True if a rank's part is of several places."""
        return self.pieces > 1 or any(len(own) > 1 for own in self.ranges)

    def spans(self, part: WeightShard, width: int) -> list[slice]:
        """Return the parts of a dimension of ``width`` that belong to ``part``."""
        if self.ranges:
            return [slice(*each) for each in self.ranges[part.rank]]
        piece, each = width // self.pieces, width // self.pieces // part.size
        return [slice(i * piece + part.rank * each, i * piece + (part.rank + 1) * each) for i in range(self.pieces)]

    def local_shape(self, part: WeightShard, shape: Sequence[int]) -> list[int]:
        """Return the shape of the part of a weight of ``shape`` that belongs to ``part``."""
        sizes = list(shape)
        sizes[self.dim] = sum(span.stop - span.start for span in self.spans(part, sizes[self.dim]))
        return sizes


@dataclass(frozen=True)
class ShardPlan:
    """The cut of a model for ``weight_shard``: weight name -> its cut, and module name -> what replaces its forward."""

    weight_shard: WeightShard
    sharded_dims: dict[str, ShardedDim]
    forwards: dict[str, MakeForward]

    def shrink_to_shard(self, model: nn.Module) -> None:
        """Replace the weights of a model on the meta device by those of ``weight_shard``, still without contents."""
        for name, cut in self.sharded_dims.items():
            owner, _, key = name.rpartition(".")
            module = model.get_submodule(owner)
            whole = module._parameters[key]
            if whole is not None:
                shape = cut.local_shape(self.weight_shard, whole.shape)
                module._parameters[key] = nn.Parameter(whole.new_empty(shape), requires_grad=False)

    def attach_collectives(self, model: nn.Module) -> None:
        """Insert the collectives by which modules with the weights of ``weight_shard`` combine results with other
        ranks.
        """
        for name, forward in self.forwards.items():
            module = model.get_submodule(name)
            module.forward = forward(module, self.weight_shard)


def plan_shard(model: nn.Module, rank: int, size: int, max_model_len: int) -> ShardPlan:
    """Return the cut of a whole model, on the meta device, for a rank. Raises UnsupportedModelError, with the sizes
    that would work, if ``size`` ranks cannot share it.
    """
    heads, is_hybrid = _heads(model, max_model_len)
    styles, step = _styles(model, needs_plan=not is_hybrid), None
    weights = dict(model.named_parameters(remove_duplicate=False))
    widths = {f"the {kv} KV heads of attention {i}": kv for i, (_, kv) in enumerate(heads)}
    if is_hybrid:
        step = capture_step(model, max_model_len)
        widths |= step.widths
        _check_size(size, widths)
        layers = step.cuts(size, styles)
        styles = {name: style for name, style in styles.items() if name not in (*layers.columns, *layers.rows)}
    cuts = {name: cut for name, w in weights.items() if (cut := _cut_of(name, w.dim(), styles)) is not None}
    widths |= {f"the {weights[n].shape[c.dim]} of {n}": weights[n].shape[c.dim] // c.pieces for n, c in cuts.items()}
    _check_size(size, widths)
    forwards = {n: f for n, s in styles.items() if n not in weights and (f := STYLES[s].forward) is not None}
    part = WeightShard(rank, size, tuple(heads))
    if step is not None:
        part = part._replace(padded=step.padded(layers))
        cuts |= _own_cuts(layers, weights)
        forwards |= {n: _padded(own, weights[f"{n}.weight"].shape[0]) for n, own in layers.wide_columns.items()}
        forwards |= dict.fromkeys(layers.rows, _reduced_linear)
    shard = ShardPlan(part, cuts, forwards)
    _check_share(model, weights, shard)
    return shard


def _own_cuts(layers: LinearCuts, weights: Mapping[str, nn.Parameter]) -> dict[str, ShardedDim]:
    """Return the cuts of weights and biases of linear layers whose cuts were found in the captured step."""
    cuts = {f"{name}.weight": ShardedDim(-2, 1, ranges) for name, ranges in layers.columns.items()}
    cuts |= {f"{name}.bias": ShardedDim(-1, 1, ranges) for name, ranges in layers.columns.items()}
    cuts |= {f"{name}.weight": ShardedDim(-1) for name in layers.rows}
    return {name: cut for name, cut in cuts.items() if name in weights}


def _styles(model: nn.Module, *, needs_plan: bool) -> dict[str, str]:
    """Return module or weight -> its style. Raises UnsupportedModelError."""
    hf: Any = model
    kind, plan = type(model).__name__, getattr(model, "_tp_plan", None) or {}
    names = [n for n, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False)) if n]
    planned = {n: plan[w] for n in names if (w := _LAYER_NUMBER.sub(".*", n)) in plan}
    if strange := next((n for n, style in planned.items() if style not in STYLES), None):
        raise UnsupportedModelError(
            f"--tensor-parallel-size: {kind} has the plan {planned[strange]!r} for {strange}, which is not supported"
        )
    if needs_plan and len(set(planned.values()) - {"colwise_gather_output", "embedding_rowwise"}) == 0:
        raise UnsupportedModelError(
            f"--tensor-parallel-size: {kind} has no plan in transformers for how its layers are cut: leave it at 1"
        )
    ends: dict[str, Any] = {"embedding_rowwise": hf.get_input_embeddings(), "colwise": hf.get_output_embeddings()}
    names_of = {id(m): n for n, m in model.named_modules()}
    return {**planned, **{names_of[id(module)]: style for style, module in ends.items()}}


def _cut_of(name: str, ndim: int, styles: dict[str, str]) -> ShardedDim | None:
    style = styles.get(name) or styles.get(name.rpartition(".")[0])
    return None if style is None else STYLES[style].shard_dim(ndim)


def _heads(model: nn.Module, max_model_len: int) -> tuple[list[tuple[int, int]], bool]:
    """Return query and KV heads of every attention, and whether the model has recurrent layers."""
    ids = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    # The other way to compute experts requires bfloat16 without data.
    route = routed_attention(model, max_model_len=max_model_len, experts="batched_mm")
    with route as router, routed_mixers(model) as mixers, torch.no_grad():
        router.local = mixers.local = True
        DecodeStep(model)(ids, ids)
    return [layer.heads for layer in router.layers], bool(mixers.calls)


def _check_size(size: int, widths: dict[str, int]) -> None:
    common = math.gcd(*widths.values())
    if common % size:
        what = next(text for text, width in widths.items() if width % size)
        fits = [str(n) for n in range(1, min(common, 1024) + 1) if common % n == 0]
        raise UnsupportedModelError(f"--tensor-parallel-size {size} does not divide {what}: use {' or '.join(fits)}")


def _check_share(model: nn.Module, weights: dict[str, nn.Parameter], shard: ShardPlan) -> None:
    part, distinct = shard.weight_shard, {id(w): (n, w) for n, w in weights.items()}.values()
    size, cuts = part.size, shard.sharded_dims
    whole = sum(w.numel() for _, w in distinct)
    own = sum(prod(cuts[n].local_shape(part, w.shape)) if n in cuts else w.numel() for n, w in distinct)
    if own > MAX_REPLICATED_SHARE * whole / size:
        raise UnsupportedModelError(
            f"--tensor-parallel-size {size}: by its plan each rank of {type(model).__name__} would have "
            f"{own / whole:.0%} of the weights: use fewer ranks"
        )


def _columns(ndim: int) -> ShardedDim | None:
    return ShardedDim(-min(ndim, 2))


def _packed_columns(ndim: int) -> ShardedDim | None:
    return ShardedDim(-2, 2) if ndim > 1 else ShardedDim(-1)


def _rows(ndim: int) -> ShardedDim | None:
    return ShardedDim(-1) if ndim > 1 else None


def _packed_rows(ndim: int) -> ShardedDim | None:
    return ShardedDim(-1, 2) if ndim > 1 else None


def _whole(ndim: int) -> ShardedDim | None:
    return None


def _gathered(module: Any, part: WeightShard) -> Forward:
    inner = module.forward
    return lambda x: ALL_GATHER_OP(inner(x), part.size)


def _reduced(module: Any, part: WeightShard) -> Forward:
    inner = module.forward
    return lambda *args, **kwargs: ALL_REDUCE_OP(inner(*args, **kwargs))


def _reduced_linear(module: Any, part: WeightShard) -> Forward:
    packed = isinstance(module, QuantizedLinear)

    def forward(x: Tensor) -> Tensor:
        width = module.in_features if packed else module.weight.shape[-1]
        if x.shape[-1] != width:
            x = x[..., part.rank * width : (part.rank + 1) * width]
        y: Tensor = ALL_REDUCE_OP(module.product(x, part.size) if packed else F.linear(x, module.weight))
        return y if module.bias is None else y + module.bias

    return forward


def _padded(ranges: Sequence[Ranges], width: int) -> MakeForward:
    """Return what makes a linear layer's forward, whose result of ``width`` columns has zeros in the places of those
    that are not its own.
    """

    def make(module: Any, part: WeightShard) -> Forward:
        inner, own = module.forward, ranges[part.rank]

        def forward(x: Tensor) -> Tensor:
            y, parts, at, done = inner(x), list[Tensor](), 0, 0
            for start, stop in own:
                parts += [y.new_zeros(*y.shape[:-1], start - done)] if start > done else []
                parts.append(y[..., at : at + stop - start])
                at, done = at + stop - start, stop
            parts += [y.new_zeros(*y.shape[:-1], width - done)] if width > done else []
            return torch.cat(parts, -1)

        return forward

    return make


def _reduced_lookup(module: Any, part: WeightShard) -> Forward:
    inner = module.forward
    count = module.num_embeddings if isinstance(module, QuantizedEmbedding) else module.weight.shape[0]
    module.padding_idx = None  # only matters to gradients, and may lie outside of this part

    def forward(ids: Tensor) -> Tensor:
        own = ids - part.rank * count
        here = (own >= 0) & (own < count)
        rows = inner(own.clamp(0, count - 1)) * here.unsqueeze(-1)
        return ALL_REDUCE_OP(rows)  # type: ignore[no-any-return]

    return forward


class Style(NamedTuple):
    """A style of a plan. ``shard_dim``: a weight's number of dimensions -> its cut. ``forward``: replaces a module's
    forward.
    """

    shard_dim: Callable[[int], ShardedDim | None]
    forward: MakeForward | None = None


# The names are transformers'. Styles that only differ in gradients are equal here.
STYLES = {
    "colwise": Style(_columns),
    "colwise_gather_output": Style(_columns, _gathered),
    "colwise_rep": Style(_columns, _gathered),
    "packed_colwise": Style(_packed_columns),
    "packed_rowwise": Style(_packed_rows),
    "rowwise": Style(_rows, _reduced_linear),
    "rowwise_split_input": Style(_rows, _reduced_linear),
    "rowwise_rep": Style(_rows, _reduced_linear),
    "embedding_rowwise": Style(_columns, _reduced_lookup),
    "embedding_colwise": Style(_rows, _gathered),
    "moe_tp_experts": Style(_whole, _reduced),
    "all_reduce": Style(_whole, _reduced),
    "local_params": Style(_whole),
    "mla_kv_a_proj": Style(_whole),
    "replicate": Style(_whole),
    "replicated_with_grad_allreduce": Style(_whole),
}
