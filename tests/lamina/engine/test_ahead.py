"""What waiting turns will load, told before they do: in their order, once, and as far as all places have room."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scheduled import make

from lamina.engine.blocks.ahead import MOST_TOLD, Ahead, Load
from lamina.engine.blocks.tier import Tier
from lamina.engine.conversations.sessions import SessionName, SessionState
from lamina.engine.sequence import Sequence
from lamina.protocol.blocks.tables import BlockTables
from lamina.protocol.partition import Lanes
from lamina.protocol.placement import FIRST, Place
from lamina.protocol.plan import MOST_EXPECTED, MOST_PAGES, Expect
from lamina.protocol.tiers import TierFacts


def keys_of(sequence: Sequence, pages: int) -> tuple[bytes, ...]:
    return tuple(f"{sequence.request_id}/{n}".encode() for n in range(pages))


def finds(pages: int = 2) -> Callable[[Sequence], Load | None]:
    return lambda s: Load(pages * 128, (FIRST,), keys_of(s, pages)) if s.request_id % 5 else None


def waiting(*numbers: int) -> list[Sequence]:
    return [make(number, 9, 9) for number in numbers]


def test_turns_are_told_once_in_their_order_and_taken_back() -> None:
    ahead, line = Ahead(100), waiting(1, 2, 5, 3)
    first = ahead.tell(line, finds())
    assert [(op.turn, op.keys) for op in first] == [
        (turn, list(keys_of(line[at], 2))) for turn, at in ((0, 0), (1, 1), (3, 3))
    ], "of 5 there is nothing to load"
    assert ahead.tell(line, finds()) == []
    late = [*line[1:], *waiting(6)]
    assert ahead.tell(late, finds()) == [Expect(0), Expect(4, 0, list(keys_of(late[-1], 2)))]
    assert ahead.tell([line[2]], finds()) == [Expect(1), Expect(3), Expect(4)]
    assert ahead.tell([], finds()) == []
    assert len(ahead) == 0


def test_what_is_being_loaded_is_needed_still() -> None:
    ahead, (one, two) = Ahead(100), waiting(1, 2)
    ahead.tell([one, two], finds())
    one.num_loading = 256
    assert ahead.tell([two], finds()) == []
    one.num_loading = 0
    assert ahead.tell([two], finds()) == [Expect(0)]


@pytest.mark.parametrize(("room", "told"), [(7, 3), (6, 3), (5, 2), (1, 0), (0, 0)])
def test_the_eviction_window(room: int, told: int) -> None:
    """Who is behind it is told once it has moved on."""
    ahead, line = Ahead(room), waiting(1, 2, 3, 4)
    assert len(ahead.tell(line, finds())) == told
    more = ahead.tell(line[1:], finds())
    assert [bool(op.keys) for op in more] == ([False, True] if told else [])


def test_a_long_queue_is_told_bit_by_bit() -> None:
    """So that no plan is long; and all workers together hold no more keys than they may."""
    each = MOST_PAGES * 3
    ahead, line = Ahead(MOST_EXPECTED * 2), waiting(*(n for n in range(500) if n % 5))
    plans = []
    while ops := ahead.tell(line, finds(each)):
        plans.append(sum(len(op.keys) for op in ops))
        assert all(len(op.keys) <= MOST_PAGES for op in ops)
    assert max(plans) < MOST_TOLD + each
    assert sum(plans) == MOST_EXPECTED // each * each
    assert len(plans) == -(-sum(plans) // max(plans))


def test_where_it_will_most_likely_lie() -> None:
    """Where its session lies, if it can be loaded there."""
    (one,) = waiting(1)
    one.session = SessionState(SessionName(b"", "a"), place=Place(2))
    load = Load(128, (Place(1), Place(2)), (b"k",))
    assert [op.place for op in Ahead(9).tell([one], lambda s: load)] == [Place(2)]
    one.session.place = Place(7)
    assert [op.place for op in Ahead(9).tell([one], lambda s: load)] == [Place(1)]


@pytest.mark.parametrize(
    ("lanes", "holders", "rooms", "room"),
    [
        ([Lanes()], [[0, 1]], [9, 7], 7),  # parts of each page
        ([Lanes((True, False)), Lanes((False, True))], [[0], [1]], [9, 7], 14),  # some pages each
        ([Lanes((True, False)), Lanes((False, True))], [[0], [0]], [9], 8),  # one that has both lanes
        ([Lanes()], [[0]], [], 0),  # nobody says
    ],
)
def test_room_of_all_workers(lanes: list[Lanes], holders: list[list[int]], rooms: list[int], room: int) -> None:
    ledger = BlockTables([0] * len(lanes), [9] * len(lanes), 4, lanes)
    facts = TierFacts(secret=b"s" * 32, identity=b"", page=4, pages=[[]] * len(rooms or [0]), rooms=rooms)
    tier = Tier(facts, ledger, holders)
    line = waiting(1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 14, 16, 17, 18, 19)
    assert len(tier.ahead.tell(line, finds(1))) == room
    tier.learn(facts, holders)
    assert len(tier.ahead.tell(line, finds(1))) == room, "workers that met anew know of nobody"
