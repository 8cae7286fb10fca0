"""The pages that waiting turns will load, announced in their order, once, and as far as all places have room."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scheduled import make

from lamina.config.partition import KvShards
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.kv_placement import FIRST_LOCATION, KvLocation
from lamina.protocol.offload_messages import OffloadFacts
from lamina.protocol.step_plan import MAX_HINTED_PAGES, MAX_PAGES_PER_TRANSFER, PrefetchHint
from lamina.scheduler.kv_manager.offload_index import OffloadIndex
from lamina.scheduler.kv_manager.prefetch import MAX_HINTED_PAGES_PER_PLAN, PrefetchHints
from lamina.scheduler.prefix_index import PrefixIndex
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.sessions.session_table import SessionName, SessionState
from lamina.scheduler.starts import KvStart


def keys_of(sequence: Sequence, pages: int) -> tuple[bytes, ...]:
    return tuple(f"{sequence.request_id}/{n}".encode() for n in range(pages))


def finds(pages: int = 2) -> Callable[[Sequence], KvStart | None]:
    return lambda s: KvStart(pages * 128, (FIRST_LOCATION,), keys_of(s, pages)) if s.request_id % 5 else None


def waiting(*numbers: int) -> list[Sequence]:
    return [make(number, 9, 9) for number in numbers]


def test_turns_are_told_once_in_their_order_and_taken_back() -> None:
    ahead, line = PrefetchHints(100), waiting(1, 2, 5, 3)
    first = ahead.next_ops(line, finds())
    assert [(op.order, op.keys) for op in first] == [
        (turn, list(keys_of(line[at], 2))) for turn, at in ((0, 0), (1, 1), (3, 3))
    ], "of 5 there is nothing to load"
    assert ahead.next_ops(line, finds()) == []
    late = [*line[1:], *waiting(6)]
    assert ahead.next_ops(late, finds()) == [PrefetchHint(0), PrefetchHint(4, 0, list(keys_of(late[-1], 2)))]
    assert ahead.next_ops([line[2]], finds()) == [PrefetchHint(1), PrefetchHint(3), PrefetchHint(4)]
    assert ahead.next_ops([], finds()) == []
    assert len(ahead) == 0


def test_what_is_being_loaded_is_needed_still() -> None:
    ahead, (one, two) = PrefetchHints(100), waiting(1, 2)
    ahead.next_ops([one, two], finds())
    one.set_transfer(loading_tokens=256)
    assert ahead.next_ops([two], finds()) == []
    one.set_transfer(loading_tokens=0)
    assert ahead.next_ops([two], finds()) == [PrefetchHint(0)]


@pytest.mark.parametrize(("room", "told"), [(7, 3), (6, 3), (5, 2), (1, 0), (0, 0)])
def test_the_eviction_window(room: int, told: int) -> None:
    """A page after the window is announced once the window has moved on."""
    ahead, line = PrefetchHints(room), waiting(1, 2, 3, 4)
    assert len(ahead.next_ops(line, finds())) == told
    more = ahead.next_ops(line[1:], finds())
    assert [bool(op.keys) for op in more] == ([False, True] if told else [])


def test_a_long_queue_is_told_bit_by_bit() -> None:
    """So that no plan is long; and all workers together hold no more keys than they may."""
    each = MAX_PAGES_PER_TRANSFER * 3
    ahead, line = PrefetchHints(MAX_HINTED_PAGES * 2), waiting(*(n for n in range(500) if n % 5))
    plans = []
    while ops := ahead.next_ops(line, finds(each)):
        plans.append(sum(len(op.keys) for op in ops))
        assert all(len(op.keys) <= MAX_PAGES_PER_TRANSFER for op in ops)
    assert max(plans) < MAX_HINTED_PAGES_PER_PLAN + each
    assert sum(plans) == MAX_HINTED_PAGES // each * each
    assert len(plans) == -(-sum(plans) // max(plans))


def test_where_it_will_most_likely_lie() -> None:
    """A prefetch goes where its session lies, if it can be loaded there."""
    (one,) = waiting(1)
    one.turn.session = SessionState(SessionName(b"", "a"), location=KvLocation(2))
    load = KvStart(128, (KvLocation(1), KvLocation(2)), (b"k",))
    assert [op.location for op in PrefetchHints(9).next_ops([one], lambda s: load)] == [KvLocation(2)]
    one.turn.session.location = KvLocation(7)
    assert [op.location for op in PrefetchHints(9).next_ops([one], lambda s: load)] == [KvLocation(1)]


@pytest.mark.parametrize(
    ("lanes", "holders", "rooms", "room"),
    [
        ([KvShards()], [[0, 1]], [9, 7], 7),  # parts of each page
        ([KvShards((True, False)), KvShards((False, True))], [[0], [1]], [9, 7], 14),  # some pages each
        ([KvShards((True, False)), KvShards((False, True))], [[0], [0]], [9], 8),  # one that has both KV shards
        ([KvShards()], [[0]], [], 0),  # no session has a place
    ],
)
def test_room_of_all_workers(lanes: list[KvShards], holders: list[list[int]], rooms: list[int], room: int) -> None:
    ledger = BlockTables([0] * len(lanes), [9] * len(lanes), 4, lanes)
    facts = OffloadFacts(secret=b"s" * 32, identity=b"", page_size=4, pages=[[]] * len(rooms or [0]), capacities=rooms)
    tier = OffloadIndex(facts, ledger, holders, PrefixIndex())
    line = waiting(1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 14, 16, 17, 18, 19)
    assert len(tier.hints.next_ops(line, finds(1))) == room
    tier.sync(facts, holders)
    assert len(tier.hints.next_ops(line, finds(1))) == room, "workers that met anew know of nobody"
