"""Preempted sequences whose KV lies beside the pool: saved as they go, loaded as they come back, and nobody waits."""

from __future__ import annotations

from collections import deque

import pytest
from msgspec import structs
from scheduled import FakePool, check_tokens, make, take

from lamina import LLM
from lamina.engine.blocks.prefixes import Prefixes
from lamina.engine.blocks.swaps import Swaps
from lamina.engine.blocks.tier import Load, Tier
from lamina.engine.promises import Promises
from lamina.engine.rounds.steps import Round, ScheduledStep
from lamina.engine.scheduler import Scheduler
from lamina.engine.sequence import Sequence
from lamina.engine.timing import Timing
from lamina.protocol.blocks.tables import BlockTables
from lamina.protocol.partition import Lanes
from lamina.protocol.placement import FIRST, Place
from lamina.protocol.plan import Drop, Export, Free, Import, New, Rows, StepPlan, Transfer
from lamina.protocol.tiers import TierFacts, Transferred

SIZE = PAGE = 4


class TierHouse:
    """A scheduler, a pool that serves its rounds at once, and a medium that answers when it is told to."""

    def __init__(self, blocks: int, mode: str = "swap", *, windows: tuple[int, ...] = (0,)) -> None:
        self.ledger, tables = (BlockTables(windows, [blocks] * len(windows), SIZE) for _ in range(2))
        self.pool = FakePool(tables)
        facts = TierFacts(secret=b"s" * 32, identity=b"i", page=PAGE, pages=[[]])
        self.tier = Tier(facts, self.ledger, [[0]] * len(windows))
        self.swaps = Swaps(self.tier, mode, b"n")
        prefixes = Prefixes(self.ledger, SIZE)
        self.scheduler = Scheduler(
            self.ledger, max_num_seqs=8, prefill_chunk=64, prefixes=prefixes, tier=self.tier, swaps=self.swaps
        )
        self.medium: dict[bytes, list[int]] = {}
        self.owed: deque[tuple[Transfer | Drop, list[list[int]]]] = deque()
        self.plans: list[StepPlan] = []

    def round(self) -> ScheduledStep | None:
        steps = self.scheduler.schedule()
        for step in steps:
            self.plans.append(step.plan)
            for op in step.plan.ops:
                if isinstance(op, Export):
                    kept, first = self.pool.stored[op.sequence], op.first
                    stop = op.first + op.count
                    self.owed.append((op, [kept[i : min(stop, i + PAGE)] for i in range(first, stop, PAGE)]))
                elif isinstance(op, Import):
                    self.owed.append((op, []))
                elif isinstance(op, Drop):
                    self.owed.append((op, []))
                    self._drop()
            self.pool.run(step)
            take(step, dict(self.pool.drawn[step.plan.batch]))
            self.scheduler.complete(step)
        return steps[0] if steps else None

    def answer(self, error: str = "") -> None:
        """The medium has done one transfer, or has failed."""
        op, pages = self.owed.popleft()
        assert not isinstance(op, Drop)
        if not error and isinstance(op, Export):
            self.medium |= dict(zip(op.keys, pages, strict=True))
        elif not error:
            self.pool.stored[op.sequence] += [t for key in op.keys for t in self.medium[key]]
        self.scheduler.moved(Transferred(view=0, id=op.id, pages=0 if error else len(op.keys), error=error))
        self._drop()

    def _drop(self) -> None:
        """What is to be forgotten behind transfers that are done."""
        while self.owed and isinstance(self.owed[0][0], Drop):
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
    loads = ops_of(house, Import)
    plan = next(p for p in house.plans if any(op.keys[0] == loads[0].keys[0] for op in ops_of_plan(p, Export)))
    (freed,) = [op for op in plan.ops if isinstance(op, Free)]
    saved = [op for op in ops_of_plan(plan, Export) if op.sequence == freed.sequence]
    assert sum(op.count for op in saved) == sum(op.count for op in loads)
    rows = [r for p in house.plans for r in p.rows if r.sequence == loads[0].sequence]
    assert (rows[0].first, rows[0].count) == (sum(op.count for op in loads), 1), "the next row, and no other"
    assert house.scheduler.num_preemptions == house.swaps.num_saved == 1
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
    assert bool(ops_of(house, Import)) == (not error)


def test_recompute_saves_nothing_of_them() -> None:
    house = TierHouse(11, "recompute")
    sequences = two_that_need_more(house)
    house.serve(sequences)
    check_tokens(sequences)
    assert house.scheduler.num_preemptions == 1
    assert not ops_of(house, Import)


