"""What memory workers have together. No torch here: the driver needs it too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .partition import Lanes
from .plan import Bound


class Capacity(NamedTuple):
    """The groups of all memory workers. Where several have the same one, that with the fewest blocks stands for all: a
    sequence takes as many from each.
    """

    windows: list[int]
    lanes: list[Lanes]
    stripe: int
    num_blocks: list[int]
    holders: list[list[int]]  # group -> memory workers


def together(bounds: Sequence[Bound], number: Callable[[int], int] = int) -> Capacity:
    """What the memory workers of one rank, in their order, have said. ``number``: of the order, among all workers."""
    blocks: dict[tuple[int, Lanes], dict[int, int]] = {}
    for worker, bound in enumerate(bounds):
        for window, lanes, count in zip(bound.windows, bound.lanes, bound.num_blocks, strict=True):
            blocks.setdefault((window, lanes), {})[number(worker)] = count
    return Capacity(
        [window for window, _ in blocks],
        [lanes for _, lanes in blocks],
        bounds[0].stripe,
        [min(of.values()) for of in blocks.values()],
        [list(of) for of in blocks.values()],
    )


def of_all_ranks(ranks: Sequence[Capacity]) -> Capacity:
    """The capacity of all ranks' memory workers, from those of each: they hold the same tokens, of other heads."""
    blocks: dict[tuple[int, Lanes], tuple[int, list[int]]] = {}
    for each in ranks:
        for window, lanes, count, holders in zip(each.windows, each.lanes, each.num_blocks, each.holders, strict=True):
            least, known = blocks.get((window, lanes), (count, []))
            blocks[window, lanes] = min(least, count), [*known, *holders]
    return Capacity(
        [window for window, _ in blocks],
        [lanes for _, lanes in blocks],
        ranks[0].stripe,
        [least for least, _ in blocks.values()],
        [holders for _, holders in blocks.values()],
    )
