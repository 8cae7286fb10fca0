"""Faults that meet others: each request gets its tokens, once; and mistakes about them are seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lamina.fleet.elastic import Elastic
from lamina.fleet.members import LostError, Member
from lamina.fleet.notices import Notices
from lamina.fleet.parity import Parity
from lamina.fleet.supervise import Supervisor
from lamina.memory.sums import BlockSums
from lamina.protocol.plan import Keep
from lamina.sim.play import is_broken
from lamina.sim.whole.crossed import crossed_fleet
from lamina.sim.whole.run import check_fleet

SEEDS, PARTS = 24, 3
ENOUGH = 120  # seeds, of which one must be broken by a mistake


@pytest.mark.parametrize("part", range(PARTS))
def test_every_stream_goes_on(part: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(part, SEEDS, PARTS):
        counts.update(check_fleet(crossed_fleet(seed))._asdict())
    assert counts["deaths"] > 2
    assert counts["hangs"] + counts["told"] + counts["flips"], "none of them came in these seeds"


def kept_by_the_dead(patch: pytest.MonkeyPatch) -> None:
    """What a memory worker said as it came to rest counts, though it has died since."""
    right, left, said = Supervisor._rest_of, Parity.left, dict[Member, dict[int, int]]()

    def rest_of(self: Supervisor, member: Member, deadline: float) -> dict[int, int]:
        said[member] = right(self, member, deadline)
        return said[member]

    def all_that_was_said(self: Parity, kept: Sequence[dict[int, int]]) -> list[dict[int, int]]:
        return left(self, [said.get(m, own) for m, own in zip(self._members.memory, kept, strict=True)])

    patch.setattr(Supervisor, "_rest_of", rest_of)
    patch.setattr(Parity, "left", all_that_was_said)


def came_whole(patch: pytest.MonkeyPatch) -> None:
    """KV counts as moved, though somebody who gave it has died meanwhile."""
    move = Elastic.move

    def moved(self: Elastic, keep: Sequence[Keep]) -> bool:
        move(self, keep)
        return True

    patch.setattr(Elastic, "move", moved)


def never_late(patch: pytest.MonkeyPatch) -> None:
    """Who is late is not made good."""
    right = Supervisor.may_make_good
    patch.setattr(Supervisor, "may_make_good", lambda self, loss: loss.ended and right(self, loss))


def one_loss_at_a_time(patch: pytest.MonkeyPatch) -> None:
    """A loss behind another one ends the run."""
    right = Supervisor.may_make_good

    def alone(self: Supervisor, loss: LostError) -> bool:
        return not self._recoveries.under_way and right(self, loss)

    patch.setattr(Supervisor, "may_make_good", alone)


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "KV of who died at rest": kept_by_the_dead,
    "KV that came in part": came_whole,
    "who hangs is waited for": never_late,
    "a loss within a loss": one_loss_at_a_time,
    "damage is not looked for": lambda patch: patch.setattr(BlockSums, "begin", lambda self, steps: None),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str) -> None:
    """In a scenario that is right without it."""

    def breaks_by_it(of: Any) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            MISTAKES[mistake](patch)
            broken = is_broken(check_fleet, of)
        return broken and not is_broken(check_fleet, of)

    assert any(breaks_by_it(crossed_fleet(seed)) for seed in range(ENOUGH))


def test_who_is_told_to_end_gives_its_kv_away_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where nobody heeds it, it would go on as if nothing were: that is seen, too."""
    told = [of for of in map(crossed_fleet, range(ENOUGH)) if any(hit.how == "told" for hit in of.hits)][:4]
    played = [check_fleet(of) for of in told]
    assert sum(one.told for one in played)
    assert sum(one.left for one in played)
    monkeypatch.setattr(Notices, "heed", lambda self: None)
    assert not sum(check_fleet(of).left for of in told)
