"""One instance's blocks: who gets them, for how long, and what is refused."""

from __future__ import annotations

import msgspec

from lamina.lending.creditor import RESERVE_S, Creditor, LendingTerms
from lamina.lending.lending_messages import NEVER, Debt, LoanGranted, LoanRefused, LoanRequest, Renew


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


def claim(debtor: str, number: int, blocks: int, since: float) -> LoanRequest:
    return LoanRequest(debtor=debtor, number=number, blocks=blocks, since=since)


def test_one_that_lacks_memory_lends_to_earlier_claims_alone() -> None:
    at = Creditor("c", 20, LendingTerms(12, 8), lacks_since=lambda: 50.0)
    assert "it lacks memory itself" in why(at.answer_request(claim("d", 1, 4, 60.0), 0.0))
    assert "it lacks memory itself" in why(at.answer_request(claim("d", 2, 4, 50.0), 0.0)), "by name, of the same time"
    assert isinstance(at.answer_request(claim("b", 1, 4, 50.0), 0.0), LoanGranted)
    assert isinstance(at.answer_request(claim("d", 3, 4, 40.0), 0.0), LoanGranted)
    assert at.heartbeat(0.0).since == 50.0


def test_it_takes_back_nothing_from_earlier_claims() -> None:
    since = NEVER
    at = Creditor("c", 20, LendingTerms(12, 8), lacks_since=lambda: since)
    for number, (debtor, came) in enumerate((("b", 40.0), ("d", 60.0), ("e", 30.0))):
        at.answer_request(claim(debtor, 1, 4, came), 0.0)
        at.renew(Renew(debtor=debtor, number=2, leases=(number,), since=came), 1.0)
    since = 50.0
    assert [o.lease for o in at.recall(12)] == [1]
    at.renew(Renew(debtor="b", number=3, leases=(0,), since=70.0), 2.0)
    assert [o.lease for o in at.recall(12)] == [1, 0], "its older request has ended"
    since = NEVER
    assert sorted(o.lease for o in at.recall(12)) == [0, 1, 2], "and without a claim any"


def test_what_earlier_claims_have_or_wait_for_does_not_come_for_its_own() -> None:
    since = 50.0
    at = Creditor("c", 20, LendingTerms(20, 12), lacks_since=lambda: since)
    at.answer_request(claim("b", 1, 8, 40.0), 0.0)
    assert at.reclaimable(0, 0.0) == 12
    at.answer_request(claim("c", 1, 3, 50.0), 0.0)
    assert (at.reclaimable(0, 0.0), at.reclaimable(3, 0.0)) == (12, 9), "what was granted is still to come"
    since = 30.0
    assert at.reclaimable(3, 0.0) == 17, "the other one's claim is a later one now"
    since = 50.0
    assert isinstance(at.answer_request(claim("d", 1, 10, 45.0), 0.0), LoanRefused)
    assert at.reclaimable(3, RESERVE_S - 0.1) == 0
    assert at.reclaimable(3, RESERVE_S + 0.1) == 9


def test_an_earlier_claim_without_room_gets_that_of_later_ones_which_wait_for_more() -> None:
    at = Creditor("c", 8, LendingTerms(8, 8))
    at.answer_request(claim("d", 1, 3, 60.0), 0.0)
    at.answer_request(claim("e", 1, 4, 70.0), 0.0)
    at.renew(Renew(debtor="d", number=2, leases=(0,), since=60.0, is_waiting=False), 0.0)
    first = claim("b", 1, 6, 50.0)
    assert "1 blocks are free" in why(at.answer_request(first, 0.0))
    assert [o.lease for o in at.outdone_by(first)] == [1], "one that has all it needs goes on"
    at.end_lease(1)
    assert "came earlier" in why(at.answer_request(claim("e", 2, 4, 70.0), 1.0))
    at.end_lease(0)
    assert isinstance(at.answer_request(claim("b", 2, 6, 50.0), 2.0), LoanGranted)
    assert isinstance(at.answer_request(claim("e", 3, 2, 70.0), 2.0), LoanGranted), "nothing is kept for it any more"


def test_a_refusal_of_one_claim_or_debtor_holds_for_nobody_else() -> None:
    since = NEVER
    at = Creditor("c", 20, LendingTerms(12, 8), lacks_since=lambda: since)

    def holds_for_all(ask: LoanRequest) -> bool:
        answer = at.answer_request(ask, 0.0)
        assert isinstance(answer, LoanRefused)
        return answer.for_all

    assert not holds_for_all(claim("d", 1, 9, 60.0)), "others may have something"
    assert isinstance(at.answer_request(claim("d", 2, 8, 60.0), 0.0), LoanGranted)
    assert holds_for_all(claim("e", 1, 8, 60.0))
    since = 50.0
    assert not holds_for_all(claim("e", 2, 2, 60.0)), "earlier ones are served"
    since = NEVER
    at.answer_request(claim("c", 1, 11, 70.0), 0.0)
    assert holds_for_all(claim("b", 1, 2, 40.0))
    assert not holds_for_all(claim("e", 3, 1, 60.0)), "the one that waits is served"


