"""The loan policy, case by case: where a sequence begins, what it keeps, and what is counted as borrowed."""

from __future__ import annotations

from lamina.engine.blocks.loans import Loans
from lamina.engine.blocks.room import Room
from lamina.engine.sequence import Sequence
from lamina.protocol.blocks.tables import BlockTables
from lamina.protocol.partition import Lanes
from lamina.protocol.placement import Place, Run
from lamina.protocol.plan import Keep
from lamina.request import CompletionOutput, SamplingParams

BLOCK, STRIPE = 2, 4  # tokens of a block, blocks of a stripe


def tables(blocks: list[int], windows: tuple[int, ...] = (0,)) -> BlockTables:
    """Of workers with so many blocks; each has a group for every one of ``windows``."""
    lanes = [Lanes(tuple(n == w for n in range(len(blocks)))) for w in range(len(blocks))]
    groups = [(window, lanes[w], blocks[w]) for window in windows for w in range(len(blocks))]
    return BlockTables([g[0] for g in groups], [g[2] for g in groups], BLOCK, [g[1] for g in groups], STRIPE, True)


def loans(blocks: list[int], windows: tuple[int, ...] = (0,), homes: int = 0) -> Loans:
    return Loans(tables(blocks, windows), homes)


def sequence(length: int, place: Place) -> Sequence:
    found = Sequence(0, SamplingParams(), 0, [1] * length, CompletionOutput(0), 10**4, frozenset())
    found.num_scheduled, found.place = length, place
    return found


def test_a_new_sequence_is_at_home_where_there_is_most_room() -> None:
    of = loans([8, 20, 12])
    assert of.place(None, 8 * STRIPE * BLOCK, 0, [8, 20, 12]) == Place(1, (Run(5, 8, 2),))
    assert of.place(None, 10 * STRIPE * BLOCK, 0, [8, 20, 12]) == Place(1, (Run(5, 8, 2), Run(8, 10, 0)))
    assert of.place(None, 10 * STRIPE * BLOCK + 1, 0, [8, 20, 12]) is None


def test_none_begins_on_a_guest_however_much_room_it_has() -> None:
    of, free = loans([8, 12, 40], homes=2), [8, 12, 40]
    assert of.place(None, 8 * STRIPE * BLOCK, 0, free) == Place(1, (Run(3, 8, 2),))
    assert of.places(4 * STRIPE * BLOCK, free) == [Place(1, (Run(3, 4, 2),))], "not whole on the guest"
    assert of.places(2 * STRIPE * BLOCK, free) == [Place(0), Place(1)]
    room = Room(tables([8, 12, 40]), 4, homes=2)
    kept = room.deal([Keep(0, 8 * STRIPE * BLOCK - 1, Place(2)), Keep(1, STRIPE, Place(2))])
    assert {k.sequence: k.place.lane for k in kept} == {0: 1, 1: 0}, "nor comes to lie there when all are laid out"
    others = [sequence(STRIPE * BLOCK, Place(0)), sequence(STRIPE * BLOCK, Place(1))]
    short = room.fit(sequence(STRIPE * BLOCK, Place(0)), None, free, others, others)
    assert short is not None
    assert short.place.lane < 2


def test_one_that_goes_on_from_another_keeps_its_home_and_its_loans() -> None:
    """Though there is more room elsewhere; what lay behind the part that it has is not its own."""
    of, begun = loans([20, 20, 20]), Place(0, (Run(2, 9, 1),))
    found = of.place(begun, 6 * STRIPE * BLOCK, 3 * STRIPE * BLOCK, [4, 20, 8])
    assert found == Place(0, (Run(2, 3, 1), Run(4, 6, 1)))


