"""The loan policy, case by case: where a sequence begins, what it keeps, and what is counted as borrowed.

Covers: lamina/scheduler/kv_manager/allocator.py.
"""

from __future__ import annotations

from lamina.config.partition import KvShards
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.kv_placement import KvLocation, StripeRun
from lamina.protocol.step_plan import SurvivingKv
from lamina.request import CompletionOutput, SamplingParams
from lamina.scheduler.kv_manager.spill_placement import SpillAllocator, SpillPlacement
from lamina.scheduler.sequence import Sequence

BLOCK, STRIPE = 2, 4  # tokens of a block, blocks of a stripe


def tables(blocks: list[int], windows: tuple[int, ...] = (0,)) -> BlockTables:
    """Makes tables of workers with so many blocks; each has a group for every one of ``windows``."""
    lanes = [KvShards(tuple(n == w for n in range(len(blocks)))) for w in range(len(blocks))]
    groups = [(window, lanes[w], blocks[w]) for window in windows for w in range(len(blocks))]
    return BlockTables([g[0] for g in groups], [g[2] for g in groups], BLOCK, [g[1] for g in groups], STRIPE, True)


def loans(blocks: list[int], windows: tuple[int, ...] = (0,), homes: int = 0) -> SpillPlacement:
    return SpillPlacement(tables(blocks, windows), homes)


def sequence(length: int, place: KvLocation) -> Sequence:
    found = Sequence(0, SamplingParams(), 0, [1] * length, CompletionOutput(0), 10**4, frozenset())
    found.num_computed_tokens, found.location = length, place
    return found


def test_a_new_sequence_is_at_home_where_there_is_most_room() -> None:
    of = loans([8, 20, 12])
    assert of.choose_location(None, 8 * STRIPE * BLOCK, 0, [8, 20, 12]) == KvLocation(1, (StripeRun(5, 8, 2),))
    assert of.choose_location(None, 10 * STRIPE * BLOCK, 0, [8, 20, 12]) == KvLocation(
        1, (StripeRun(5, 8, 2), StripeRun(8, 10, 0))
    )
    assert of.choose_location(None, 10 * STRIPE * BLOCK + 1, 0, [8, 20, 12]) is None


def test_none_begins_on_a_guest_however_much_room_it_has() -> None:
    of, free = loans([8, 12, 40], homes=2), [8, 12, 40]
    assert of.choose_location(None, 8 * STRIPE * BLOCK, 0, free) == KvLocation(1, (StripeRun(3, 8, 2),))
    assert of.candidate_locations(4 * STRIPE * BLOCK, free) == [KvLocation(1, (StripeRun(3, 4, 2),))], (
        "not whole on the guest"
    )
    assert of.candidate_locations(2 * STRIPE * BLOCK, free) == [KvLocation(0), KvLocation(1)]
    room = SpillAllocator(tables([8, 12, 40]), 4, homes=2)
    kept = room.reassign([SurvivingKv(0, 8 * STRIPE * BLOCK - 1, KvLocation(2)), SurvivingKv(1, STRIPE, KvLocation(2))])
    assert {k.sequence: k.location.kv_shard for k in kept} == {0: 1, 1: 0}, (
        "nor comes to lie there when all are laid out"
    )
    others = [sequence(STRIPE * BLOCK, KvLocation(0)), sequence(STRIPE * BLOCK, KvLocation(1))]
    short = room.find_room(sequence(STRIPE * BLOCK, KvLocation(0)), None, free, others, others)
    assert short is not None
    assert short.location.kv_shard < 2


def test_one_that_goes_on_from_another_keeps_its_home_and_its_loans() -> None:
    """It stays though there is more room elsewhere; the source's tokens after the shared part are not its own."""
    of, begun = loans([20, 20, 20]), KvLocation(0, (StripeRun(2, 9, 1),))
    found = of.choose_location(begun, 6 * STRIPE * BLOCK, 3 * STRIPE * BLOCK, [4, 20, 8])
    assert found == KvLocation(0, (StripeRun(2, 3, 1), StripeRun(4, 6, 1)))


