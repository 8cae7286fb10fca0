"""Sequences that are kept for the tokens that they begin with: found, forked, given up; tokens are as without.

Covers: lamina/scheduler/starts.py.
"""

from __future__ import annotations

import random

import pytest
from scheduled import FakePool, check_tokens, drive, make, take

from lamina.config.partition import KvShards
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.kv_placement import FIRST_LOCATION
from lamina.protocol.step_plan import Fork, Free, New, RowRange, SequenceOp, StepPlan
from lamina.request import CompletionOutput, SamplingParams
from lamina.scheduler.batch import ChunkPolicy
from lamina.scheduler.feature import NewMemory
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.scheduler.kv_manager.session_cache import SessionCache
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.sessions.cache_options import CacheOptions
from lamina.scheduler.sessions.session_table import SessionName
from lamina.scheduler.starts import Candidates, KvStart, start_op

SIZE = 4


class Desk:
    """Prefixes over a ledger, and sequences that come and go at once."""

    def __init__(self, blocks: int = 40, windows: tuple[int, ...] = (0,), **options: bool) -> None:
        self.ledger = BlockTables(windows, [blocks] * len(windows), SIZE)
        self.now = 0.0
        self.prefixes = PrefixCache(self.ledger, SIZE, clock=lambda: self.now, **options)
        self.step = 0

    def waiting(self, tokens: list[int], number: int = -1, salt: bytes = b"", **params: int) -> Sequence:
        found = Sequence(0, SamplingParams(**params), 0, tokens, CompletionOutput(0), 100, frozenset(), salt)
        found.id = number
        return found

    def match(self, sequence: Sequence) -> KvStart | None:
        return self.prefixes.longest_cached(self.prefixes.lookup(sequence))

    def start_op(self, sequence: Sequence, hit: KvStart | None) -> SequenceOp:
        self.prefixes.on_started(Candidates(sequence, [], ChunkPolicy(1, False)), hit)
        return start_op(sequence, hit)

    def is_coming(self, sequence: Sequence, hit: KvStart | None) -> bool:
        return self.prefixes.pending_match(self.prefixes.lookup(sequence), hit) is not None

    def serve(
        self, number: int, prompt: list[int], more: tuple[int, ...] = (), reason: str = "stop", salt: bytes = b"",
        retention_s: float = 0.0,
    ) -> KvStart | None:  # fmt: skip
        """Start a sequence, compute all of it but the last token, and end it."""
        sequence = self.waiting(prompt, number, salt)
        sequence.options = CacheOptions(retention_s=retention_s)
        hit = self.match(sequence)
        op = self.start_op(sequence, hit)
        sequence.tokens += more
        sequence.num_computed_tokens = len(sequence.tokens) - 1
        first = hit.length if hit else 0
        rows = (
            [RowRange(number, first, sequence.num_computed_tokens - first)]
            if sequence.num_computed_tokens > first
            else []
        )
        self.apply(op, rows=rows)
        sequence.finish(reason)
        self.apply(*self.prefixes.retain_or_free(sequence))
        return hit

    def apply(self, *ops: Fork | Free | New, rows: list[RowRange] | None = None) -> None:
        self.ledger.apply(StepPlan(step=self.step, ops=list(ops), rows=rows or []))
        self.step += 1
        self.ledger.check_integrity()


def forked(source: int, length: int, blocks: tuple[int, ...]) -> KvStart:
    return KvStart(length, (FIRST_LOCATION,), source=source, blocks=blocks)


def tokens(*runs: tuple[int, int]) -> list[int]:
    return [100 * name + i for name, count in runs for i in range(count)]


def test_the_longest_known_beginning_is_found_to_the_token() -> None:
    desk = Desk()
    assert desk.serve(1, tokens((1, 11))) is None
    assert desk.serve(2, tokens((1, 6), (2, 20))) == forked(1, 6, (1,))
    found = desk.match(desk.waiting(tokens((1, 6), (2, 11), (3, 9))))
    assert found == forked(2, 17, (4,)), "6 + 11 tokens are four pages and a token"
    assert desk.match(desk.waiting(tokens((1, 3), (4, 9)))) is None, "less than a page is not worth a fork"
    assert desk.match(desk.waiting(tokens((2, 20)))) is None, "a page counts behind the same pages only"


