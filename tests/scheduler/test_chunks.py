"""Prompts of one batch share a step's chunk, so that short ones do not wait for the rest of a long one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduled import make

from lamina.protocol.blocks.block_tables import BlockTables
from lamina.scheduler.batch import ChunkPolicy, Prompt
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.sequence import Sequence


def rounds_until_computed(long: int, short: int, *, aligned: bool) -> tuple[int, int]:
    """Rounds after which the short prompt, which comes later, and the long one before it are computed."""
    scheduler = Scheduler(BlockTables([0], [999], 4), max_num_seqs=8, prefill_chunk=8, aligned=aligned)
    both = make(0, long, 50), make(1, short, 50)
    scheduler.add(both[0])
    for step in scheduler.schedule():
        scheduler.on_step_done(step)
    scheduler.add(both[1])
    done: dict[Sequence, int] = {}
    for number in range(1, 100):
        for step in scheduler.schedule():
            scheduler.on_step_done(step)
        for sequence in both:
            if sequence.num_computed_tokens >= len(sequence.prompt):
                done.setdefault(sequence, number)
        if len(done) == len(both):
            return done[both[1]], done[both[0]]
    raise AssertionError("a prompt was never computed")


def test_a_short_prompt_does_not_wait_for_the_rest_of_a_long_one() -> None:
    """The long one still needs 9 chunks of 8 tokens. The short one takes 4 tokens of the next one."""
    short, long = rounds_until_computed(80, 4, aligned=False)
    assert short == 1
    assert long == 10


def test_with_cuts_at_multiples_of_a_chunk_prompts_run_in_order_of_arrival() -> None:
    short, long = rounds_until_computed(80, 4, aligned=True)
    assert (short, long) == (10, 9)


def test_a_long_prompt_alone_has_the_whole_chunk() -> None:
    assert ChunkPolicy(512, False).divide([Prompt(4000, 0)]) == [512]


def test_the_oldest_prompt_has_half_of_the_chunk_however_many_short_ones_come() -> None:
    counts = ChunkPolicy(512, False).divide([Prompt(4000, 0), *[Prompt(100, 0)] * 20])
    assert counts[0] == 256
    assert counts[1:] == [100, 100, 56, *[0] * 17]


def test_a_long_prompt_takes_nothing_of_an_older_shorter_one() -> None:
    assert ChunkPolicy(512, False).divide([Prompt(600, 0), Prompt(700, 0)]) == [512, 0]


def test_what_short_prompts_leave_goes_to_the_oldest_one() -> None:
    assert ChunkPolicy(512, False).divide([Prompt(4000, 0), Prompt(600, 0), Prompt(30, 0)]) == [256, 226, 30]
    assert ChunkPolicy(512, False).divide([Prompt(4000, 0), Prompt(30, 0)]) == [482, 30]


def test_a_new_prompt_begins_where_it_is_shorter_than_another_one_that_is_not_the_oldest() -> None:
    policy = ChunkPolicy(512, False)
    assert policy.has_room([Prompt(4000, 0), Prompt(3000, 0)], Prompt(100, 0))
    assert not policy.has_room([Prompt(4000, 0), Prompt(3000, 0)], Prompt(3500, 0))
    assert not ChunkPolicy(512, True).has_room([Prompt(4000, 0)], Prompt(100, 0))


@pytest.mark.parametrize("aligned", [False, True])
@given(
    chunk=st.integers(1, 64),
    prompts=st.lists(st.builds(Prompt, st.integers(1, 200), st.integers(0, 200)), min_size=1, max_size=8),
)
def test_no_chunk_is_exceeded_or_left_empty(aligned: bool, chunk: int, prompts: list[Prompt]) -> None:
    policy = ChunkPolicy(chunk, aligned)
    counts = policy.divide(prompts)
    assert all(0 <= count <= prompt.due for count, prompt in zip(counts, prompts, strict=True))
    assert counts[0] > 0
    if aligned:
        assert sum(counts) <= chunk
    else:
        assert sum(counts) == min(chunk, sum(prompt.due for prompt in prompts))
