"""Preempted sequences whose KV is offloaded: it is saved as they go and loaded as they come back, and no step waits.

Covers: lamina/scheduler/kv_manager/offload_index.py, lamina/scheduler/kv_manager/pending_deletes.py,
lamina/scheduler/scheduler_output.py, lamina/scheduler/step_timing.py.
"""

from __future__ import annotations

from collections import deque

import pytest
from msgspec import structs
from scheduled import FakePool, check_tokens, make, take

from lamina import LLM
from lamina.config.partition import KvShards
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.kv_placement import FIRST_LOCATION, KvLocation
from lamina.protocol.offload_messages import OffloadFacts, TransferDone
from lamina.protocol.step_plan import DeletePages, Free, LoadKv, New, RowRange, SaveKv, StepPlan, Transfer
from lamina.scheduler.batch import Batch
from lamina.scheduler.feature import Loss, PlanDraft
from lamina.scheduler.kv_manager.offload_index import OffloadIndex
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.scheduler.kv_manager.session_cache import SessionCache
from lamina.scheduler.kv_manager.swap import SwapPolicy
from lamina.scheduler.prefix_index import PrefixIndex
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.scheduler_output import Round, ScheduledStep
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.slo_admission import SloAdmission
from lamina.scheduler.starts import KvStart
from lamina.scheduler.step_timing import StepTimer

SIZE = PAGE = 4


class TierHouse:
    """A scheduler, a pool that serves its rounds at once, and a medium that answers when a test lets it."""

    def __init__(
        self,
        blocks: int,
        mode: str = "swap",
        *,
        windows: tuple[int, ...] = (0,),
        workers: int = 1,
        recomputes: bool = True,
    ) -> None:
        self.workers = workers
        self.ledger, tables = (BlockTables(windows, [blocks] * len(windows), SIZE) for _ in range(2))
        self.pool = FakePool(tables)
        facts = OffloadFacts(secret=b"s" * 32, identity=b"i", page_size=PAGE, pages=[[]] * workers)
        prefixes, holders = PrefixCache(self.ledger, SIZE), [[*range(workers)]] * len(windows)
        self.tier = OffloadIndex(facts, self.ledger, holders, prefixes.prefix_index, recomputes=recomputes)
        self.swaps = SwapPolicy(self.tier, mode, b"n")
        self.scheduler = Scheduler(
            self.ledger,
            max_num_seqs=8,
            prefill_chunk=64,
            features=[self.swaps, prefixes, SessionCache(prefixes, self.ledger, self.tier), self.tier],
        )
        self.medium: dict[bytes, list[int]] = {}
        self.owed: deque[tuple[Transfer | DeletePages, list[list[int]]]] = deque()
        self.plans: list[StepPlan] = []

    def round(self) -> ScheduledStep | None:
        steps = self.scheduler.schedule()
        for step in steps:
            self.plans.append(step.plan)
            for op in step.plan.ops:
                if isinstance(op, SaveKv):
                    kept, first = self.pool.stored[op.sequence], op.first
                    stop = op.first + op.count
                    self.owed.append((op, [kept[i : min(stop, i + PAGE)] for i in range(first, stop, PAGE)]))
                elif isinstance(op, LoadKv):
                    self.owed.append((op, []))
                elif isinstance(op, DeletePages):
                    self.owed.append((op, []))
                    self._drop()
            self.pool.run(step)
            take(step, dict(self.pool.drawn[step.plan.batch]))
            self.scheduler.on_step_done(step)
        return steps[0] if steps else None

    def answer(self, error: str = "") -> None:
        """The medium has done one transfer, or has failed."""
        op, pages = self.owed.popleft()
        assert not isinstance(op, DeletePages)
        if not error and isinstance(op, SaveKv):
            self.medium |= dict(zip(op.keys, pages, strict=True))
        elif not error:
            self.pool.stored[op.sequence] += [t for key in op.keys for t in self.medium[key]]
        done = 0 if error else len(op.keys)
        for _ in range(self.workers):
            self.scheduler.on_report(TransferDone(epoch=0, transfer_id=op.transfer_id, num_pages=done, error=error))
        self._drop()

    def _drop(self) -> None:
        """Drops what is to be forgotten after transfers that are done."""
        while self.owed and isinstance(self.owed[0][0], DeletePages):
            for key in self.owed.popleft()[0].keys:
                self.medium.pop(key, None)

    def serve(self, sequences: list[Sequence], error: str = "") -> None:
        """To the end: the medium answers where nothing else can be done."""
        for _ in range(1000):
            if self.round() is None:
                if all(s.finished for s in sequences) and not self.owed:
                    break
                if self.owed:
                    self.answer(error)
        assert all(s.finished for s in sequences)
        self.ledger.check_integrity()


