"""Helpers of the scheduler's tests: fake pools that execute its plans late, in any order, and check them as workers
would.
"""

from __future__ import annotations

import random
from collections import deque

from lamina.config.partition import KvShards
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.kv_placement import FIRST_LOCATION, KvLocation
from lamina.protocol.step_plan import FetchPrefix, Fork, Free, New, PrefillGrant, StepPlan
from lamina.request import CompletionOutput, SamplingParams
from lamina.scheduler.conductor.latency_model import TransferLatency, TransferLatencyEstimator
from lamina.scheduler.feature import Feature
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.scheduler.kv_manager.prompt_store import PromptCache
from lamina.scheduler.prefill_dispatch import PrefillDispatcher
from lamina.scheduler.prefill_placement import PrefillPlacement
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.scheduler_output import Round, ScheduledStep
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.slo_admission import KnownKv, KvTransferLatency, SloAdmission

MAX_ROWS = 12
STOP = 1_000_000  # a token that no prompt has and no model draws


def make(request_id: int, prompt: int, outputs: int, stop_at: int | None = None) -> Sequence:
    params = SamplingParams(max_tokens=outputs)
    tokens = [request_id * 1000 + i for i in range(prompt)]
    seq = Sequence(request_id, params, 0, tokens, CompletionOutput(0), prompt + outputs, frozenset([STOP]))
    seq.stop_at = stop_at  # type: ignore[attr-defined]
    return seq


class DoneRounds(Feature):
    """Notes what completes with each step: its round, or nothing."""

    def __init__(self) -> None:
        self.each = list[Round | None]()

    def on_step_done(self, step: ScheduledStep, done: Round | None = None) -> None:
        self.each.append(done)


def with_prefill(prefill: PrefillDispatcher, prefix_cache: PrefixCache | None = None) -> list[Feature]:
    """The features of a scheduler that has prefill workers."""
    prefixes = prefix_cache or PrefixCache(BlockTables([0], [1], 1), 0)
    return [prefill, prefixes, PrefillPlacement(prefill, prefixes)]


def begin(plan: StepPlan, stored: dict[int, list[int]]) -> None:
    """Start and forget sequences as ``plan`` says."""
    for op in plan.ops:
        if isinstance(op, New):
            assert op.sequence not in stored
            stored[op.sequence] = []
        elif isinstance(op, Fork):
            assert op.sequence not in stored
            stored[op.sequence] = stored[op.source][: op.length]
            assert len(stored[op.sequence]) == op.length
        elif isinstance(op, Free):
            del stored[op.sequence]


