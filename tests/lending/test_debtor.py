"""A debtor's way to a loan, and how long it thinks that it has it.

Covers: lamina/lending/lending_messages.py.
"""

from __future__ import annotations

import pytest

from lamina.lending.debtor import LEDGER, BorrowingTerms, Debtor
from lamina.lending.lending_messages import (
    Candidate,
    Candidates,
    CandidatesRequest,
    CreditorRefused,
    GiveBack,
    LoanGranted,
    LoanRefused,
    LoanRequest,
    Recall,
    Renew,
    Renewed,
)


def searching(blocks: int = 5, *creditors: Candidate, since: float = 0.0) -> Debtor:
    debtor = Debtor("d", BorrowingTerms(answer_s=1.0, retry_s=2.0))
    debtor.num_wanted, debtor.since, debtor.is_waiting = blocks, since, bool(since)
    assert debtor.tick(0.0) == [(LEDGER, CandidatesRequest(debtor="d", number=1, blocks=blocks, since=since))]
    named = creditors or (Candidate("a", "", 9), Candidate("b", "", 9))
    assert debtor.on_message(Candidates(number=1, creditors=named), 0.1)[0][0] == named[0].name
    return debtor


def granted(number: int, creditor: str, lease: int = 0, blocks: int = 5) -> LoanGranted:
    return LoanGranted(number=number, creditor=creditor, lease=lease, blocks=blocks, lease_s=10.0)


def test_it_asks_in_turn_until_one_grants() -> None:
    debtor = searching()
    out = debtor.on_message(LoanRefused(number=2, creditor="a", beat=7), 0.2)
    assert out == [(LEDGER, CreditorRefused(creditor="a", beat=7)), ("b", LoanRequest(debtor="d", number=3, blocks=5))]
    assert debtor.on_message(granted(3, "b"), 0.3) == []
    assert (debtor.num_borrowed, debtor.num_wanted, debtor.refusals) == (5, 0, 1)
    assert debtor.loans["b", 0].until == 0.2 + 9.0, "from the ask on, and a part earlier"


def test_a_refusal_that_holds_for_it_alone_is_no_news_for_the_ledger() -> None:
    debtor = searching()
    out = debtor.on_message(LoanRefused(number=2, creditor="a", beat=7, for_all=False), 0.2)
    assert out == [("b", LoanRequest(debtor="d", number=3, blocks=5))]


def test_it_asks_nobody_for_less_than_is_of_use() -> None:
    debtor = Debtor("d", BorrowingTerms(), num_wanted=5, num_least=3)
    assert debtor.tick(0.0)
    named = Candidate("a", "", 2), Candidate("b", "", 3)
    assert debtor.on_message(Candidates(number=1, creditors=named), 0.1) == [
        ("b", LoanRequest(debtor="d", number=2, blocks=3))
    ]
    assert debtor.on_message(granted(2, "b", blocks=3), 0.2) == [], "the rest is too small to be of use"
    assert all(to != LEDGER for to, _ in debtor.tick(2.0))


def test_after_the_end_of_a_guest_it_waits_as_after_a_search_that_finds_nothing() -> None:
    """A creditor that cannot start one would be asked again at once, each time for a change of the engine's memory."""
    debtor = searching()
    debtor.on_message(granted(2, "a", lease=7), 0.2)
    debtor.on_guest_ended("a", 7, 0.3)
    debtor.on_guest_ended("a", 8, 1.5)
    debtor.num_wanted = 5
    assert (debtor.num_borrowed, debtor.tick(2.2)) == (0, [])
    assert debtor.tick(2.4) == [(LEDGER, CandidatesRequest(debtor="d", number=3, blocks=5))]


def test_it_asks_for_as_much_as_one_has_and_goes_on_for_the_rest() -> None:
    debtor = searching(5, Candidate("a", "", 2))
    assert debtor.on_message(granted(2, "a", blocks=2), 0.2) == [
        (LEDGER, CandidatesRequest(debtor="d", number=3, blocks=3))
    ]


def test_who_does_not_answer_is_passed_over_and_its_late_grant_given_back() -> None:
    debtor = searching()
    assert debtor.tick(1.0) == []
    assert debtor.tick(1.2) == [("b", LoanRequest(debtor="d", number=3, blocks=5))]
    assert debtor.on_message(granted(2, "a", 4), 1.3) == [("a", GiveBack(debtor="d", lease=4))]
    debtor.on_message(granted(3, "b"), 1.4)
    assert debtor.on_message(granted(3, "b"), 1.5) == [], "it comes twice, and is kept"
    assert debtor.num_borrowed == 5


def test_when_all_refuse_it_asks_the_ledger_again_later() -> None:
    debtor = searching(5, Candidate("a", "", 9))
    debtor.on_message(LoanRefused(number=2, creditor="a", beat=7), 0.2)
    assert debtor.tick(2.1) == []
    assert [type(m) for _, m in debtor.tick(2.2)] == [CandidatesRequest]


def test_without_an_answer_of_the_ledger_it_asks_again() -> None:
    debtor = Debtor("d", BorrowingTerms(answer_s=1.0, retry_s=2.0))
    debtor.num_wanted = 1
    debtor.tick(0.0)
    assert debtor.tick(1.1) == []
    assert [type(m) for _, m in debtor.tick(3.2)] == [CandidatesRequest]


def test_leases_are_renewed_and_end_by_themselves() -> None:
    debtor = searching()
    debtor.on_message(granted(2, "a"), 0.2)
    ((to, renew),) = debtor.tick(4.0)
    assert to == "a"
    assert isinstance(renew, Renew)
    assert renew.leases == (0,)
    debtor.on_message(Renewed(number=renew.number, creditor="a", leases=(0,), lease_s=10.0), 6.0)
    assert debtor.loans["a", 0].until == 13.0, "from when it asked"
    assert [b.lease for b in debtor.expire(13.0)] == [0]
    assert debtor.num_borrowed == 0