def test_nothing_is_taken_or_kept_for_a_request_that_is_refused_anyway() -> None:
    busy, since = "", NEVER
    at = Creditor("c", 8, LendingTerms(8, 8), busy=lambda: busy, lacks_since=lambda: since)
    at.answer_request(claim("e", 1, 6, 70.0), 0.0)
    assert [x.debtor for x in at.heartbeat(0.0).waiting] == ["e"]
    first = claim("b", 1, 4, 50.0)
    for reason, own_since in (("guests read 10 of 10 Gb/s", NEVER), ("", 40.0)):
        busy, since = reason, own_since
        first = msgspec.structs.replace(first, number=first.number + 1)
        assert isinstance(at.answer_request(first, 0.0), LoanRefused)
        assert at.outdone_by(first) == []
        assert at.heartbeat(0.0).first == "c", "no room is kept"
        assert bool(at.heartbeat(0.0).waiting) != bool(busy), "nobody is sent for it"
    busy, own = "guests read 10 of 10 Gb/s", claim("c", 1, 4, 40.0)
    assert isinstance(at.answer_request(own, 0.0), LoanRefused)
    assert [o.lease for o in at.outdone_by(own)] == [0], "its own is not refused for these reasons"


def test_the_ledger_knows_the_claim_for_which_room_is_kept() -> None:
    at = Creditor("c", 8, LendingTerms(8, 8), lacks_since=lambda: 55.0)
    at.answer_request(claim("c", 1, 8, 55.0), 0.0)
    assert (at.heartbeat(0.0).since, at.heartbeat(0.0).first) == (55.0, "c")
    assert isinstance(at.answer_request(claim("d", 1, 8, 50.0), 0.0), LoanRefused)
    assert (at.heartbeat(1.0).since, at.heartbeat(1.0).first) == (50.0, "d")
    assert at.heartbeat(RESERVE_S + 0.1).first == "c"


def test_room_is_kept_for_an_earlier_claim_for_a_while() -> None:
    at = Creditor("c", 8, LendingTerms(8, 8))
    at.answer_request(claim("d", 1, 8, 60.0), 0.0)
    assert "0 blocks are free" in why(at.answer_request(claim("b", 1, 8, 50.0), 0.0))
    at.end_lease(0)
    assert "came earlier" in why(at.answer_request(claim("d", 2, 8, 60.0), RESERVE_S - 0.1))
    assert isinstance(at.answer_request(claim("d", 3, 8, 60.0), RESERVE_S + 0.1), LoanGranted), "it may be gone"


def test_room_that_is_kept_for_a_debtors_request_is_there_for_its_next_one() -> None:
    at = Creditor("c", 8, LendingTerms(8, 8))
    at.answer_request(claim("e", 1, 6, 70.0), 0.0)
    assert isinstance(at.answer_request(claim("d", 1, 8, 40.0), 0.0), LoanRefused)
    assert isinstance(at.answer_request(claim("d", 2, 2, 80.0), 1.0), LoanGranted), "its first request has ended"
    at.end_lease(0)
    assert isinstance(at.answer_request(claim("e", 2, 6, 70.0), 1.0), LoanGranted), "nothing is kept for that one"


def test_nothing_is_taken_or_kept_for_more_than_a_debtor_may_have() -> None:
    at = Creditor("c", 8, LendingTerms(8, 4))
    at.answer_request(claim("e", 1, 4, 70.0), 0.0)
    at.answer_request(claim("b", 1, 2, 50.0), 0.0)
    more = claim("b", 2, 3, 50.0)
    assert isinstance(at.answer_request(more, 0.0), LoanRefused)
    assert at.outdone_by(more) == []
    assert at.heartbeat(0.0).first == "c", "no room is kept"
    assert isinstance(at.answer_request(claim("f", 1, 2, 80.0), 0.0), LoanGranted)
    own = claim("c", 1, 8, 40.0)
    assert isinstance(at.answer_request(own, 0.0), LoanRefused)
    assert [o.lease for o in at.outdone_by(own)] == [2, 0, 1], "its own requests have no limit"


def test_room_is_kept_until_its_debtor_waits_no_longer() -> None:
    at = Creditor("c", 8, LendingTerms(8, 8))

    def is_kept_after(number: int, since: float, *, is_waiting: bool) -> bool:
        at.renew(Renew(debtor="b", number=number, leases=(), since=since, is_waiting=is_waiting), 0.0)
        return at.heartbeat(0.0).first == "b"

    at.answer_request(claim("d", 1, 6, 60.0), 0.0)
    at.answer_request(claim("b", 4, 8, 50.0), 0.0)
    assert is_kept_after(5, 50.0, is_waiting=True)
    assert is_kept_after(3, 40.0, is_waiting=False), "it was sent before the request"
    assert not is_kept_after(6, 50.0, is_waiting=False)
    at.answer_request(claim("b", 7, 8, 50.0), 0.0)
    assert not is_kept_after(8, 70.0, is_waiting=True), "it waits for another request"
