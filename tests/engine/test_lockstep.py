"""Sequences whose tokens their caller chooses, over a wire that has no workers."""

from __future__ import annotations

import struct
from contextlib import nullcontext

import msgspec
import pytest
import torch
from engine_api import make_engine, run
from fake_executor import VOCAB, FakeWire, continuation, next_token

from lamina.engine.engine import Engine
from lamina.engine.feature import EngineFeature
from lamina.engine.lockstep import Lockstep
from lamina.ops.sampling.sampler import Sampler
from lamina.protocol.control import RunStep, SampledToken, SamplingRequest, StepDone
from lamina.protocol.executor import EpochChanged
from lamina.protocol.step_plan import SurvivingKv
from lamina.request import SamplingParams
from lamina.workers.compute.tensor_parallel import LogitCandidates

PROMPTS = [[1, 2, 3], [5] * 30, [7], [4] * 11]


class WireOfLogits(FakeWire):
    """A wire on which the model's next token has the largest logit of a whole draw."""

    def execute(self, step: RunStep) -> StepDone:
        done = super().execute(step)
        drawn = [
            SampledToken(d.sequence, 0, logits=logits(next_token(self.stored[d.sequence]))) if d.return_logits else one
            for d, one in zip(step.sampling_requests, done.sampled_tokens, strict=True)
        ]
        return msgspec.structs.replace(done, sampled_tokens=drawn)


def logits(best: int) -> bytes:
    return struct.pack(f"<{VOCAB}f", *(float(t == best) for t in range(VOCAB)))


def best_of(row: bytes) -> int:
    values = struct.unpack(f"<{VOCAB}f", row)
    return values.index(max(values))


def hold(engine: Engine, prompts: list[list[int]], max_tokens: int = 12) -> Lockstep:
    return Lockstep(engine, prompts, max_tokens, step=engine.step, settle=engine.release_idle_blocks, use=nullcontext)


def choose_best(rows: Lockstep, count: int) -> list[list[int]]:
    """The tokens that the model would draw, chosen one by one."""
    tokens = []
    for _ in range(count):
        tokens.append([best_of(row) for row in rows.logits()])
        rows.choose(tokens[-1])
    return [list(each) for each in zip(*tokens, strict=True)]


@pytest.mark.parametrize("pipeline", [1, 2, 3])
def test_chosen_tokens_are_the_text_that_logits_see(pipeline: int) -> None:
    """Prompts end in different steps; no one goes on before all have their logits."""
    engine = make_engine(WireOfLogits(), prefill_chunk=8, max_num_seqs=4, pipeline=pipeline)
    with hold(engine, PROMPTS) as rows:
        assert choose_best(rows, 9) == [continuation(p, 9) for p in PROMPTS]
        odd = [90, 0, 41, 7]
        rows.choose([best_of(r) for r in rows.logits()])
        rows.logits()
        rows.choose(odd)
        found = [best_of(row) for row in rows.logits()]
    before = [p + continuation(p, 10) for p in PROMPTS]
    assert found == [next_token([*b, o]) for b, o in zip(before, odd, strict=True)], "not its own choice"
    assert not engine.has_work
    assert engine.free_blocks == (64,)


def test_others_go_on_meanwhile_and_draw_their_own_tokens() -> None:
    engine = make_engine(WireOfLogits(), max_num_seqs=8)
    drawing = engine.add([9, 9], SamplingParams(max_tokens=5))
    with hold(engine, PROMPTS[:1]) as rows:
        rows.logits()
        done = {}
        while drawing not in done:
            done |= {o.request_id: o for o in engine.step() if o.finished}
        assert done[drawing].outputs[0].token_ids == continuation([9, 9], 5)
        assert choose_best(rows, 3) == [continuation(PROMPTS[0], 3)]