def ops_of(house: TierHouse, kind: type) -> list[Transfer]:
    return [op for plan in house.plans for op in plan.ops if isinstance(op, kind)]


def two_that_need_more(house: TierHouse) -> list[Sequence]:
    sequences = [make(1, 9, 20), make(2, 10, 20)]  # the second one goes in the midst of a page
    for sequence in sequences:
        house.scheduler.add(sequence)
    return sequences


def test_a_preempted_one_comes_back_as_it_went() -> None:
    house = TierHouse(11)
    sequences = two_that_need_more(house)
    house.serve(sequences)
    check_tokens(sequences)
    loads = ops_of(house, LoadKv)
    plan = next(p for p in house.plans if any(op.keys[0] == loads[0].keys[0] for op in ops_of_plan(p, SaveKv)))
    (freed,) = [op for op in plan.ops if isinstance(op, Free)]
    saved = [op for op in ops_of_plan(plan, SaveKv) if op.sequence == freed.sequence]
    assert sum(op.count for op in saved) == sum(op.count for op in loads)
    rows = [r for p in house.plans for r in p.rows if r.sequence == loads[0].sequence]
    assert (rows[0].first, rows[0].count) == (sum(op.count for op in loads), 1), "the next row, and no other"
    assert house.scheduler.num_preemptions == house.swaps.num_swapped_sequences == 1
    keys = {key for op in saved for key in op.keys}
    assert not keys & house.medium.keys(), "nobody needs them any more"


def ops_of_plan(plan: StepPlan, kind: type) -> list[Transfer]:
    return [op for op in plan.ops if isinstance(op, kind)]


@pytest.mark.parametrize("error", ["disk full", ""])
def test_what_could_not_be_kept_is_computed(error: str) -> None:
    house = TierHouse(11)
    sequences = two_that_need_more(house)
    house.serve(sequences, error)
    check_tokens(sequences)
    assert bool(ops_of(house, LoadKv)) == (not error)


LOST, GONE = (0, "damaged", False), (0, "gone", True)  # pages, the error, and whether it is a miss


@pytest.mark.parametrize(
    ("reports", "fails"),
    [((LOST, GONE), False), ((GONE, LOST), False), ((GONE, (1, "damaged", False)), False), ((LOST, LOST), True)],
)
def test_a_page_that_has_expired_is_computed_although_failed_loads_end_requests(
    reports: tuple[tuple[int, str, bool], ...], fails: bool
) -> None:
    """A page that one worker misses may be damaged at another one: it is a miss, as what comes after it is."""
    house = TierHouse(11, workers=2, recomputes=False)
    two_that_need_more(house)
    while house.round() is not None or not isinstance(house.owed[0][0], LoadKv):
        if house.owed and isinstance(house.owed[0][0], SaveKv):
            house.answer()
    number = house.owed.popleft()[0].transfer_id  # type: ignore[union-attr]
    first, last = (
        house.scheduler.on_report(
            TransferDone(epoch=0, transfer_id=number, num_pages=pages, error=error, is_miss=is_miss)
        )
        for pages, error, is_miss in reports
    )
    assert first is None
    assert last is not None
    assert last.error
    assert last.is_fatal == fails


def test_recompute_saves_nothing_of_them() -> None:
    house = TierHouse(11, "recompute")
    sequences = two_that_need_more(house)
    house.serve(sequences)
    check_tokens(sequences)
    assert house.scheduler.num_preemptions == 1
    assert not ops_of(house, LoadKv)


def test_what_a_window_has_passed_is_computed() -> None:
    house = TierHouse(11, windows=(0, 6))
    sequences = two_that_need_more(house)
    house.serve(sequences)
    check_tokens(sequences)
    assert house.scheduler.num_preemptions == 1
    assert house.swaps.num_swapped_sequences == 0


def test_no_step_waits_for_a_medium() -> None:
    """A disk that never answers is still saving all that a full pool retains."""
    house = TierHouse(16)
    for number in range(4):
        sequence = make(10 + number, 9, 4)
        house.scheduler.add(sequence)
        while not sequence.finished:
            house.round()
        house.round()
    assert len(house.owed) >= 3, "being saved"
    sequences = [make(1, 17, 24), make(2, 9, 30)]
    for sequence in sequences:
        house.scheduler.add(sequence)
    decoded = 0
    while not sequences[0].finished:
        step = house.round()
        assert step is not None, "a round without anybody"
        assert sequences[0] in step.sequences, "the oldest one has waited"
        decoded += 1
    assert decoded == 24
    assert house.scheduler.num_preemptions, "the other one gave way"
    house.serve(sequences)
    check_tokens(sequences)


