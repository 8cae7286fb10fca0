"""Emulated devices take their time, one thing after the other, and change no result.

Covers: lamina/workers/compute/emulated_slices.py.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lamina.kv.paged_cache import allocate_layer, row_table
from lamina.kv.stored_format import StoredRows
from lamina.ops.attention import Operator, get
from lamina.ops.attention.spec import AttentionSpec
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.step_plan import New, RowRange, StepPlan
from lamina.utils.emulated_device import VARIABLE, EmulatedDevice
from lamina.workers.compute.emulated_slices import EmulatedProgram, emulation_of


class Model:
    """A slice that sends and a last one that does not."""

    def __init__(self, log: list[str]) -> None:
        def first(x: Tensor, send: Any) -> tuple[Tensor, ...]:
            send.q(0, x)
            send.kv(0, x + 1, x + 2)
            log.append("computed")
            return (x * 2,)

        self.slices = [first, lambda x: (x + 1,)]


class Pool:
    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.sent: dict[str, list[Tensor]] = {}
        self.times: list[float] = []

    def q(self, layer: int, q: Tensor) -> None:
        self.log.append("q")
        self.times.append(time.monotonic())
        self.sent["q"] = [q]

    def kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.log.append("kv")
        self.times.append(time.monotonic())
        self.sent["kv"] = [k, v]


def test_each_message_leaves_when_the_device_has_done_its_share_of_the_slice() -> None:
    log: list[str] = []
    pool, x = Pool(log), torch.arange(3.0).view(3, 1)
    first, last = EmulatedProgram(Model(log), (0.05, 0.02), 0.01, [(0.25, 0.75), ()]).slices
    start = time.monotonic()
    (out,) = first(x, pool)
    whole = 0.05 + 3 * 0.01
    assert time.monotonic() - start >= whole
    assert [at - start >= share * whole for at, share in zip(pool.times, (0.25, 0.75), strict=True)] == [True, True]
    assert log == ["computed", "q", "kv"]
    assert torch.equal(out, x * 2)
    assert all(torch.equal(*pair) for pair in zip([*pool.sent["q"], *pool.sent["kv"]], [x, x + 1, x + 2], strict=True))
    start = time.monotonic()
    (out,) = last(x[:1])
    assert time.monotonic() - start >= 0.03
    assert torch.equal(out, x[:1] + 1)


def test_a_device_is_one() -> None:
    device = EmulatedDevice()
    start = time.monotonic()
    device.begin(0.04)
    device.begin(0.05)
    device.finish()
    assert time.monotonic() - start >= 0.09
    device.finish()  # nothing is left


def test_attention_takes_its_time_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 stored tokens of 2 KV heads with 8 + 8 numbers of 4 bytes are 8192 bytes."""
    monkeypatch.setenv(VARIABLE, '{"attention_s": 0.03, "attention_byte_s": 1e-5}')
    device, dtype = torch.device("cpu"), torch.float32
    tables, store = BlockTables([0], [8], 16), allocate_layer(8, 2, 16, 8, 8, dtype=dtype, device=device)
    tables.apply(StepPlan(step=0, ops=[New(0)], rows=[RowRange(0, 0, 64)]))
    rows = [RowRange(0, 64, 1)]
    tables.apply(StepPlan(step=1, ops=[], rows=rows))
    generator = torch.Generator().manual_seed(3)
    for part in (store.k, store.v):
        part.copy_(torch.randn(part.shape, generator=generator))
    q, k, v = (torch.randn(1, heads, 8, generator=generator) for heads in (4, 2, 2))
    op = Operator(spec=AttentionSpec(scale=0.3), q_heads=4, kv_heads=2, qk_dim=8, v_dim=8)
    results, seconds = [], []
    for name in ("auto", "emulate"):
        backend, out = get(name, device, dtype), torch.empty(1, 4, 8)
        prepared = backend.prepare(row_table(tables, 0, rows, align=128))
        start = time.monotonic()
        backend.finish(op, prepared, backend.attend_stored(op, prepared, store, q), q, StoredRows(k, v), out)
        seconds.append(time.monotonic() - start)
        results.append(out)
    assert torch.equal(*results)
    assert np.isfinite(results[0].numpy()).all()
    assert seconds[1] >= 0.03 + 8192e-5
    of = op, store, torch.tensor(tables.block_ids(0, 0, 0, 4)), q, torch.tensor([64])
    start = time.monotonic()
    scores = get("emulate", device, dtype).block_scores(*of)
    assert time.monotonic() - start >= 0.03 + 4096e-5, "K alone is read"
    assert torch.equal(scores, get("auto", device, dtype).block_scores(*of))


def test_without_the_variable_nothing_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    model = Model([])
    assert _emulated(model) is model
    monkeypatch.setenv(VARIABLE, '{"slice_s": [0.01]}')
    assert isinstance(_emulated(model), EmulatedProgram)


def _emulated(model: Model) -> Any:
    cut: Any = SimpleNamespace(slices=[None, None])  # another stage has these slices
    emulate = emulation_of(cut)
    return emulate(model) if emulate else model


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"slice_s": [0.1, -1]}', "at least 0"),
        ('{"slice_s": []}', "must have one"),
        ('{"slices": [1]}', "unknown field `slices`"),
        ("0.1", "LAMINA_EMULATE"),
        ('{"slice_s": [1, 1, 1]}', "3 times for 2 slices"),
    ],
)
def test_bad_tables_are_one_clear_line(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match=message) as error:
        _emulated(Model([]))
    assert "\n" not in str(error.value)