def test_another_salt_finds_nothing_and_the_same_one_finds_all() -> None:
    desk = Desk()
    desk.serve(1, tokens((1, 9)), salt=b"a")
    assert desk.serve(2, tokens((1, 9)), salt=b"b") is None
    assert desk.serve(3, tokens((1, 9))) is None, "none is another one, too"
    assert desk.ledger.sequences == [1, 2, 3], "each holds blocks of its own"
    for number, salt in ((1, b"a"), (2, b"b"), (3, b"")):
        assert desk.match(desk.waiting(tokens((1, 9)), salt=salt)) == forked(number, 8, (2,))


def test_nobody_waits_for_another_salt() -> None:
    """Its time would tell of it."""
    desk = Desk()
    source = desk.waiting(tokens((1, 20)), 1, b"a")
    desk.apply(desk.start_op(source, None), rows=[RowRange(1, 0, 9)])
    assert desk.is_coming(desk.waiting(tokens((1, 13)), salt=b"a"), None)
    assert not desk.is_coming(desk.waiting(tokens((1, 13)), salt=b"b"), None)


def test_salts_that_nobody_has_any_more_take_no_memory() -> None:
    desk = Desk()
    for number in range(5):
        desk.serve(number, tokens((1, 9)), salt=bytes([number]))
        desk.serve(10 + number, tokens((1, 3)), salt=bytes([10 + number]))  # not a page
    assert desk.prefixes.prefix_index.num_known_pages == 10, "two pages of each salt, whose second one is the rest"
    for number in desk.prefixes.eviction_order:
        desk.apply(desk.prefixes.evict(number))
    assert desk.prefixes.prefix_index.num_known_pages == 0
    desk.serve(30, tokens((1, 9)), salt=b"a")
    desk.apply(*desk.prefixes.clear())
    assert desk.prefixes.prefix_index.num_known_pages == 0
    assert desk.serve(31, tokens((1, 9)), salt=b"a") is None


@pytest.mark.parametrize(("length", "exact", "whole"), [(9, 8, 8), (8, 7, 4), (5, 4, 4), (4, 0, 0)])
def test_a_row_is_left_to_draw_behind(length: int, exact: int, whole: int) -> None:
    for wanted, desk in ((exact, Desk()), (whole, Desk(exact=False))):
        desk.serve(1, tokens((1, 30)))
        hit = desk.match(desk.waiting(tokens((1, length))))
        assert (hit.length if hit else 0) == wanted


def test_of_all_that_goes_on_behind_a_page_the_nearest_is_found() -> None:
    desk = Desk(blocks=200)
    ends = [(1, 2, 3, 4), (1, 2, 9), (1, 3), (2, 2, 2, 2), (5,)]
    for number, end in enumerate(ends, 1):
        desk.serve(number, [*tokens((7, 4)), *end, 0])  # whose last token is not computed
    for end, length, source in (
        ((1, 2, 3, 5, 5), 3, 1), ((1, 2, 9, 1), 3, 2), ((1, 3, 9, 1), 2, 3),
        ((2, 2, 3), 2, 4), ((5, 5), 1, 5), ((6, 6), 0, 5),
    ):  # fmt: skip
        hit = desk.match(desk.waiting([*tokens((7, 4)), *end]))
        assert hit is not None
        assert (hit.length, hit.source) == (4 + length, source), end
        assert hit.blocks == (1,), "the begun block is a copy"


def test_a_fork_of_a_begun_block_takes_one_of_its_own() -> None:
    desk = Desk(blocks=8)
    desk.serve(1, tokens((1, 8)))  # 7 tokens in 2 blocks
    assert desk.serve(2, tokens((1, 6), (2, 2))) == forked(1, 6, (1,))
    assert desk.ledger.free_blocks == (5,)
    assert desk.ledger.block_table(0, 1)[1][0] == desk.ledger.block_table(0, 2)[1][0]
    assert desk.ledger.block_table(0, 1)[1][1] != desk.ledger.block_table(0, 2)[1][1]


def test_completions_are_prefixes_too_unless_prompts_alone_are_meant() -> None:
    for prompts_only, length in ((False, 19), (True, 10)):
        desk = Desk(prompts_only=prompts_only)
        desk.serve(1, tokens((1, 10)), tuple(tokens((2, 10))))
        hit = desk.match(desk.waiting(tokens((1, 10), (2, 10), (3, 1))))
        assert hit is not None
        assert hit.length == length