def test_what_a_window_has_passed_is_computed() -> None:
    house = TierHouse(11, windows=(0, 6))
    sequences = two_that_need_more(house)
    house.serve(sequences)
    check_tokens(sequences)
    assert house.scheduler.num_preemptions == 1
    assert house.swaps.num_saved == 0


def test_no_step_waits_for_a_medium() -> None:
    """Of a full pool all that is retained is still being saved by a disk that never answers."""
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
        assert sequences[0] in step.parts, "the oldest one has waited"
        decoded += 1
    assert decoded == 24
    assert house.scheduler.num_preemptions, "the other one gave way"
    house.serve(sequences)
    check_tokens(sequences)


def test_the_medium_is_asked_once_for_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    house = TierHouse(11)
    running, waiting = make(1, 20, 12), make(2, 30, 4)
    asked = 0
    right = Tier._find

    def find(self: Tier, sequence: Sequence, beyond: int) -> Load | None:
        nonlocal asked
        asked += sequence is waiting
        return right(self, sequence, beyond)

    monkeypatch.setattr(Tier, "_find", find)
    for sequence in (running, waiting):
        house.scheduler.add(sequence)
    for _ in range(6):
        house.round()
    assert (waiting.id, asked) == (-1, 1)
    keys = house.tier.keys_of(waiting, 8)
    house.tier.learn(TierFacts(secret=b"s" * 32, identity=b"i", page=PAGE, pages=[keys]), [[0]])
    house.round()
    assert asked == 2, "there are others now"
    assert house.tier.find(waiting, 0) == Load(8, (FIRST,), tuple(keys))
    house.tier.drop(keys[1:])
    assert house.tier.find(waiting, 0) == Load(4, (FIRST,), tuple(keys[:1]))


def test_auto_takes_the_faster_way() -> None:
    house = TierHouse(11, "auto")
    swaps = house.swaps
    assert swaps.worth_it, "so that it is measured"
    swaps.computed(100, 1.0)
    assert swaps.worth_it
    swaps.loaded(100, 2.0)
    assert not swaps.worth_it
    for _ in range(9):
        swaps.loaded(100, 0.1)
    assert swaps.worth_it


def test_what_was_saved_before_others_came_is_loaded_wherever_it_lies_now() -> None:
    """One of two lanes had it; then there is one lane, then there are two, whose workers have all of it, or some."""
    both, lanes = (Lanes((True, False)), Lanes((False, True))), (Lanes(),)
    ledger = BlockTables((0, 0), [20, 20], SIZE, both)
    facts = TierFacts(secret=b"s" * 32, identity=b"i", page=PAGE, pages=[[], []])
    tier = Tier(facts, ledger, [[0], [1]])
    swaps, sequence = Swaps(tier, "swap", b"n"), make(1, 2 * PAGE + 1, 4)
    sequence.id, sequence.num_scheduled, sequence.place = 0, 2 * PAGE, Place(1)
    ledger.apply(StepPlan(step=0, ops=[New(0)], rows=[Rows(0, 0, 2 * PAGE, Place(1))]))
    for op in tier.numbered([*swaps.save(sequence)]):
        for _ in range(2):
            tier.report(Transferred(view=0, id=op.id, pages=2))  # type: ignore[union-attr]
    keys = list(swaps._kept[sequence].keys)
    own = Load(2 * PAGE, (Place(1),), tuple(keys), own=True)
    assert swaps.find(sequence) == own
    ledger.become(BlockTables((0,), [20], SIZE, lanes))
    tier.learn(structs.replace(facts, pages=[keys]), [[0]])
    assert swaps.find(sequence) == own._replace(places=(FIRST,))
    ledger.become(BlockTables((0, 0), [20, 20], SIZE, both))
    tier.learn(structs.replace(facts, pages=[keys, keys[:1]]), [[0], [1]])
    assert swaps.find(sequence) == own._replace(places=(FIRST,))
    tier.learn(structs.replace(facts, pages=[keys, keys]), [[0], [1]])
    assert swaps.find(sequence) == own._replace(places=(Place(1), FIRST))


