"""Whatever dies, at whatever moment: each request gets its tokens, once; and what would break that is seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from lamina.engine.engine import Engine
from lamina.engine.request import Request
from lamina.executor.step_reorder_buffer import StepReorderBuffer
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.blocks.held_blocks import BlockPool
from lamina.protocol.control import StepDone
from lamina.protocol.step_plan import CopyStripes
from lamina.scheduler import scheduler as scheduler_module
from lamina.scheduler.kv_manager.allocator import KvAllocator
from lamina.scheduler.kv_manager.migration import KvMigration
from lamina.scheduler.kv_manager.offload_index import OffloadIndex
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.scheduler.kv_manager.spill_placement import SpillAllocator
from lamina.scheduler.kv_manager.swap import SwapPolicy
from lamina.scheduler.prefill_dispatch import PrefillDispatcher
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.surviving_kv import SurvivingTokens
from simulation.copies import SimCopies
from simulation.play import is_broken
from simulation.run import ScenarioError, check, check_restart, play, smaller
from simulation.scenario import Scenario, borrowing, leaving, planned, scenario
from simulation.workers import SimMemory

SEEDS, PARTS, MANY = 300, 6, 1000
RESTARTS = 120
PLANNED = 96
LEAVING = 24
BORROWING = 60
ENOUGH = 600  # seeds, of which one must be broken by a mistake


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_every_stream_goes_on(part: int) -> None:
    losses = preemptions = 0
    for seed in range(part, SEEDS, PARTS):
        outcome = check(scenario(seed))
        losses, preemptions = losses + outcome.losses, preemptions + outcome.preemptions
    assert losses > SEEDS / PARTS
    assert preemptions, "no memory was tight"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_stream_of_many_goes_on(part: int) -> None:
    """Once a week, of a thousand seeds those that each run leaves out."""
    assert sum(check(scenario(seed)).losses for seed in range(SEEDS + part, MANY, PARTS))


@pytest.mark.parametrize(
    "seed",
    [
        612,  # what a sequence was forked from in this round gives way in it
        924,  # the plan of a batch comes before that of another one, whose transfer was begun before
        2136,  # a prefill worker dies while it tells of two chunks
        1000014,  # no sequence decodes, and what is retained is in the way of a chunk of a prompt
        5066230,  # two chunks of a prompt, the second in a block of its own, and one more prompt in a pool nearly full
        5030298,  # a prompt is scored, gives way, comes back, and a page of it is lost after its first rows
    ],
)
def test_rare_ones(seed: int) -> None:
    check(scenario(seed))


def test_a_rare_one_that_the_next_engine_meets() -> None:
    """A completion that has given way is computed before the one that it shares with, and both are cancelled."""
    check_restart(scenario(5063589))


@pytest.mark.long(but=["5"])
@pytest.mark.parametrize("part", range(PARTS))
def test_every_stream_goes_on_while_memory_workers_come_and_go(part: int) -> None:
    """Some die in the midst of it, and some KV is damaged; no reader sees a difference to as many workers
    as at first.
    """
    losses = changes = 0
    for seed in range(part, PLANNED, PARTS):
        outcome = check(planned(seed))
        losses, changes = losses + outcome.losses, changes + outcome.changes
    assert changes > PLANNED / PARTS
    assert losses > PLANNED / PARTS


@pytest.mark.long(but=["nothing is copied", "where it lies is sure at once"])
@pytest.mark.parametrize("mistake", ["", "nothing is copied", "where it lies is sure at once"])
def test_sequences_leave_memory_workers_one_by_one(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of whom die in the midst of that."""
    took, take, tend = list[int](), SimCopies.take, KvMigration.after_admission

    def taken(self: SimCopies, worker: SimMemory, op: CopyStripes) -> int:
        took.append(take(self, worker, op) if mistake != "nothing is copied" else 4)
        return took[-1]

    def tended(self: KvMigration, *args: Any, **options: Any) -> None:
        tend(self, *args, **options)
        self.unsure.clear()

    monkeypatch.setattr(SimCopies, "take", taken)
    if mistake == "where it lies is sure at once":
        monkeypatch.setattr(KvMigration, "after_admission", tended)
    if mistake:
        assert any(is_broken(check, leaving(seed)) for seed in range(ENOUGH))
        return
    losses = sum(check(leaving(seed)).losses for seed in range(LEAVING))
    assert losses
    assert sum(map(bool, took)) > LEAVING // 2


