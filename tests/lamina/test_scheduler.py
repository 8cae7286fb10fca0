"""The scheduler alone: no torch, no workers. A fake pool executes the plans with a one-step delay."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.engine.scheduler import Scheduler
from lamina.engine.sequence import Sequence
from lamina.engine.steps import ScheduledStep
from lamina.kv.blocks import BlockTables
from lamina.kv.partition import Lanes, by_request
from lamina.request import CompletionOutput, SamplingParams
from lamina.workers.stepplan import Free, New

MAX_ROWS = 12


def make(request_id: int, prompt: int, outputs: int, stop_at: int | None = None) -> Sequence:
    params = SamplingParams(max_tokens=outputs)
    tokens = [request_id * 1000 + i for i in range(prompt)]
    seq = Sequence(request_id, params, 0, tokens, CompletionOutput(0), prompt + outputs, frozenset([-5]))
    seq.stop_at = stop_at  # type: ignore[attr-defined]
    return seq


class FakePool:
    """Keeps what each sequence id has stored, and checks every plan the way a memory worker would."""

    def __init__(self, tables: BlockTables) -> None:
        self.tables = tables
        self.stored: dict[int, list[int]] = {}
        self.drawn: dict[int, dict[int, int]] = {}  # batch -> sequence -> token

    def run(self, step: ScheduledStep) -> None:
        self.tables.apply(step.plan)  # raises where the scheduler promised blocks that are not there
        last = self.drawn.pop(step.plan.batch, {})
        drawn = self.drawn[step.plan.batch] = {}
        for op in step.plan.ops:
            if isinstance(op, New):
                assert op.sequence not in self.stored
                self.stored[op.sequence] = []
            elif isinstance(op, Free):
                del self.stored[op.sequence]
        at = 0
        for sequence, rows in zip(step.parts, step.plan.rows, strict=True):
            tokens = step.tokens[at : at + rows.count]
            at += rows.count
            tokens = [last[rows.sequence] if t == -1 else t for t in tokens]
            kv = self.stored[rows.sequence]
            assert rows.first <= len(kv), "a hole in the stored tokens"
            kv[rows.first :] = tokens
            if sequence in step.draws:
                # the model: the next token is a function of everything stored, so a wrong token would show
                drawn[rows.sequence] = next_token(kv)


def next_token(tokens: list[int]) -> int:
    return sum((i + 1) * t for i, t in enumerate(tokens)) % 9973


def drive(
    sequences: list[Sequence],
    *,
    blocks: int,
    block_size: int = 4,
    arrivals: random.Random | None = None,
    num_batches: int = 1,
    lanes: tuple[Lanes, ...] = (Lanes(),),
    stripe: int = 0,
    regroups: random.Random | None = None,
) -> Scheduler:
    """Run to the end. Rounds are served in order; the driver hears of several batches' steps in any order.

    ``regroups``: deal anew now and then.
    """
    ledger, tables = (BlockTables([0] * len(lanes), [blocks] * len(lanes), block_size, lanes, stripe) for _ in range(2))
    scheduler = Scheduler(ledger, max_num_seqs=4, prefill_chunk=MAX_ROWS - 4, num_batches=num_batches)
    pool, order = FakePool(tables), arrivals or random.Random(0)
    rounds: list[list[ScheduledStep]] = []
    served: list[tuple[ScheduledStep, dict[int, int]]] = []  # with the tokens drawn; the driver has not heard yet
    queue = list(sequences)
    for _ in range(5000):
        while queue and (arrivals is None or arrivals.random() < 0.4):
            scheduler.add(queue.pop(0))
        if regroups and regroups.random() < 0.1:
            scheduler.regroup(regroups.randint(1, 4))
        steps = scheduler.schedule()
        assert all(step.plan.num_rows <= MAX_ROWS for step in steps)
        rounds += [steps] if steps else []
        assert len(rounds) <= Scheduler.LOOKAHEAD + 1
        if (rounds or served) and not (steps and scheduler.may_run_ahead):
            if rounds and (not served or order.random() < 0.3):
                for step in rounds.pop(0):
                    pool.run(step)
                    served.append((step, dict(pool.drawn[step.plan.batch])))
            batch = order.choice(sorted({step.plan.batch for step, _ in served}))
            done, drawn = served.pop([step.plan.batch for step, _ in served].index(batch))
            take(done, drawn)
            scheduler.complete(done)
        if not queue and not rounds and not served and not scheduler.num_running and all(s.finished for s in sequences):
            break
    assert all(s.finished for s in sequences), "stuck"
    assert not pool.stored, "sequences left on the memory workers"
    assert ledger.free_blocks == (blocks,) * len(lanes)
    return scheduler


def take(done: ScheduledStep, drawn: dict[int, int]) -> None:
    for sequence, rows in zip(done.parts, done.plan.rows, strict=True):
        if sequence not in done.draws:
            continue
        if sequence.finished:
            sequence.num_drawing -= 1
        else:
            token = drawn[rows.sequence]
            sequence.append(-5 if sequence.num_outputs == sequence.stop_at else token)  # type: ignore[attr-defined]


def expected(prompt: list[int], outputs: int, stop_at: int | None) -> list[int]:
    tokens = list(prompt)
    for i in range(outputs):
        tokens.append(-5 if i == stop_at else next_token(tokens))
        if i == stop_at:
            break
    return tokens[len(prompt) :]


def check_tokens(sequences: list[Sequence]) -> None:
    for s in sequences:
        outputs = s.params.max_tokens or 0
        assert s.tokens[len(s.prompt) :] == expected(s.prompt, outputs, s.stop_at)  # type: ignore[attr-defined]


def test_one_sequence_is_chunked_then_decoded() -> None:
    sequence = make(1, prompt=21, outputs=5)
    drive([sequence], blocks=100)
    check_tokens([sequence])
    assert sequence.output.finish_reason == "length"


def test_stop_token_ends_and_drops_the_row_in_flight() -> None:
    sequences = [make(1, 5, 20, stop_at=3), make(2, 9, 20)]
    drive(sequences, blocks=100)
    check_tokens(sequences)
    assert [s.output.finish_reason for s in sequences] == ["stop", "length"]


@pytest.mark.parametrize("num_batches", [1, 2, 3])
def test_preemption_loses_nothing(num_batches: int) -> None:
    sequences = [make(i, 10, 30) for i in range(4)]
    scheduler = drive(sequences, blocks=20, num_batches=num_batches)  # 4 x 40 tokens would need 40 blocks
    check_tokens(sequences)
    assert scheduler.num_preemptions > 0


@pytest.mark.parametrize("stripe", [0, 1, 2])
def test_sequences_go_to_the_lane_with_room(stripe: int) -> None:
    """Each memory worker has room for two at most; the third waits or preempts, and nothing is lost."""
    sequences = [make(i, 10, 30) for i in range(7)]
    drive(sequences, blocks=25, lanes=(Lanes((True, False)), Lanes((False, True))), stripe=stripe)
    check_tokens(sequences)


@pytest.mark.parametrize("weights", [[1, 1], [3, 1], [1, 1, 1], [7, 3]])
@pytest.mark.parametrize("stripe", [0, 8])
def test_lanes_are_filled_by_weight(weights: list[int], stripe: int) -> None:
    """32 ragged prompts, placed as they come: what a worker keeps is off by less than the longest of them; by less than
    5 % where they are dealt out.
    """
    partition = by_request([4], [float(w) for w in weights])
    lanes = [p.lanes for w in range(len(weights)) for p in partition.pieces(0, w)]
    tables = BlockTables([0] * len(lanes), [9999] * len(lanes), 4, lanes, stripe)
    scheduler = Scheduler(tables, max_num_seqs=32, prefill_chunk=9999)
    sizes = random.Random(3)
    for i in range(32):
        scheduler.add(make(i, sizes.randint(20, 400), 5))
    (step,) = scheduler.schedule()
    assert len(step.parts) == 32
    assert len({s.id for s in step.parts}) == 32
    kept = [9999 - n for n in tables.free_blocks]
    for weight, mine in zip(weights, kept, strict=True):
        exact = sum(kept) * weight / sum(weights)
        assert abs(mine - exact) < (0.05 * exact if stripe else max(len(s.prompt) for s in step.parts) / 4)


def test_decode_goes_on_between_prefill_chunks() -> None:
    ledger = BlockTables([0], [100], 4)
    scheduler = Scheduler(ledger, max_num_seqs=4, prefill_chunk=8)
    short, long = make(1, 3, 50), make(2, 60, 5)
    scheduler.add(short)
    (first,) = scheduler.schedule()
    short.append(7)
    scheduler.complete(first)
    scheduler.add(long)
    for _ in range(5):
        (step,) = scheduler.schedule()
        assert set(step.parts) == {short, long}, "the long prompt must not stall the short one"
        assert step.draws == [short]
        short.append(7)
        scheduler.complete(step)


def test_a_new_sequence_joins_the_batch_that_reads_least() -> None:
    scheduler = Scheduler(BlockTables([0], [100], 4), max_num_seqs=8, prefill_chunk=64, num_batches=2)
    for i, length in enumerate([40, 3, 5, 6]):
        scheduler.add(make(i, length, 5))
    steps = scheduler.schedule()
    assert [[len(s.prompt) for s in step.parts] for step in steps] == [[40], [3, 5, 6]]


def test_batches_are_dealt_anew_by_what_their_attention_reads() -> None:
    scheduler = Scheduler(BlockTables([0], [100], 4), max_num_seqs=8, prefill_chunk=100, num_batches=1)
    sequences = [make(i, length, 20) for i, length in enumerate([3, 40, 5, 30, 6])]
    for sequence in sequences:
        scheduler.add(sequence)
    (first,) = scheduler.schedule()
    scheduler.regroup(2)
    assert scheduler.schedule() == [], "not while a round is in flight"
    for sequence in sequences:
        sequence.append(7)
    done = scheduler.complete(first)
    assert done is not None
    assert (done.num_batches, done.rows, done.steady) == (1, 84, False)
    steps = scheduler.schedule()
    assert [[len(s.prompt) for s in step.parts] for step in steps] == [[3, 40], [5, 30, 6]]
    assert all(-1 not in step.tokens for step in steps)
    ahead = scheduler.schedule()
    found = [scheduler.complete(step) for step in (*steps, *ahead)]
    assert [r and (r.num_batches, r.rows, r.steady) for r in found] == [None, (2, 5, False), None, (2, 5, True)]


def test_a_batch_that_joins_late_rotates_in_phase_with_the_others() -> None:
    """Three batches over two replicas: neighbours are never on the same one, however long one has been alone."""
    for alone in (1, 2, 3):
        scheduler = Scheduler(BlockTables([0], [100], 4), max_num_seqs=8, prefill_chunk=64, num_batches=3, num_layers=3)
        sequences = [make(i, 4, 20) for i in range(3)]
        scheduler.add(sequences[0])
        for _ in range(alone):
            (step,) = scheduler.schedule()
            sequences[0].append(7)
            scheduler.complete(step)
        for late in sequences[1:]:
            scheduler.add(late)
        steps = scheduler.schedule()
        assert [s.plan.batch for s in steps] == [0, 1, 2]
        for layer in range(3):
            on = [s.plan.source[layer] for s in steps]
            assert on in ([0, 1, 0], [1, 0, 1])


@settings(max_examples=120, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 12), st.none() | st.integers(0, 11)), min_size=1, max_size=8
    ),
    blocks=st.integers(11, 40),
    seed=st.integers(0, 1000),
    num_batches=st.integers(1, 4),
    regroups=st.none() | st.builds(random.Random, st.integers(0, 1000)),
)
def test_any_mix_gives_every_sequence_its_own_tokens(
    shapes: list[tuple[int, int, int | None]],
    blocks: int,
    seed: int,
    num_batches: int,
    regroups: random.Random | None,
) -> None:
    sequences = [make(i, p, o, stop) for i, (p, o, stop) in enumerate(shapes)]
    drive(sequences, blocks=blocks, arrivals=random.Random(seed), num_batches=num_batches, regroups=regroups)
    check_tokens(sequences)


def test_policy_imports_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, lamina.engine.scheduler, lamina.kv.blocks, lamina.kv.partition; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    "bad", [{"temperature": float("nan")}, {"top_p": 0.0}, {"top_k": -2}, {"max_tokens": 0}, {"n": 0}]
)
def test_bad_sampling_values_are_named(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)  # type: ignore[arg-type]
