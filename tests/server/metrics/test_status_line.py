"""The status line of a server: what it says, and when it is not written."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest
from fake import http_of, make_service

from lamina.server.metrics import status_line


def test_a_line_has_rates_and_levels_and_none_comes_while_nothing_happens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("lamina").propagate = True
    caplog.set_level(logging.INFO, logger="lamina")
    service = make_service(log_stats_s=10.0)

    async def work() -> None:
        waits, ticks = asyncio.Queue[float](), asyncio.Queue[None]()

        async def sleep(seconds: float) -> None:
            waits.put_nowait(seconds)
            await ticks.get()

        async def lines() -> list[logging.LogRecord]:
            """Passes the time between two lines, and returns all lines so far."""
            ticks.put_nowait(None)
            assert await asyncio.wait_for(waits.get(), 10) == 10.0
            return [record for record in caplog.records if record.getMessage() == "status"]

        monkeypatch.setattr(status_line, "asyncio", SimpleNamespace(sleep=sleep))
        writing = asyncio.create_task(status_line.log_status_forever(service))
        await asyncio.wait_for(waits.get(), 10)
        assert await lines() == []
        async with http_of(service) as http:
            assert (await http.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 2})).status_code == 200
        (line,) = await lines()
        fields = line.fields  # type: ignore[attr-defined]
        assert (fields["running"], fields["waiting"]) == (1, 2)
        assert 0 < fields["gen_tok_s"] < fields["prompt_tok_s"], "2 tokens and 3"
        assert 0 < fields["kv_pct"] < 100
        assert await lines() == [line]
        writing.cancel()

    asyncio.run(work())


def test_no_line_is_written_where_none_is_wanted() -> None:
    asyncio.run(asyncio.wait_for(status_line.log_status_forever(make_service(log_stats_s=0.0)), 10))
