"""The prompts that prefill workers keep: found, begun with, given up; no tenant gets another one's K and V."""

from __future__ import annotations

import random
from collections.abc import Sequence as Several

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled import check_tokens, drive, make

from lamina.config.flat_options import make_config
from lamina.config.partition import KvShards
from lamina.engine.engine import Engine
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.control import ComputeReady, RunRound
from lamina.protocol.executor import EpochChanged
from lamina.protocol.prefix_fetch import can_fetch_prefixes
from lamina.protocol.step_plan import (
    MEMORY_WORKERS,
    BindReply,
    FetchPrefix,
    Fork,
    Free,
    New,
    RowRange,
    SequenceOp,
    StepPlan,
    SurvivingKv,
)
from lamina.request import SamplingParams
from lamina.scheduler.conductor import PromptInfo
from lamina.scheduler.conductor.latency_model import TransferLatency, TransferLatencyEstimator
from lamina.scheduler.conductor.routing import RoutingDecision
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.scheduler.kv_manager.prompt_store import PromptCache
from lamina.scheduler.prefill_dispatch import PrefillDispatcher
from lamina.scheduler.prefill_placement import PrefillPlacement
from lamina.scheduler.prefix_index import PREFILL, PageKeys, PrefixIndex
from lamina.scheduler.scheduler_output import ScheduledStep
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.slo_admission import KnownKv, KvTransferLatency, SloAdmission
from lamina.tools.plan.simulator.clock import VirtualClock
from lamina.tools.plan.simulator.lossless import SimulatedExecutor, simulated_ready

PAGE = 4
EACH = (KvShards((True, False)), KvShards((False, True)))


def prompt(number: int, alike: int, more: int, outputs: int = 3, salt: bytes = b"") -> Sequence:
    """``alike`` tokens that all have, and so many of its own."""
    sequence = make(number, alike + more, outputs)
    sequence.prompt[:alike] = range(alike)
    sequence.tokens[:alike] = range(alike)
    sequence.salt = salt
    return sequence


def test_what_begins_alike_is_computed_once() -> None:
    sequences = [prompt(number, 40, 20) for number in range(6)]
    alone = drive([prompt(number, 40, 20) for number in range(6)], blocks=120, page=PAGE, prefill_workers=1)
    kept = drive(sequences, blocks=120, page=PAGE, prefill_workers=1, kept=60)
    check_tokens(sequences)
    assert alone.num_prefilled == 6 * 60  # type: ignore[attr-defined]
    assert kept.num_prefilled == 60 + 5 * 20  # type: ignore[attr-defined]


class OneThenAll(random.Random):
    """Arrivals of which the first is done before all others come at once."""

    calls = 0

    def random(self) -> float:
        self.calls += 1
        return 0.99 if 1 < self.calls < 200 else 0.0


def test_what_one_worker_has_another_one_fetches() -> None:
    """A document that one worker has is computed by no other."""
    counts = []
    for sends in (False, True):
        sequences = [prompt(number, 40, 20) for number in range(8)]
        arrivals = OneThenAll()
        sent = drive(sequences, blocks=120, page=PAGE, prefill_workers=3, kept=60, sends=sends, arrivals=arrivals)
        check_tokens(sequences)
        counts.append((sent.num_fetched, sent.num_prefilled))  # type: ignore[attr-defined]
    assert counts == [(0, 60 + 2 * 40 + 7 * 20), (2 * 40, 60 + 7 * 20)]


@settings(max_examples=80, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(1, 6), st.sampled_from([b"", b"a"])),
        min_size=1,
        max_size=9,
    ),
    blocks=st.integers(16, 60),
    kept=st.integers(1, 30),
    seed=st.integers(0, 1000),
    num_batches=st.integers(1, 3),
    cancels=st.none() | st.builds(random.Random, st.integers(0, 1000)),
    prefill_workers=st.integers(1, 3),
    window=st.sampled_from([0, 0, 0, 9]),
    sends=st.booleans(),
    lanes=st.sampled_from([(KvShards(),), EACH]),
)
def test_any_mix_gives_every_sequence_its_own_tokens(
    shapes: list[tuple[int, int, int, bytes]],
    blocks: int,
    kept: int,
    seed: int,
    num_batches: int,
    cancels: random.Random | None,
    prefill_workers: int,
    window: int,
    sends: bool,
    lanes: tuple[KvShards, ...],
) -> None:
    """Memory enough and too little on both sides; sequences that begin in different KV shards."""
    sequences = [prompt(number, *shape) for number, shape in enumerate(shapes)]
    drive(
        sequences,
        blocks=blocks,
        arrivals=random.Random(seed),
        num_batches=num_batches,
        cancels=cancels,
        prefill_workers=prefill_workers,
        window=window,
        lanes=lanes,
        page=PAGE,
        kept=kept,
        sends=sends,
    )
    check_tokens(sequences)


