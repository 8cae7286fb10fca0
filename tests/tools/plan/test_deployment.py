"""The number of sequences that a deployment is to run, which deployments there are, and which of them are equal.

Covers: lamina/tools/plan/message_sizes.py, lamina/tools/plan/ranking.py.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from planned import STOCK, even, planner

from lamina.facts.hardware import DEVICES
from lamina.tools.plan.cost_model import BatchLoad, split_load
from lamina.tools.plan.deployment import Deployment, Inventory, deployments
from lamina.tools.plan.message_sizes import message_bytes_of, network_card_seconds
from lamina.tools.plan.ranking import MeanStoredTokens, OperatingPoint, Planner, RefusedDeployment, nearest
from lamina.tools.plan.tables import network_link
from lamina.tools.plan.verdict import best_reachable, tie_width

H100, H20, L40S = DEVICES["h100"], DEVICES["h20"], DEVICES["l40s"]
SPLIT, ALONE = Deployment(H100, 2, H20, 4, 2), Deployment(H100, 4)


def operating(mine: Planner, where: Deployment, prompt: int, answer: int) -> OperatingPoint:
    found = mine.operating_point(where, MeanStoredTokens(even(10, prompt, answer), mine.costs.model, mine.chunk))
    assert isinstance(found, OperatingPoint)
    return found


@pytest.mark.parametrize("lengths", [(100, 100), (1000, 200), (8000, 100)])
@pytest.mark.parametrize("where", [SPLIT, ALONE, Deployment(H100, 2, H20, 4, 3)], ids=lambda d: d.label)
def test_no_number_of_sequences_gives_many_more_tokens(where: Deployment, lengths: tuple[int, int]) -> None:
    """Than the one that was chosen, of all numbers that fit."""
    mine = planner()
    point, stored = operating(mine, where, *lengths), MeanStoredTokens(even(10, *lengths), mine.costs.model)
    fit = mine.memory.kv_bytes(mine.costs.model, where) / mine.costs.model.kv_bytes(stored.of_one)
    assert point.batch <= fit
    for count in range(1, int(fit), max(1, int(fit) // 97)):
        took = mine.costs.round(where, split_load(stored.load(count), where.batches)).seconds
        assert count / took < 1.06 * point.tokens_s, f"{count} in place of {point.batch}"


def test_more_than_the_best_number_are_slower_somewhere() -> None:
    point = operating(planner(), Deployment(H100, 2, H20, 4, 3), 1100, 200)
    assert point.limit.startswith("more are slower")
    assert operating(planner(), SPLIT, 30_000, 200).limit.startswith("memory holds no more")


def test_cards_are_shared_by_all_batches() -> None:
    """Two batches, whose messages each overlap with the other one's work, cannot send more than the cards do."""
    costs, load = planner(rate="20Gbps").costs, BatchLoad(512, {0: 512 * 1000.0})
    dealt = split_load(load, 2)
    took = costs.round(SPLIT, dealt)
    every = message_bytes_of(costs.model, SPLIT, 512.0)
    assert took.seconds >= max(every.q + every.kv, every.o) / (2 * network_link("20Gbps").bandwidth(H100))
    assert network_card_seconds(
        costs.link, SPLIT, [message_bytes_of(costs.model, SPLIT, x.rows) for x in dealt]
    ) == pytest.approx(network_card_seconds(costs.link, SPLIT, [every]))
    assert network_card_seconds(costs.link, ALONE, [every]) == 0.0
    slow = planner(rate="1Gbps").costs
    assert slow.round(Deployment(H100, 2, H20, 4, 4), split_load(load, 4)).limit in ("network", "latency")


def test_ranks_without_an_interconnect_are_slow_or_none() -> None:
    costs, rows = planner().costs, 256.0
    pcie, nvlink = (costs.collective(Deployment(d, 4), rows).seconds for d in (L40S, replace(H20, name="no-table")))
    assert pcie > 5 * nvlink
    lonely = Inventory(replace(L40S, interconnect_gbs=None), 8)
    assert {d.ranks for d in deployments({"l40s": lonely}, costs.model) if not d.is_split} == {1}
    with pytest.raises(ValueError, match="states no interconnect"):
        costs.collective(Deployment(lonely.device, 2), rows)


