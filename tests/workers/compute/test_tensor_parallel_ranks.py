"""Ranks that draw together draw what one with all logits does, from few of them; and go through turns in one order.

Covers: lamina/workers/compute/compute_worker.py, lamina/workers/compute/tensor_parallel.py.
"""

from __future__ import annotations

import heapq
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import on_all

from lamina.ops.collective.mesh import MeshCollective
from lamina.ops.sampling.sampler import Sampler
from lamina.ops.sampling.token_history import LogitChanges, TokenHistories, logit_changes_of
from lamina.protocol.control import (
    ALL_TOKENS_BANNED,
    NO_TOKEN,
    LogitsUpdate,
    Penalties,
    RunStep,
    SampledToken,
    SamplingRequest,
)
from lamina.protocol.step_plan import StepPlan
from lamina.request import FILTERS
from lamina.workers.compute.compute_worker import SliceTask, SliceTasks
from lamina.workers.compute.tensor_parallel import LogitCandidates, TensorParallelRanks

WIDTH = 96
SAMPLER = Sampler(threads=1)
sample = SAMPLER.sample


class Alike:
    """Stands in for a rank's collective where all parts are here: gathers what the others have packed."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self.parts = parts

    def gathered(
        self, few: LogitCandidates, draws: list[SamplingRequest], seen: dict[int, LogitChanges]
    ) -> torch.Tensor:
        packed = [few.pack(x, draws, seen, r * x.shape[1], SAMPLER) for r, x in enumerate(self.parts)]
        return few.unpack(torch.cat(packed, -1), sum(x.shape[1] for x in self.parts))


tokens = st.integers(0, WIDTH - 1)
penalties = st.builds(
    Penalties,
    presence=st.sampled_from([0.0, 1.5]),
    frequency=st.sampled_from([0.0, 0.7]),
    repetition=st.sampled_from([1.0, 1.4]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-9.0, 4.0]), max_size=2),
    prompt_token_ids=st.lists(tokens, max_size=2, unique=True),
)
adjusts = st.builds(LogitsUpdate, num_known_tokens=st.just(0), tokens=st.lists(tokens, max_size=4), penalties=penalties)


@st.composite
def draws(draw: Any) -> SamplingRequest:
    temperature = draw(st.sampled_from([0.0, 0.0, 0.8]))
    return SamplingRequest(
        row=0,
        sequence=3,
        temperature=temperature,
        top_k=draw(st.integers(1, 4)) if temperature else 0,
        top_p=draw(st.sampled_from([1.0, 0.6])),
        min_p=draw(st.sampled_from([0.0, 0.2])),
        seed=draw(st.integers(0, 99)),
        output_index=draw(st.integers(0, 9)),
        logprobs=draw(st.sampled_from([-1, 0, 3])),
        banned_token_ids=draw(st.lists(tokens, max_size=2, unique=True)),
        logits_update=draw(st.none() | adjusts),
        has_pending_token=draw(st.booleans()),
        prompt_logprob_token=draw(st.sampled_from([-1, -1, 5])),
        filter_order=tuple(draw(st.permutations(FILTERS))),
    )


@pytest.mark.no_retry
@settings(max_examples=120, deadline=None)
@given(draw=draws(), seed=st.integers(0, 10_000), size=st.sampled_from([1, 2, 4]), pending=tokens)
def test_few_logits_give_the_same_token_and_log_probabilities(
    draw: SamplingRequest, seed: int, size: int, pending: int
) -> None:
    # Quarters: many are equal, as those of 16 bits often are.
    logits = (torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(seed)) * 8).round() / 4
    seen = logit_changes_of(TokenHistories().note([], [draw]), {3: pending} if draw.has_pending_token else {})
    few = LogitCandidates.needed_for([draw], WIDTH, seen)
    if few is None:  # its top_p is a share of the probability of all tokens
        assert draw.top_p < 1.0
        assert draw.filter_order.index("top_p") < draw.filter_order.index("top_k")
        return
    known = Alike(list(logits.split(WIDTH // size, -1))).gathered(few, [draw], seen)
    (wanted,), (found,) = sample(logits, [draw], seen), sample(known, [draw], seen, logits.logsumexp(-1))
    assert found.token_id == wanted.token_id
    assert [v for _, v, _ in found.logprobs] == pytest.approx([v for _, v, _ in wanted.logprobs], abs=1e-4)
    assert [(t, rank) for t, _, rank in found.logprobs[1:]] == [(t, rank) for t, _, rank in wanted.logprobs[1:]]


def plain(**options: Any) -> SamplingRequest:
    fields = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0, "output_index": 0, "logprobs": -1, **options}
    return SamplingRequest(row=0, sequence=0, **fields)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [1, WIDTH - 1])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_k": 3}])
def test_logits_that_are_no_numbers_on_any_rank_give_no_token(broken: float, at: int, options: dict[str, Any]) -> None:
    logits = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(0))
    logits[0, at] = broken
    draw = plain(**options)
    few = LogitCandidates.needed_for([draw], WIDTH)
    assert few is not None
    known = Alike(list(logits.chunk(2, -1))).gathered(few, [draw], {})
    assert [d.token_id for d in sample(known, [draw], {})] == [NO_TOKEN]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_equal_logits_the_lowest_ids_are_packed(dtype: torch.dtype) -> None:
    raw = torch.zeros(2, WIDTH, dtype=dtype)
    raw[0, 50:60] = 1.0
    packed = LogitCandidates(3, 0).pack(raw, [plain(), plain()], {}, 1000, SAMPLER)
    assert packed[:, 3:6].tolist() == [[1050, 1051, 1052], [1000, 1001, 1002]]


def test_all_ranks_together_know_that_every_token_is_banned() -> None:
    logits = torch.full((1, WIDTH), float("-inf"))
    logits[0, [2, WIDTH - 1]] = 1.0
    draw = plain(banned_token_ids=[2, WIDTH - 1])
    few = LogitCandidates.needed_for([draw], WIDTH)
    assert few is not None
    known = Alike(list(logits.chunk(2, -1))).gathered(few, [draw], {})
    assert [d.token_id for d in sample(known, [draw], {})] == [ALL_TOKENS_BANNED]


def test_what_needs_all_logits_gets_them() -> None:
    assert LogitCandidates.needed_for([plain()], 1000) == LogitCandidates(1, 0)
    assert LogitCandidates.needed_for([plain(), plain(temperature=1.0)], 1000) is None
    assert LogitCandidates.needed_for([plain(temperature=1.0, top_k=40)], 1000) == LogitCandidates(41, 0)
    assert LogitCandidates.needed_for([plain(logprobs=20, prompt_logprob_token=4)], 1000) == LogitCandidates(20, 1)
    assert LogitCandidates.needed_for([plain(banned_token_ids=list(range(600)))], 1000) is None


@pytest.mark.parametrize("draw", [plain(logprobs=2), plain(temperature=0.9, seed=4), plain(temperature=0.9, top_k=3)])
def test_all_ranks_are_told_the_token(draw: SamplingRequest) -> None:
    logits = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
    both = [draw, plain()]

    def work(mesh: MeshCollective) -> list[SampledToken]:
        return TensorParallelRanks(mesh, 1).sample(logits.chunk(4, -1)[mesh.rank], both, {})

    wanted = sample(logits, both)
    for found in on_all(4, work):
        assert [d.token_id for d in found] == [d.token_id for d in wanted]


@pytest.mark.no_retry
@pytest.mark.parametrize("width", [WIDTH, 1 << 17], ids=["small", "more than torch sums by one thread"])
def test_no_bit_of_a_score_depends_on_other_draws(width: int) -> None:
    """Not on how many there are, nor on whether one of them needs all logits."""
    logits = torch.randn(3, width, generator=torch.Generator().manual_seed(2)) * 3
    mine = plain(logprobs=2)
    mates = [[], [plain()], [plain(temperature=1.0), plain(logprobs=1)]]

    def work(mesh: MeshCollective) -> list[list[tuple[int, float, int]]]:
        ranks, part = TensorParallelRanks(mesh, 1), logits.chunk(2, -1)[mesh.rank].contiguous()
        return [ranks.sample(part[: 1 + len(others)], [mine, *others], {})[0].logprobs for others in mates]

    alone, *others = on_all(2, work)[0]
    assert others == [alone, alone]
    wanted = sample(logits[:1], [mine])[0].logprobs
    assert [(t, rank) for t, _, rank in alone] == [(t, rank) for t, _, rank in wanted]
    assert [v for _, v, _ in alone] == pytest.approx([v for _, v, _ in wanted], abs=1e-5)


def test_all_ranks_together_know_the_place_of_a_token() -> None:
    """Also of one that is far from the best of its rank, and among equals."""
    logits = (torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1)) * 4).round() / 4
    bias = LogitsUpdate(
        num_known_tokens=0,
        tokens=[],
        penalties=Penalties(presence=0.0, frequency=0.0, repetition=1.0, logit_bias={9: 90.0}, prompt_token_ids=[]),
    )
    asked = [plain(logprobs=1, prompt_logprob_token=7), plain(logprobs=2), plain(logprobs=0, logits_update=bias),
             plain(logits_update=bias), plain(logprobs=0, banned_token_ids=list(range(4)))]  # fmt: skip
    seen = logit_changes_of(TokenHistories().note([], asked[2:3]), {})
    assert LogitCandidates.needed_for(asked, WIDTH // 4, seen) is not None

    def work(mesh: MeshCollective) -> list[SampledToken]:
        return TensorParallelRanks(mesh, 1).sample(logits.chunk(4, -1)[mesh.rank], asked, seen)

    wanted = sample(logits, asked, seen)
    found = on_all(4, work)[0]
    assert [[(t, r) for t, _, r in d.logprobs] for d in found] == [[(t, r) for t, _, r in d.logprobs] for d in wanted]
    for row, known in zip(logits.tolist(), wanted, strict=True):
        order = sorted(range(WIDTH), key=lambda i: (-row[i], i))
        assert all(order[r - 1] == t for t, _, r in known.logprobs)
    assert [bool(d.logprobs) for d in found] == [True, True, True, False, True]


def test_turns_are_taken_in_the_order_of_rank_0_whenever_rounds_come() -> None:
    """Rank 1 hears of the second round before it begins, rank 0 only when it is through with the first one."""
    step = RunStep(plan=StepPlan(step=0, ops=[], rows=[]), token_ids=[1], sampling_requests=[])
    first = [SliceTask(1, 0, b, False) for b in (0, 1)]
    second = [SliceTask(1, 0, b, True) for b in (0, 1)]
    assert sorted(first + second) != first + second, "the control: alone, rank 1 would take another order"

    def work(mesh: MeshCollective) -> list[SliceTask]:
        ranks, turns, taken = TensorParallelRanks(mesh, 2), SliceTasks(), list[SliceTask]()
        for turn in first if mesh.rank == 0 else first + second:
            heapq.heappush(turns, (turn, step))
        for at in range(4):
            if at == 2 and mesh.rank == 0:
                for turn in second:
                    heapq.heappush(turns, (turn, step))
            found = ranks.pop_next(turns)
            assert found is not None
            taken.append(found[0])
        return taken

    assert on_all(2, work) == [first + second] * 2


def test_a_turn_whose_round_has_not_come_is_waited_for() -> None:
    step = RunStep(plan=StepPlan(step=0, ops=[], rows=[]), token_ids=[1], sampling_requests=[])
    early, late = (SliceTask(1, 1, 0, False), step), (SliceTask(1, 0, 0, False), step)

    def work(mesh: MeshCollective) -> bool:
        ranks, turns = TensorParallelRanks(mesh, 2), SliceTasks([late] if mesh.rank == 0 else [early])
        if mesh.rank == 0:
            return ranks.pop_next(turns) == late
        nothing = ranks.pop_next(turns) is None and not ranks.has_next(turns)
        turns.append(late)
        return nothing and ranks.has_next(turns) and ranks.pop_next(turns) == late and turns == [early]

    assert on_all(2, work) == [True, True]


@pytest.mark.parametrize("order", list(permutations(FILTERS)), ids=",".join)
def test_a_share_of_all_tokens_is_not_taken_of_the_best_few(order: tuple[str, ...]) -> None:
    """top_p before top_k: the probability of tokens that no rank would send counts."""
    draw = plain(temperature=1.0, top_k=3, top_p=0.5, filter_order=order)
    first = order.index("top_p") < order.index("top_k")
    assert (LogitCandidates.needed_for([draw], WIDTH) is None) == first
    assert LogitCandidates.needed_for([plain(temperature=1.0, top_k=3, filter_order=order)], WIDTH) is not None
