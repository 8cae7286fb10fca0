"""Pages that are saved as they fill, while their sequences go on; and pages that no request may find.

Covers: lamina/scheduler/kv_manager/transfers_in_flight.py.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduled import check_tokens, make
from test_swap import PAGE, TierHouse, ops_of

from lamina.config.partition import KvShards
from lamina.engine.sessions import EngineSessions
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.kv_placement import KvLocation, StripeRun
from lamina.protocol.offload_messages import OffloadFacts, PagesExpired, TransferDone
from lamina.protocol.step_plan import DeletePages, LoadKv, SaveKv, SetRetention
from lamina.scheduler.kv_manager.offload_index import OffloadIndex
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.scheduler.prefix_index import PrefixIndex
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.sessions.cache_options import CacheOptions
from lamina.scheduler.sessions.session_table import SessionName, Sessions
from lamina.scheduler.sessions.token_ranges import remove_ranges


def wanted(house: TierHouse, sequence: Sequence) -> dict[bytes, list[int]]:
    """The keys of the pages that a finished sequence has left: the whole ones, and a partial last one."""
    stop = min(sequence.num_computed_tokens, len(sequence.tokens))
    keys = house.tier.keys_of(sequence, stop, parts=True)
    return {key: sequence.tokens[n * PAGE : min(stop, (n + 1) * PAGE)] for n, key in enumerate(keys)}


def test_each_page_is_saved_once_with_the_plan_behind_its_last_row() -> None:
    house = TierHouse(40)
    sequence = make(1, 6, 12)
    house.scheduler.add(sequence)
    house.serve([sequence])
    saved = {op.first: plan.step for plan in house.plans for op in plan.ops if isinstance(op, SaveKv)}
    last = {row.first + row.count: plan.step for plan in house.plans for row in plan.rows}
    assert saved == {
        first: 1 + min(step for stop, step in last.items() if stop >= min(17, first + PAGE))
        for first in range(0, 17, 4)
    }
    assert [op.count for op in ops_of(house, SaveKv)] == [*[PAGE] * 4, 1], "17 tokens: the last one was drawn"


def test_a_page_that_is_not_whole_is_found_to_its_end() -> None:
    """A prompt that continues it finds it, as soon as that is a page more than the pool has."""
    house = TierHouse(40)
    first = make(1, 9, 6)
    house.scheduler.add(first)
    house.serve([first])
    house.scheduler.evict_retained()
    house.round()
    for tokens, cached in ((first.tokens[:14], 12), ([*first.tokens[:14], 7], 14), ([*first.tokens[:13], 7, 7], 12)):
        other = make(2, 0, 3)
        other.prompt[:], other.tokens[:], other.max_len = tokens, tokens, len(tokens) + 3
        house.scheduler.add(other)
        house.serve([other])
        assert other.num_cached_tokens == cached
        check_tokens([other])
        house.scheduler.evict_retained()
        house.round()


def test_pages_that_have_expired_are_not_found() -> None:
    house = TierHouse(40)
    first = make(1, 9, 8)
    house.scheduler.add(first)
    house.serve([first])
    other = make(2, 0, 3)
    other.prompt[:], other.tokens[:] = [*first.tokens, 7], [*first.tokens, 7]
    found = house.tier.find_loadable(other, 0)
    assert found is not None
    assert house.scheduler.on_report(PagesExpired(epoch=0, keys=sorted(house.tier.stored_keys)[1:])) is None
    assert house.tier.find_loadable(other, 0) != found
    assert len(house.tier.stored_keys) == 1


def test_the_pool_is_not_left_for_less_than_a_page() -> None:
    house = TierHouse(40)
    first = make(1, 9, 8)
    house.scheduler.add(first)
    house.serve([first])
    other = make(2, 0, 3)
    other.prompt[:], other.tokens[:] = [*first.tokens, 7], [*first.tokens, 7]
    assert house.tier.find_loadable(other, 0) is not None
    assert house.tier.find_loadable(other, 12) == house.tier.find_loadable(other, 0)
    assert house.tier.find_loadable(other, 13) is None, "of 16 tokens"


@given(seed=st.integers(0, 10**6), blocks=st.integers(12, 60), errors=st.booleans())
def test_what_lies_beside_the_pool_are_the_tokens_of_its_keys(seed: int, blocks: int, *, errors: bool) -> None:
    """A page is saved again at the end, however late the medium answers, whichever sequence gives way, and whatever
    fails.
    """
    order, house = random.Random(seed), TierHouse(blocks)
    sequences = [make(number, order.randint(1, 14), order.randint(1, 24)) for number in range(6)]
    queue = list(sequences)
    for _ in range(3000):
        if queue and order.random() < 0.3:
            house.scheduler.add(queue.pop(0))
        if house.owed and order.random() < 0.4:
            house.answer("disk full" if errors and order.random() < 0.3 else "")
        if house.round() is None and not queue and not house.owed and all(s.finished for s in sequences):
            break
    check_tokens(sequences)
    house.ledger.check_integrity()
    pages = {key: tokens for s in sequences for key, tokens in wanted(house, s).items()}
    assert all(tokens == pages[key] for key, tokens in house.medium.items()), (
        "a page has other tokens than its key says"
    )
    assert house.tier.stored_keys <= house.medium.keys(), "found, and not there"
    if not errors:
        assert house.tier.stored_keys == house.medium.keys() == pages.keys()


def test_a_page_that_could_not_be_saved_is_saved_at_the_end() -> None:
    house = TierHouse(40)
    sequence = make(1, 9, 6)
    house.scheduler.add(sequence)
    while not house.owed:
        house.round()
    house.answer("disk full")
    house.serve([sequence])
    assert house.medium == wanted(house, sequence)


def test_what_went_wrong_leaves_nothing() -> None:
    house = TierHouse(40)
    sequence = make(1, 9, 20)
    house.scheduler.add(sequence)
    while len(ops_of(house, SaveKv)) < 3:
        house.round()
    house.answer()
    sequence.finish("error")
    house.serve([sequence])
    assert house.medium == {}
    assert not house.tier.stored_keys


def test_pages_that_are_to_be_kept_are_named_at_the_end_also_where_others_have_them() -> None:
    house = TierHouse(40)
    first, again, other = make(1, 9, 4), make(1, 9, 4), make(2, 9, 4)
    again.options = CacheOptions(retention_s=60.0)
    for sequence in (first, again, other):
        house.scheduler.add(sequence)
        house.serve([sequence])
    (op,) = [op for plan in house.plans for op in plan.ops if isinstance(op, SetRetention)]
    assert (op.seconds, set(op.keys)) == (60.0, wanted(house, first).keys())


def test_a_turn_that_has_lost_tokens_is_loaded_from_the_pages_of_its_whole_conversation() -> None:
    """The pages that are left are loaded, each from where it was saved, up to the first that is missing; for its
    session alone.
    """
    house, name = TierHouse(60), SessionName(b"me", "a")
    first = make(1, 20, 4)
    first.turn.session = house.scheduler.features[PrefixCache].sessions.get_or_create(name)
    house.scheduler.add(first)
    house.serve([first])
    house.scheduler.evict_retained()
    house.round()
    for turns, lost, cached in ((True, ((4, 12),), 12), (True, ((0, 4), (8, 12)), 12), (False, ((4, 12),), 0)):
        turn, given = make(2, 0, 3), [*first.tokens, 7, 8]
        turn.turn.original_prompt, turn.turn.discarded_ranges = given, lost
        turn.prompt[:] = turn.tokens[:] = remove_ranges(given, lost)
        turn.max_len = len(turn.tokens) + 3
        turn.turn.session = house.scheduler.features[PrefixCache].sessions.get_or_create(name) if turns else None
        before = len(ops_of(house, LoadKv))
        house.scheduler.add(turn)
        house.serve([turn])
        check_tokens([turn])
        assert turn.num_cached_tokens == cached
        moved = [(op.first, op.count, op.page_shift) for op in ops_of(house, LoadKv)[before:]]
        assert moved == {0: [], 12: [(0, 4, 0), (4, 8, 8)] if lost[0] == (4, 12) else [(0, 4, 4), (4, 8, 8)]}[cached]
        house.scheduler.evict_retained()
        house.round()


@pytest.mark.parametrize("alone", [True, False])
def test_a_session_that_is_deleted_in_its_turn_leaves_nothing(*, alone: bool) -> None:
    """But what another one shares."""
    house, name = TierHouse(40), SessionName(b"me", "a")
    sequence, other = make(1, 9, 20), make(1, 9, 2)
    if not alone:
        house.scheduler.add(other)
        house.serve([other])
    shared = dict(house.medium)
    sequence.turn.session = house.scheduler.features[PrefixCache].sessions.get_or_create(name)
    house.scheduler.add(sequence)
    while len(house.tier.stored_keys) < 4:
        house.round()
        if house.owed:
            house.answer()
    assert EngineSessions(house.scheduler, Sessions(PrefixIndex()), max_tokens=0).drop(name)
    house.serve([sequence])
    check_tokens([sequence])
    assert house.medium == shared


@pytest.mark.parametrize(("told", "saved_again"), [(False, False), (True, False), (True, True)])
def test_a_session_that_is_deleted_before_a_loss_leaves_nothing(*, told: bool, saved_again: bool) -> None:
    """Nothing is left even where a plan had named a page that memory workers may not have reached; what is saved later
    stays.
    """
    house, name = TierHouse(40), SessionName(b"me", "a")
    turn, other = make(1, 9, 3), make(1, 9, 3)
    turn.turn.session = house.scheduler.features[PrefixCache].sessions.get_or_create(name)
    house.scheduler.add(turn)
    house.serve([turn])
    before = dict(house.medium)
    assert EngineSessions(house.scheduler, Sessions(PrefixIndex()), max_tokens=0).drop(name)
    steps = house.scheduler.schedule() if told else []
    assert told == any(isinstance(op, DeletePages) for step in steps for op in step.plan.ops)
    if saved_again:
        house.pool.run(steps.pop())
        house.scheduler.rounds_in_flight.clear()
        house.scheduler.add(other)
        house.serve([other])
    keep = house.scheduler.roll_back(steps, lambda each: each.length)
    house.pool.tables.reconcile(keep)
    house.tier.sync(OffloadFacts(secret=b"s" * 32, identity=b"i", page_size=PAGE, pages=[list(before)]), [[0]])
    house.medium |= before
    assert (house.tier.find_loadable(make(1, 9, 3), 0) is not None) == saved_again
    house.scheduler.evict_retained()
    house.serve([other] if other.finished else [])
    assert (house.medium == before) == saved_again
    assert bool(house.medium) == saved_again


def test_of_a_session_that_is_deleted_another_one_keeps_the_page_that_is_not_whole() -> None:
    house, name = TierHouse(40), SessionName(b"me", "a")
    turn, other = make(1, 9, 3), make(1, 9, 3)
    turn.turn.session = house.scheduler.features[PrefixCache].sessions.get_or_create(name)
    house.scheduler.add(turn)
    house.serve([turn])
    house.scheduler.evict_retained()
    house.scheduler.add(other)
    house.serve([other])
    before = dict(house.medium)
    assert before.keys() == wanted(house, other).keys()
    assert EngineSessions(house.scheduler, Sessions(PrefixIndex()), max_tokens=0).drop(name)
    house.serve([other])
    assert house.medium == before


def test_where_a_window_takes_blocks_nothing_is_saved_before_the_end() -> None:
    house = TierHouse(40, windows=(0, 6))
    sequence = make(1, 9, 20)
    house.scheduler.add(sequence)
    while not sequence.finished:
        house.round()
    assert not ops_of(house, SaveKv)
    assert not ops_of(house, DeletePages)


def test_a_page_whose_last_token_is_being_drawn_waits_for_it() -> None:
    """Its key stands for all of its tokens."""
    house, sequence = TierHouse(40), make(1, 2 * PAGE - 1, 4)
    sequence.id, sequence.num_computed_tokens = 0, 2 * PAGE
    (first,) = house.tier.batch_ops([sequence])
    assert (first.first, first.count) == (0, PAGE)
    sequence.tokens.append(7)
    (second,) = house.tier.batch_ops([sequence])
    assert (second.first, second.count) == (PAGE, PAGE)
    assert [*first.keys, *second.keys] == house.tier.keys_of(sequence, 2 * PAGE)


def test_a_page_on_loan_is_found_where_it_lies() -> None:
    """The first page was still being saved when the next one came to lie elsewhere."""
    lanes = (KvShards((True, False)), KvShards((False, True)))
    ledger, index = BlockTables((0, 0), [20, 20], PAGE, lanes, 1, stays=True), PrefixIndex()
    tier = OffloadIndex(
        OffloadFacts(secret=b"s" * 32, identity=b"i", page_size=PAGE, pages=[[], []]), ledger, [[0], [1]], index
    )
    sequence = make(1, 2 * PAGE + 1, 4)
    sequence.id, sequence.num_computed_tokens = 0, PAGE
    ops = tier.batch_ops([sequence])
    sequence.num_computed_tokens, sequence.location = 2 * PAGE, KvLocation(0, (StripeRun(1, 2, 1),))
    ops += tier.batch_ops([sequence])
    for op in tier.assign_ids([*ops]):
        for _ in range(2):
            tier.on_transfer_done(TransferDone(epoch=0, transfer_id=op.transfer_id, num_pages=1))  # type: ignore[union-attr]
    places = [index.place(tier.backend, lane) for lane in range(2)]
    found = [[index.has(place, key) for place in places] for key in tier.keys_of(sequence, 2 * PAGE)]
    assert found == [[True, False], [False, True]]


@pytest.mark.parametrize("num_parity", [0, 1, 2])
def test_a_transfer_ends_when_parity_workers_have_reported_too(num_parity: int) -> None:
    ledger, index = BlockTables((0,), [20], PAGE), PrefixIndex()
    facts = OffloadFacts(secret=b"s" * 32, identity=b"i", page_size=PAGE, pages=[[], []])
    tier = OffloadIndex(facts, ledger, [[0, 1]], index, num_parity=num_parity)
    sequence = make(1, PAGE + 1, 4)
    sequence.id, sequence.num_computed_tokens = 0, PAGE
    (op,) = tier.assign_ids(tier.batch_ops([sequence]))
    for _ in range(1 + num_parity):
        tier.on_transfer_done(TransferDone(epoch=0, transfer_id=op.transfer_id, num_pages=1))  # type: ignore[union-attr]
        assert tier.has_transfers
    tier.on_transfer_done(TransferDone(epoch=0, transfer_id=op.transfer_id, num_pages=1))  # type: ignore[union-attr]
    assert not tier.has_transfers
