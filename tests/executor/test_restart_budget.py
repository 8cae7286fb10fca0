"""The losses that count as a recovery, and how many there may be."""

from __future__ import annotations

from lamina.executor.restart_budget import WINDOW_S, RestartBudget

OLD, NEW = ["a", "b", "c"], ["a2", "b", "c"]


def test_each_begins_with_a_loss_and_ends_when_all_have_met() -> None:
    now = [0.0]
    recoveries = RestartBudget(2, lambda: now[0])
    for lost in ("a", "b"):
        assert recoveries.allows([lost])
        recoveries.begin(OLD, [lost])
        assert recoveries.in_progress
        recoveries.end()
        assert not recoveries.in_progress
    assert not recoveries.allows(["c"])
    now[0] = WINDOW_S + 1.0
    assert recoveries.allows(["c"])


def test_those_that_were_there_as_it_began_count_once_and_a_newcomer_once_more() -> None:
    recoveries = RestartBudget(2, lambda: 0.0)
    recoveries.begin(OLD, ["a"])
    assert recoveries.allows(["b", "c"])
    recoveries.begin(NEW, ["b", "c"])
    recoveries.begin(NEW, ["a2"])
    assert recoveries.allows(["a2"]), "it has been counted"
    assert not recoveries.allows(["a2", "b2"])
    assert not recoveries.allows(["b2"])


def test_none_at_all() -> None:
    assert not RestartBudget(0, lambda: 0.0).allows(["a"])
    assert not RestartBudget(0, lambda: 0.0).allows([])
    assert RestartBudget(1, lambda: 0.0).allows([]), "of one that is late"