def test_tokens_whose_kv_was_never_computed_are_no_prefix() -> None:
    """The last one of a completion."""
    desk = Desk()
    desk.serve(1, tokens((1, 8)))
    hit = desk.match(desk.waiting(tokens((1, 20))))
    assert hit is not None
    assert hit.length == 7


def test_scores_of_a_prompt_need_its_rows() -> None:
    desk = Desk()
    desk.serve(1, tokens((1, 30)))
    assert desk.match(desk.waiting(tokens((1, 30)), prompt_logprobs=1)) is None


def test_a_longer_one_takes_the_place_of_its_beginning() -> None:
    """A conversation holds its blocks once."""
    desk = Desk()
    desk.serve(1, tokens((1, 9)))
    desk.serve(2, tokens((1, 9), (2, 8)))
    assert (desk.prefixes.num_retained, desk.ledger.sequences) == (1, [2])
    desk.serve(3, tokens((1, 9), (3, 8)))
    assert desk.prefixes.num_retained == 2
    desk.serve(4, tokens((1, 9), (3, 8)))
    assert desk.ledger.sequences == [2, 3], "all its pages were known"
    desk.serve(5, tokens((1, 9), (2, 7)))
    assert desk.ledger.sequences == [2, 3], "and one that is not whole"
    desk.serve(6, tokens((1, 9), (2, 12)))
    assert desk.ledger.sequences == [3, 6], "it goes on where 2 had begun a page"


def test_what_went_wrong_is_not_kept() -> None:
    desk = Desk()
    desk.serve(1, tokens((1, 30)), reason="error")
    assert (desk.prefixes.num_retained, desk.ledger.sequences) == (0, [])


def test_the_least_recently_used_one_goes_first() -> None:
    desk = Desk()
    for number in (1, 2, 3):
        desk.serve(number, tokens((number, 9)))
    desk.serve(4, tokens((1, 8), (4, 1)))  # has all its pages from 1
    assert desk.prefixes.eviction_order == [2, 3, 1]
    assert [desk.prefixes.evict(number) for number in (2, 3, 1)] == [Free(2), Free(3), Free(1)]
    assert desk.match(desk.waiting(tokens((1, 9)))) is None


def test_what_is_prolonged_goes_behind_others_until_its_time_has_passed() -> None:
    desk = Desk()
    for number in (1, 2, 3):
        desk.serve(number, tokens((number, 9)), retention_s=10.0 * (number == 1))
    assert desk.prefixes.eviction_order == [2, 3, 1]
    desk.now = 11.0
    assert desk.prefixes.eviction_order == [1, 2, 3]
    desk.serve(4, tokens((1, 9)), retention_s=10.0)  # 1 has all of it, and is used later than 3
    desk.serve(5, tokens((5, 9)))
    assert desk.prefixes.eviction_order == [2, 3, 5, 1]
    desk.serve(6, tokens((1, 9), (6, 8)))  # in its place
    assert desk.prefixes.eviction_order == [2, 3, 5, 6]
    desk.now = 22.0
    assert desk.prefixes.eviction_order == [2, 3, 5, 6]
    desk.serve(7, tokens((2, 9), (7, 5)), reason="error", retention_s=10.0)
    assert desk.prefixes.eviction_order == [3, 5, 6, 2], "what went wrong prolongs nothing; 2 was used"


def test_a_running_one_is_found_as_far_as_it_was_scheduled() -> None:
    desk = Desk()
    source, other = desk.waiting(tokens((1, 20)), 1), desk.waiting(tokens((1, 13), (2, 5)))
    desk.apply(desk.start_op(source, None), rows=[RowRange(1, 0, 9)])
    assert desk.match(other) is None
    assert desk.is_coming(other, None)
    source.num_computed_tokens = 9
    hit = desk.match(other)
    assert hit == forked(1, 8, (2,))
    assert desk.is_coming(other, hit), "a third page"
    source.num_computed_tokens = 12
    desk.apply(rows=[RowRange(1, 9, 3)])
    assert desk.match(other) == forked(1, 12, (3,))
    assert not desk.is_coming(other, desk.match(other))
    assert desk.prefixes.eviction_order == [], "it runs"
    desk.prefixes.forget_sequence(source)
    assert desk.match(other) is None
    assert not desk.is_coming(other, None)