@pytest.mark.parametrize("drawing", [0, 1, 2])
def test_what_steps_have_drawn_that_were_never_told_is_drawn_again(drawing: int) -> None:
    """One that goes has rows in flight, whose KV goes with it. Behind a loss its tokens are drawn anew, perhaps others:
    it comes back with KV of tokens that are known, in whole pages, and a row is left to draw.
    """
    ledger, facts = BlockTables((0,), [20], SIZE), TierFacts(secret=b"s" * 32, identity=b"i", page=PAGE, pages=[[]])
    tier = Tier(facts, ledger, [[0]])
    swaps, sequence = Swaps(tier, "swap", b"n"), make(1, 9, 4)
    sequence.id, sequence.num_drawing, sequence.num_scheduled = 0, drawing, 8 + drawing
    ledger.apply(StepPlan(step=0, ops=[New(0)], rows=[Rows(0, 0, 8 + drawing)]))
    swaps.save(sequence)
    keys = list(swaps._kept[sequence].keys)
    sequence.restart()
    sequence.roll_back(0)
    tier.cancel()
    tier.learn(structs.replace(facts, pages=[keys]), [[0]])
    assert swaps.find(sequence) == Load(8, (FIRST,), tuple(keys[:2]), own=True)


def test_where_bits_count_no_clock_decides() -> None:
    for mode, worth_it in (("auto", True), ("swap", True), ("recompute", False)):
        swaps = Swaps(TierHouse(11).tier, mode, b"n", fixed=True)
        swaps.loaded(1, 9.0)
        swaps.computed(1, 0.1)
        assert swaps.worth_it == worth_it


def test_times_are_those_of_rounds_of_prompts_and_of_loads() -> None:
    house = TierHouse(99, "auto")
    swaps, timing = house.swaps, Timing(house.swaps, Promises())
    sequence = make(1, 40, 4)
    sequence.id = 7
    steps = [ScheduledStep(StepPlan(step=n, ops=[], rows=[]), [], []) for n in range(3)]
    timing.sent(steps[:1], 1.0)
    timing.sent(steps[1:2], 1.5)
    timing.done(0, Round(set(), 1, 40, 39, 0, steady=False), 3.0)
    assert swaps._compute_s == 2.0 / 40
    timing.done(1, Round(set(), 1, 40, 0, 0, steady=False), 9.0)
    assert swaps._compute_s == 2.0 / 40, "a round of decoding says nothing"
    sequence.num_loading = 32
    timing.sent([ScheduledStep(StepPlan(step=2, ops=[], rows=[Rows(7, 0, 40)]), [sequence], [])], 9.0)
    timing.done(2, Round(set(), 1, 40, 39, 0, steady=False), 99.0)
    assert swaps._compute_s == 2.0 / 40, "nor does one that may have waited for a load"
    sequence.num_loading = 0
    load = StepPlan(step=3, ops=[Import(7, 1, 0, 8, [b"k"])], rows=[])
    timing.sent([ScheduledStep(load, [], [])], 10.0)
    sequence.num_cached = 8
    timing.loaded(sequence, 14.0)
    timing.loaded(sequence, 99.0)
    assert swaps._load_s == 0.5


def test_a_swap_needs_a_place() -> None:
    with pytest.raises(ValueError, match="^--preemption-mode swap keeps KV beside the pool: say where, .*$"):
        LLM("nowhere", preemption_mode="swap")


def test_a_reset_has_the_medium_give_up_all_but_what_is_being_loaded() -> None:
    """Bit by bit, behind what is being saved; and whoever comes next finds pages of its own era alone."""
    house = TierHouse(40)
    first, second = make(1, 9, 2), make(2, 13, 2)
    house.scheduler.add(first)
    house.serve([first])
    house.scheduler.give_up_retained()
    house.scheduler.add(second)
    again = make(1, 13, 2)
    while not (second.finished and ops_of(house, Export)[-1].sequence == second.id):
        house.round()
    house.scheduler.add(again)
    while not again.num_loading:
        house.round()
    loaded, saving = house.owed[-1][0], house.owed[0][0]
    house.scheduler.forget_prefixes(b"e" * 16)
    assert house.scheduler.owes
    house.serve([again])
    check_tokens([again])
    assert house.medium.keys() == set(loaded.keys)
    assert set(saving.keys) <= {
        key for plan in house.plans for op in plan.ops if isinstance(op, Drop) for key in op.keys
    }
    assert not house.scheduler.owes
    later = make(2, 13, 2)
    house.scheduler.add(later)
    house.serve([later])
    assert later.num_cached == 0
    assert house.medium.keys() - set(loaded.keys)
