"""Terms of a round, means of a trace, and the files that users write.

Covers: lamina/tools/plan/operators.py, lamina/tools/plan/tables.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from planned import STOCK, even, planner

from lamina.facts.hardware import DEVICES, read_devices
from lamina.tools.plan.cost_model import BatchLoad, split_load
from lamina.tools.plan.deployment import Deployment, deployments
from lamina.tools.plan.operators import OperatorTables
from lamina.tools.plan.tables import network_link, price_book
from lamina.tools.plan.verdict import decide_split
from lamina.tools.request_traces import RequestTrace, TracedRequest

H100, H20 = DEVICES["h100"], DEVICES["h20"]
HEAD = "op,device,dtype,shape,seconds,source\n"


def test_a_round_is_the_longest_of_its_terms() -> None:
    costs, load = planner().costs, BatchLoad(600, {0: 600 * 1000.0})
    for batches in (1, 2, 3, 4):
        where, dealt = Deployment(H100, 2, H20, 4, batches), split_load(load, batches)
        steps, took = [costs.step(where, x) for x in dealt], costs.round(where, dealt)
        terms = {
            "memory": sum(s.attention_s for s in steps),
            "compute": sum(s.model_s for s in steps) / max(1, batches - 1),
            "latency": max(s.model_s + s.attention_s + s.network_s for s in steps),
            "driver": costs.driver_s(600),
        }
        assert took.seconds == pytest.approx(max(terms.values()))
        assert terms[took.limit] == max(terms.values())
        assert took.compute_busy == pytest.approx(terms["compute"] / took.seconds)


def test_a_slow_driver_shows() -> None:
    costs, load = planner().costs, BatchLoad(64, {0: 64 * 100.0})
    slow = replace(costs, constants=costs.constants.moved("driver_row", 1000.0))
    where = Deployment(H100, 2, H20, 4)
    assert costs.round(where, [load]).limit != "driver"
    assert slow.round(where, [load])[:2] == (slow.driver_s(64), "driver")


def test_a_cut_that_moves_is_carried() -> None:
    costs, load = planner().costs, BatchLoad(64, {0: 64 * 1000.0})
    two, three = (costs.step(Deployment(H100, 2, H20, 4, n), load).network_s for n in (2, 3))
    moved = 80 * 64 * 8192 * 2 / (2 * network_link("400Gbps").bandwidth(H100, H20))
    assert three - two == pytest.approx(moved)


@pytest.mark.long
def test_a_gain_within_the_error_is_no_split() -> None:
    """A little before the price at which the split begins to pay, it is a tie: the simpler one is it."""
    mine, trace = planner(base="calibrated"), even(50, 1000, 200)
    asked = list(deployments(STOCK, mine.costs.model))
    turn = decide_split(mine, mine.rank(asked, trace)).turning_points[0]
    assert turn.factor is not None
    for share in (0.99, 1.01):
        there = mine.with_price("h20", turn.factor**share)
        verdict = decide_split(there, there.rank(asked, trace))
        assert verdict.gain == pytest.approx(verdict.width, abs=0.02)
        assert verdict.should_split == (verdict.gain >= verdict.width)
        assert verdict.is_tie == (not verdict.should_split)
    assert verdict.width > 0.1


def test_stored_tokens_are_a_mean_over_steps() -> None:
    requests = (TracedRequest(0.0, 100, 50), TracedRequest(1.0, 10, 10))
    trace = RequestTrace("two", requests)
    assert trace.stored() == pytest.approx(((100 + 25) * 50 + (10 + 5) * 10) / 60)
    assert trace.stored(window=120) == pytest.approx((100 * 20 + 200 + 120 * 30 + 15 * 10) / 60)
    assert trace.stored(window=10**6) == trace.stored()


def test_a_link_is_no_faster_than_the_cards() -> None:
    assert network_link("400Gbps").bandwidth(H100, H20) == pytest.approx(45.7e9)
    assert network_link("1600Gbps").bandwidth(H100, H20) == pytest.approx(45.7e9)
    assert network_link("50GB/s").rate == network_link("400Gbps").rate == 50e9


def test_tables_of_ones_own_go_first(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    shapes = {"rows=1 ranks=2 weights=1e9": "1e-3", "rows=100 ranks=2 weights=1e9": "1e-1"}
    path.write_text(HEAD + "".join(f"linear,H100,bfloat16,{k},{v},me\n" for k, v in shapes.items()))
    mine = OperatorTables([path])
    assert mine.seconds("linear", "h100", 2, 10) == (pytest.approx(1e-2), 1e9)
    assert mine.seconds("linear", "h100", 2, 200)[0] == pytest.approx(2e-1)
    assert mine.seconds("linear", "h100", 2, 0.5)[0] == 1e-3
    assert not mine.has("linear", "h100", 4), "a table of one's own replaces all of that operator"
    assert mine.has("all_reduce", "h100", 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("op,x\n", "the first line must be"),
        (HEAD + "gemm,h100,bfloat16,rows=1,1,me\n", "line 2: gemm is not one of"),
        (HEAD + "linear,h100,bfloat16,rows=1 ranks=2,1,me\n", "line 2: shape"),
        (HEAD + "linear,h100,bfloat16,rows=1 ranks=2 weights=3,-1,me\n", "line 2: seconds must be"),
        (HEAD + "linear,h100,bfloat16,rows=1 ranks=2 weights=3,1,\n", "line 2: source is empty"),
    ],
)
def test_a_bad_table_names_its_line(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=words):
        OperatorTables([tmp_path / "t.csv"])


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        ('"80"', "has no unit"),
        ("80", "Expected `str`, got `int` - at `$.memory`"),
        ('"80 GB"\ncores = 3', "unknown field `cores`"),
    ],
)
def test_a_bad_device_names_its_field(memory: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "d.toml"
    path.write_text(f'[mine]\ntitle = "x"\ntflops = 1\nbandwidth = 1\nsource = "me"\nmemory = {memory}\n')
    with pytest.raises(ValueError, match=re.escape(words)):
        read_devices(path)


def test_units_of_memory() -> None:
    assert DEVICES["b200"].memory_gb == pytest.approx(180 * 2**30 / 1e9)
    assert planner().memory.bytes_of(DEVICES["b200"]) == 180 * 2**30
    assert planner().memory.bytes_of(H100) == 80 * 2**30
    assert replace(planner().memory, unit="GB").bytes_of(H100) == 80e9


def test_a_book_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "b.toml"
    path.write_text('[book]\ndate = "2026-11"\ncurrency = "USD"\nsource = "me"\n[H100]\nhour = 2.5\n')
    assert price_book(str(path)).hour(H100) == 2.5
    with pytest.raises(ValueError, match="no price of h20"):
        price_book(str(path)).hour(H20)
    path.write_text("[h100]\nhour = 2.5\n")
    with pytest.raises(ValueError, match=r"\[book\] is missing"):
        price_book(str(path))
