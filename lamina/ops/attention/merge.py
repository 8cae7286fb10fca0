"""Partial attention results and their merges, which do not depend on the worker that computed each part.

A partial result is the attention over some of the tokens, with the log of its softmax denominator. Two of them can be
merged into the attention over both sets of tokens (arXiv 2405.01814 section 4.2). Rounding makes that order-dependent.
So the stored tokens of a sequence are cut at absolute positions, multiples of CHUNK_TOKENS. Chunks are merged in the
binary tree over their absolute numbers: *node* (level, n) covers chunks ``n << level .. (n + 1) << level``. A node's
value depends on the chunks below it alone. Therefore the root does not depend, bit for bit, on how chunks are spread
over memory workers, if each of them merges only nodes that it holds whole.

Only operations are used whose result at an element does not depend on its place in the tensor: IEEE arithmetic, exp and
log. Fused multiply-adds (addcmul, lerp) are excluded, as vector lanes and remainders differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_TOKENS = 128

_LOWEST = torch.finfo(torch.float32).min


class MergeNode(NamedTuple):
    """A node of the merge tree; see the module's docstring."""

    level: int
    number: int


class Partial(NamedTuple):
    """Attention over some tokens: o [..., Dv] normalised, lse [...] log-sum-exp of the scores, both fp32. Over no token
    at all: o = 0, lse = -inf.
    """

    o: Tensor
    lse: Tensor


def merge(a: Partial, b: Partial) -> Partial:
    """Return the attention over the tokens of both. With an empty one this is exactly the other; of two empty ones,
    empty.
    """
    high = torch.maximum(a.lse, b.lse)
    shift = high.clamp_min(_LOWEST)  # -inf - -inf would be NaN
    weight_a, weight_b = (a.lse - shift).exp_(), (b.lse - shift).exp_()
    total = (weight_a + weight_b).clamp_min_(1.0)  # the higher one weighs 1, so this changes only empty ones
    o = (weight_a / total).unsqueeze(-1) * a.o
    o += (weight_b / total).unsqueeze(-1) * b.o
    return Partial(o, total.log_().add_(high))


def finish(stored: Partial, new: Partial, sinks: Tensor | None, out: Tensor) -> None:
    """Merge the attention over stored tokens with that over the step's own, add the sinks, round into ``out``. o [R,
    Hq, Dv], lse [R, Hq], sinks [Hq] fp32 or None, out [R, Hq, Dv] in the dtype of messages. A sink is a logit without a
    value: it enters the denominator once, here.
    """
    whole = merge(stored, new)
    if sinks is not None:
        whole = merge(whole, Partial(torch.zeros_like(whole.o), sinks.expand_as(whole.lse)))
    out.copy_(whole.o)


Merge = Callable[[Partial, Partial], Partial]


class Fold:
    """Merges consecutive nodes, added from left to right, into the largest aligned nodes of their range."""

    def __init__(self, merge: Merge = merge) -> None:
        self._merge = merge
        self.nodes: list[tuple[MergeNode, Partial]] = []

    def push(self, node: MergeNode, part: Partial) -> None:
        """Add the next node. Raises ValueError if it does not follow the last one."""
        if self.nodes:
            last = self.nodes[-1][0]
            if (last.number + 1) << last.level != node.number << node.level:
                raise ValueError(f"{node} does not follow {last}")
        while self.nodes and node.number & 1 and self.nodes[-1][0] == MergeNode(node.level, node.number - 1):
            part = self._merge(self.nodes.pop()[1], part)
            node = MergeNode(node.level + 1, node.number >> 1)
        self.nodes.append((node, part))


def root(nodes: Iterable[tuple[MergeNode, Partial]], merge: Merge = merge) -> Partial:
    """Return the value of the whole tree, from one or more disjoint nodes of any workers, in any order. A node without
    a sibling rises unchanged, as the missing one is empty.
    """
    level, here, waiting = 0, dict[int, Partial](), dict(nodes)
    while waiting or len(here) > 1:
        for node in [n for n in waiting if n.level == level]:
            here[node.number] = waiting.pop(node)
        above: dict[int, Partial] = {}
        for number in sorted(here):
            parent = number >> 1
            above[parent] = merge(above[parent], here[number]) if parent in above else here[number]
        level, here = level + 1, above
    return next(iter(here.values()))
