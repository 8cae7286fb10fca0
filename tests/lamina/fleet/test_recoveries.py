"""What counts as a recovery, and how many there may be."""

from __future__ import annotations

from lamina.fleet.recoveries import RECENT_S, Recoveries

OLD, NEW = ["a", "b", "c"], ["a2", "b", "c"]


def test_each_begins_with_a_loss_and_ends_when_all_have_met() -> None:
    now = [0.0]
    recoveries = Recoveries(2, lambda: now[0])
    for lost in ("a", "b"):
        assert recoveries.allow([lost])
        recoveries.count(OLD, [lost])
        assert recoveries.under_way
        recoveries.end()
        assert not recoveries.under_way
    assert not recoveries.allow(["c"])
    now[0] = RECENT_S + 1.0
    assert recoveries.allow(["c"])


def test_those_that_were_there_as_it_began_count_once_and_a_newcomer_once_more() -> None:
    recoveries = Recoveries(2, lambda: 0.0)
    recoveries.count(OLD, ["a"])
    assert recoveries.allow(["b", "c"])
    recoveries.count(NEW, ["b", "c"])
    recoveries.count(NEW, ["a2"])
    assert recoveries.allow(["a2"]), "it has been counted"
    assert not recoveries.allow(["a2", "b2"])
    assert not recoveries.allow(["b2"])


def test_none_at_all() -> None:
    assert not Recoveries(0, lambda: 0.0).allow(["a"])
    assert not Recoveries(0, lambda: 0.0).allow([])
    assert Recoveries(1, lambda: 0.0).allow([]), "of one that is late"
