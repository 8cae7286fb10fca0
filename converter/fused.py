"""Splits a fused QKV projection whose outputs are contiguous, so that Q can be computed and sent first."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .capture import Capture
from .graph import is_expensive

aten = torch.ops.aten

_SPLITS = {aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default}
_RESHAPES = {aten.view.default, aten.reshape.default}


@dataclass(frozen=True)
class _Columns:
    """Columns [start, end) of the projection's output, read by ``node``."""

    node: fx.Node
    start: int
    end: int


def split_fused_projections(capture: Capture) -> int:
    """Replace each GEMM that makes Q, K and V together by one for Q and one for the rest, over views of its weight.
    Returns the number of replaced GEMMs.

    Handled: ``linear`` and ``addmm`` whose output, after at most reshaping and clamping, is split along its last
    dimension by slices, split or chunk. Not handled: outputs interleaved by head (a view per head comes first).
    """
    done = 0
    for node in list(capture.graph.nodes):
        if node.target in (aten.linear.default, aten.addmm.default) and _split(capture, node):
            done += 1
    capture.graph.eliminate_dead_code()
    return done


def _split(capture: Capture, gemm: fx.Node) -> bool:
    chain, parts = _parts_of(gemm)
    weight = gemm.args[1] if gemm.target is aten.linear.default else gemm.args[2]
    if not parts or weight not in capture.weights:
        return False
    feeds = [(p, _operands_fed(capture, p.node)) for p in parts]
    q_parts = [p for p, fed in feeds if fed == {0}]
    if len(q_parts) != 1 or not any(fed & {1, 2} for _, fed in feeds):
        return False
    (q,), width = q_parts, gemm.meta["val"].shape[-1]
    bounds = [(a, b) for a, b in ((0, q.start), (q.start, q.end), (q.end, width)) if a < b]
    homes = [next(((a, b) for a, b in bounds if a <= p.start and p.end <= b), None) for p in parts]
    if None in homes:
        return False
    with capture.graph.inserting_before(next(iter((chain or [gemm])[-1].users))):
        pieces = {home: _replay(chain, _columns(gemm, *home), home[1] - home[0]) for home in bounds if home in homes}
        for part, home in zip(parts, homes, strict=True):
            assert home is not None
            piece, span = pieces[home], (part.start - home[0], part.end - home[0])
            if (part.start, part.end) != home:
                piece = _call(aten.slice.Tensor, (piece, -1, *span), part.node)
            part.node.replace_all_uses_with(piece)
    return True


def _parts_of(gemm: fx.Node) -> tuple[list[fx.Node], list[_Columns]]:
    """Return the chain of single-use nodes after the GEMM that keep its last dimension, and the parts of the chain's
    end.
    """
    width, chain, end = gemm.meta["val"].shape[-1], [], gemm
    while len(end.users) == 1:
        (user,) = end.users
        same = user.target in _RESHAPES and user.meta["val"].shape[-1] == width
        if not same and user.target is not aten.clamp.default:
            break
        chain.append(user)
        end = user
    users = list(end.users)
    last = end.meta["val"].dim() - 1
    if users and all(u.target is aten.slice.Tensor and len(u.args) == 4 and u.args[1] in (-1, last) for u in users):
        return chain, [_Columns(u, *_clip(u.args[2], u.args[3], width)) for u in users]
    if len(users) == 1 and users[0].target in _SPLITS and _split_dim(users[0]) in (-1, last):
        widths = [v.shape[-1] for v in users[0].meta["val"]]
        starts = [sum(widths[:i]) for i in range(len(widths) + 1)]
        items = [u for u in users[0].users if u.target is operator.getitem]
        return chain, [_Columns(u, starts[u.args[1]], starts[u.args[1] + 1]) for u in items]  # type: ignore[index, operator]
    return chain, []


def _split_dim(node: fx.Node) -> object:
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)


def _clip(start: object, end: object, width: int) -> tuple[int, int]:
    low, high, _ = slice(start, end).indices(width)
    return low, high


def _operands_fed(capture: Capture, node: fx.Node) -> set[int]:
    """Return the operands of attention (0 q, 1 k, 2 v) that this node reaches through cheap operators alone."""
    seen, stack, fed = {node}, [node], set()
    while stack:
        for user in (source := stack.pop()).users:
            if user in capture.calls:
                fed |= {i for i in range(3) if user.args[i] is source}
            elif user not in seen and not is_expensive(user):
                seen.add(user)
                stack.append(user)
    return fed


def _columns(gemm: fx.Node, start: int, end: int) -> fx.Node:
    """Return the same GEMM for columns [start, end) of its output only."""
    if gemm.target is aten.linear.default:
        x, weight, *bias = gemm.args
        parts = [_view(weight, 0, start, end), *[_view(b, 0, start, end) for b in bias if b is not None]]
        args = (x, *parts)
    else:
        bias_, x, weight = gemm.args
        args = (_view(bias_, -1, start, end), x, _view(weight, 1, start, end))
    piece = _call(gemm.target, args, gemm)
    piece.kwargs = gemm.kwargs
    piece.meta["val"] = gemm.meta["val"][..., start:end]
    return piece


def _view(node: object, dim: int, start: int, end: int) -> fx.Node:
    assert isinstance(node, fx.Node)
    view = _call(aten.slice.Tensor, (node, dim % node.meta["val"].dim(), start, end), node)
    view.meta["val"] = torch.narrow(node.meta["val"], dim, start, end - start)
    return view


def _replay(chain: list[fx.Node], piece: fx.Node, width: int) -> fx.Node:
    for node in chain:
        args = list(node.args[1:])
        if node.target in _RESHAPES:
            sizes: list[Any] = list(args[0])  # type: ignore[arg-type]
            args = [[*sizes[:-1], -1 if sizes[-1] == -1 else width]]
        value = node.meta["val"][..., :width]
        piece = _call(node.target, (piece, *args), node)
        piece.kwargs = node.kwargs
        piece.meta["val"] = value
    return piece


def _call(target: object, args: tuple[object, ...], like: fx.Node) -> fx.Node:
    node = like.graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta = {k: v for k, v in like.meta.items() if k in ("val", "nn_module_stack")}
    return node