class Desk:
    """One store of two, and what its worker would have."""

    def __init__(self, kept: int, workers: int = 2) -> None:
        self.index = PrefixIndex()
        self.keys = PageKeys(PAGE, self.index.root)
        self.places = [self.index.place(PREFILL, worker) for worker in range(workers)]
        self.stores = [
            PromptCache(w, self.index, self.keys, BlockTables([0], [kept + 20], PAGE), [20]) for w in range(workers)
        ]
        self._step = 0

    def compute(self, sequence: Sequence, at: int = 0, most: int = 1000) -> list[SequenceOp]:
        """All of a prompt, after what may be begun with; the ops before it."""
        store = self.stores[at]
        sequence.id = sequence.request_id
        sequence.num_computed_tokens = store.num_cached_tokens(sequence, most)
        store.reserve(sequence, sequence.num_computed_tokens)
        return self.finish(sequence, at)

    def finish(self, sequence: Sequence, at: int = 0) -> list[SequenceOp]:
        store, first = self.stores[at], sequence.num_computed_tokens
        keys = self.keys_of(sequence)
        self.index.promise(self.places[at], keys)
        ops = store.begin_ops(sequence)
        self._step += 1
        rows = [RowRange(sequence.id, first, sequence.num_tokens_with_placeholders - first)]
        store.apply(StepPlan(step=self._step, ops=ops, rows=rows))
        self.index.confirm(self.places[at], keys)
        store.on_computed(sequence)
        return ops

    def keys_of(self, sequence: Sequence) -> list[bytes]:
        return self.keys.whole(sequence, len(sequence.prompt))

    def num_cached_pages(self, sequence: Sequence) -> list[int]:
        """The pages from the first on that each worker has, or will."""
        return self.index.match(self.places, self.keys_of(sequence))


def test_a_prompt_begins_with_the_most_that_is_there() -> None:
    desk = Desk(kept=20)
    assert desk.compute(prompt(1, 8, 9)) == [New(1)]
    assert desk.compute(prompt(2, 16, 9)) == [Fork(2, 1, 8)]
    assert desk.compute(prompt(3, 16, 9)) == [Fork(3, 2, 16)]
    assert desk.stores[0].num_cached_tokens(prompt(4, 16, 9), 15) == 12
    assert desk.stores[0].num_cached_tokens(prompt(5, 16, 1, salt=b"other"), 1000) == 0
    assert desk.stores[0].num_cached_tokens(prompt(6, 8, 0), 1000) == 4, "its last token is for a row that draws"


def test_who_was_used_the_longest_ago_gives_way() -> None:
    desk = Desk(kept=10)
    for number in range(3):
        desk.compute(make(number, 12, 1))
    assert desk.stores[0].num_cached_tokens(_again(0), 1000) == 8
    desk.compute(_again(0, name=10))
    assert Free(1) in desk.compute(make(3, 12, 1)) + desk.compute(make(4, 12, 1))
    assert [desk.stores[0].num_cached_tokens(_again(n), 1000) for n in (0, 1)] == [8, 0]


def test_who_has_copies_gives_way_before_others() -> None:
    desk = Desk(kept=9)
    for number in range(3):
        desk.compute(make(number, 12, 1))
    desk.compute(_again(2, name=20), at=1)
    assert desk.index.num_replicas(PREFILL) == 3
    desk.compute(make(5, 12, 1))
    assert [desk.stores[0].num_cached_tokens(_again(n), 1000) for n in range(3)] == [8, 8, 0]
    assert desk.index.num_replicas(PREFILL) == 0
    assert desk.num_cached_pages(_again(2)) == [0, 3]


def test_what_is_promised_stays_and_what_is_forgotten_is_found_by_nobody() -> None:
    desk = Desk(kept=6)
    desk.compute(make(0, 12, 1))
    store, late = desk.stores[0], _again(0, name=7)
    late.id, late.num_computed_tokens = 7, store.num_cached_tokens(late, 1000)
    store.reserve(late, late.num_computed_tokens)
    desk.compute(make(1, 24, 1))
    store.invalidate()
    assert store.num_cached_tokens(_again(0), 1000) == 0
    assert desk.num_cached_pages(_again(0)) == [0, 0]
    assert desk.finish(late)[-2:] == [Fork(7, 0, 8), Free(0)]


