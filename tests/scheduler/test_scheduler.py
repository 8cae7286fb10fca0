"""The scheduler alone: no torch, no workers. A fake pool executes the plans with a one-step delay.

Covers: lamina/scheduler/admission.py, lamina/scheduler/preemption.py.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled import DoneRounds, check_tokens, drive, make, with_prefill

from lamina.config.partition import KvShards, by_request
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.step_plan import Free
from lamina.request import SamplingParams
from lamina.scheduler.prefill_dispatch import PrefillDispatcher
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.scheduler_output import ScheduledStep


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
@pytest.mark.parametrize("prefill_workers", [0, 1])
def test_sequences_go_to_the_lane_with_room(stripe: int, prefill_workers: int) -> None:
    """Each memory worker has room for two at most; the third waits or preempts, and nothing is lost."""
    sequences = [make(i, 10, 30) for i in range(7)]
    drive(
        sequences,
        blocks=25,
        lanes=(KvShards((True, False)), KvShards((False, True))),
        stripe=stripe,
        prefill_workers=prefill_workers,
    )
    check_tokens(sequences)


@pytest.mark.parametrize("weights", [[1, 1], [3, 1], [1, 1, 1], [7, 3]])
@pytest.mark.parametrize("stripe", [0, 8])
def test_lanes_are_filled_by_weight(weights: list[int], stripe: int) -> None:
    """32 ragged prompts, placed as they come: what a worker keeps is off by less than the longest of them; by less than
    5 % where they are dealt out.
    """
    partition = by_request([4], [float(w) for w in weights])
    lanes = [p.kv_shards for w in range(len(weights)) for p in partition.pieces(0, w)]
    tables = BlockTables([0] * len(lanes), [9999] * len(lanes), 4, lanes, stripe)
    scheduler = Scheduler(tables, max_num_seqs=32, prefill_chunk=9999)
    sizes = random.Random(3)
    for i in range(32):
        scheduler.add(make(i, sizes.randint(20, 400), 5))
    (step,) = scheduler.schedule()
    assert len(step.sequences) == 32
    assert len({s.id for s in step.sequences}) == 32
    kept = [9999 - n for n in tables.free_blocks]
    for weight, mine in zip(weights, kept, strict=True):
        exact = sum(kept) * weight / sum(weights)
        assert abs(mine - exact) < (0.05 * exact if stripe else max(len(s.prompt) for s in step.sequences) / 4)


@pytest.mark.parametrize("num_batches", [1, 3])
@pytest.mark.parametrize("prefill_workers", [1, 2])
def test_preemption_beside_prefill_workers_loses_nothing(prefill_workers: int, num_batches: int) -> None:
    sequences = [make(i, 10, 30) for i in range(4)]
    scheduler = drive(sequences, blocks=20, num_batches=num_batches, prefill_workers=prefill_workers)
    check_tokens(sequences)
    assert scheduler.num_preemptions > 0


def test_a_prompt_waits_until_its_blocks_are_not_promised_to_another() -> None:
    """Two that fit one at a time: were both begun, neither could end."""
    sequences = [make(i, 30, 5) for i in range(2)]
    assert drive(sequences, blocks=14, prefill_workers=2).num_preemptions == 0
    check_tokens(sequences)


def test_who_is_preempted_beside_a_prefill_worker() -> None:
    """One sequence decodes until it needs a block that there is not, while a prompt is on its way."""
    scheduler = Scheduler(
        BlockTables([0], [11], 4), max_num_seqs=4, prefill_chunk=8, features=with_prefill(PrefillDispatcher(1, 8, 1))
    )
    decoding, prompt, behind = sequences = [make(0, 1, 40), make(1, 20, 5), make(2, 12, 5)]
    for sequence in sequences:
        scheduler.add(sequence)
    chunks: list[ScheduledStep] = []
    while steps := scheduler.schedule():
        chunks += scheduler.take_side_steps()
        for step in steps:
            decoding.append(7)
            scheduler.on_step_done(step)
    assert (len(decoding.tokens), prompt.transfer.unstored_chunks, scheduler.num_preemptions) == (29, 2, 0), (
        "it waits for K and V"
    )
    for chunk in chunks:
        scheduler.on_step_done(chunk)
    (step,) = scheduler.schedule()
    assert step.sequences == [decoding]
    assert isinstance(step.plan.ops[0], Free)
    assert (scheduler.num_preemptions, prompt.transfer.on_side_worker, prompt.num_computed_tokens) == (1, False, 0)
    assert [c.sequences for c in scheduler.take_side_steps()] == [[behind]] * 2, (
        "the worker goes on with the next prompt"
    )


def test_prompts_go_to_the_prefill_worker_with_the_least_to_do() -> None:
    prefill = PrefillDispatcher(2, 8, 2)
    features = with_prefill(prefill)
    scheduler = Scheduler(BlockTables([0], [100], 4), max_num_seqs=8, prefill_chunk=8, num_batches=2, features=features)
    sequences = [make(i, length, 20) for i, length in enumerate([20, 5, 1, 9, 30, 7])]
    for sequence in sequences:
        scheduler.add(sequence)
    steps = scheduler.schedule()
    there = [prefill.slo_admission.reserve(s) if s.transfer.on_side_worker else None for s in sequences]
    assert there == [0, 1, None, 1, None, 0], (
        "the fifth waits for worker 1, which has two; the last one need not wait for that"
    )
    assert [[len(s.prompt) for s in step.sequences] for step in steps] == [[], [1]], "a single token is decoded at once"
    chunks = scheduler.take_side_steps()
    assert [(c.side_worker, len(c.sequences[0].prompt), len(c.tokens),
        len(c.sampled_sequences)) for c in chunks] == [ (0, 20, 8, 0), (0, 20, 8, 0), (1, 5, 5, 1), (1, 9, 8, 0)
    ]  # fmt: skip
    assert len({(c.plan.batch, c.plan.step) for c in chunks}) == 4
    assert not scheduler.take_side_steps()


def test_decode_goes_on_between_prefill_chunks() -> None:
    ledger = BlockTables([0], [100], 4)
    scheduler = Scheduler(ledger, max_num_seqs=4, prefill_chunk=8)
    short, long = make(1, 3, 50), make(2, 60, 5)
    scheduler.add(short)
    (first,) = scheduler.schedule()
    short.append(7)
    scheduler.on_step_done(first)
    scheduler.add(long)
    for _ in range(5):
        (step,) = scheduler.schedule()
        assert set(step.sequences) == {short, long}, "the long prompt must not stall the short one"
        assert step.sampled_sequences == [short]
        short.append(7)
        scheduler.on_step_done(step)


def test_a_new_sequence_joins_the_batch_that_reads_least() -> None:
    scheduler = Scheduler(BlockTables([0], [100], 4), max_num_seqs=8, prefill_chunk=64, num_batches=2)
    for i, length in enumerate([40, 3, 5, 6]):
        scheduler.add(make(i, length, 5))
    steps = scheduler.schedule()
    assert [[len(s.prompt) for s in step.sequences] for step in steps] == [[40], [3, 5, 6]]


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("num_batches", [1, 2, 3, 4])
def test_every_batch_fills_its_chunk_after_a_cold_start(num_batches: int, aligned: bool) -> None:
    """300 prompts of 8 tokens, chunks of 64: a round takes 8 of them into every batch and keeps loads even."""
    ledger = BlockTables([0], [9999], 4)
    scheduler = Scheduler(ledger, max_num_seqs=512, prefill_chunk=64, num_batches=num_batches, aligned=aligned)
    sequences = [make(i, 8, 500) for i in range(300)]
    for sequence in sequences:
        scheduler.add(sequence)
    rounds, ahead = 0, list[ScheduledStep]()
    while scheduler.num_waiting:
        before = scheduler.num_running
        steps = scheduler.schedule()
        new = scheduler.num_running - before
        assert new == min(8 * num_batches, 300 - before)
        for step in ahead:
            for drawn in step.sampled_sequences:
                drawn.append(7)
            scheduler.on_step_done(step)
        rounds, ahead = rounds + 1, steps
        loads = [b.load for b in scheduler.batches]
        assert max(loads) - min(loads) <= 9
    assert rounds == -(-300 // (8 * num_batches))
    ids = [s.id for s in sequences]
    assert ids == sorted(ids), "first come, first served"


def test_a_batch_whose_chunk_is_full_leaves_the_next_prompt_to_another() -> None:
    """Batch 1 reads least, and its chunk is full: batch 0 has room in its own, and no prompt waits."""
    scheduler = Scheduler(BlockTables([0], [9999], 4), max_num_seqs=8, prefill_chunk=40, num_batches=2)
    for i, length in enumerate([100, 4]):
        scheduler.add(make(i, length, 50))
    for _ in range(3):  # rounds that the longer prompt takes
        for step in scheduler.schedule():
            for drawn in step.sampled_sequences:
                drawn.append(7)
            scheduler.on_step_done(step)
    for i, length in enumerate([40, 8]):
        scheduler.add(make(2 + i, length, 50))
    steps = scheduler.schedule()
    assert [[r.count for r in step.plan.rows] for step in steps] == [[1, 8], [1, 40]]
    assert [b.load for b in scheduler.batches] == [111, 49]


def test_a_cancelled_sequence_waits_no_more() -> None:
    scheduler = Scheduler(BlockTables([0], [9], 4), max_num_seqs=8, prefill_chunk=16)
    sequences = [make(i, 5, 5) for i in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    sequences[1].finish("abort")
    assert scheduler.num_waiting == 2
    (step,) = scheduler.schedule()
    assert step.sequences == [sequences[0], sequences[2]]


def test_batches_are_dealt_anew_by_what_their_attention_reads() -> None:
    rounds = DoneRounds()
    scheduler = Scheduler(BlockTables([0], [100], 4), max_num_seqs=8, prefill_chunk=100, features=[rounds])
    sequences = [make(i, length, 20) for i, length in enumerate([3, 40, 5, 30, 6])]
    for sequence in sequences:
        scheduler.add(sequence)
    (first,) = scheduler.schedule()
    scheduler.set_num_batches(2)
    assert scheduler.schedule() == [], "not while a round is in flight"
    for sequence in sequences:
        sequence.append(7)
    scheduler.on_step_done(first)
    (done,) = rounds.each
    assert done is not None
    assert (done.num_batches, done.rows, done.is_decode_only) == (1, 84, False)
    steps = scheduler.schedule()
    assert [[len(s.prompt) for s in step.sequences] for step in steps] == [[3, 40], [5, 30, 6]]
    assert all(-1 not in step.tokens for step in steps)
    ahead = scheduler.schedule()
    for step in (*steps, *ahead):
        scheduler.on_step_done(step)
    found = [r and (r.num_batches, r.rows, r.is_decode_only) for r in rounds.each[1:]]
    assert found == [None, (2, 5, False), None, (2, 5, True)]


def test_a_batch_that_joins_late_rotates_in_phase_with_the_others() -> None:
    """Three batches over two replicas: neighbours are never on the same one, however long one has been alone."""
    for alone in (1, 2, 3):
        scheduler = Scheduler(BlockTables([0], [100], 4), max_num_seqs=8, prefill_chunk=64, num_batches=3, num_layers=3)
        sequences = [make(i, 4, 20) for i in range(3)]
        scheduler.add(sequences[0])
        for _ in range(alone):
            (step,) = scheduler.schedule()
            sequences[0].append(7)
            scheduler.on_step_done(step)
        for late in sequences[1:]:
            scheduler.add(late)
        steps = scheduler.schedule()
        assert [s.plan.batch for s in steps] == [0, 1, 2]
        for layer in range(3):
            on = [s.plan.send_from[layer] for s in steps]
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
    cancels=st.none() | st.builds(random.Random, st.integers(0, 1000)),
    prefill_workers=st.integers(0, 3),
    window=st.sampled_from([0, 0, 3, 9]),
)
def test_any_mix_gives_every_sequence_its_own_tokens(
    shapes: list[tuple[int, int, int | None]],
    blocks: int,
    seed: int,
    num_batches: int,
    regroups: random.Random | None,
    cancels: random.Random | None,
    prefill_workers: int,
    window: int,
) -> None:
    sequences = [make(i, p, o, stop) for i, (p, o, stop) in enumerate(shapes)]
    drive(
        sequences,
        blocks=blocks,
        arrivals=random.Random(seed),
        num_batches=num_batches,
        regroups=regroups,
        cancels=cancels,
        prefill_workers=prefill_workers,
        window=window,
    )
    check_tokens(sequences)


def test_policy_imports_no_torch() -> None:
    import subprocess
    import sys

    modules = "lamina.scheduler.scheduler, lamina.protocol.blocks.block_tables, lamina.config.partition"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": -2},
        {"max_tokens": 0},
        {"n": 0},
        {"stop": 5},
        {"stop": [5]},
    ],
)
def test_bad_sampling_values_are_named(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)  # type: ignore[arg-type]