def test_what_is_kept_of_a_place_ends_with_the_tokens_that_are_kept() -> None:
    of, place = loans([20, 20]), Place(0, (Run(1, 3, 1), Run(5, 6, 1)))
    assert of.settled(place, 6 * STRIPE * BLOCK) == place
    assert of.settled(place, 5 * STRIPE * BLOCK) == Place(0, (Run(1, 3, 1),))
    assert of.settled(place, STRIPE * BLOCK + 1) == Place(0, (Run(1, 2, 1),))
    assert of.settled(place, STRIPE * BLOCK) == Place(0)


def test_borrowed_blocks_are_counted_where_they_lie_and_as_far_as_tokens_go() -> None:
    of = loans([40, 40, 40], windows=(0, 16))
    place = Place(0, (Run(1, 3, 1), Run(4, 6, 2)))
    whole, part = sequence(6 * STRIPE * BLOCK, place), sequence((2 * STRIPE + 1) * BLOCK - 1, place)
    assert of.borrowed([]) == [0] * 6
    assert of.borrowed([whole]) == [0, 2 * STRIPE, 2 * STRIPE, 0, 0, 0], "a group with a window counts for nothing"
    assert of.borrowed([part]) == [0, STRIPE + 1, 0, 0, 0, 0]
    assert of.borrowed([whole, part, sequence(9, Place(2))]) == [0, 3 * STRIPE + 1, 2 * STRIPE, 0, 0, 0]


def grown(place: Place, free: list[int], stripes: int = 2) -> Place:
    """Where a sequence of so many whole stripes has its next one."""
    of, one = loans([40] * len(free)), sequence(stripes * STRIPE * BLOCK, place)
    assert not of.grow({one: 1}, lambda: list(free))
    return one.place


def test_the_next_stripe_is_at_home_then_with_the_creditor_then_where_most_room_is() -> None:
    assert grown(Place(0), [STRIPE, 30, 30]) == Place(0)
    assert grown(Place(0), [STRIPE - 1, 20, 30]) == Place(0, (Run(2, 3, 2),))
    lent = Place(0, (Run(1, 2, 1),))
    assert grown(lent, [0, STRIPE, 30]) == Place(0, (Run(1, 3, 1),))
    assert grown(lent, [0, STRIPE - 1, 30]) == Place(0, (Run(1, 2, 1), Run(2, 3, 2)))
    assert grown(lent, [STRIPE, 30, 30]) == lent, "home again as soon as there is room"
    assert grown(lent, [0, 0, 0]) == lent, "and where there is none"
    begun = Place(0, (Run(2, 4, 1),))  # for rows that never came
    assert grown(begun, [0, 0, 30]) == Place(0, (Run(2, 3, 2),))


def test_two_that_grow_at_once_do_not_get_the_same_room() -> None:
    of, asked = loans([40, 40, 40]), list[None]()
    both = [sequence(2 * STRIPE * BLOCK, Place(0)) for _ in range(2)]

    def free() -> list[int]:
        asked.append(None)
        return [0, STRIPE, STRIPE]

    assert not of.grow(dict.fromkeys(both, 1), free)
    assert sorted(one.place.moved[0].lane for one in both) == [1, 2]
    assert len(asked) == 1


def test_the_last_stripe_takes_what_the_sequence_can_still_become() -> None:
    of, one = loans([40, 40]), sequence(2 * STRIPE * BLOCK, Place(0))
    one.max_len = (2 * STRIPE + 1) * BLOCK
    assert not of.grow({one: 1}, lambda: [1, 40])
    assert one.place == Place(0)


def test_who_needs_no_new_stripe_asks_for_no_room() -> None:
    def free() -> list[int]:
        raise AssertionError("asked for")

    assert not loans([40, 40]).grow({sequence(2 * STRIPE * BLOCK - 1, Place(0)): 1}, free)
    prompt = sequence(3 * STRIPE * BLOCK, Place(0))
    prompt.num_scheduled = 1  # it has a place for all of its prompt
    assert not loans([40, 40]).grow({prompt: 2 * STRIPE * BLOCK}, free)
