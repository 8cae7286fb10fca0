"""How many KV blocks sequences need, and memory workers have. No tensors, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lamina.protocol.options.declare import size_flag
from lamina.protocol.partition import Lanes
from lamina.protocol.placement import Deal, Place, Placement


def blocks_of_one(length: int, window: int, block_size: int, max_rows: int) -> int:
    """The most blocks that one sequence of up to ``length`` tokens holds in a group, with ``max_rows`` rows a step.

    A windowed group keeps what the queries of the last two steps can see, and those steps' own tokens.
    """
    whole = -(-length // block_size)
    return min(whole, -(-(window + 2 * max_rows) // block_size) + 1) if window else whole


def split_memory(
    kv_bytes: int,
    block_bytes: Sequence[int],
    windows: Sequence[int],
    lanes: Sequence[Lanes],
    *,
    stripe: int = 0,
    stays: bool = False,
    block_size: int,
    max_rows: int,
    max_len: int,
    most_kept: Sequence[int] = (),
) -> list[int]:
    """Blocks for every group out of ``kv_bytes``; ``block_bytes[g]`` is the size of one block in all layers of group g.

    A group's store has one block more, the null block, which counts against ``kv_bytes`` too. Every group can hold one
    sequence of ``max_len`` tokens; where others lend (``stays``), a stripe of it. What is left is shared out for
    sequences of a quarter of that length, spread evenly over the lanes: with longer ones the groups without a window
    run out first, with shorter ones the others. ``most_kept[g]``: tokens that a sequence has in group g once blocks
    were dropped, 0 = all. Where such groups exist, the rest is shared out for sequences of full length, since groups
    that drop blocks are for long ones, and each has room for one prompt on its way. Raises ValueError where
    ``kv_bytes`` cannot hold one sequence.
    """

    placement = Placement(num_lanes(lanes), 0 if stays else stripe)
    places = [Place(lane) for lane in range(placement.num_lanes)]

    def most(length: int, limit: int) -> list[int]:
        whole = -(-length // block_size)
        kept = [min(limit, max(Deal(x, placement).kept(place, whole) for place in places)) for x in lanes]
        return [min(n, blocks_of_one(length, w, block_size, max_rows)) for n, w in zip(kept, windows, strict=True)]

    everything = -(-max_len // block_size)
    counts = most(max_len, stripe if stays else everything)
    need = sum((n + 1) * b for n, b in zip(counts, block_bytes, strict=True))
    if need > kv_bytes:
        raise ValueError(
            f"{size_flag(kv_bytes)} of KV memory cannot hold one sequence of {max_len} tokens, which needs "
            f"{size_flag(need, least=True)} on each memory worker: raise --kv-memory or lower --max-model-len"
        )
    kept = most_kept if any(most_kept) else [0] * len(lanes)
    usual, dealt = most(max_len if any(kept) else -(-max_len // 4), everything), stripe > 0 and not stays
    usual = [min(n, -(-k // block_size)) if k else n for n, k in zip(usual, kept, strict=True)]
    typical = [n * (1.0 if dealt else x.portion) for n, x in zip(usual, lanes, strict=True)]
    more = (kv_bytes - need) / sum(n * b for n, b in zip(typical, block_bytes, strict=True))
    return [n + int(t * more) for n, t in zip(counts, typical, strict=True)]


def num_lanes(lanes: Iterable[Lanes]) -> int:
    """The number of lanes of a partition, as far as ``lanes``, those of some of its pieces, show it. Raises ValueError
    where they disagree.
    """
    counts = {len(x.pattern) for x in lanes} - {1} or {1}
    if len(counts) > 1:
        raise ValueError(f"lanes of {' and '.join(map(str, sorted(counts)))}")
    return counts.pop()
