"""A request that makes engines fail is refused for ten minutes, over HTTP and in the journal; others go on as before.

Covers: lamina/server/engine_client/open_prompts.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_flow import until
from wired import FATAL, ThreadEngine, WiredServer, over_a_wire

from lamina.server.engine_client.open_prompts import GUILTY
from lamina.server.engine_client.suspects import PROOF
from lamina.server.journal.journal import Journal
from lamina.server.journal.resume import finish_all

SOON_S = 60.0
PATH = "/v1/completions"


def asked(*prompt: int, **more: Any) -> dict[str, Any]:
    return {"prompt": list(prompt), "max_tokens": 40, "ignore_eos": True, "temperature": 0, **more}


INNOCENT = [asked(first, first + 1, first + 2) for first in range(5, 11)]


@pytest.fixture
def wired(tmp_path: Path) -> Iterator[WiredServer]:
    logging.getLogger("lamina").propagate = True
    with over_a_wire():
        yield WiredServer(tmp_path)


def serving(server: WiredServer, work: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def whole() -> None:
        await server.open()
        try:
            await asyncio.wait_for(work(server.http), SOON_S)
        finally:
            await server.close()

    asyncio.run(whole())


async def text_of(http: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """Returns the text of a stream, which must come to its end."""
    answer = await http.post(PATH, json={**body, "stream": True})
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert not [chunk for chunk in chunks if "error" in chunk]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def lines(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if re.search(words, record.getMessage())]


@pytest.mark.parametrize("behind", [0, 3, PROOF - 1])
def test_it_costs_two_engines_and_others_are_answered_as_without_it(
    wired: WiredServer, behind: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        wanted = [await text_of(http, body) for body in INNOCENT]
        streams = [asyncio.create_task(text_of(http, body)) for body in INNOCENT]
        refused = await http.post(PATH, json=asked(5, FATAL + behind))
        assert (refused.status_code, refused.json()["error"]["message"]) == (500, GUILTY)
        assert [await stream for stream in streams] == wanted
        assert len(wired.engines) == 3
        (said,) = lines(caplog, "is refused for 600 s")
        assert re.search(r"request cmpl-[0-9a-f]{12} is refused for 600 s", said)
        assert (await http.get("/health")).json() == {"status": "ok"}

    serving(wired, work)


@pytest.mark.parametrize("stream", [False, True])
def test_the_same_again_costs_no_engine(wired: WiredServer, stream: bool) -> None:
    """Clients ask again by themselves where a status is 500; and several may have asked at once."""

    async def work(http: httpx.AsyncClient) -> None:
        body = asked(5, FATAL, stream=stream)
        for answer in await asyncio.gather(*(http.post(PATH, json=body) for _ in range(4))):
            assert GUILTY in answer.text
        await until(lambda: len(wired.engines) == 3)
        for seed in (None, 7):
            assert GUILTY in (await http.post(PATH, json={**body, "seed": seed})).text
        assert (await http.post(PATH, json=asked(5, 6))).status_code == 200
        assert len(wired.engines) == 3
        assert (await http.post(PATH, json={**body, "prompt": [6, FATAL]})).status_code in (200, 500)
        await until(lambda: len(wired.engines) == 5)  # another request is another one

    serving(wired, work)


def test_a_journal_has_its_error_and_no_later_server_begins_it_again(wired: WiredServer, tmp_path: Path) -> None:
    found = list[str]()

    async def work(http: httpx.AsyncClient) -> None:
        asking = asyncio.create_task(http.post(PATH, json=asked(5, FATAL + 2, stream=True)))
        await until(wired.journal.unfinished)
        (entry,) = wired.journal.unfinished()
        found.append(entry.accepted.id)
        assert GUILTY in (await asking).text
        answer = await http.get(f"{PATH}/{found[0]}")
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, GUILTY)

    serving(wired, work)
    journal = Journal(str(tmp_path / "journal"), wired.start.model, 1 << 20)
    assert journal.unfinished() == []
    entry = journal.find(found[0])
    assert entry is not None
    assert entry.failed is not None
    journal.close()


def test_one_that_ended_the_server_before_ends_in_the_next_one_as_it_resumes(tmp_path: Path) -> None:
    """With all that was under way there, and these go on."""
    logging.getLogger("lamina").propagate = True
    with over_a_wire():
        first, second = WiredServer(tmp_path, max_recoveries=0), WiredServer(tmp_path)

        async def break_down() -> None:
            await first.open()
            long = [{**body, "max_tokens": 100} for body in INNOCENT[:3]]  # none ends before the fatal one comes
            asking = [asyncio.create_task(first.http.post(PATH, json=body)) for body in long]
            await until(lambda: len(first.journal.unfinished()) == 3)
            fatal = await first.http.post(PATH, json=asked(5, FATAL + 1))
            assert fatal.status_code == 503, "the server ends, by --max-recoveries 0"
            assert {(await each).status_code for each in asking} <= {200, 503}
            await first.close()

        async def go_on() -> None:
            await second.open()
            left = second.journal.unfinished()
            await asyncio.wait_for(finish_all(second.service, second.journal, left), SOON_S)
            assert second.journal.unfinished() == []
            failed = [entry for entry in left if entry.failed is not None]
            assert [entry.prompts[0].ids for entry in failed] == [[5, FATAL + 1]]
            assert len(second.engines) == 3
            await second.close()

        asyncio.run(break_down())
        asyncio.run(go_on())


def test_engines_that_somebody_ends_are_nobodys_fault(wired: WiredServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drill kills engines during the same streams, again and again."""
    monkeypatch.setattr(ThreadEngine, "status", -signal.SIGKILL)

    async def work(http: httpx.AsyncClient) -> None:
        wanted = await text_of(http, asked(5, 6, max_tokens=100))
        stream = asyncio.create_task(text_of(http, asked(5, 6, max_tokens=100)))
        for number in range(1, 5):
            await until(lambda n=number: len(wired.engines) == n and wired.client.prompts.keys)
            wired.engines[-1].kill()
        assert await stream == wanted
        assert len(wired.engines) == 5

    serving(wired, work)


def test_as_long_as_others_come_to_their_ends_no_number_of_such_requests_ends_a_server(wired: WiredServer) -> None:
    """Each costs two engines, and --max-recoveries is 5."""

    async def work(http: httpx.AsyncClient) -> None:
        for number in range(6):
            assert (await http.post(PATH, json=asked(*INNOCENT[0]["prompt"]))).status_code == 200
            assert (await http.post(PATH, json=asked(number, FATAL))).status_code == 500
        await until(lambda: len(wired.engines) == 13)
        assert wired.client.failure is None

    serving(wired, work)


def test_a_server_whose_engines_fail_by_all_requests_ends(wired: WiredServer) -> None:
    """An engine is broken where no request comes to its end, whatever it is."""

    async def work(http: httpx.AsyncClient) -> None:
        statuses = [(await http.post(PATH, json=asked(number, FATAL))).status_code for number in range(4)]
        assert statuses == [500, 500, 500, 503]
        assert "--max-recoveries 5 allows no other one" in (wired.client.failure or "")
        assert len(wired.engines) == 6

    serving(wired, work)


def test_a_client_that_leaves_in_its_trial_lets_the_others_go_on(wired: WiredServer) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        leaving = asyncio.create_task(http.post(PATH, json=asked(5, FATAL)))
        others = [asyncio.create_task(text_of(http, body)) for body in INNOCENT]
        await until(lambda: len(wired.engines) == 2)
        leaving.cancel()
        assert all([await each for each in others])
        assert len(wired.engines) <= 3

    serving(wired, work)
