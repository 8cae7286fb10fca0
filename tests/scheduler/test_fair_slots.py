"""Tenants that run much give places up to those that run little: soon, no more than needed, with the same tokens."""

from __future__ import annotations

from collections import Counter

import pytest
from engine_api import make_engine
from fake_executor import FakeWire, continuation
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fair_order import TENANTS, add

from lamina.engine.engine import Engine
from lamina.kv.page_keys import tenant_of

PLACES = 4
NAMES = {tenant: name for name, tenant in TENANTS.items()}


def shares(engine: Engine) -> Counter[str]:
    return Counter(NAMES.get(tenant_of(s.salt), "") for s in engine.scheduler.running if not s.finished)


def tokens_of(engine: Engine) -> dict[int, list[int]]:
    """Run all requests; return their tokens."""
    found = dict[int, list[int]]()
    while engine.has_work:
        for output in engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
    engine.release_idle_blocks()
    return found


@pytest.mark.parametrize("blocks", [0, 24], ids=["places", "kv"])
def test_a_tenant_that_waits_begins_while_anothers_requests_run(blocks: int) -> None:
    engine = make_engine(FakeWire(blocks) if blocks else None, max_num_seqs=64 if blocks else PLACES)
    many = [add(engine, "a", prompt=4, outputs=32) for _ in range(12)]
    for _ in range(12):
        engine.step()
    one, steps = add(engine, "b"), 0
    found = dict[int, int]()
    while one not in found:
        found.update({output.request_id: steps for output in engine.step() if output.finished})
        steps += 1
        assert steps < 15, "it waits for a whole request of the other"
    assert len(found.keys() & set(many)) <= PLACES
    assert engine.scheduler.num_preemptions >= 1


def test_shares_become_equal_and_then_stay() -> None:
    engine = make_engine(max_num_seqs=PLACES)
    for tenant in "ab":
        for _ in range(8):
            add(engine, tenant, outputs=100)
        for _ in range(5):
            engine.step()
    for _ in range(20):
        engine.step()
    assert shares(engine) == {"a": 2, "b": 2}
    before = engine.scheduler.num_preemptions
    assert before == 2, "no more than the places that changed hands"
    for _ in range(15):
        engine.step()
    assert engine.scheduler.num_preemptions == before


@pytest.mark.parametrize("tenant", ["a", ""])
def test_one_tenants_requests_take_no_places_from_each_other(tenant: str) -> None:
    engine = make_engine(max_num_seqs=PLACES)
    for _ in range(12):
        add(engine, tenant, outputs=20)
    tokens_of(engine)
    assert engine.scheduler.num_preemptions == 0


def test_a_more_urgent_request_keeps_its_place() -> None:
    engine = make_engine(max_num_seqs=PLACES, scheduling_policy="priority")  # type: ignore[arg-type]
    urgent = [add(engine, "a", outputs=30, priority=-1) for _ in range(PLACES)]
    for _ in range(5):
        engine.step()
    one = add(engine, "b")
    assert list(tokens_of(engine))[:PLACES] == urgent
    assert engine.scheduler.num_preemptions == 0
    assert one not in urgent


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.integers(1, 30), st.integers(0, 6)), max_size=16)
)
def test_tokens_do_not_depend_on_who_gives_up_a_place(requests: list[tuple[str, int, int, int]]) -> None:
    engine, expected, got = make_engine(max_num_seqs=2), dict[int, list[int]](), dict[int, list[int]]()
    for tenant, prompt, outputs, steps in requests:
        number = add(engine, tenant, prompt, outputs)
        expected[number] = continuation([5] * prompt, outputs)
        for _ in range(steps):
            got.update({o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished})
    got.update(tokens_of(engine))
    assert got == expected
    assert engine.free_blocks == (64,)