def test_what_is_lent_stays_until_it_is_returned() -> None:
    """It stays whatever else the worker keeps, although no other request finds it any more."""
    desk = Desk(kept=6)
    desk.compute(make(0, 12, 1))
    lender, borrower, late = desk.stores[0], desk.stores[1], _again(0, name=7)
    late.id, late.num_computed_tokens = 7, lender.num_sendable_tokens(late, 1000)
    borrower.reserve(late, 8, lender)
    assert borrower.begin_ops(late) == [New(7), FetchPrefix(7, 0, 8, 0, 0)]
    assert desk.compute(make(1, 24, 1)) == [New(1)]
    lender.invalidate()
    assert lender.num_sendable_tokens(_again(0), 1000) == 0
    assert Free(0) not in desk.compute(make(2, 12, 1))
    lender.on_sent(late)
    assert Free(0) in desk.compute(make(3, 12, 1))


def test_a_worker_fetches_what_it_has_not() -> None:
    desk = Desk(kept=20)
    desk.compute(prompt(1, 24, 5))
    desk.compute(prompt(2, 8, 5), at=1)
    late = prompt(7, 24, 5)
    late.id, late.num_computed_tokens = 7, 24
    desk.stores[1].reserve(late, 24, desk.stores[0])
    assert desk.finish(late, at=1) == [Fork(7, 2, 8), FetchPrefix(7, 8, 16, 0, 1)]
    assert desk.stores[1].num_cached_tokens(prompt(9, 24, 5), 1000) == 24


def test_nobody_is_sent_what_is_still_computed() -> None:
    """A prompt is kept by the plan of the next one; until it is done no other worker can have it."""
    desk = Desk(kept=20)
    store, first, second = desk.stores[0], make(0, 12, 1), make(1, 12, 1)
    first.id, second.id = 0, 1
    for step, sequence in enumerate((first, second)):
        store.apply(StepPlan(step=step, ops=store.begin_ops(sequence), rows=[RowRange(sequence.id, 0, 12)]))
    assert (store.num_cached_tokens(_again(0), 1000), store.num_sendable_tokens(_again(0), 1000)) == (8, 0)
    store.on_computed(first)
    assert (store.num_cached_tokens(_again(0), 1000), store.num_sendable_tokens(_again(0), 1000)) == (8, 8)


def test_of_layers_with_a_window_nothing_is_sent() -> None:
    desk = Desk(kept=20)
    room = BlockTables([100], [40], PAGE)
    store = desk.stores[0] = PromptCache(0, desk.index, desk.keys, room, [20])
    desk.compute(make(0, 12, 1))
    assert (store.num_cached_tokens(_again(0), 1000), store.num_sendable_tokens(_again(0), 1000)) == (8, 0)


@pytest.mark.parametrize("given_up", [False, True])
def test_a_holder_that_has_given_up_since_the_arrival_is_not_asked(given_up: bool) -> None:
    """The index was right at the arrival. Another worker that has it is asked; if there is none it is computed."""
    prefill, desk = conducted(3)
    for worker in (0, 1):
        desk.compute(make(0, 12, 1) if not worker else _again(0, name=10), at=worker)
    for number, worker in ((20, 0), (21, 1)):  # both are busy
        prefill.slo_admission.conductor.reserve(
            number, PromptInfo(40), RoutingDecision(worker, 0, 0.0, 0.0, 1.0, 1.0, ""), now_s=0.0
        )
    late = _again(0, name=30)
    late.id = 30
    prefill.on_arrival(late)
    assert (prefill.slo_admission.reserve(late), prefill.slo_admission.prefix_source(late)) == (2, 0)
    desk.stores[0].invalidate()
    if given_up:
        desk.stores[1].invalidate()
    late.num_computed_tokens = prefill.num_cached_tokens(late, 1000)
    assert late.num_computed_tokens == (0 if given_up else 8)
    prefill.assign(late)
    grant = prefill.next_grant(late)
    assert grant is not None
    fetched = [op for op in prefill.begin_chunk(late, grant).plan.ops if isinstance(op, FetchPrefix)]
    assert fetched == ([] if given_up else [FetchPrefix(30, 0, 8, 1, 10)])