def test_several_ranks_may_have_the_same_kv_head() -> None:
    """Eight KV heads on eight ranks, or two on eight: then four ranks hold and read the same K and V."""
    mine = planner()
    few = msgspec.structs.replace(
        mine.costs.model, attentions=[msgspec.structs.replace(a, kv_heads=2) for a in mine.costs.model.attentions]
    )
    where, load = Deployment(H20, 8), BatchLoad(64, {0: 64 * 1000.0})
    assert where in set(deployments({"h20": Inventory(H20, 8)}, few))
    assert all(d.ranks <= 2 for d in deployments({"h20": Inventory(H20, 8)}, few) if d.is_split)
    assert mine.memory.kv_bytes(mine.costs.model, where) == pytest.approx(4 * mine.memory.kv_bytes(few, where))
    once, four = (replace(mine.costs, model=m).step(where, load).attention_s for m in (mine.costs.model, few))
    floors = mine.costs.constants["attention_floor"] * few.num_layers
    assert four - floors == pytest.approx(4 * (once - floors))


def test_attention_is_by_its_table_where_there_is_one() -> None:
    costs, load = planner().costs, BatchLoad(64, {0: 64 * 1024.0})
    by_table, by_roofline = (costs.step(Deployment(H100, 1, d, 1), load).phases["attention"] for d in (H100, H20))
    assert by_table.origin.startswith("table: h100, 8 query heads")
    assert by_roofline.origin.startswith("roofline")
    read = 64 * 1024 * 4096  # bytes of a layer, a number of the table
    assert by_table.seconds == pytest.approx(80 * costs.tables.seconds("attention", "h100", 8, read)[0])
    assert costs.tables.nearest("attention", "h100", 4) == 1
    assert costs.tables.nearest("attention", "h20", 4) == 0


def test_a_tie_is_as_wide_as_the_error_of_the_worse_one() -> None:
    costs = planner().costs
    widths = [tie_width(costs, Deployment(H20, ranks), SPLIT) for ranks in (1, 2, 4, 8)]
    assert widths == [0.15, 0.15, 0.20, 0.29]
    assert tie_width(costs, Deployment(H100, 8), SPLIT) == 0.15, "its products are measured"


def test_the_best_reachable_does_not_depend_on_the_order() -> None:
    mine, asked = planner(slo_s=1e-3), list(deployments(STOCK, planner().costs.model))
    trace = even(10, 1000, 100)
    there, back = (mine.rank(order, trace) for order in (asked, asked[::-1]))
    assert best_reachable(there) == best_reachable(back)
    quickest = min(r.tbt_s for r in there.refused if r.tbt_s)
    assert f"{quickest * 1e3:.1f} ms" in best_reachable(there)
    short = [RefusedDeployment(ALONE, "far", missing_bytes=9.0), RefusedDeployment(SPLIT, "near", missing_bytes=1.0)]
    assert [nearest(x).why for x in (short, short[::-1])] == ["near", "near"]  # type: ignore[union-attr]


def test_requests_beyond_the_models_own_limit_are_left_out() -> None:
    mine = planner()
    costs = replace(mine.costs, model=msgspec.structs.replace(mine.costs.model, max_len=1500))
    bound = replace(mine, costs=costs)
    mixed = replace(even(40, 1000, 100), requests=(*even(40, 1000, 100).requests, *even(3, 2000, 100).requests))
    assert bound.rank([ALONE, SPLIT], mixed).trace.dropped == 3
    with pytest.raises(ValueError, match="longer than the 1500 tokens"):
        bound.rank([ALONE], even(3, 2000, 100))


def test_prompts_have_a_price() -> None:
    """Computed here, they cost as many rows as they have tokens; chunks of a prompt read what is stored once each."""
    free, paid = planner(), replace(planner(), chunk=512)
    for where in (ALONE, SPLIT):
        assert operating(paid, where, 1000, 200).dollars > 2 * operating(free, where, 1000, 200).dollars
        assert operating(paid, where, 10, 2000).dollars < 1.2 * operating(free, where, 10, 2000).dollars
    load = MeanStoredTokens(even(10, 1024, 256), paid.costs.model, 512).load(256.0)
    assert load.rows == 256 * (1 + 4)
    assert load.pairs is not None
    assert load.pairs[0] == pytest.approx(256 * (1024 + 128) + 1024 * 1025 / 2)
    assert load.stored[0] == pytest.approx(256 * (1024 + 128) + 512 + 1024, rel=0.01), "a prompt ends in every round"