def test_nobody_waits_for_what_a_window_has_passed() -> None:
    desk = Desk(windows=(6,))
    source, other = desk.waiting(tokens((1, 30)), 1), desk.waiting(tokens((1, 13), (2, 5)))
    desk.apply(desk.start_op(source, None), rows=[RowRange(1, 0, 12)])
    for first, count in ((12, 8), (20, 8), (28, 1)):
        desk.apply(rows=[RowRange(1, first, count)])
    source.num_computed_tokens = 29
    assert desk.match(other) is None
    assert not desk.is_coming(other, None)


def test_a_window_that_is_gone_is_no_prefix() -> None:
    desk = Desk(windows=(0, 6))
    sequence = desk.waiting(tokens((1, 33)), 1)
    desk.apply(desk.start_op(sequence, None), rows=[RowRange(1, 0, 16)])
    desk.apply(rows=[RowRange(1, 16, 16)])
    desk.apply(rows=[RowRange(1, 32, 1)])
    sequence.num_computed_tokens = 33
    sequence.finish("stop")
    desk.apply(*desk.prefixes.retain_or_free(sequence))
    assert desk.match(desk.waiting(tokens((1, 13)))) is None
    hit = desk.match(desk.waiting(tokens((1, 40))))
    assert hit is not None
    assert hit.length == 33
    assert hit.blocks == (8, 1), "block 8 is a copy, of a window of 6 tokens one is left before"


class House:
    """A scheduler and a pool that serves its rounds at once."""

    def __init__(self, blocks: int) -> None:
        self.ledger, tables = (BlockTables([0], [blocks], SIZE) for _ in range(2))
        self.pool = FakePool(tables)
        prefixes = PrefixCache(self.ledger, SIZE)
        features = [prefixes, SessionCache(prefixes, self.ledger, None)]
        self.scheduler = Scheduler(self.ledger, max_num_seqs=16, prefill_chunk=256, features=features)
        self.number = 0

    def ask(self, prompt: list[int], outputs: int) -> Sequence:
        """Queue a request."""
        self.number += 1
        sequence = make(self.number, 0, outputs)
        sequence.prompt[:], sequence.tokens[:] = prompt, prompt
        sequence.max_len += len(prompt)
        self.scheduler.add(sequence)
        return sequence

    def serve(self) -> list[tuple[int, int]]:
        """Runs rounds until no request asks for more, and returns the sequences that run in each, and its rows."""
        found = []
        while steps := self.scheduler.schedule():
            found.append((self.scheduler.num_running, sum(step.plan.num_rows for step in steps)))
            for step in steps:
                self.pool.run(step)
                take(step, dict(self.pool.drawn[step.plan.batch]))
                self.scheduler.on_step_done(step)
        self.pool.tables.check_integrity()
        return found


def test_what_is_retained_gives_way_at_once() -> None:
    """To as many as have room, in the round in which they come."""
    house = House(64)
    for number in range(40):
        house.ask(tokens((number, 7)), 2)
        house.serve()
    assert house.scheduler.features[PrefixCache].num_retained == 32, "all blocks"
    assert house.scheduler.features[PrefixCache].evictable(house.scheduler.available_blocks) == [64]
    asked = [house.ask(tokens((100 + number, 11)), 12) for number in range(16)]
    rounds = house.serve()
    assert rounds[0][0] == 16, "3 blocks of 64 each"
    check_tokens(asked)


@pytest.mark.parametrize("others", [0, 2, 4])
def test_what_begins_alike_shares_however_full_the_pool_is(others: int) -> None:
    """The beginning of all is 21 of 30 blocks; everything else that is retained is evicted first, though it was used
    later.
    """
    house = House(30)
    beginning = tokens((500, 80))
    house.ask([*beginning, 1], 2)
    house.serve()
    for number in range(others):
        house.ask(tokens((number, 5)), 2)
        house.serve()
    asked = [house.ask([*beginning, 10 + number], 8) for number in range(4)]
    rounds = house.serve()
    assert rounds[0][0] == 4, "each takes a block besides"
    assert sum(rows for _, rows in rounds) <= 4 * (8 + 1)
    check_tokens(asked)


def test_a_reset_is_forgotten_where_workers_meet_anew() -> None:
    house = House(20)
    house.ask(tokens((1, 9)), 2)
    house.serve()
    house.scheduler.reset_prefix_cache()
    assert house.scheduler.roll_back([], lambda keep: keep.length) == []
    house.pool.tables.reconcile([])
    house.pool.stored.clear()
    again = house.ask(tokens((1, 9)), 2)
    house.serve()
    check_tokens([again])


