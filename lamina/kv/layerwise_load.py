"""When the first row of a turn may run while KV of its history is still being loaded, layer after layer
(CachedAttention section 3.2.1, arXiv 2403.19708). Pure policy: no torch, no I/O, no clock.

A pool of pages needs no buffer of its own to read into: what the paper calls the size of that is the gate here.
"""

from __future__ import annotations

from itertools import pairwise

MAX_RUNS = 16  # parts in which a load comes
MIN_RUN_BYTES = 32 << 10  # bytes of a part: a read costs something, however short it is


def buffer_bytes(rate: float, load_s: float, prefill_s: float) -> float:
    """S_buf: bytes of a turn's history that must be loaded before its first row runs, so that no layer waits for its
    KV: they make up for the time by which the load is longer than the computation of the new tokens beside it (section
    3.2.1). ``rate``: bytes a second; ``load_s``, ``prefill_s``: of the whole history, and of all new tokens.
    """
    return max(0.0, rate * (load_s - prefill_s))


def can_start(nbytes: int, loaded: int, seconds: float, spare_s: float) -> bool:
    """Whether rows may come: ``loaded`` bytes of ``nbytes`` are there, which took ``seconds``, and the first rows will
    be computed for ``spare_s``. The first layer has to be among them.
    """
    if loaded <= 0 or spare_s <= 0:
        return loaded >= nbytes
    rate = loaded / max(seconds, 1e-9)
    return loaded >= buffer_bytes(rate, nbytes / rate, spare_s)


def layer_runs(num_layers: int, nbytes: int) -> list[range]:
    """The layers in which a load of ``nbytes`` comes, one run after another."""
    count = max(1, min(num_layers, MAX_RUNS, nbytes // MIN_RUN_BYTES))
    bounds = [number * num_layers // count for number in range(count + 1)]
    return [range(low, high) for low, high in pairwise(bounds)]