@pytest.mark.parametrize("has_caches", [False, True])
def test_memory_workers_send_under_the_number_of_the_step_that_fetches(*, has_caches: bool) -> None:
    """The grant of a first chunk lets them send what its step fetches, and as much; no later chunk does."""
    prefill, _ = conducted(1) if has_caches else (PrefillDispatcher(1, 8, 1), None)
    sent, fetched = list[tuple[int, int, int]](), list[tuple[int, int, int]]()
    for number, (alike, stored) in enumerate(((8, 8), (8, 16), (0, 0), (0, 4))):
        sequence = prompt(number, alike, 32 - alike)
        sequence.id, sequence.num_computed_tokens = number, stored
        prefill.assign(sequence)
        in_flight = list[ScheduledStep]()
        while (grant := prefill.next_grant(sequence)) is not None or in_flight:
            if grant is None:
                prefill.on_chunk_stored(in_flight.pop(0), 0)
                continue
            in_flight.append(step := prefill.begin_chunk(sequence, grant))
            if grant.num_fetched:
                sent.append((grant.step, grant.first, grant.num_fetched))
            fetches = [op for op in step.plan.ops if isinstance(op, FetchPrefix)]
            assert all((op.worker, op.source) == (MEMORY_WORKERS, number) for op in fetches)
            fetched += [(step.plan.step, op.first + op.count, op.count) for op in fetches]
        prefill.remove(sequence)
    assert sent == fetched == [(0, 8, 8), (3, 16, 8 if has_caches else 16), (9, 4, 4)]


def conducted(workers: int) -> tuple[PrefillDispatcher, Desk]:
    """Workers whose stores are on a desk."""
    desk, transfers = Desk(kept=20, workers=workers), TransferLatencyEstimator(TransferLatency.at_rate(1e6))
    promises = SloAdmission(workers, known=KnownKv(desk.index, desk.keys), transfers=KvTransferLatency(transfers))
    return PrefillDispatcher(workers, 8, 1, promises, desk.stores), desk


def test_after_a_reset_reserved_prompts_have_new_keys_and_running_ones_none() -> None:
    (prefill, desk), era = conducted(1), b"e" * 16
    waiting, running = make(20, 12, 1), make(21, 12, 1)
    for sequence in (waiting, running):
        prefill.slo_admission.reserve(sequence)
        assert desk.num_cached_pages(sequence) == [3]
    running.do_not_cache, desk.index.root.era = True, era
    for sequence in (waiting, running):
        sequence.known_keys.forget()
        assert desk.num_cached_pages(sequence) == [0]
    placement = PrefillPlacement(prefill, PrefixCache(BlockTables([0], [1], PAGE), 0))
    for feature in (prefill, placement):
        feature.reset(era, [waiting, running])
    assert desk.num_cached_pages(waiting) == [3]
    assert desk.index.num_known_pages == 3, "the old keys are forgotten"
    prefill.slo_admission.remove(running)
    prefill.slo_admission.remove(waiting)
    assert desk.index.num_known_pages == 0


@pytest.mark.parametrize("begun", [False, True])
def test_a_prompt_that_is_dropped_leaves_nothing(begun: bool) -> None:
    desk = Desk(kept=6)
    store, gone = desk.stores[0], make(0, 12, 1)
    gone.id = 0
    if begun:
        store.apply(StepPlan(step=100, ops=store.begin_ops(gone), rows=[RowRange(0, 0, 5)]))
    store.on_dropped(gone)
    assert desk.compute(make(1, 12, 1)) == [*([Free(0)] if begun else []), New(1)]
    assert store.num_cached_tokens(_again(0), 1000) == 0


@pytest.mark.parametrize("outlived", [False, True])
def test_of_what_is_not_kept_the_index_knows_nothing(outlived: bool) -> None:
    """A request that is to leave nothing, and a prompt that is forgotten while it is computed, are not in the index."""
    desk = Desk(kept=6)
    store, gone = desk.stores[0], make(0, 12, 1)
    gone.id, gone.do_not_cache = 0, outlived
    desk.index.promise(desk.places[0], desk.keys_of(gone))
    store.apply(StepPlan(step=100, ops=store.begin_ops(gone), rows=[RowRange(0, 0, 12)]))
    if not outlived:
        store.invalidate()
    desk.index.confirm(desk.places[0], desk.keys_of(gone))
    store.on_computed(gone)
    assert store.num_cached_tokens(_again(0), 1000) == 0
    assert desk.num_cached_pages(_again(0)) == [0, 0]


