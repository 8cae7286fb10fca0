"""The order in which replicas take their turns is the one that the rotation plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from rotation_plan import rotation
from torch import Tensor

from lamina.netstack import PeerFault
from lamina.ops.sampling.token_history import LogitChanges
from lamina.protocol.control import RunRound, RunStep, SampledToken, SamplingRequest, StepDone
from lamina.protocol.step_plan import New, RowRange, StepPlan
from lamina.scheduler.rotation.pipeline import num_replicas, route
from lamina.workers.compute.compute_worker import ComputeWorker, LocalPipeline, SingleRank

Call = tuple[int, int, int]  # batch, step, slice


class FakePool:
    """Memory workers that are never late."""

    send_s = wait_s = 0.0

    def __init__(self) -> None:
        self.plan: StepPlan | None = None
        self.announced: list[tuple[int, int]] = []

    def send_plan(self, plan: StepPlan) -> None:
        self.announced.append((plan.step, plan.batch))

    def prepare(self, plan: StepPlan) -> None: ...

    def begin_step(self, plan: StepPlan) -> None:
        self.plan = plan

    def o(self, layer: int, rows: int, dtype: torch.dtype) -> Tensor:
        return torch.full((rows, 1), float(layer))

    def outputs(self, exchange: int, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return (self.o(exchange, num_rows, dtype),)

    def check_errors(self) -> None: ...


class FakeProgram:
    """Each slice adds its number, so that what a row went through can be read from its last value."""

    def __init__(self, layers: int, pool: FakePool, log: list[Call]) -> None:
        self.slices = [self._slice(i, layers, pool, log) for i in range(layers + 1)]

    def _slice(self, index: int, layers: int, pool: FakePool, log: list[Call]) -> Any:
        def run(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
            assert pool.plan is not None
            log.append((pool.plan.batch, pool.plan.step, index))
            if index == 0:
                return (x.double(),)
            o = rest[0]
            assert (o == index - 1).all(), "the O of the layer before"
            x = x * 2 + index
            return (x,) if index < layers else (torch.nn.functional.one_hot(x.long() % 97, 97).float(),)

        return run


def through(token: int, layers: int) -> int:
    for index in range(1, layers + 1):
        token = token * 2 + index
    return token % 97


def make_round(number: int, batches: list[int], n: int, layers: int, first: bool) -> RunRound:
    steps = []
    for b in batches:
        source, reply_to = route(b, number, layers, n)
        plan = StepPlan(
            step=number, batch=b, ops=[New(b)] if first else [], rows=[RowRange(b, number, 1)], send_from=source,
            reply_to=reply_to,
        )  # fmt: skip
        draw = SamplingRequest(
            row=0, sequence=b, temperature=0.0, top_k=0, top_p=1.0, seed=0, output_index=number, logprobs=-1
        )
        steps.append(RunStep(plan=plan, token_ids=[b + 5 if first else -1], sampling_requests=[draw]))
    return RunRound(round=number, steps=steps)


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("known", [1, 3], ids=["rounds come one by one", "rounds are queued"])
def test_turns_follow_the_rotation(n: int, layers: int, known: int) -> None:
    tokens, log, ring = 4, list[Call](), LocalPipeline()  # what moves between replicas is kept in one place here
    pools = [FakePool() for _ in range(num_replicas(n))]
    replicas = [
        ComputeWorker(FakeProgram(layers, p, log), p, dtype=torch.float64, replica=r, ring=ring)  # type: ignore[arg-type]
        for r, p in enumerate(pools)
    ]
    rounds = [make_round(t, list(range(n)), n, layers, t == 0) for t in range(tokens)]
    done = list[StepDone]()
    for event in rotation(n, [1.0] * layers, [0.5] * layers, tokens).events:
        while rounds and rounds[0].round < event.token + known:
            for replica in replicas:
                replica.submit(rounds[0])
            rounds.pop(0)
        mine = replicas[event.replica - 1]
        if event.slice == 0 and event.token:
            finished = mine.run_next()
            assert finished is not None
            assert (finished.batch, finished.step) == (event.batch, event.token - 1)
            assert log.pop() == (event.batch, event.token - 1, layers)
            done.append(finished)
        assert mine.run_next() is None
        assert log.pop() == (event.batch, event.token, event.slice)
        assert not log
    for replica in replicas:
        while replica.has_work:
            last = replica.run_next()
            assert last is not None
            done.append(last)
    token = {b: b + 5 for b in range(n)}
    for d in sorted(done, key=lambda d: (d.step, d.batch)):
        token[d.batch] = through(token[d.batch], layers)
        assert [x.token_id for x in d.sampled_tokens] == [token[d.batch]]
    assert len(done) == n * tokens
    assert pools[0].announced == [(t, b) for t in range(tokens) for b in range(n)]
    assert not any(p.announced for p in pools[1:])


class Failing(FakePool):
    """Messages of step 1 have failed, which is unknown until it asks."""

    def check_errors(self) -> None:
        if self.plan is not None and self.plan.step == 1:
            raise PeerFault("a memory worker is gone")


class Drawing(SingleRank):
    def __init__(self) -> None:
        super().__init__()
        self.draws = 0

    def sample(
        self, logits: Tensor, draws: list[SamplingRequest], seen: Mapping[int, LogitChanges]
    ) -> list[SampledToken]:
        self.draws += 1
        return super().sample(logits, draws, seen)


def test_nothing_is_drawn_from_what_failed() -> None:
    pool, ranks = Failing(), Drawing()
    worker = ComputeWorker(FakeProgram(2, pool, []), pool, dtype=torch.float64, ranks=ranks)  # type: ignore[arg-type]
    for number in range(2):
        worker.submit(make_round(number, [0], 1, 2, number == 0))
    turns = iter(worker.run_next, ranks)  # one after the other, without an end
    with pytest.raises(PeerFault, match="is gone"):
        list(turns)
    assert ranks.draws == 1


def test_a_step_without_rows_is_done_at_once_and_by_one_replica() -> None:
    pools = [FakePool(), FakePool()]
    replicas = [
        ComputeWorker(FakeProgram(2, p, []), p, dtype=torch.float64, replica=r)  # type: ignore[arg-type]
        for r, p in enumerate(pools)
    ]
    source, reply_to = route(1, 0, 2, 3)
    step = RunStep(
        plan=StepPlan(step=0, batch=1, ops=[], rows=[], send_from=source, reply_to=reply_to),
        token_ids=[],
        sampling_requests=[],
    )
    for replica in replicas:
        replica.submit(RunRound(round=0, steps=[step]))
    done = [r.run_next() for r in replicas if r.has_work]
    assert [(d.batch, d.step, d.sampled_tokens) for d in done if d] == [(1, 0, [])]