def test_the_medium_is_asked_once_for_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    house = TierHouse(11)
    running, waiting = make(1, 20, 12), make(2, 30, 4)
    asked = 0
    right = OffloadIndex.find

    def find(self: OffloadIndex, sequence: Sequence, beyond: int) -> KvStart | None:
        nonlocal asked
        asked += sequence is waiting
        return right(self, sequence, beyond)

    monkeypatch.setattr(OffloadIndex, "find", find)
    for sequence in (running, waiting):
        house.scheduler.add(sequence)
    for _ in range(6):
        house.round()
    assert (waiting.id, asked) == (-1, 1)
    keys = house.tier.keys_of(waiting, 8)
    house.tier.sync(OffloadFacts(secret=b"s" * 32, identity=b"i", page_size=PAGE, pages=[keys]), [[0]])
    house.round()
    assert asked == 2, "there are others now"
    assert house.tier.find_loadable(waiting, 0) == KvStart(8, (FIRST_LOCATION,), tuple(keys))
    house.tier.remove(keys[1:])
    assert house.tier.find_loadable(waiting, 0) == KvStart(4, (FIRST_LOCATION,), tuple(keys[:1]))


def test_auto_takes_the_faster_way() -> None:
    house = TierHouse(11, "auto")
    swaps = house.swaps
    assert swaps.is_worthwhile, "so that it is measured"
    swaps.record_prefill(100, 1.0)
    assert swaps.is_worthwhile
    swaps.record_load(100, 2.0)
    assert not swaps.is_worthwhile
    for _ in range(9):
        swaps.record_load(100, 0.1)
    assert swaps.is_worthwhile


def test_what_was_saved_before_others_came_is_loaded_wherever_it_lies_now() -> None:
    """One of two lanes had it; then there is one lane, then there are two, whose workers have all of it, or some."""
    both, lanes = (KvShards((True, False)), KvShards((False, True))), (KvShards(),)
    ledger = BlockTables((0, 0), [20, 20], SIZE, both)
    facts = OffloadFacts(secret=b"s" * 32, identity=b"i", page_size=PAGE, pages=[[], []])
    tier = OffloadIndex(facts, ledger, [[0], [1]], PrefixIndex())
    swaps, sequence = SwapPolicy(tier, "swap", b"n"), make(1, 2 * PAGE + 1, 4)
    sequence.id, sequence.num_computed_tokens, sequence.location = 0, 2 * PAGE, KvLocation(1)
    ledger.apply(StepPlan(step=0, ops=[New(0)], rows=[RowRange(0, 0, 2 * PAGE, KvLocation(1))]))
    ops = tier.assign_ids([*swaps.save_ops(sequence)])
    for op in ops:
        for _ in range(2):
            tier.on_transfer_done(TransferDone(epoch=0, transfer_id=op.transfer_id, num_pages=2))  # type: ignore[union-attr]
    keys = [key for op in ops for key in op.keys]  # type: ignore[union-attr]
    own = KvStart(2 * PAGE, (KvLocation(1),), tuple(keys), is_swapped=True)
    assert swaps.find_loadable(sequence) == own
    ledger.replace_with(BlockTables((0,), [20], SIZE, lanes))
    tier.sync(structs.replace(facts, pages=[keys]), [[0]])
    assert swaps.find_loadable(sequence) == own._replace(locations=(FIRST_LOCATION,))
    ledger.replace_with(BlockTables((0, 0), [20, 20], SIZE, both))
    tier.sync(structs.replace(facts, pages=[keys, keys[:1]]), [[0], [1]])
    assert swaps.find_loadable(sequence) == own._replace(locations=(FIRST_LOCATION,))
    tier.sync(structs.replace(facts, pages=[keys, keys]), [[0], [1]])
    assert swaps.find_loadable(sequence) == own._replace(locations=(KvLocation(1), FIRST_LOCATION))


