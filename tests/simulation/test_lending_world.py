"""Leases and the ledger on a virtual clock, over a network that delays, loses and doubles, with crashes; and
mistakes in them, each of which is seen.
"""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from lamina.lending import debt_ledger, debtor
from lamina.lending.creditor import Creditor, Lease
from lamina.lending.debt_ledger import DebtLedger, LedgerEntry
from lamina.lending.debtor import Debtor
from lamina.lending.lending_messages import NEVER
from simulation.lending.contest import check_contest, contest
from simulation.lending.scenario import lending_scenario, rough
from simulation.lending.world import BrokenLendingError, check_lending

SEEDS, SHARES = 160, 4  # perf/simulate_lending.py tries as many as one likes
TRIED = 400  # until a mistake is seen


@pytest.mark.long
@pytest.mark.parametrize("share", range(SHARES))
def test_nothing_is_lent_twice_or_lost_whatever_fails(share: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(share, SEEDS, SHARES):
        counts.update(check_lending(lending_scenario(seed))._asdict())
    assert min(counts.values()) > 0, f"something never happened: {counts}"


@pytest.mark.long(but=["2-9.0-8.0", "100-2.0-4.0"])
@pytest.mark.parametrize(("instances", "wild_s", "calm_s"), [(2, 9.0, 8.0), (100, 2.0, 4.0), (1000, 0.4, 1.5)])
def test_from_two_to_a_thousand_instances(instances: int, wild_s: float, calm_s: float) -> None:
    of = replace(lending_scenario(7, instances), wild_s=wild_s, calm_s=calm_s, crashes=2, ledger_crashes=0, loss=0.05)
    assert check_lending(of).granted > 0


def test_without_a_ledger_loans_go_on() -> None:
    """It dies, and comes a second later, again and again: what is lent is renewed all the same."""
    calm = replace(lending_scenario(3), loss=0.0, late_s=0.05, crashes=0, ledger_crashes=0)
    often = replace(calm, ledger_crashes=6)
    assert check_lending(often).granted > check_lending(calm).granted / 4


def test_a_late_request_of_a_claim_that_has_ended_keeps_room_for_a_while() -> None:
    """It comes after the last one that its debtor sent, so it looks like a new one. Others wait for RESERVE_S."""
    assert check_lending(lending_scenario(193000385)).borrowed == 36


def _old_heartbeats_too(self: DebtLedger, beat: Any, now: float) -> bool:
    self.entries[beat.name] = LedgerEntry(beat, now)
    return True


def _keeps_late_grants(self: Debtor, message: Any, now: float) -> list[Any]:
    key = message.creditor, message.lease
    self.loans[key] = debtor.Borrowed(
        *key, message.blocks, now + debtor.SAFETY_FACTOR * message.lease_s, message.lease_s
    )
    return []


def _no_cap(self: Creditor, ask: Any, now: float) -> str:
    return "" if 0 < ask.blocks <= self.free_blocks else "none is free"


def _asks_anew(self: Creditor, ask: Any, now: float, take: Any = Creditor.answer_request) -> Any:
    self.answered.clear()
    return take(self, ask, now)


def _frees_and_keeps(self: Creditor, number: int) -> None:
    self.free += self.leases[number].blocks


def _renews_for_ever(self: Debtor, message: Any) -> None:
    for loan in self.loans.values():
        if loan.creditor == message.creditor:
            loan.until += 2 * message.lease_s


def _turns_away(self: Creditor, ask: Any, now: float, why: Any = Creditor.refusal_reason) -> str:
    return str(why(self, ask, now) or ("it is not your turn" if ask.debtor != self.name and ask.blocks > 4 else ""))


MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "a cap is forgotten": (Creditor, "refusal_reason", _no_cap),
    "a debtor counts a lease for longer": (debtor, "SAFETY_FACTOR", 3.0),
    "an old heartbeat counts": (DebtLedger, "on_heartbeat", _old_heartbeats_too),
    "a refusal is forgotten": (DebtLedger, "on_refusal", lambda self, message: None),
    "four are proposed": (debt_ledger, "MAX_CANDIDATES", 4),
    "leases never end": (Creditor, "expire", lambda self, now: []),
    "a late grant is kept": (Debtor, "_granted", _keeps_late_grants),
    "an ask that comes twice has two loans": (Creditor, "answer_request", _asks_anew),
    "blocks come back and stay lent": (Creditor, "end_lease", _frees_and_keeps),
    "a renewal counts from its answer, and more": (Debtor, "_renewed", _renews_for_ever),
    "who comes first is not served": (Creditor, "refusal_reason", _turns_away),
    "a debtor keeps what has ended": (Debtor, "expire", lambda self, now: []),
}


