"""Snapshots of recurrent states in storage: a prompt begins with its own, whatever was evicted, damaged or restarted.

Covers: lamina/scheduler/kv_manager/stored_states.py.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from collections.abc import Sequence as Several
from functools import partial

import pytest

from lamina.config.partition import KvShards
from lamina.kv.page_keys import page_key, state_key, tokens_of_state
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.blocks.state_versions import ZEROS, StateVersions, loads_of_states
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.offload_messages import OffloadFacts, TransferDone
from lamina.protocol.step_plan import DeletePages, LoadKv, SaveKv, SetRetention, StepPlan
from lamina.request import CompletionOutput, SamplingParams
from lamina.scheduler.kv_manager.hybrid_prefix_cache import HybridPrefixCache
from lamina.scheduler.kv_manager.offload_index import OffloadIndex
from lamina.scheduler.kv_manager.session_cache import SessionCache
from lamina.scheduler.kv_manager.stored_states import StoredStates
from lamina.scheduler.recurrent_states import RecurrentStates
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.scheduler_output import ScheduledStep
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.sessions.cache_options import CacheOptions
from lamina.scheduler.sessions.session_table import SessionName
from lamina.scheduler.state_ledger import StateLedger

BLOCK, PAGE, DRAWN, SEQUENCES = 2, 4, 7, 3
ONE, OTHER = SessionName(b"", "one"), SessionName(b"", "other")
ROOT = page_key(b"r" * 32, 0, [1])


class House:
    """A scheduler, a memory worker whose states are the tokens that they have taken in, and storage. ``clamps``: those
    of prompts are taken in in another way, as negative numbers.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        blocks: int = 400,
        slots: int = 6 * SEQUENCES,
        failures: float = 0.0,
        clamps: bool = False,
    ) -> None:
        self.rng, self.failures, self.clamps = random.Random(seed), failures, clamps
        self.pages, self.states = dict[bytes, None](), dict[bytes, list[int]]()
        self.num_failed = self.num_loaded = 0
        self.renewed = set[bytes]()  # pages and states
        self.blocks, self.slots, self.requests = blocks, slots, 0
        self.restart()

    def restart(self) -> None:
        """Let another server begin with what is stored."""
        tables = BlockTables([0], [self.blocks], BLOCK)
        self.prefixes = prefixes = HybridPrefixCache(
            StateLedger([KvShards()], self.slots, 3), tables, BLOCK, prompts_only=self.clamps
        )
        facts = OffloadFacts(
            secret=b"s" * 32,
            identity=b"i",
            page_size=PAGE,
            pages=[[*self.pages]],
            backend="file",
            states=[[*self.states]],
        )
        self.index = OffloadIndex(
            facts,
            tables,
            [[0]],
            prefixes.prefix_index,
            whole=PAGE,
            prompts_only=self.clamps,
            cached_tokens_of=prefixes.num_cached_tokens,
            states=partial(StoredStates, shards=[KvShards()], snapshots_of=prefixes.snapshots_of),
        )
        self.sessions = SessionCache(prefixes, tables, self.index)
        features = [prefixes, self.sessions, self.index, RecurrentStates(prefixes)]
        self.scheduler = Scheduler(tables, max_num_seqs=SEQUENCES, prefill_chunk=8, features=features)
        self.versions, self.contents = StateVersions(self.slots, lambda row: True), dict[int, list[int]]()
        self.running = dict[int, Sequence]()

    def ask(self, prompt: list[int], outputs: int = 3, session: SessionName | None = None) -> Sequence:
        params, limit = SamplingParams(max_tokens=outputs), len(prompt) + outputs
        sequence = Sequence(self.requests, params, 0, prompt, CompletionOutput(0), limit, frozenset())
        if session is not None:
            sequence.turn.session = self.prefixes.sessions.get_or_create(session)
        self.requests += 1
        self.scheduler.add(sequence)
        return sequence

    def serve(self, *prompts: list[int]) -> list[int]:
        """Run prompts to their end. Returns the cached tokens of each."""
        sequences = [self.ask(prompt) for prompt in prompts]
        self.finish()
        assert all(s.finished for s in sequences)
        return [s.num_cached_tokens for s in sequences]

    def finish(self) -> None:
        while (steps := self.scheduler.schedule()) or self.scheduler.running or self.scheduler.waiting:
            for step in steps:
                self.run(step)

    def run(self, step: ScheduledStep) -> None:
        """Run a step on the memory worker, and all of its transfers."""
        plan = step.plan
        self.versions.check(plan)
        self.save(plan)
        segments = self.versions.begin(plan)
        self.load(plan)
        tokens = [DRAWN if token < 0 else token for token in step.tokens]
        for row, sequence, (first, rows, _, read, write) in zip(plan.rows, step.sequences, segments, strict=True):
            had = [] if read == ZEROS else self.contents[read]
            assert had == self.taken_in(sequence, sequence.tokens[: row.first]), "a row continues its own tokens' state"
            self.contents[write] = self.taken_in(
                sequence, [*sequence.tokens[: row.first], *tokens[first : first + rows]]
            )
        self.versions.commit(plan.rows)
        for sequence in step.sampled_sequences:
            if not sequence.finished:
                sequence.append(DRAWN)
        self.scheduler.on_step_done(step)

    def taken_in(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        """Return the state after the first ``tokens`` of a sequence."""
        clamped = len(sequence.prompt) if self.clamps else 0
        return [*(-token for token in tokens[:clamped]), *tokens[clamped:]]

    def save(self, plan: StepPlan) -> None:
        for op in plan.ops:
            if isinstance(op, DeletePages):
                for key in op.keys:
                    self.pages.pop(key, None)
                    self.states.pop(key, None)
            if isinstance(op, SetRetention):
                self.renewed |= set(op.keys)
            if not isinstance(op, SaveKv):
                continue
            fails = self.rng.random() < self.failures
            if op.is_of_states and not fails:
                slot = self.versions.slot_of(op.sequence, op.first)
                assert slot is not None
                (key,) = op.keys
                assert self.states.setdefault(key, self.contents[slot]) == self.contents[slot]
            elif not fails:
                self.pages |= dict.fromkeys(op.keys)
            self.end(op, 0 if fails else len(op.keys))

    def load(self, plan: StepPlan) -> None:
        by_sequence = {s.id: s for s in self.scheduler.running}
        for op in loads_of_states(plan):
            slot, sequence = self.versions.slot_to_fill(op.rows), by_sequence[op.sequence]
            right = self.taken_in(sequence, sequence.tokens[: op.first])
            assert slot is not None
            (key,) = op.keys
            assert self.states[key] == right
            fails = self.rng.random() < self.failures
            self.contents[slot] = [-1] if fails else self.states[key]
            if fails:
                del self.states[key]
                self.num_failed += 1
            else:
                self.versions.commit([op.rows])
                self.num_loaded += 1
            self.end(op, int(not fails))
        for op in plan.ops:
            if isinstance(op, LoadKv) and not op.is_of_states:
                count = next((n for n, key in enumerate(op.keys) if key not in self.pages), len(op.keys))
                self.end(op, count)

    def end(self, op: SaveKv | LoadKv, pages: int) -> None:
        error = "" if pages == len(op.keys) else "it is damaged"
        report = TransferDone(epoch=0, transfer_id=op.transfer_id, num_pages=pages, error=error)
        self.scheduler.on_report(report)

    def drop(self, session: SessionName) -> None:
        ops = self.sessions.drop_session(session, self.scheduler.running)
        assert ops is not None
        self.scheduler.add_pending_ops(ops)
        self.finish()

    def forget_pool(self) -> None:
        self.scheduler.evict_retained()
        self.serve()


def test_the_key_of_states_tells_the_page_before_them_and_their_tokens() -> None:
    whole, part = page_key(ROOT, 0, [1, 2, 3, 4]), page_key(ROOT, 1, [5])
    keys = {state_key(whole, last, count) for last, count in ((whole, 4), (part, 5), (page_key(ROOT, 1, [6]), 5))}
    assert len(keys) == 3
    assert {len(key) for key in keys} == {len(whole)}
    assert sorted(map(tokens_of_state, keys)) == [4, 5, 5]


def test_prompts_begin_with_states_that_were_stored_where_prompts_and_turns_end() -> None:
    house, prompt = House(), [*range(20, 31)]
    assert house.serve(prompt) == [0]
    for again in (House.forget_pool, House.restart):
        again(house)
        assert house.serve([*prompt, 99, 98]) == [11]
        again(house)
        assert house.serve([*prompt, DRAWN, DRAWN, DRAWN, 50]) == [13]
        again(house)
        assert house.serve([*prompt[:8], 60]) == [0], "no snapshot is there"
        house.scheduler.reset_prefix_cache(b"e" * 16)
        house.serve()
        assert house.serve([*prompt, 99, 98]) == [0]
        house.states.clear()
        house.pages.clear()
        house.restart()
        house.serve(prompt)


def test_where_prompts_are_clamped_states_are_stored_at_their_ends_and_not_after_answers() -> None:
    house, prompt = House(clamps=True), [*range(20, 31)]
    assert house.serve(prompt) == [0]
    for again in (House.forget_pool, House.restart):
        again(house)
        assert house.serve([*prompt, 99, 98]) == [11]
        again(house)
        assert house.serve([*prompt, DRAWN, DRAWN, DRAWN, 50]) == [11], "as a prompt its answer is clamped"
        house.states, house.pages = dict[bytes, list[int]](), dict[bytes, None]()
        house.restart()
        house.serve(prompt)


def test_states_at_a_prompts_end_are_stored_while_its_answer_is_computed() -> None:
    """So they are found if it is preempted, and after the server's end."""
    house, prompt = House(), [*range(20, 31)]
    sequence = house.ask(prompt, 20)
    while sequence.num_output_tokens < 5:
        for step in house.scheduler.schedule():
            house.run(step)
    assert [tokens_of_state(key) for key in house.states] == [11]
    house.scheduler.preempt(house.scheduler.batches[0], sequence)
    house.scheduler.waiting.append(sequence)
    while sequence.num_output_tokens < 9:
        for step in house.scheduler.schedule():
            house.run(step)
    assert sequence.num_cached_tokens == 11
    house.restart()
    assert house.serve([*prompt, 99, 98]) == [11]


def test_a_third_prompt_begins_where_the_second_one_left_stored_pages() -> None:
    house, system = House(), [*range(20, 34)]
    found = list[int]()
    for number in range(4):
        found += house.serve([*system, 50 + number, 60 + number, 70 + number])
        house.restart()
    assert found == [0, 0, 12, 12], "whole pages of the system prompt"


def test_states_that_are_lost_are_computed_again() -> None:
    house, prompt = House(), [*range(20, 31)]
    house.serve(prompt)
    house.forget_pool()
    house.failures = 1.0
    assert house.serve([*prompt, 99, 98]) == [0]
    assert house.num_failed == 1
    house.failures = 0.0
    house.forget_pool()
    assert house.serve([*prompt, 97]) == [0], "they are found no more"


@pytest.mark.parametrize("other", [OTHER, None])
def test_a_dropped_session_leaves_the_states_that_another_session_or_a_prompt_in_the_pool_shares(
    other: SessionName | None,
) -> None:
    house, prompt = House(), [*range(20, 31)]
    house.ask(prompt, session=ONE)
    house.finish()
    house.ask([*prompt, 60, 61, 62, 63], session=other)
    house.finish()
    if other is not None:
        house.forget_pool()
    house.drop(ONE)
    house.forget_pool()
    assert house.serve([*prompt, 99, 98]) == [11]
    assert house.serve([*prompt, DRAWN, DRAWN, DRAWN, 50]) == [11], "its answer is gone"


def test_a_dropped_session_leaves_what_another_one_shares_with_a_turn_that_was_replaced() -> None:
    house, prompt = House(), [*range(20, 31)]
    answer = [DRAWN] * 3
    for turn, session in ((prompt, ONE), ([*prompt, *answer, 60, 61], OTHER), ([*prompt, 70, 71, 72, 73, 74], ONE)):
        house.ask(turn, session=session)
        house.finish()
        house.forget_pool()
    house.drop(ONE)
    assert house.serve([*prompt, *answer, 99]) == [13]
    house.forget_pool()
    house.drop(OTHER)
    assert [tokens_of_state(key) for key in house.states if tokens_of_state(key) < 15] == []


def test_a_session_is_dropped_with_the_states_of_all_its_turns() -> None:
    house, prompt = House(), [*range(20, 31)]
    for turn in (prompt, [*prompt, DRAWN, DRAWN, DRAWN, 50], [*prompt, 70, 71, 72, 73, 74]):
        house.ask(turn, session=ONE)
        house.finish()
        house.forget_pool()
    assert len(house.states) == 6, "where each turn's prompt and answer ended"
    house.drop(ONE)
    assert (house.pages, house.states) == ({}, {})


def test_an_imported_session_is_dropped_with_its_states() -> None:
    house, prompt = House(), [*range(20, 31)]
    house.ask(prompt, session=ONE)
    house.finish()
    copy = house.sessions.export_session(ONE)
    assert copy is not None
    house.serve([*range(40, 49)])
    house.restart()
    house.sessions.import_session(b"", copy, 100)
    house.drop(ONE)
    assert len(house.states) == 2
    house.restart()
    assert house.serve([*prompt, 99], [*range(40, 49), 9]) == [0, 9]


def test_retention_is_renewed_for_pages_and_for_the_states_after_them() -> None:
    house, prompt = House(), [*range(20, 31)]
    for _ in range(2):
        house.serve(prompt)
    ids = {each.sequence for each in house.prefixes.retained()}
    assert not house.renewed
    house.ask(prompt).options = CacheOptions(retention_s=60.0)
    house.finish()
    assert {each.sequence for each in house.prefixes.retained()} == ids, "it has nothing new"
    assert house.renewed == {*house.pages, *house.states}


def num_calls(function: Callable[[], object]) -> int:
    """Return how many Python functions are called."""
    calls = list[str]()
    sys.setprofile(lambda frame, event, arg: calls.append(event) if event == "call" else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(calls)


def test_a_lookup_costs_no_more_with_many_states_of_other_prompts_after_the_same_page() -> None:
    house, page = House(), [*range(20, 24)]
    house.serve([*page, 50, 51])
    sequence, states = house.ask([*page, 50, 51, 52]), house.index.states
    key = house.index.keys_of(sequence, PAGE)[0]

    def found() -> list[int]:
        return [*states.lengths_up_to(sequence, PAGE, PAGE + 2)]

    assert found() == [PAGE + 2]
    before = num_calls(found)
    house.prefixes.prefix_index.add_states(
        state_key(key, page_key(key, 1, [number, 60]), PAGE + 2) for number in range(1000)
    )
    assert found() == [PAGE + 2]
    assert num_calls(found) == before


def test_a_waiting_prompt_is_not_looked_up_anew_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    house, known, calls = House(blocks=34), [*range(20, 51)], list[int]()
    house.serve(known)
    house.ask([*range(60, 100)], 20)
    last, count = house.ask([*known, 97, 98], 1), OffloadIndex.num_loadable_pages

    def counting(self: OffloadIndex, keys: Several[bytes], location: KvLocation) -> int:
        calls[-1] += 1
        return count(self, keys, location)

    monkeypatch.setattr(OffloadIndex, "num_loadable_pages", counting)
    while last in house.scheduler.waiting:
        calls.append(0)
        for step in house.scheduler.schedule():
            house.run(step)
    assert len(calls) > 10
    assert 0 < len([each for each in calls if each]) < len(calls) / 2, "only after storage has changed"


@pytest.mark.parametrize("failures", [1.0, 0.0])
def test_after_a_failed_load_no_version_is_counted_and_no_snapshot_is_indexed(failures: float) -> None:
    house, prompt = House(), [*range(20, 31)]
    house.serve(prompt)
    house.forget_pool()
    house.failures = failures
    sequence = house.ask([*prompt, 99, 98])
    for step in house.scheduler.schedule():
        house.run(step)
    snapshots, has = house.prefixes.snapshots_of(sequence.id), house.prefixes.states.has(sequence.id, 11)
    assert (snapshots, has) == (([], False) if failures else ([11], True))
    assert house.num_failed == bool(failures)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("clamps", [False, True])
def test_any_prompts_have_the_states_of_their_own_tokens(clamps: bool, seed: int) -> None:
    rng = random.Random(seed)
    blocks, slots = rng.choice([24, 40, 400]), rng.choice([3, 4, 6]) * SEQUENCES
    house = House(seed, blocks=blocks, slots=slots, failures=0.1, clamps=clamps)
    known = [[rng.randrange(20, 24) for _ in range(rng.randrange(1, 20))] for _ in range(4)]
    for _ in range(30):
        prompts = list[list[int]]()
        for _ in range(rng.randrange(1, 5)):
            begun = rng.choice(known)
            prompts.append([*begun[: rng.randrange(len(begun) + 1)], *(rng.randrange(20, 24) for _ in range(4))][:24])
        house.serve(*prompts)
        known += [[*prompt, DRAWN, DRAWN, DRAWN] for prompt in prompts]
        if (chance := rng.random()) < 0.3:
            house.forget_pool()
        elif chance < 0.4:
            house.restart()
    assert house.num_loaded > 0