@pytest.mark.parametrize("drawing", [0, 1, 2])
def test_what_steps_have_drawn_that_were_never_told_is_drawn_again(drawing: int) -> None:
    """One that goes has rows in flight, whose KV goes with it. After a loss its tokens are sampled anew, and may
    differ: it comes back with KV of known tokens, in whole pages, and one row is left to sample.
    """
    ledger, facts = (
        BlockTables((0,), [20], SIZE),
        OffloadFacts(secret=b"s" * 32, identity=b"i", page_size=PAGE, pages=[[]]),
    )
    tier = OffloadIndex(facts, ledger, [[0]], PrefixIndex())
    swaps, sequence = SwapPolicy(tier, "swap", b"n"), make(1, 9, 4)
    sequence.id, sequence.num_output_placeholders, sequence.num_computed_tokens = 0, drawing, 8 + drawing
    ledger.apply(StepPlan(step=0, ops=[New(0)], rows=[RowRange(0, 0, 8 + drawing)]))
    keys = [key for op in swaps.save_ops(sequence) for key in op.keys]
    sequence.reset_computed()
    sequence.roll_back(0)
    tier.roll_back(Loss([], lambda keep: 0))
    tier.sync(structs.replace(facts, pages=[keys]), [[0]])
    assert swaps.find_loadable(sequence) == KvStart(8, (FIRST_LOCATION,), tuple(keys[:2]), is_swapped=True)


def test_where_bits_count_no_clock_decides() -> None:
    for mode, worth_it in (("auto", True), ("swap", True), ("recompute", False)):
        swaps = SwapPolicy(TierHouse(11).tier, mode, b"n", fixed=True)
        swaps.record_load(1, 9.0)
        swaps.record_prefill(1, 0.1)
        assert swaps.is_worthwhile == worth_it


def test_times_are_those_of_rounds_of_prompts_and_of_loads() -> None:
    house = TierHouse(99, "auto")
    swaps, now = house.swaps, [0.0]
    timing = StepTimer(SloAdmission(clock=lambda: now[0]), swaps)

    def begin(plan: StepPlan, at_s: float, *sequences: Sequence) -> ScheduledStep:
        now[0] = at_s
        batch = Batch(0, ops=list(plan.ops))
        timing.extend_plan(
            PlanDraft(batch, plan.step, dict.fromkeys(sequences, 1), house.ledger, lambda: plan, lambda *_: False, [])
        )
        return ScheduledStep(plan, [], [])

    def end(step: ScheduledStep, prompt_rows: int, at_s: float) -> None:
        now[0] = at_s
        timing.on_step_done(step, Round(set(), 1, 40, prompt_rows, 0, is_decode_only=False))

    sequence = make(1, 40, 4)
    sequence.id = 7
    first, second = (begin(StepPlan(step=n, ops=[], rows=[]), at_s) for n, at_s in ((0, 1.0), (1, 1.5)))
    end(first, 39, 3.0)
    assert swaps.prefill_estimate_s(1) == 2.0 / 40
    end(second, 0, 9.0)
    assert swaps.prefill_estimate_s(1) == 2.0 / 40, "a round of decoding says nothing"
    sequence.set_transfer(loading_tokens=32)
    end(begin(StepPlan(step=2, ops=[], rows=[]), 9.0, sequence), 39, 99.0)
    assert swaps.prefill_estimate_s(1) == 2.0 / 40, "nor does one that may have waited for a load"
    sequence.set_transfer(loading_tokens=0)
    begin(StepPlan(step=3, ops=[LoadKv(7, 1, 0, 8, [b"k"])], rows=[]), 10.0)
    sequence.num_cached_tokens = 8
    now[0] = 14.0
    timing.on_loaded(sequence)
    now[0] = 99.0
    timing.on_loaded(sequence)
    assert swaps.load_s == 0.5


def test_a_swap_needs_a_place() -> None:
    with pytest.raises(ValueError, match='^preemption_mode="swap" needs kv_offloading_size .*$'):
        LLM("nowhere", preemption_mode="swap")


def test_a_reset_has_the_medium_give_up_all_but_what_is_being_loaded() -> None:
    """Pages go bit by bit, after those that are being saved; the next requests find pages of their own era alone."""
    house = TierHouse(40)
    first, second = make(1, 9, 2), make(2, 13, 2)
    house.scheduler.add(first)
    house.serve([first])
    house.scheduler.evict_retained()
    house.scheduler.add(second)
    again = make(1, 13, 2)
    while not (second.finished and ops_of(house, SaveKv)[-1].sequence == second.id):
        house.round()
    house.scheduler.add(again)
    while not again.transfer.loading_tokens:
        house.round()
    loaded, saving = house.owed[-1][0], house.owed[0][0]
    house.scheduler.reset_prefix_cache(b"e" * 16)
    house.serve([again])
    check_tokens([again])
    assert house.medium.keys() == set(loaded.keys)
    assert set(saving.keys) <= {
        key for plan in house.plans for op in plan.ops if isinstance(op, DeletePages) for key in op.keys
    }
    later = make(2, 13, 2)
    house.scheduler.add(later)
    house.serve([later])
    assert later.num_cached_tokens == 0
    assert house.medium.keys() - set(loaded.keys)
