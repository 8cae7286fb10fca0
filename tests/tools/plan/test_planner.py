"""The bandwidth formula and the work of products, against numbers worked out by hand and against the paper's.

Covers: lamina/facts/report.py, lamina/tools/plan/command.py, lamina/tools/plan/plan_flags.py,
lamina/tools/plan/plan_report.py.
"""

from __future__ import annotations

import pytest

from lamina.facts.hardware import DEVICES, device
from lamina.facts.report import size_text
from lamina.tools.plan.cost_model import min_bandwidth
from lamina.tools.plan.model_facts import GemmGroup


@pytest.mark.parametrize(("length", "gigabytes"), [(2048, 47.7), (4096, 30.9), (8192, 18.1), (16384, 9.9)])
def test_minimum_bandwidth_of_the_paper(length: int, gigabytes: float) -> None:
    """Llama-3-70B, 300 sequences, at the peak rates of an H100 and an H20."""
    message_bytes = (2 + 2 / 8) * 2 * 8192 * 300 * 80
    model_s, attention_s = 300 * 139e9 / 989e12, 300 * length * 327680 / 4e12
    assert min_bandwidth(message_bytes, model_s, attention_s) / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_rows_read_only_the_experts_that_they_need() -> None:
    dense = GemmGroup(count=3, weight_bytes=10**9, itemsize=2, flops_per_row=10**9)
    assert dense.work(5) == (3 * 10**9, 15 * 10**9)
    experts = GemmGroup(count=1, weight_bytes=8 * 10**9, itemsize=2, flops_per_row=2 * 10**9)
    assert [experts.work(rows)[0] for rows in (1, 2, 100)] == pytest.approx(
        [2 * 10**9, (1 - 0.75**2) * 8 * 10**9, 8 * 10**9]
    )


def test_devices_say_where_their_numbers_are_from() -> None:
    assert all(d.source and d.tflops > 0 and d.bandwidth_gbs > 0 for d in DEVICES.values())
    assert device("H20", "--devices") is DEVICES["h20"]
    with pytest.raises(ValueError, match="--devices h21 is not one of h100, h20"):
        device("h21", "--devices")


def test_sizes_have_decimal_units() -> None:
    assert [size_text(n) for n in (12, 1500, 2.5e6, 141e9)] == ["12 B", "1.5 kB", "2.5 MB", "141.0 GB"]