def test_rows_that_have_no_room_together_are_refused_and_leave_none() -> None:
    engine = make_engine(WireOfLogits(num_blocks=10), max_num_seqs=4)
    with (
        pytest.raises(ValueError, match="4 rows have no room together: pass fewer"),
        hold(engine, PROMPTS) as rows,
    ):
        choose_best(rows, 12)
    assert not engine.has_work
    assert engine.free_blocks == (10,)
    engine.add([1, 2, 3], SamplingParams(max_tokens=3))
    assert [o.outputs[0].token_ids for o in run(engine).values()] == [continuation([1, 2, 3], 3)]
    with pytest.raises(ValueError, match=r"5 rows cannot decode together, at most 4 .* max_num_seqs=5"):
        hold(engine, [[1]] * 5)


def test_a_row_that_is_computed_again_has_its_logits_again() -> None:
    """Both where its KV was lost with its worker, and where it was kept."""
    for kept in (0, 3):
        engine = make_engine(WireOfLogits(), max_num_seqs=4)
        with hold(engine, PROMPTS[:1]) as rows:
            before = rows.logits()
            lost_and_found(engine, {0: kept})
            assert engine.request(0).pending_logits() == b"", "of the old epoch"
            assert rows.logits() == before
            assert choose_best(rows, 4) == [continuation(PROMPTS[0], 4)]


def lost_and_found(engine: Engine, kept: dict[int, int]) -> None:
    wire = engine.executor
    assert isinstance(wire, FakeWire)

    def resume(keep: list[SurvivingKv]) -> object:
        for sequence in {*wire.stored} - {k.sequence for k in keep}:
            del wire.stored[sequence]
        wire.tables.reconcile(keep)
        return msgspec.structs.replace(wire.ready, epoch=engine.scheduler.epoch + 1)

    wire.resume = resume  # type: ignore[method-assign,assignment]
    wire.check_workers = lambda: EpochChanged([], [kept])  # type: ignore[method-assign,assignment,return-value]
    engine.check_workers()


def test_a_row_that_has_all_its_tokens_takes_no_more() -> None:
    engine = make_engine(WireOfLogits(), max_num_seqs=4)
    with hold(engine, PROMPTS[:2], max_tokens=2) as rows:
        choose_best(rows, 2)
        for call in (rows.logits, lambda: rows.choose([1, 1])):
            with pytest.raises(ValueError, match=r"^a row has ended \(length\): no token follows$"):
                call()
    assert not engine.has_work


def test_a_row_that_is_refused_says_why() -> None:
    class NoLender(EngineFeature):
        def on_idle(self, engine: Engine) -> str:
            return "nobody lends"

    engine = make_engine(WireOfLogits(num_blocks=4), [NoLender()])
    with (
        hold(engine, [[5] * 30]) as rows,
        pytest.raises(ValueError, match=r"^a row has ended \(error\): nobody lends$"),
    ):
        rows.logits()
    assert not engine.has_work


def test_a_token_that_is_none_is_refused() -> None:
    engine = make_engine(WireOfLogits(), max_num_seqs=4)
    with hold(engine, PROMPTS[:1]) as rows:
        rows.logits()
        for bad in (-1, VOCAB):
            with pytest.raises(ValueError, match=f"token id {bad} is out of vocabulary: it has {VOCAB} tokens"):
                rows.choose([bad])
        assert choose_best(rows, 2) == [continuation(PROMPTS[0], 2)]


def test_a_whole_draw_gives_all_logits_beside_draws_of_tokens() -> None:
    rows = torch.tensor([[1.0, 3.0, float("nan")], [0.0, 2.0, 5.0]], dtype=torch.bfloat16)
    whole, plain = Sampler(threads=1).sample(rows, [draw(0, whole=True), draw(1)])
    assert (whole.token_id, plain.token_id, plain.logits) == (0, 2, b"")
    assert struct.unpack("<3f", whole.logits) == (1.0, 3.0, pytest.approx(float("nan"), nan_ok=True))


def test_ranks_give_all_that_they_have_where_one_draw_is_whole() -> None:
    assert LogitCandidates.needed_for([draw(0), draw(1)], 4096) is not None
    assert LogitCandidates.needed_for([draw(0), draw(1, whole=True)], 4096) is None


def draw(row: int, *, whole: bool = False) -> SamplingRequest:
    return SamplingRequest(
        row=row, sequence=row, temperature=0.0, top_k=0, top_p=1.0, seed=0, output_index=0, logprobs=-1,
        return_logits=whole
    )  # fmt: skip
