"""The status line: the numbers that an operator wants to see every few seconds."""

from __future__ import annotations

import asyncio
import logging
import time

from lamina.server.call import Service

logger = logging.getLogger(__name__)


async def log_status_forever(service: Service) -> None:
    """Log a line every ``log_stats_s`` seconds, and none while nothing happens."""
    every = service.config.log_stats_s
    if not every:
        return
    last = _Totals(service)
    while True:
        await asyncio.sleep(every)
        now = _Totals(service)
        if now.tokens != last.tokens or service.queue_limit.completions:
            logger.info("status", extra={"fields": now.since(last)})
        last = now


class _Totals:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._at = time.monotonic()
        self._prompt = service.metrics.totals["prompt_tokens"]
        self._generated = service.metrics.totals["generation_tokens"]
        self._calls, self._wait_s = service.engine_metrics.attention_calls

    @property
    def tokens(self) -> float:
        return self._prompt + self._generated

    def since(self, last: _Totals) -> dict[str, object]:
        """Return rates and levels, by their names in the line."""
        service, seconds = self._service, self._at - last._at
        state = service.client.state
        calls = self._calls - last._calls
        waits = {"attention_wait_us": round((self._wait_s - last._wait_s) / calls * 1e6)} if calls > 0 else {}
        return {
            "running": state.running if state else 0,
            "waiting": state.waiting if state else 0,
            "prompt_tok_s": round((self._prompt - last._prompt) / seconds, 1),
            "gen_tok_s": round((self._generated - last._generated) / seconds, 1),
            "kv_pct": round(service.engine_metrics.kv_usage * 100, 1),
            **waits,
        }