def test_what_is_retained_stays_where_workers_meet_anew() -> None:
    """It stays as far as all workers have it whole; what ran is found no more, but computed again."""
    house = House(40)
    for number in (1, 2):
        house.ask(tokens((number, 9)), 4)
        house.serve()
    first, second = house.scheduler.features[PrefixCache].eviction_order
    running = house.ask(tokens((3, 9)), 30)
    for step in house.scheduler.schedule():
        house.pool.run(step)
        take(step, dict(house.pool.drawn[step.plan.batch]))
        house.scheduler.on_step_done(step)
    lengths = {first: 12, second: 11}
    keep = house.scheduler.roll_back([], lambda each: lengths.get(each.sequence, 0))
    assert [(each.sequence, each.length) for each in keep] == [(first, 12)], "of the second one a token is missing"
    house.pool.tables.reconcile(keep)
    house.pool.stored = {first: house.pool.stored[first][:12]}
    again = [house.ask([*tokens((number, 9)), 7], 4) for number in (1, 2)]
    house.serve()
    check_tokens([running, *again])
    assert [sequence.num_cached_tokens for sequence in again] == [9, 0]


def test_what_is_retained_moves_as_far_as_there_is_room_behind_what_runs() -> None:
    """To other blocks: the most recently used one first; a session goes where its leaf goes."""
    house = House(40)
    session = house.scheduler.features[PrefixCache].sessions.get_or_create(SessionName(b"", "mine"))
    for number in (1, 2, 3):
        house.ask(tokens((number, 9)), 4).turn.session = session if number == 3 else None
        house.serve()
    running = house.ask(tokens((4, 9)), 4)
    for step in house.scheduler.schedule():
        house.pool.run(step)
        take(step, dict(house.pool.drawn[step.plan.batch]))
        house.scheduler.on_step_done(step)
    numbers = [*house.scheduler.features[PrefixCache].eviction_order, running.id]
    lanes = (KvShards((True, False)), KvShards((False, True)))
    keep = house.scheduler.roll_back([], lambda each: each.length)
    assert sorted(each.sequence for each in keep) == numbers
    kept = house.scheduler.adopt_memory(NewMemory(BlockTables([0, 0], [4, 8], SIZE, lanes), 16), keep)
    assert {each.sequence: each.location.kv_shard for each in kept} == {running.id: 0, numbers[2]: 1, numbers[1]: 1}
    assert house.scheduler.features[PrefixCache].eviction_order == numbers[1:3]
    assert (session.retained_sequence, session.location.kv_shard) == (numbers[2], 1)
    for number, there in ((1, 0), (2, 9), (3, 9)):
        waiting = house.ask([*tokens((number, 9)), 7], 4)
        hit = house.scheduler.features[PrefixCache].longest_cached(
            house.scheduler.features[PrefixCache].lookup(waiting)
        )
        assert (hit.length if hit else 0) == there
    house.ledger.check_integrity()


def family(order: random.Random, count: int) -> list[Sequence]:
    """Prompts that begin with one another's tokens."""
    known = [tokens((500 + name, 40)) for name in range(3)]
    found = []
    for number in range(count):
        prompt = order.choice(known)[: order.randint(5, 40)] + [1000 * number + i for i in range(order.randint(1, 12))]
        sequence = make(number, 0, order.randint(1, 8))
        sequence.prompt[:], sequence.tokens[:] = prompt, prompt
        sequence.max_len += len(prompt)
        known.append(prompt)
        found.append(sequence)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_tokens_are_as_without(seed: int) -> None:
    order = random.Random(seed)
    sequences = family(order, 30)
    options = [
        {},
        {"num_batches": 3},
        {"lanes": (KvShards((True, False)), KvShards((False, True))), "num_batches": 2},
        {"lanes": (KvShards((True, False)), KvShards((False, True))), "stripe": 2},
        {"window": 7},
        {"num_batches": 3, "regroups": order, "cancels": order},
    ][seed % 6]
    scheduler = drive(sequences, blocks=order.choice([24, 40, 200]), arrivals=order, page=4, **options)  # type: ignore[arg-type]
    check_tokens(sequences)
    assert scheduler.features[PrefixCache].num_hit_tokens > 0 or "window" in options
