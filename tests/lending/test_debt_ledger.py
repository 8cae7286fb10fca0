"""The creditors that the ledger proposes, and that it knows no more than heartbeats have reported."""

from __future__ import annotations

from collections import Counter
from typing import Any

from lamina.lending.debt_ledger import MAX_LATE_REFUSALS, DebtLedger, distance
from lamina.lending.lending_messages import MAX_NAMES, CandidatesRequest, CreditorRefused, Debt, Heartbeat


def beat(name: str, free: int, number: int = 1, **more: Any) -> Heartbeat:
    return Heartbeat(name=name, number=number, free=free, **{"cap": 100, "debtor_cap": 100, **more})


def names(ledger: DebtLedger, blocks: int = 1, debtor: str = "d", place: str = "", now: float = 0.0) -> list[str]:
    query = CandidatesRequest(debtor=debtor, number=1, blocks=blocks, place=place)
    return [c.name for c in ledger.answer(query, now).creditors]


def of(*beats: Heartbeat) -> DebtLedger:
    ledger = DebtLedger(silent_s=3.0)
    for each in beats:
        ledger.on_heartbeat(each, 0.0)
    return ledger


def test_three_the_nearest_first_then_those_with_most_space() -> None:
    far, near = {"place": "r2/h"}, {"place": "r1/h"}
    ledger = of(beat("a", 50, **far), beat("b", 5, **near), beat("c", 9, **near), beat("e", 70, **far), beat("d", 99))
    assert names(ledger, place="r1/x") == ["c", "b", "e"]
    assert names(of(beat("a", 2), beat("b", 9)), blocks=5, place="") == ["b", "a"]
    assert [distance("z/r/h", x) for x in ("z/r/h", "z/r/i", "z/s/h", "y/r/h", "z/r")] == [0, 1, 2, 3, 1]


def test_queries_between_heartbeats_spread() -> None:
    ledger = of(*(beat(f"c{i}", 40) for i in range(8)))
    firsts = Counter(names(ledger, 5, debtor=f"d{i}")[0] for i in range(32))
    assert set(firsts.values()) == {4}, firsts
    assert names(of(beat("c", 4)), 4) == ["c"]


def test_who_has_refused_is_not_named_before_a_later_heartbeat() -> None:
    ledger = of(beat("c", 9, 5))
    ledger.on_refusal(CreditorRefused(creditor="c", beat=6))
    assert names(ledger) == []
    ledger.on_heartbeat(beat("c", 9, 6), 0.0)
    assert names(ledger) == [], "it was sent before the refusal, and has come late"
    ledger.on_heartbeat(beat("c", 9, 7), 0.0)
    assert names(ledger) == ["c"]
    ledger.on_refusal(CreditorRefused(creditor="nobody", beat=1))


def test_nobody_is_silenced_for_good() -> None:
    ledger = of(beat("c", 9, 5))
    ledger.on_refusal(CreditorRefused(creditor="c", beat=1 << 60))
    assert names(ledger) == []
    ledger.on_heartbeat(beat("c", 9, 5 + MAX_LATE_REFUSALS + 1), 1.0)
    assert names(ledger, now=1.0) == ["c"]


def test_old_heartbeats_and_silent_instances_do_not_count() -> None:
    ledger = of(beat("c", 9, 5))
    assert not ledger.on_heartbeat(beat("c", 99, 4), 1.0)
    assert ledger.entries["c"].heartbeat.free == 9
    assert names(ledger, now=3.0) == ["c"]
    assert names(ledger, now=3.1) == []
    ledger.forget(3.1)
    assert not ledger.on_heartbeat(beat("c", 99, 4), 3.1), "it is known still that this is an old one"
    ledger.forget(31.1)
    assert not ledger.entries


def test_what_one_debtor_may_have_is_counted() -> None:
    ledger = of(beat("c", 50, debtor_cap=8, lent=(Debt("d", 6),)))
    (candidate,) = ledger.answer(CandidatesRequest(debtor="d", number=1, blocks=9), 0.0).creditors
    assert candidate.free == 2
    assert ledger.debts(0.0) == {("d", "c"): 6}


def test_room_that_is_kept_for_a_claim_is_proposed_to_it_and_to_earlier_ones_alone() -> None:
    ledger = of(beat("c", 9, since=50.0, first="d"), beat("a", 9, since=50.0))

    def proposed(debtor: str, since: float) -> list[str]:
        query = CandidatesRequest(debtor=debtor, number=1, blocks=1, since=since)
        return sorted(c.name for c in ledger.answer(query, 0.0).creditors)

    assert proposed("d", 50.0) == ["c"], "a is short of memory itself, and goes first by its name"
    assert proposed("d", 60.0) == ["c"], "what is kept for its earlier request is there for its next one"
    assert proposed("e", 50.0) == []
    assert proposed("e", 40.0) == ["a", "c"]


def test_a_ledger_that_begins_anew_hears_of_refusals_before_heartbeats() -> None:
    """One that is older than the refusal comes late: its sender refuses still."""
    ledger = DebtLedger(3.0)
    ledger.on_refusal(CreditorRefused(creditor="c", beat=4))
    ledger.on_refusal(CreditorRefused(creditor="far", beat=1 << 50))
    ledger.on_heartbeat(beat("c", 9, 4), 0.0)
    ledger.on_heartbeat(beat("far", 9, 4), 0.0)
    assert names(ledger) == []
    ledger.on_heartbeat(beat("c", 9, 5), 0.0)
    assert names(ledger) == ["c"]
    ledger.on_heartbeat(beat("far", 9, 5 + MAX_LATE_REFUSALS), 0.0)
    assert sorted(names(ledger)) == ["c", "far"], "nobody is silenced for good"
    for number in range(2 * MAX_NAMES):
        ledger.on_refusal(CreditorRefused(creditor=str(number), beat=1))
    assert len(ledger.early) == MAX_NAMES