@pytest.mark.long(but=["a cap is forgotten", "a debtor counts a lease for longer", "an old heartbeat counts"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MISTAKES[mistake])
    with pytest.raises(BrokenLendingError):
        _try_seeds()


def _try_seeds() -> None:
    for seed in range(TRIED):
        check_lending(lending_scenario(seed))
        check_lending(rough(lending_scenario(seed)))


CONTESTS = 2000
EARLIER_FIRST = 0  # a seed by which the first claim is earlier than the last one


@pytest.mark.long
@pytest.mark.parametrize("share", range(SHARES))
def test_where_all_need_more_than_there_is_each_is_served_in_the_end(share: int) -> None:
    """No schedule waits for ever while the total would serve one of them."""
    seeds = range(share, CONTESTS, SHARES)
    assert sum(check_contest(contest(seed)) for seed in seeds) > len(seeds)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_each_is_served_in_the_end_in_a_hundred_thousand_contests() -> None:
    first = random.randrange(10**9)
    with ProcessPoolExecutor(2) as pool:
        served = pool.map(_served, range(first, first + 100_000, 250))
        assert sum(served) > 100_000


def _served(first: int) -> int:
    return sum(check_contest(contest(seed)) for seed in range(first, first + 250))


def test_two_that_lend_to_each_other_and_both_need_it_are_served_one_after_the_other() -> None:
    both = replace(contest(0, 2), jobs=(((60, 3.0),), ((60, 3.0),)))
    both = replace(both, of=replace(both.of, blocks=40, cap=40, debtor_cap=40, loss=0.0, twice=0.0, late_s=0.05))
    assert check_contest(both) == 2


def test_one_whose_own_memory_an_earlier_claim_has_borrows_of_others_meanwhile() -> None:
    """The last one's memory goes to the first, its neighbour. The request that waits for it would end too late."""
    long = replace(contest(EARLIER_FIRST, 4), jobs=(((80, 100.0),), (), (), ((1, 5.0), (40, 60.0))))
    long = replace(long, of=replace(long.of, blocks=40, cap=40, debtor_cap=40, loss=0.0, twice=0.0, late_s=0.05))
    assert check_contest(long) == 3


def _lends_nothing_while_it_lacks(self: Creditor, ask: Any, now: float, why: Any = Creditor.refusal_reason) -> str:
    """The rule before there was an order of claims: all others count as the last."""
    return str(why(self, ask if ask.debtor == self.name else msgspec.structs.replace(ask, since=1e300), now))


UNFAIR: dict[str, tuple[Any, str, Any]] = {
    "who lacks memory lends nothing": (Creditor, "refusal_reason", _lends_nothing_while_it_lacks),
    "who waits keeps what it has": (Creditor, "outdone_by", lambda self, ask: []),
    "an owner takes back what an earlier claim uses": (Lease, "claim", property(lambda self: (NEVER, self.debtor))),
}


@pytest.mark.parametrize("mistake", UNFAIR)
def test_a_wait_in_a_circle_is_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*UNFAIR[mistake])
    with pytest.raises(BrokenLendingError, match="requests were served in|fits: True; the answer is LoanRefused"):
        _served(0)
