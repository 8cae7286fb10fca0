"""An engine that rests has no step in flight, and goes on under another epoch with the tokens that it would have
had.
"""

from __future__ import annotations

import pytest
from engine_api import make_engine, run
from fake_executor import FakeWire, continuation
from msgspec import structs

from lamina.protocol.control import RunRound
from lamina.request import SamplingParams

PROMPTS = [[5, 6, 7], [9], [3] * 20]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class Viewed(FakeWire):
    """Keeps the views of the plans."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = structs.replace(self.ready, epoch=1)
        self.views: list[int] = []

    def submit(self, new: RunRound) -> None:
        self.views += [step.plan.epoch for step in new.steps]
        super().submit(new)


@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("pipeline", [1, 3])
def test_it_goes_on_where_it_was(pipeline: int, steps: int) -> None:
    wire = Viewed()
    engine = make_engine(wire, pipeline=pipeline, prefill_chunk=8)
    ids = [engine.add(prompt, PARAMS) for prompt in PROMPTS]
    for _ in range(steps):
        engine.step()
    with pytest.raises(ValueError, match="finish_in_flight first"):
        engine.resume(wire.ready)
    engine.finish_in_flight()
    assert not wire.flight
    assert not wire.done
    assert engine.finish_in_flight() == []
    assert set(wire.views) == {1}
    before = len(wire.views)
    engine.resume(structs.replace(wire.ready, epoch=4))
    outputs = run(engine)
    assert [outputs[i].outputs[0].token_ids for i in ids] == [continuation(p, 12) for p in PROMPTS]
    assert set(wire.views[before:]) == {4}
    wire.tables.check_integrity()


def test_another_capacity_is_refused() -> None:
    wire = Viewed()
    engine = make_engine(wire)
    with pytest.raises(ValueError, match="memory workers had .* KV blocks, and now have"):
        engine.resume(structs.replace(wire.ready, num_blocks=[[7]]))
    assert engine.scheduler.epoch == 1