def test_creditors_hear_at_once_whether_it_waits_and_of_which_claim() -> None:
    """One that has all it needs would otherwise lose it to an earlier claim that finds no room."""
    debtor = searching()
    assert debtor.is_seeking
    debtor.on_message(granted(2, "a"), 0.2)
    told = list[tuple[float, float, bool]]()
    changes = (
        (0.2, 0.0, False),
        (0.6, 0.0, False),
        (0.9, 0.0, True),
        (1.0, 7.0, True),
        (1.3, 8.0, True),
        (2.0, 8.0, True),
    )
    for now, debtor.since, debtor.is_waiting in changes:
        sent = [m for to, m in debtor.tick(now) if to == "a"]
        told += [(now, m.since, m.is_waiting) for m in sent if isinstance(m, Renew)]
    assert told == [(0.2, 0.0, False), (0.9, 0.0, True), (1.3, 8.0, True)], "changes in quick succession are told once"
    debtor.give_back("a", 0)
    debtor.since = 9.0
    assert debtor.tick(2.4) == []


def test_who_has_refused_hears_when_it_waits_no_longer() -> None:
    """Else room would be kept for it, and others wait in vain."""
    debtor = searching(5, Candidate("a", "", 9), since=7.0)
    debtor.on_message(LoanRefused(number=2, creditor="a", beat=7), 0.2)
    assert debtor.tick(0.3) == [], "it waits still"
    debtor.num_wanted, debtor.since, debtor.is_waiting = 0, 0.0, False
    ((to, renew),) = debtor.tick(1.0)
    assert to == "a"
    assert isinstance(renew, Renew)
    assert (renew.leases, renew.is_waiting) == ((), False)
    debtor.since = 9.0
    assert debtor.tick(2.0) == [], "once"


@pytest.mark.parametrize("now_since", [0.0, 9.0], ids=["no claim", "a new claim"])
def test_who_refuses_after_the_claim_has_ended_hears_of_its_end(now_since: float) -> None:
    """Room is kept for the claim of the request, whatever the debtor has when the refusal comes."""
    debtor = searching(5, Candidate("a", "", 9), since=7.0)
    debtor.on_message(LoanRefused(number=2, creditor="a", beat=7), 0.2)
    assert debtor.tick(2.2) == [(LEDGER, CandidatesRequest(debtor="d", number=3, blocks=5, since=7.0))]
    debtor.on_message(Candidates(number=3, creditors=(Candidate("b", "", 9),)), 2.3)
    debtor.num_wanted, debtor.since, debtor.is_waiting = 0, now_since, bool(now_since)
    debtor.on_message(LoanRefused(number=4, creditor="b", beat=7), 2.4)
    told = {to: m for to, m in debtor.tick(3.0) if isinstance(m, Renew)}
    assert set(told) == {"a", "b"}
    assert (told["b"].since, told["b"].is_waiting) == (now_since, bool(now_since))
    assert debtor.tick(4.0) == [], "once"


@pytest.mark.parametrize("is_over", [False, True], ids=["another is asked", "the search is over"])
def test_who_refuses_after_it_was_passed_over_hears_of_the_end_at_once(is_over: bool) -> None:
    """A creditor that takes longer than ``answer_s`` has kept room for the claim, too."""
    debtor = searching(5, Candidate("a", "", 9), Candidate("b", "", 9), since=7.0)
    assert debtor.tick(1.2) == [("b", LoanRequest(debtor="d", number=3, blocks=5, since=7.0))]
    if is_over:
        debtor.on_message(granted(3, "b"), 1.3)
        debtor.give_back("b", 0)
    debtor.num_wanted, debtor.since, debtor.is_waiting = 0, 0.0, False
    debtor.on_message(LoanRefused(number=2, creditor="a", beat=7), 1.4)
    told = {to: m for to, m in debtor.tick(1.5) if isinstance(m, Renew)}
    assert [*told] == ["a"]
    assert (told["a"].since, told["a"].is_waiting) == (0.0, not is_over)
    assert debtor.refusals == 0, "nobody waits for it"


def test_a_creditor_that_is_gone_hears_nothing() -> None:
    debtor = searching(5, Candidate("a", "", 9), since=7.0)
    debtor.on_message(LoanRefused(number=2, creditor="a", beat=7), 0.2)
    debtor.on_creditor_lost("a")
    debtor.num_wanted = 0
    assert debtor.tick(1.0) == []


def test_what_is_not_renewed_is_wanted_back() -> None:
    debtor = searching()
    debtor.on_message(granted(2, "a"), 0.2)
    ((_, renew),) = debtor.tick(4.0)
    assert isinstance(renew, Renew)
    debtor.on_message(Renewed(number=renew.number, creditor="a", leases=(), lease_s=10.0), 4.1)
    assert debtor.loans["a", 0].is_recalled
    assert debtor.give_back("a", 0) == [("a", GiveBack(debtor="d", lease=0))]
    assert debtor.num_borrowed == 0


def test_a_recall_marks_its_lease_alone() -> None:
    debtor = searching()
    debtor.on_message(granted(2, "a"), 0.2)
    debtor.on_message(Recall(creditor="a", lease=1), 0.3)
    debtor.on_message(Recall(creditor="b", lease=0), 0.3)
    assert not debtor.loans["a", 0].is_recalled
    debtor.on_message(Recall(creditor="a", lease=0), 0.4)
    assert debtor.loans["a", 0].is_recalled
