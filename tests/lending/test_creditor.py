"""One instance's blocks: who gets them, for how long, and what is refused."""

from __future__ import annotations

from lamina.lending.creditor import Creditor, LendingTerms
from lamina.lending.lending_messages import Debt, LoanGranted, LoanRefused, LoanRequest, Renew


def creditor(**changed: int) -> Creditor:
    return Creditor("c", 20, LendingTerms(**{"max_lent": 12, "max_lent_per_debtor": 8, **changed}))


def ask(debtor: str, number: int, blocks: int) -> LoanRequest:
    return LoanRequest(debtor=debtor, number=number, blocks=blocks)


def why(answer: object) -> str:
    assert isinstance(answer, LoanRefused)
    return answer.why


def test_local_and_remote_calls_are_one() -> None:
    at = creditor()
    assert isinstance(at.answer_request(ask("c", 1, 15), 0.0), LoanGranted)
    assert "5 blocks are free" in why(at.answer_request(ask("d", 1, 6), 0.0))
    assert isinstance(at.answer_request(ask("d", 2, 5), 0.0), LoanGranted)
    assert "0 blocks are free" in why(at.answer_request(ask("c", 2, 1), 0.0)), "its own come in their turn, too"
    assert (at.lent_blocks, at.lent_to("c"), at.free_blocks) == (5, 15, 0)


def test_caps_hold_for_all_debtors_and_for_each() -> None:
    at = creditor()
    assert isinstance(at.answer_request(ask("d", 1, 8), 0.0), LoanGranted)
    assert "one debtor may have 8 blocks, and has 8" in why(at.answer_request(ask("d", 2, 1), 0.0))
    assert "8 of 12 blocks are lent" in why(at.answer_request(ask("e", 1, 5), 0.0))
    assert isinstance(at.answer_request(ask("e", 2, 4), 0.0), LoanGranted)
    assert at.refusals == 2
    assert at.heartbeat(0.0).lent == (Debt("d", 8), Debt("e", 4))
    assert at.heartbeat(0.0).free == 0


def test_a_lease_ends_unless_it_is_renewed() -> None:
    at = creditor()
    at.answer_request(ask("d", 1, 4), 0.0)
    assert at.renew(Renew(debtor="d", number=2, leases=(0,)), 9.0).leases == (0,)
    at.expire(18.9)
    assert at.lent_blocks == 4
    at.expire(19.0)
    assert (at.lent_blocks, at.free_blocks) == (0, 20)
    assert at.renew(Renew(debtor="d", number=3, leases=(0,)), 19.0).leases == ()


def test_nobody_renews_for_another() -> None:
    at = creditor()
    at.answer_request(ask("d", 1, 4), 0.0)
    assert at.renew(Renew(debtor="e", number=1, leases=(0,)), 5.0).leases == ()
    assert at.lent_to("d") == 4


def test_an_ask_that_comes_twice_is_one() -> None:
    at = creditor()
    first = at.answer_request(ask("d", 7, 4), 0.0)
    assert at.answer_request(ask("d", 7, 4), 0.1) == first
    assert at.answer_request(ask("d", 6, 4), 0.1) is None, "one from before comes late"
    assert at.lent_blocks == 4


def test_a_lease_that_has_ended_never_comes_back() -> None:
    at = creditor()
    at.answer_request(ask("d", 1, 6), 0.0)
    at.end_lease(0)
    assert at.renew(Renew(debtor="d", number=1, leases=(0,)), 1.0).leases == ()
    assert (at.lent_blocks, at.free_blocks) == (0, 20)


def test_recalled_leases_are_the_newest_and_are_not_renewed() -> None:
    at = creditor()
    for number in range(3):
        at.answer_request(ask("d", number, 2), 0.0)
    at.answer_request(ask("c", 1, 14), 0.0)
    assert [o.lease for o in at.recall(3)] == [2, 1]
    assert [o.lease for o in at.recall(3)] == [2, 1], "asked again, they are the same"
    assert at.renew(Renew(debtor="d", number=9, leases=(0, 1, 2)), 5.0).leases == (0,)


def test_no_loans_while_busy() -> None:
    busy = Creditor("c", 20, LendingTerms(12, 8), busy=lambda: "guests read 10 of 10 Gb/s")
    assert why(busy.answer_request(ask("d", 1, 1), 0.0)) == "guests read 10 of 10 Gb/s"
    assert busy.heartbeat(0.0).free == 0
    assert isinstance(busy.answer_request(ask("c", 1, 1), 0.0), LoanGranted), "what is its own costs nobody else"