@pytest.mark.long
def test_what_is_kept_beside_the_pools_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """But that tokens are loaded, and not computed."""
    loads, right = list[int](), OffloadIndex.begin_load

    def load(self: OffloadIndex, sequence: Sequence, wanted: Any, spare_s: float) -> Any:
        loads.append(wanted.length)
        return right(self, sequence, wanted, spare_s)

    monkeypatch.setattr(OffloadIndex, "begin_load", load)
    for seed in range(0, SEEDS, 6):
        of = replace(scenario(seed), faults=())
        if "kv_offloading_size" in of.options:
            without = {**of.options, "kv_offloading_size": "", "preemption_mode": "auto"}
            both = play(of).requests, play(replace(of, options=without)).requests
            assert [a for ask, a, b in zip(of.asks, *both, strict=True) if ask.cancel_s is None and a != b] == []
    assert len(loads) > SEEDS / 60


def keeping(owner: type[Any], method: str, *fields: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A mistake: what ``method`` puts right stays as it was."""

    def make(monkeypatch: pytest.MonkeyPatch) -> None:
        right = getattr(owner, method)

        def wrong(self: Any, *args: Any) -> Any:
            before = {name: getattr(self, name) for name in fields}
            found = right(self, *args)
            for name, had in before.items():
                setattr(self, name, had)
            return found

        monkeypatch.setattr(owner, method, wrong)

    return make


def replacing(owner: Any, method: str, wrong: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setattr(owner, method, wrong)


def prefill_keeping(part: str) -> Callable[[pytest.MonkeyPatch], None]:
    """One thing that prefill workers have stays with them."""

    def wrong(self: PrefillDispatcher, sequences: Iterable[Sequence] = ()) -> tuple[int, ...]:
        for worker in self.workers:
            if part != "prompts":
                worker.prompts.clear()
            if part != "in_flight":
                worker.in_flight.clear()
            if part != "held":
                worker.held_sequence = -1
        return ()

    return replacing(PrefillDispatcher, "roll_back", wrong)


def scores_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Engine.roll_back

    def wrong(self: Engine, change: Any) -> Any:
        before = [(s, s.num_scored_prompt_tokens) for r in self.requests.values() for s in r.sequences]
        keep = right(self, change)
        for sequence, count in before:
            sequence.num_scored_prompt_tokens = count
        return keep

    monkeypatch.setattr(Engine, "roll_back", wrong)


def told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake: what was done before a loss is added once more."""
    right, right_append = Engine.on_epoch_changed, Request.append

    def twice(self: Request, sequence: Sequence, drawn: Any) -> None:
        right_append(self, sequence, drawn)
        sequence.output.token_ids.append(drawn.token_id)

    def wrong(self: Engine, change: Any) -> Any:
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(Request, "append", twice)
            return right(self, change)

    monkeypatch.setattr(Engine, "on_epoch_changed", wrong)


def old_view_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are of the epoch before."""
    right = Engine.resume

    def wrong(self: Engine, ready: Any) -> None:
        view = self.scheduler.epoch
        right(self, ready)
        self.scheduler.epoch = view

    monkeypatch.setattr(Engine, "resume", wrong)


def waiting_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake: a preempted sequence whose last token was being sampled goes on waiting for it."""
    right = Scheduler.roll_back

    def wrong(self: Scheduler, *args: Any) -> Any:
        before = [(s, s.num_output_placeholders) for s in self.waiting]
        keep = right(self, *args)
        for sequence, count in before:
            sequence.num_output_placeholders = count
        return keep

    monkeypatch.setattr(Scheduler, "roll_back", wrong)


def rows_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose KV is being loaded has rows at once."""
    right = OffloadIndex.begin_load

    def wrong(self: OffloadIndex, sequence: Sequence, wanted: Any, spare_s: float) -> Any:
        ops = right(self, sequence, wanted, spare_s)
        sequence.num_computed_tokens = wanted.length
        sequence.set_transfer(loading_tokens=0)
        return ops

    monkeypatch.setattr(OffloadIndex, "begin_load", wrong)


def transfer_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that was under way is awaited after a loss, too."""
    keeping(Sequence, "roll_back", "transfer")(monkeypatch)
    keeping(Sequence, "reset_computed", "transfer")(monkeypatch)


def holders_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake: the memory workers are those from before."""
    right = Engine.roll_back

    def wrong(self: Engine, change: Any) -> Any:
        before = self.worker_info.holders
        keep = right(self, change)
        self.worker_info = msgspec.structs.replace(self.worker_info, holders=before)
        return keep

    monkeypatch.setattr(Engine, "roll_back", wrong)


def old_done_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is done counts, though one before it was not."""

    def take(self: StepReorderBuffer) -> StepDone | None:
        for batch, step in self.done:
            if step in self.queued.get(batch, ()):
                self.queued[batch].remove(step)
                return self.done.pop((batch, step))
        return None

    monkeypatch.setattr(StepReorderBuffer, "next_done", take)


MISTAKES = {
    "num_computed_tokens": replacing(
        Scheduler, "roll_back", lambda self, steps, kept, right=Scheduler.roll_back: right(self, [], kept)
    ),
    "num_output_placeholders": keeping(Sequence, "roll_back", "num_output_placeholders"),
    "transfer": transfer_kept,
    "num_tokens_in_penalties": replacing(Scheduler, "resend_penalties", lambda self: None),
    "num_scored_prompt_tokens": scores_kept,
    "of those that wait": waiting_kept,
    "a delta twice": told_twice,
    "a step behind a gap": old_done_used,
    "the epoch": old_view_kept,
    "no truncation": keeping(Sequence, "roll_back", "num_computed_tokens"),
    "steps of the engine": keeping(Engine, "roll_back", "in_flight"),
    "rounds in flight": keeping(Scheduler, "roll_back", "rounds_in_flight"),
    "numbers of rounds": replacing(
        Scheduler,
        "roll_back",
        lambda self, *args, right=Scheduler.roll_back: (
            setattr(self, "next_round", max(0, self.next_round - 1)),
            right(self, *args),
        )[1],
    ),
    "numbers of sequences": replacing(
        Scheduler,
        "roll_back",
        lambda self, *args, right=Scheduler.roll_back: (setattr(self.admission, "next_id", 0), right(self, *args))[1],
    ),
    "prompts": prefill_keeping("prompts"),
    "chunks": prefill_keeping("in_flight"),
    "what prefill workers hold": prefill_keeping("held"),
    "the ledger": replacing(BlockTables, "reconcile", lambda self, keep: None),
    "lost KV": replacing(SurvivingTokens, "count", lambda self, wanted: wanted.length),
    "KV behind a window": replacing(
        BlockTables,
        "surviving_blocks",
        lambda self, keep: list(self.count_blocks([keep.sequence])),
    ),
    "retained KV": replacing(
        PrefixCache,
        "roll_back",
        lambda self, loss, right=PrefixCache.roll_back: (
            setattr(loss, "surviving", lambda keep: keep.length),
            right(self, loss),
        ),
    ),
    "shared blocks": replacing(BlockPool, "share", lambda self, blocks: None),
    "KV of another preempted one": replacing(
        OffloadIndex,
        "save_all_ops",
        lambda self, of, length, root, right=OffloadIndex.save_all_ops: right(self, of, length, b""),
    ),
    "KV behind a preempted one": replacing(
        SwapPolicy,
        "find_loadable",
        lambda self, of, right=SwapPolicy.find_loadable: (
            (load := right(self, of)) and load._replace(length=load.length - 1)
        ),
    ),
    "KV that is being loaded": rows_too_early,
    "KV that was not loaded behind an open gate": replacing(Sequence, "hold_back", lambda self, drawn: False),
    "KV that was not loaded": replacing(
        OffloadIndex,
        "on_transfer_done",
        lambda self, said, right=OffloadIndex.on_transfer_done: right(
            self, msgspec.structs.replace(said, num_pages=64)
        ),
    ),
    "transfers of an older epoch": replacing(OffloadIndex, "roll_back", lambda self, loss: None),
    "a beginning that was given back": replacing(
        OffloadIndex,
        "keys_of",
        lambda self, of, length, right=OffloadIndex.keys_of, **more: right(self, of, length, **more)[::-1],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("part", range(2))
def test_loans_come_and_go_beside_stored_pages(part: int) -> None:
    """With deaths of workers at home and on loan."""
    counts, losses, changes = Counter[str](), 0, 0
    for seed in range(part, BORROWING, 2):
        outcome = check(borrowing(seed))
        counts, losses, changes = counts + outcome.counts, losses + outcome.losses, changes + outcome.changes
    assert min(counts["written on loan"], counts["loaded pages"], losses, changes) > BORROWING / 4


def test_a_worker_on_loan_that_is_said_to_have_saved_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages would be loaded there."""
    replacing(SimMemory, "num_elsewhere", lambda self, op: len(op.keys))(monkeypatch)
    assert any(breaks(borrowing(seed)) for seed in range(BORROWING))


# Of what happens as memory workers come and go.
PLANNED_MISTAKES = {
    "where sequences lie": replacing(scheduler_module, "apply_locations", lambda batches, found: []),
    "who has no room": replacing(
        scheduler_module, "apply_locations", lambda *args, right=scheduler_module.apply_locations: (right(*args), [])[1]
    ),
    "where they were": replacing(
        KvAllocator,
        "reassign",
        lambda self, *args, right=KvAllocator.reassign: [
            msgspec.structs.replace(k, previous_location=None) for k in right(self, *args)
        ],
    ),
    "who lends": keeping(SpillAllocator, "reassign", "spill"),
    "the ledger's blocks": replacing(BlockTables, "replace_with", lambda self, other: None),
    "who holds what": holders_kept,
    "what is retained": replacing(PrefixCache, "relocate", lambda self, kept: None),
    "who keeps pages": replacing(
        OffloadIndex,
        "sync",
        lambda self, facts, holders, right=OffloadIndex.sync: right(
            self, facts, vars(self).setdefault("first", holders)
        ),
    ),
}


# Rare mistakes: the first of the seeds, of which one must be broken.
BEGIN = {
    "a step behind a gap": 88,
    "num_computed_tokens": 98,
    "of those that wait": 70,
    "KV of another preempted one": 24,
    "KV behind a preempted one": 6504,
    "KV that was not loaded": 270,
    "KV that was not loaded behind an open gate": 24,
    "KV that is being loaded": 24,
    "a delta twice": 32,
    "retained KV": 12,
    "transfers of an older epoch": 150,
    "a beginning that was given back": 150,
    "where sequences lie": 24,
    "who has no room": 24,
    "who lends": 57,
    "what is retained": 42,
    "who keeps pages": 24,
}


@pytest.mark.long(but=["num_computed_tokens", "num_output_placeholders", "steps of the engine"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str) -> None:
    """In a scenario that is right without it."""
    begin = BEGIN.get(mistake, 0)
    assert any(breaks_by(mistake, scenario(seed)) for seed in range(begin, begin + ENOUGH))


@pytest.mark.parametrize("mistake", PLANNED_MISTAKES)
def test_a_mistake_about_planned_changes_is_seen(mistake: str) -> None:
    assert any(breaks_by(mistake, planned(seed)) for seed in range(BEGIN.get(mistake, 0), PLANNED))


def breaks_by(mistake: str, of: Scenario) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        (MISTAKES | PLANNED_MISTAKES)[mistake](patch)
        broken = breaks(of)
    return broken and not breaks(of)


@pytest.mark.long
def test_a_broken_scenario_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be played again, and needs what is left of it."""
    MISTAKES["num_output_placeholders"](monkeypatch)
    broken = next(s for s in map(scenario, range(ENOUGH)) if breaks(s) and len(s.asks) > 2)
    small = smaller(broken)
    assert len(small.asks) + len(small.faults) < len(broken.asks) + len(broken.faults)
    with pytest.raises(ScenarioError, match=rf"Scenario\(seed={broken.seed}"):
        check(small)


def breaks(of: Any) -> bool:
    try:
        check(of)
    except ScenarioError:
        return True
    return False


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_another_engine_goes_on_where_one_has_died(part: int) -> None:
    """With what readers have by then, at any moment: all get what they would have got."""
    begun = 0
    for seed in range(part, RESTARTS, PARTS):
        begun += check_restart(scenario(seed))
    assert begun > RESTARTS / PARTS / 2, "few had begun when it died"
