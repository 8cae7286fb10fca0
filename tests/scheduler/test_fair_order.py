"""Tenants that wait get equal shares of tokens; one tenant's requests run in the order of arrival."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

from engine_api import make_engine
from hypothesis import given
from hypothesis import strategies as st

from lamina.engine.engine import Engine
from lamina.request import SamplingParams
from lamina.scheduler.sessions.cache_options import CacheOptions

TENANTS = {name: name.encode() * 32 for name in "abc"}


def one_at_a_time(**options: str) -> Engine:
    return make_engine(max_num_seqs=1, **options)  # type: ignore[arg-type]


def add(engine: Engine, tenant: str, prompt: int = 2, outputs: int = 3, priority: int = 0) -> int:
    params = SamplingParams(max_tokens=outputs, ignore_eos=True)
    terms = CacheOptions(salt=TENANTS.get(tenant, b""), priority=priority)
    return engine.add([5] * prompt, params, terms=terms)


def order_of(engine: Engine) -> list[int]:
    """Run all requests; return them in the order in which they finished."""
    order = list[int]()
    while engine.has_work:
        order += [output.request_id for output in engine.step() if output.finished]
    return order


def test_a_tenants_first_request_does_not_wait_for_all_of_anothers() -> None:
    engine = one_at_a_time()
    many = [add(engine, "a") for _ in range(20)]
    one = add(engine, "b")
    order = order_of(engine)
    assert order.index(one) <= 1
    assert [n for n in order if n != one] == many, "one tenant's requests keep their order"


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=12))
def test_one_tenant_has_the_order_of_arrival(requests: list[tuple[int, int]]) -> None:
    engine = one_at_a_time()
    numbers = [add(engine, "", prompt, outputs) for prompt, outputs in requests]
    assert order_of(engine) == numbers


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5), st.integers(1, 4)), min_size=8, max_size=24))
def test_while_two_tenants_wait_neither_gets_a_request_more_than_the_other(
    requests: list[tuple[str, int, int]],
) -> None:
    engine = one_at_a_time()
    asked = {add(engine, tenant, p, o): (tenant, p + o) for tenant, p, o in requests}
    order, largest = order_of(engine), max(tokens for _, tokens in asked.values())
    left = Counter(tenant for tenant, _ in asked.values())
    served = Counter[str]()
    for number in order:
        tenant, tokens = asked[number]
        served[tenant] += tokens
        left[tenant] -= 1
        shares = [served[t] for t in left if left[t] > 0]
        # the first request of all began before others came: one request more than start-time fair queueing allows
        assert not shares or max(shares) - min(shares) <= 3 * largest


def test_a_tenant_saves_up_no_share_while_it_is_idle() -> None:
    engine = one_at_a_time()
    for _ in range(30):
        add(engine, "a")
    order_of(engine)
    first = [add(engine, tenant) for tenant in "babababa"]
    assert order_of(engine) == first, "a has used much before, and b nothing"


def test_requests_with_long_answers_count_as_much_as_they_may_have() -> None:
    engine = one_at_a_time()
    long = [add(engine, "a", outputs=30) for _ in range(3)]
    short = [add(engine, "b", outputs=3) for _ in range(9)]
    order = order_of(engine)
    before_second = order[: order.index(long[1])]
    assert sum(n in short for n in before_second) >= 5
    assert list(accumulate(n in long for n in order))[-1] == 3


def test_one_tenants_urgent_request_does_not_put_anothers_after_all_that_the_first_asked_for() -> None:
    engine = one_at_a_time(scheduling_policy="priority")
    many = [add(engine, "a") for _ in range(20)]
    add(engine, "a", priority=-1)
    one = add(engine, "b")
    order = order_of(engine)
    assert order.index(one) < order.index(many[3])


def test_shares_of_urgent_requests_do_not_depend_on_those_that_wait_for_them() -> None:
    engine = one_at_a_time(scheduling_policy="priority")
    add(engine, "c", priority=1)
    many = [add(engine, "a", priority=-1) for _ in range(20)]
    for _ in range(30):
        engine.step()
    late = [add(engine, "b", priority=-1) for _ in range(20)]
    order = order_of(engine)
    left = [n for n in many if n in order]
    assert order.index(left[5]) < order.index(late[10]), "b has saved up nothing while a alone asked"


def test_priorities_come_before_shares() -> None:
    engine = one_at_a_time(scheduling_policy="priority")
    add(engine, "c")
    urgent = [add(engine, "a", priority=-1) for _ in range(5)]
    later = add(engine, "b")
    order = order_of(engine)
    assert order.index(later) > max(order.index(n) for n in urgent)
