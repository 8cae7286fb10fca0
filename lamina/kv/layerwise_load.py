"""The time at which a sequence may have its first row while KV of its history is still loaded, layer after layer.

See CachedAttention, section 3.2.1 (arXiv 2403.19708). Pure policy: no torch, no I/O, no clock.

Pages are loaded into the pool, without a read buffer. So the size of the paper's buffer is the number of bytes to load
before the first row.
"""

from __future__ import annotations

from itertools import pairwise

MAX_RUNS = 16  # parts of a load, at most
MIN_RUN_BYTES = 32 << 10  # bytes of a part, at least, as each read has a fixed cost


def buffer_bytes(rate: float, load_s: float, prefill_s: float) -> float:
    """Return S_buf: the bytes of history that must be loaded before the first row, so that no layer waits for its KV.
    They cover the time by which the load takes longer than the computation of the new tokens (section 3.2.1). ``rate``:
    bytes a second. ``load_s``: seconds to load the whole history. ``prefill_s``: seconds to compute all new tokens.
    """
    return max(0.0, rate * (load_s - prefill_s))


def can_start(nbytes: int, loaded: int, seconds: float, spare_s: float) -> bool:
    """Return whether rows may begin. ``loaded`` of ``nbytes`` bytes took ``seconds`` so far. The first rows will be
    computed for ``spare_s`` seconds. At least the first layer must be loaded.
    """
    if loaded <= 0 or spare_s <= 0:
        return loaded >= nbytes
    rate = loaded / max(seconds, 1e-9)
    return loaded >= buffer_bytes(rate, nbytes / rate, spare_s)


def layer_runs(num_layers: int, nbytes: int) -> list[range]:
    """Return the runs of layers in which ``nbytes`` are loaded, one after another."""
    count = max(1, min(num_layers, MAX_RUNS, nbytes // MIN_RUN_BYTES))
    bounds = [number * num_layers // count for number in range(count + 1)]
    return [range(low, high) for low, high in pairwise(bounds)]
