"""The pace of large bodies: no key's bodies keep other keys' requests waiting, and who is alone never waits."""

from __future__ import annotations

import asyncio
import itertools
import random
from hashlib import sha256

import httpx
import pytest
from fake import http_of, make_service
from test_layers import error_of, run

from lamina.server.body_pace import ACTIVE_S, AT_ONCE, BYTES_PER_S, BodyPace
from lamina.server.tenants import salt_of

BODY = 8 << 20
NEVER = 1e9


class Clock:
    """A time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_bodies_of_one_tenant_are_read_at_the_pace_while_another_has_requests() -> None:
    clock, ends = Clock(), list[float]()
    pace = BodyPace(2, clock)
    for _ in range(50):
        pace.note(b"other")
        clock.now += pace.wait_s(b"one", BODY, NEVER)
        ends.append(clock.now)
    first = AT_ONCE // BODY
    assert ends[first] == ends[0], "these come at once"
    assert ends[-1] - ends[first] == pytest.approx((len(ends) - 1 - first) * BODY / BYTES_PER_S)


def test_bodies_that_come_together_wait_one_after_another() -> None:
    pace = BodyPace(2, Clock())
    pace.note(b"other")
    waits = [pace.wait_s(b"one", BODY, NEVER) for _ in range(6)]
    steps = {round(later - sooner, 6) for sooner, later in itertools.pairwise(waits[2:])}
    assert steps == {BODY / BYTES_PER_S}
    assert pace.wait_s(b"other", BODY, NEVER) == 0, "another's debt is its own"


@pytest.mark.parametrize("tenants", [1, 2])
def test_who_is_alone_never_waits(tenants: int) -> None:
    clock = Clock()
    pace = BodyPace(tenants, clock)
    pace.note(b"other")
    clock.now += ACTIVE_S if tenants > 1 else 0  # without keys, all requests are one tenant's
    assert [pace.wait_s(b"one", BODY, NEVER) for _ in range(20)] == [0] * 20


def test_a_pace_that_no_prompts_reach_is_never_waited_for() -> None:
    """Bodies at random times, in sum below the pace, never wait: 4 MB a second are a million tokens."""
    clock, rng = Clock(), random.Random(3)
    pace = BodyPace(2, clock)
    for _ in range(2000):
        size = rng.randrange(1 << 14, 1 << 21)
        clock.now += size / BYTES_PER_S * rng.uniform(0.9, 1.3)
        pace.note(b"other")
        assert pace.wait_s(b"one", size, NEVER) == 0


@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_body_that_would_wait_too_long_is_refused_before_it_is_read(in_chunks: bool) -> None:
    service = make_service(api_key="one,other", body_timeout_s=20.0)
    service.body_pace = BodyPace(2, Clock())
    pieces = [b'{"prompt": "', *[b"a" * (1 << 20)] * 7]

    async def send(http: httpx.AsyncClient, key: str, *, small: bool = False) -> httpx.Response:
        async def chunks() -> object:
            for piece in pieces:
                yield piece

        heads = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        large = chunks() if in_chunks else b"".join(pieces)
        body = b'{"prompt": "x", "max_tokens": 1}' if small else large
        return await http.post("/v1/completions", content=body, headers=heads)  # type: ignore[arg-type]

    async def work() -> None:
        async with http_of(service) as http:
            alone = [await send(http, "one") for _ in range(4)]
            assert {response.status_code for response in alone} == {400}
            assert (await send(http, "other", small=True)).status_code == 200
            assert (await send(http, "one")).status_code == 400
            service.body_pace.wait_s(salt_of(sha256(b"one").digest(), None), AT_ONCE + 21 * BYTES_PER_S, NEVER)
            assert (late := await send(http, "one")).status_code == 429
            assert error_of(late)["code"] == "overloaded"
            assert 1 <= int(late.headers["retry-after"]) <= 60
            assert (await send(http, "one", small=True)).status_code == 200, "small ones never wait"
            assert (await send(http, "other")).status_code == 400, "nor do another key's"

    run(asyncio.wait_for(work(), 60))