def _again(number: int, name: int = -1) -> Sequence:
    """The same prompt as one before."""
    sequence = make(number, 12, 1)
    sequence.request_id = name
    return sequence


def test_a_hit_that_leaves_no_room_for_the_rest_is_given_up() -> None:
    """The second prompt takes 12 of 16 blocks, and 12 are retained, of which it begins with 2."""
    sequences = [prompt(0, 28, 20), prompt(1, 8, 44)]
    drive(sequences, blocks=16, page=PAGE, prefill_workers=1, kept=14, arrivals=random.Random(0))
    check_tokens(sequences)


def test_who_begins_with_nothing_waits_for_nobody_who_begins_alike() -> None:
    sequences = [prompt(number, 40, 20) for number in range(6)]
    scored = sequences[2]
    scored.params.prompt_logprobs = 0
    drive(sequences, blocks=120, page=PAGE, prefill_workers=1, kept=60)
    check_tokens(sequences)
    assert sorted(s.id for s in sequences).index(scored.id) <= 2, "in its turn"


@pytest.mark.parametrize(
    ("windows", "blocks", "workers", "can"),
    [([0], 29, 2, True), ([0], 28, 2, False), ([8], 200, 2, False), ([0, 8], 200, 2, False), ([0], 200, 1, False)],
)
def test_prefill_workers_meet_where_something_can_be_fetched(
    windows: list[int], blocks: int, workers: int, can: bool
) -> None:
    """28 blocks are for a prompt and the first chunk of the next."""
    lanes, totals = [KvShards()] * len(windows), [blocks] * len(windows)
    store = BindReply(windows=windows, kv_shards=lanes, stripe_blocks=0, num_blocks=totals)
    ready = simulated_ready(num_layers=1, num_blocks=1000, block_size=PAGE, max_len=100)
    batching = make_config({"transport": "shm", "prefill_chunk": 8, "max_num_seqs": 8}).batching
    assert (
        can_fetch_prefixes([msgspec.structs.replace(ready, prefill_stores=[store])] * workers, batching, workers) == can
    )


class StoreWire(SimulatedExecutor):
    """Its prefill worker has so many blocks; once it is lost, the next has ``later``."""

    def __init__(self, clock: VirtualClock, blocks: int, later: int) -> None:
        ready = simulated_ready(num_layers=1, num_blocks=1000, block_size=PAGE, max_len=100)
        super().__init__(clock, ready, lambda load: 1.0)
        self._later = later
        self._start(blocks)

    def _start(self, blocks: int) -> None:
        self.tables = BlockTables([0], [blocks], PAGE)
        store = BindReply(windows=[0], kv_shards=[KvShards()], stripe_blocks=0, num_blocks=[blocks])
        self.ready = msgspec.structs.replace(self.ready, epoch=self.ready.epoch + 1, prefill_stores=[store])

    def submit_prefill(self, worker: int, new: RunRound) -> None:
        for step in new.steps:
            self.tables.apply(step.plan)
        super().submit_prefill(worker, new)

    def check_workers(self) -> EpochChanged:
        return EpochChanged([], [{}])

    def resume(self, keep: Several[SurvivingKv]) -> ComputeReady:
        self._start(self._later)
        return self.ready


@pytest.mark.parametrize(("blocks", "later"), [(200, 60), (200, 28), (28, 200)])
def test_who_takes_the_place_of_a_lost_worker_may_have_another_store(blocks: int, later: int) -> None:
    """28 blocks are for a prompt and the first chunk of the next: nothing is kept then."""
    clock = VirtualClock()
    wire = StoreWire(clock, blocks, later)
    options = {"transport": "shm", "block_size": PAGE, "prefill_chunk": 8, "prefill_workers": 1, "max_num_seqs": 8}
    engine = Engine(wire, make_config(options), clock)
    engine.slo_admission.conductor.transfer_latency = learned = TransferLatencyEstimator(TransferLatency(0.5, 7.0))
    for part in range(2):
        for number in range(6):
            engine.add([part, number] * 25, SamplingParams(max_tokens=2, ignore_eos=True))
        while engine.has_work:
            engine.step()
        assert (len(wire.tables.sequences) > 1) == ((blocks, later)[part] > 28)
        if not part:
            engine.check_workers()
    keeps = later > 28
    assert (engine.slo_admission.num_page_replicas is not None) == keeps
    assert engine.slo_admission.keeps_prompts == keeps, "else the Conductor counts on pages that nobody has"
    assert engine.slo_admission.conductor.transfer_latency is learned
