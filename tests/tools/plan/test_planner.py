"""The roofline and its bandwidth formula against numbers worked out by hand and against the paper's.

Covers: lamina/facts/report.py, lamina/facts/roofline.py, lamina/tools/plan/command.py, lamina/tools/plan/plan_flags.py,
lamina/tools/plan/plan_report.py.
"""

from __future__ import annotations

import pytest

from lamina.facts.hardware import DEVICES, device
from lamina.facts.report import estimate_text, size_text
from lamina.facts.roofline import AttentionWork, Estimate, GemmWork, attention_seconds, estimate, gemm_seconds

_H100, _H20 = DEVICES["h100"], DEVICES["h20"]


def llama3_70b(batch: int, length: int, num_compute: int = 1, num_memory: int = 1) -> Estimate:
    """80 layers, d = 8192, G = 8, e = 2; 69.5e9 weights in GEMMs."""
    attention = AttentionWork(
        kv_bytes=2 * 8 * 128 * 2, flops=4 * 64 * 128, window=0, message_bytes=(16 + 4 + 16) * 1024
    )
    return estimate(
        [GemmWork(weight_bytes=139 * 10**9, itemsize=2, flops_per_token=139 * 10**9)],
        [attention] * 80,
        141 * 10**9,
        compute=_H100,
        memory=_H20,
        num_compute=num_compute,
        num_memory=num_memory,
        batch=batch,
        length=length,
    )


@pytest.mark.parametrize(("length", "gigabytes"), [(2048, 47.7), (4096, 30.9), (8192, 18.1), (16384, 9.9)])
def test_minimum_bandwidth_of_the_paper(length: int, gigabytes: float) -> None:
    assert llama3_70b(300, length).min_bandwidth / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_each_term() -> None:
    e = llama3_70b(300, 8192)
    assert e.message_bytes == (2 + 2 / 8) * 2 * 8192 * 300 * 80
    assert e.model_s == pytest.approx(300 * 139e9 / 989e12)
    assert (e.compute_bound, e.attention_bound) == (1.0, "memory")
    assert e.attention_s == pytest.approx(300 * 8192 * 327680 / 4e12)
    assert e.min_bandwidth == pytest.approx(e.message_bytes / (0.2 * (e.model_s + e.attention_s)))
    assert e.network_s == pytest.approx(e.message_bytes / 50e9)
    assert (e.compute_needed, e.memory_needed) == (2, 9)
    assert llama3_70b(300, 8192, 2, 4).attention_s == pytest.approx(e.attention_s / 4)


def test_small_batches_are_limited_by_memory_and_read_only_the_experts_they_use() -> None:
    dense = GemmWork(weight_bytes=10**9, itemsize=2, flops_per_token=10**9)
    assert gemm_seconds(dense, 1, _H100, 1) == (pytest.approx(10**9 / 3.35e12), False)
    experts = GemmWork(weight_bytes=8 * 10**9, itemsize=2, flops_per_token=2 * 10**9)
    assert gemm_seconds(experts, 1, _H100, 1)[0] == pytest.approx(2 * 10**9 / 3.35e12)
    assert gemm_seconds(experts, 2, _H100, 1)[0] == pytest.approx((1 - 0.75**2) * 8 * 10**9 / 3.35e12)
    assert gemm_seconds(experts, 100, _H100, 1)[0] == pytest.approx(8 * 10**9 / 3.35e12)


def test_windows_bound_what_is_read() -> None:
    full = AttentionWork(kv_bytes=1000, flops=1, window=0, message_bytes=0)
    window = AttentionWork(kv_bytes=1000, flops=1, window=512, message_bytes=0)
    assert attention_seconds([full, window], 2, 4096, _H20, 1)[0] == pytest.approx(2 * 1000 * (4096 + 512) / 4e12)


def test_devices_say_where_their_numbers_are_from() -> None:
    assert all(d.source and d.tflops > 0 and d.bandwidth_gbs > 0 for d in DEVICES.values())
    assert device("H20", "--memory-device") is _H20
    with pytest.raises(ValueError, match="--memory-device h21 is not one of h100, h20"):
        device("h21", "--memory-device")


def test_text_says_that_it_is_modelled_and_what_does_not_fit() -> None:
    text = estimate_text(llama3_70b(300, 8192), _H100, _H20)
    assert text.startswith("modelled, not measured")
    assert "18.2 GB/s" in text
    assert "does not fit 1 h100: at least 2 are needed" in text
    assert "arXiv 2405.01814, table 1" in text
    assert [size_text(n) for n in (12, 1500, 2.5e6, 141e9)] == ["12 B", "1.5 kB", "2.5 MB", "141.0 GB"]
