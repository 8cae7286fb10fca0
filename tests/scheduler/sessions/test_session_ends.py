"""Turns of sessions that end while something else happens to their session, in an engine whose workers are fakes.

Covers: lamina/scheduler/kv_manager/session_cache.py, lamina/engine/sessions.py.
"""

from __future__ import annotations

import pytest
from engine_api import make_engine
from fake_executor import FakeWire

from lamina.engine.engine import Engine
from lamina.request import SamplingParams
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.scheduler.sessions.cache_options import CacheOptions
from lamina.scheduler.sessions.session_table import SessionName

NAME = SessionName(b"me", "a")
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def turn(engine: Engine, prompt: list[int]) -> list[int]:
    """Runs a whole turn, as far as a client sees: the engine has not settled after it. The conversation after it."""
    number = engine.add(prompt, PARAMS, terms=CacheOptions(session=NAME))
    while True:
        for output in engine.step():
            if output.request_id == number and output.finished:
                return [*prompt, *output.outputs[0].token_ids]


@pytest.fixture
def wire() -> FakeWire:
    return FakeWire()


@pytest.fixture
def engine(wire: FakeWire) -> Engine:
    return make_engine(wire, enable_prefix_caching=True, prefill_chunk=64)


def settle(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
    engine.release_idle_blocks()


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_a_session_that_is_deleted_before_its_turn_is_settled_leaves_nothing(
    engine: Engine, wire: FakeWire, turns: int
) -> None:
    said = [5] * 40
    for number in range(turns):
        said = [*turn(engine, said), *[6 + number] * 20]
    assert engine.sessions.drop(NAME)
    assert not engine.sessions.drop(NAME)
    settle(engine)
    assert engine.scheduler.features[PrefixCache].num_retained == 0
    assert wire.tables.free_blocks == (64,)
    turn(engine, said)
    settle(engine)
    assert [facts.turns for facts in engine.sessions.list_tenant(b"me")] == [1]


def test_a_turn_that_is_broken_off_leaves_its_session_where_it_was(engine: Engine) -> None:
    said = [*turn(engine, [5] * 90), 7, 8]
    settle(engine)
    (before,) = engine.sessions.list_tenant(b"me")
    number = engine.add(
        [*said, *[9] * 20], SamplingParams(prompt_logprobs=1, max_tokens=5), terms=CacheOptions(session=NAME)
    )
    for _ in range(2):
        engine.step()
    engine.cancel(number)
    settle(engine)
    (after,) = engine.sessions.list_tenant(b"me")
    assert after.tokens == before.tokens > 0
    output = engine.add([*said, *[3] * 19], PARAMS, terms=CacheOptions(session=NAME))
    found = None
    while engine.has_work:
        found = next((o for o in engine.step() if o.request_id == output), found)
    assert found is not None
    assert (found.num_cached_tokens or 0) >= before.tokens


def test_turns_that_wait_while_their_session_is_deleted_leave_no_session() -> None:
    engine = make_engine(FakeWire(), enable_prefix_caching=True, prefill_chunk=64, max_num_seqs=1)
    said = turn(engine, [5] * 40)
    for number in (6, 7):
        engine.add([*said, *[number] * 40], PARAMS, terms=CacheOptions(session=NAME))
    assert engine.sessions.drop(NAME)
    while not any(output.finished for output in engine.step()):
        pass
    engine.step()
    engine.scheduler.evict_retained()
    settle(engine)
    assert engine.scheduler.features[PrefixCache].num_retained == 1, "the last turn, which has no name"
    assert engine.sessions.list_tenant(b"me") == []