def test_what_is_kept_of_a_place_ends_with_the_tokens_that_are_kept() -> None:
    of, place = loans([20, 20]), KvLocation(0, (StripeRun(1, 3, 1), StripeRun(5, 6, 1)))
    assert of.location_of_prefix(place, 6 * STRIPE * BLOCK) == place
    assert of.location_of_prefix(place, 5 * STRIPE * BLOCK) == KvLocation(0, (StripeRun(1, 3, 1),))
    assert of.location_of_prefix(place, STRIPE * BLOCK + 1) == KvLocation(0, (StripeRun(1, 2, 1),))
    assert of.location_of_prefix(place, STRIPE * BLOCK) == KvLocation(0)


def test_borrowed_blocks_are_counted_where_they_lie_and_as_far_as_tokens_go() -> None:
    of = loans([40, 40, 40], windows=(0, 16))
    place = KvLocation(0, (StripeRun(1, 3, 1), StripeRun(4, 6, 2)))
    whole, part = sequence(6 * STRIPE * BLOCK, place), sequence((2 * STRIPE + 1) * BLOCK - 1, place)
    assert of.borrowed_blocks([]) == [0] * 6
    assert of.borrowed_blocks([whole]) == [0, 2 * STRIPE, 2 * STRIPE, 0, 0, 0], (
        "a group with a window counts for nothing"
    )
    assert of.borrowed_blocks([part]) == [0, STRIPE + 1, 0, 0, 0, 0]
    assert of.borrowed_blocks([whole, part, sequence(9, KvLocation(2))]) == [0, 3 * STRIPE + 1, 2 * STRIPE, 0, 0, 0]


def grown(place: KvLocation, free: list[int], stripes: int = 2) -> KvLocation:
    """Returns the place of the next stripe of a sequence that has so many whole stripes."""
    of, one = loans([40] * len(free)), sequence(stripes * STRIPE * BLOCK, place)
    assert not of.spill_next_stripes({one: 1}, lambda: list(free))
    return one.location


def test_the_next_stripe_is_at_home_then_with_the_creditor_then_where_most_room_is() -> None:
    assert grown(KvLocation(0), [STRIPE, 30, 30]) == KvLocation(0)
    assert grown(KvLocation(0), [STRIPE - 1, 20, 30]) == KvLocation(0, (StripeRun(2, 3, 2),))
    lent = KvLocation(0, (StripeRun(1, 2, 1),))
    assert grown(lent, [0, STRIPE, 30]) == KvLocation(0, (StripeRun(1, 3, 1),))
    assert grown(lent, [0, STRIPE - 1, 30]) == KvLocation(0, (StripeRun(1, 2, 1), StripeRun(2, 3, 2)))
    assert grown(lent, [STRIPE, 30, 30]) == lent, "home again as soon as there is room"
    assert grown(lent, [0, 0, 0]) == lent, "and where there is none"
    begun = KvLocation(0, (StripeRun(2, 4, 1),))  # for rows that never came
    assert grown(begun, [0, 0, 30]) == KvLocation(0, (StripeRun(2, 3, 2),))


def test_two_that_grow_at_once_do_not_get_the_same_room() -> None:
    of, asked = loans([40, 40, 40]), list[None]()
    both = [sequence(2 * STRIPE * BLOCK, KvLocation(0)) for _ in range(2)]

    def free() -> list[int]:
        asked.append(None)
        return [0, STRIPE, STRIPE]

    assert not of.spill_next_stripes(dict.fromkeys(both, 1), free)
    assert sorted(one.location.moved_runs[0].kv_shard for one in both) == [1, 2]
    assert len(asked) == 1


def test_the_last_stripe_takes_what_the_sequence_can_still_become() -> None:
    of, one = loans([40, 40]), sequence(2 * STRIPE * BLOCK, KvLocation(0))
    one.max_len = (2 * STRIPE + 1) * BLOCK
    assert not of.spill_next_stripes({one: 1}, lambda: [1, 40])
    assert one.location == KvLocation(0)


def test_who_needs_no_new_stripe_asks_for_no_room() -> None:
    def free() -> list[int]:
        raise AssertionError("asked for")

    assert not loans([40, 40]).spill_next_stripes({sequence(2 * STRIPE * BLOCK - 1, KvLocation(0)): 1}, free)
    prompt = sequence(3 * STRIPE * BLOCK, KvLocation(0))
    prompt.num_computed_tokens = 1  # it has a place for all of its prompt
    assert not loans([40, 40]).spill_next_stripes({prompt: 2 * STRIPE * BLOCK}, free)
