"""The gate of CachedAttention's pre-loading: how much is there before the first row, and in which parts it comes."""

from __future__ import annotations

import pytest

from lamina.kv.layerwise_load import MAX_RUNS, MIN_RUN_BYTES, buffer_bytes, can_start, layer_runs

T_LOAD, T_COMPUTE = 0.61, 0.39  # of the paper's prefill time (figure 19)


@pytest.mark.parametrize(("layers", "first"), [(40, 15), (16, 6)])
def test_the_gate_opens_behind_the_papers_buffer(layers: int, first: int) -> None:
    """The buffer has as many layers of as many bytes, which come at an even rate."""
    there = [n for n in range(layers + 1) if can_start(layers * 1000, n * 1000, T_LOAD * n / layers, T_COMPUTE)]
    assert there[0] == first == -(-buffer_bytes(layers / T_LOAD, T_LOAD, T_COMPUTE) // 1)
    assert there == list(range(first, layers + 1)), "once open, it stays so"


@pytest.mark.parametrize(("spare_s", "first"), [(0.0, 16), (1e-9, 16), (0.61, 1), (99.0, 1)])
def test_how_many_of_16_layers(spare_s: float, first: int) -> None:
    """All of them where the time of rows is unknown; one at least, as they begin with that."""
    assert first == next(n for n in range(17) if can_start(16, n, T_LOAD * n / 16, spare_s))


def test_what_has_no_bytes_is_there() -> None:
    assert can_start(0, 0, 0.0, 0.0)
    assert can_start(0, 0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("layers", "nbytes", "count"),
    [
        (16, 1 << 30, 16),
        (80, 1 << 30, MAX_RUNS),
        (6, 3 * MIN_RUN_BYTES, 3),
        (6, MIN_RUN_BYTES - 1, 1),
        (6, 0, 1),
        (1, 1 << 30, 1),
    ],
)
def test_every_layer_is_in_one_run(layers: int, nbytes: int, count: int) -> None:
    runs = layer_runs(layers, nbytes)
    assert len(runs) == count
    assert [layer for run in runs for layer in run] == list(range(layers))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