class FakePool:
    """Keeps what each sequence id has stored, and checks every plan the way a memory worker would."""

    def __init__(self, tables: BlockTables) -> None:
        self.tables = tables
        self.stored: dict[int, list[int]] = {}
        self.drawn: dict[int, dict[int, int]] = {}  # batch -> sequence -> token
        self.places: dict[int, KvLocation] = {}
        self.granted: dict[
            tuple[int, int], tuple[PrefillGrant, list[list[int]]]
        ] = {}  # with the blocks, by (worker, step)

    def run(self, step: ScheduledStep) -> None:
        self.tables.apply(step.plan)  # raises where the scheduler promised blocks that are not there
        coming = {g.sequence for g, _ in self.granted.values()}
        assert not coming & {r.sequence for r in step.plan.rows}, "rows before K and V have come"
        assert not coming & {op.sequence for op in step.plan.ops if isinstance(op, Free)}, "freed before they have come"
        for rows in [*step.plan.rows, *(op.rows for op in step.plan.ops if isinstance(op, PrefillGrant))]:
            assert self.places.setdefault(rows.sequence, rows.location) == rows.location, "nobody has moved its tokens"
        last = self.drawn.pop(step.plan.batch, {})
        drawn = self.drawn[step.plan.batch] = {}
        begin(step.plan, self.stored)
        for op in step.plan.ops:
            if isinstance(op, PrefillGrant):
                self.granted[op.worker, op.step] = op, self._blocks(op)
        at = 0
        for sequence, rows in zip(step.sequences, step.plan.rows, strict=True):
            tokens = step.tokens[at : at + rows.count]
            at += rows.count
            tokens = [last[rows.sequence] if t == -1 else t for t in tokens]
            kv = self.stored[rows.sequence]
            assert rows.first <= len(kv), "a hole in the stored tokens"
            kv[rows.first :] = tokens
            if sequence in step.sampled_sequences:
                # the model: the next token is a function of everything stored, so a wrong token would show
                drawn[rows.sequence] = next_token(kv)

    def store(self, worker: int, step: ScheduledStep) -> None:
        """K and V of a prefill worker's step have come."""
        grant, blocks = self.granted.pop((worker, step.plan.step))
        (rows,) = step.plan.rows
        assert rows == grant.rows
        assert self._blocks(grant) == blocks, "blocks were given back while their K and V were on the way"
        kv = self.stored[rows.sequence]
        assert rows.first == len(kv)
        kv += step.tokens

    def _blocks(self, grant: PrefillGrant) -> list[list[int]]:
        """Returns the blocks of the granted tokens that the windows of the last token can see, by group."""
        found = []
        for group, window in enumerate(self.tables.windows):
            start, _ = self.tables.block_table(group, grant.sequence)
            size, stop = self.tables.block_size, grant.first + grant.count
            low = max(grant.first, stop - window) if window else grant.first
            assert start <= low // size
            stripe, lane = self.tables.stripe_blocks, self.tables.placement.kv_shard_of
            numbers = range(low // size, -(-stop // size))
            kept = [n for n in numbers if lane(grant.location, stripe and n // stripe) in self.tables.kv_shards[group]]
            found.append([self.tables.block_ids(group, grant.sequence, n, n + 1)[0] for n in kept])
        return found


class FakePrefill:
    """A prefill worker: has the tokens of the prompt that it computes, and samples after the last."""

    def __init__(self, tables: BlockTables, all_workers: list[FakePrefill]) -> None:
        self.tables, self.all_workers = tables, all_workers
        self.stored: dict[int, list[int]] = {}
        self.steps: deque[ScheduledStep] = deque()
        self.num_rows = self.num_fetched = 0

    def run(self) -> tuple[ScheduledStep, dict[int, int]]:
        step = self.steps.popleft()
        self.tables.apply(step.plan)
        begin(step.plan, self.stored)
        for op in step.plan.ops:
            if isinstance(op, FetchPrefix):
                self._fetch(op)
        (rows,) = step.plan.rows
        kv = self.stored[rows.sequence]
        assert rows.first == len(kv)
        kv += step.tokens
        self.num_rows += rows.count
        return step, {rows.sequence: next_token(kv)} if step.sampled_sequences else {}

    def _fetch(self, op: FetchPrefix) -> None:
        assert len(self.stored[op.sequence]) == op.first
        came = self.all_workers[op.worker].stored[op.source][op.first : op.first + op.count]
        assert len(came) == op.count, "it has not computed that yet"
        self.stored[op.sequence] += came
        self.num_fetched += op.count


def next_token(tokens: list[int]) -> int:
    return sum((i + 1) * t for i, t in enumerate(tokens)) % 9973


def drive(
    sequences: list[Sequence],
    *,
    blocks: int,
    block_size: int = 4,
    arrivals: random.Random | None = None,
    num_batches: int = 1,
    lanes: tuple[KvShards, ...] = (KvShards(),),
    stripe: int = 0,
    regroups: random.Random | None = None,
    cancels: random.Random | None = None,
    prefill_workers: int = 0,
    window: int = 0,
    page: int = 0,
    kept: int = 0,
    sends: bool = False,
) -> Scheduler:
    """Run to the end. Rounds are served in order; the driver hears of several batches' steps in any order.

    ``regroups``: deal anew now and then; ``cancels``: end a sequence now and then. ``page``: of retained sequences.
    ``kept``: blocks that a prefill worker has for prompts other than the one that it computes; ``sends``: they send to
    each other what they keep.
    """
    windows = [window] * len(lanes)
    ledger, tables = (BlockTables(windows, [blocks] * len(lanes), block_size, lanes, stripe) for _ in range(2))
    chunk = MAX_ROWS - 4
    most = max(len(s.prompt) + (s.params.max_tokens or 0) for s in sequences)
    room = (
        BlockTables([window], [1], block_size).max_blocks(FIRST_LOCATION, most, MAX_ROWS)[0] + chunk // block_size + 1
    )
    prefixes, sending = PrefixCache(ledger, page), sends and not window
    promises = SloAdmission(
        prefill_workers,
        known=KnownKv(prefixes.prefix_index, prefixes.keys, prefixes.num_cached_or_pending),
        transfers=KvTransferLatency(TransferLatencyEstimator(TransferLatency.at_rate(1e6)) if sending else None),
    )

    def store_blocks() -> BlockTables:
        return BlockTables([window], [room + kept], block_size)

    stores = [
        PromptCache(w, prefixes.prefix_index, prefixes.keys, store_blocks(), [room])
        for w in range(prefill_workers if kept else 0)
    ]
    prefill = PrefillDispatcher(prefill_workers, chunk, 4, promises, stores)
    scheduler = Scheduler(
        ledger,
        max_num_seqs=4,
        prefill_chunk=chunk,
        num_batches=num_batches,
        features=with_prefill(prefill, prefixes),
    )
    prefills = list[FakePrefill]()
    prefills += [FakePrefill(store_blocks(), prefills) for _ in range(prefill_workers)]
    pool, order = FakePool(tables), arrivals or random.Random(0)
    rounds: list[list[ScheduledStep]] = []
    served: list[tuple[ScheduledStep, dict[int, int]]] = []  # with the tokens drawn; the driver has not heard yet
    queue = list(sequences)
    for _ in range(5000):
        while queue and (arrivals is None or arrivals.random() < 0.4):
            scheduler.add(queue.pop(0))
        if regroups and regroups.random() < 0.1:
            scheduler.set_num_batches(regroups.randint(1, 4))
        if cancels and cancels.random() < 0.05:
            cancels.choice(sequences).finish("abort")
        steps = scheduler.schedule()
        for step in steps if prefill_workers and not page else []:
            assert all(row.count == 1 for row in step.plan.rows), "prompts are not for the compute workers"
        assert all(step.plan.num_rows <= MAX_ROWS for step in steps)
        rounds += [steps] if steps else []
        for chunk_step in scheduler.take_side_steps():
            prefills[chunk_step.side_worker or 0].steps.append(chunk_step)
        assert len(rounds) <= Scheduler.LOOKAHEAD + 1
        ready = [w for w, p in enumerate(prefills) if p.steps and (w, p.steps[0].plan.step) in pool.granted]
        if (rounds or served or ready) and not (steps and scheduler.can_schedule_ahead):
            if ready and (not (rounds or served) or order.random() < 0.3):
                worker = order.choice(ready)
                step, drawn = prefills[worker].run()
                pool.store(worker, step)
                served.append((step, drawn))
            elif rounds and (not served or order.random() < 0.3):
                for step in rounds.pop(0):
                    pool.run(step)
                    served.append((step, dict(pool.drawn[step.plan.batch])))
            batch = order.choice(sorted({step.plan.batch for step, _ in served}))
            done, drawn = served.pop([step.plan.batch for step, _ in served].index(batch))
            take(done, drawn)
            scheduler.on_step_done(done)
        busy = rounds or served or scheduler.num_running or any(p.steps for p in prefills)
        if not busy and not queue and all(s.finished for s in sequences):
            break
    assert all(s.finished for s in sequences), "stuck"
    scheduler.reset_prefix_cache()
    scheduler.num_prefilled = sum(p.num_rows for p in prefills)  # type: ignore[attr-defined]
    scheduler.num_fetched = sum(p.num_fetched for p in prefills)  # type: ignore[attr-defined]
    for step in scheduler.schedule():
        pool.run(step)
    tables.check_integrity()
    assert not pool.stored, "sequences left on the memory workers"
    assert ledger.free_blocks == (blocks,) * len(lanes)
    return scheduler


def take(done: ScheduledStep, drawn: dict[int, int]) -> None:
    for sequence, rows in zip(done.sequences, done.plan.rows, strict=True):
        if sequence not in done.sampled_sequences:
            continue
        if sequence.finished:
            sequence.num_output_placeholders -= 1
        else:
            token = drawn[rows.sequence]
            sequence.append(STOP if sequence.num_output_tokens == sequence.stop_at else token)  # type: ignore[attr-defined]


def expected(prompt: list[int], outputs: int, stop_at: int | None) -> list[int]:
    tokens = list(prompt)
    for i in range(outputs):
        tokens.append(STOP if i == stop_at else next_token(tokens))
        if i == stop_at:
            break
    return tokens[len(prompt) :]


def check_tokens(sequences: list[Sequence]) -> None:
    for s in (s for s in sequences if s.output.finish_reason != "abort"):
        outputs = s.params.max_tokens or 0
        assert s.tokens[len(s.prompt) :] == expected(s.prompt, outputs, s.stop_at)  # type: ignore[attr-defined]
