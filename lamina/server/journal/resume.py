"""Finishes the requests that an earlier server has left in the journal, or records why it cannot."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from lamina.facts.report import count_text
from lamina.kv.page_keys import tenant_of
from lamina.request import ErrorOrigin
from lamina.scheduler.sessions.cache_options import CacheOptions
from lamina.server.call import Service
from lamina.server.engine_client.engine_client import EngineGoneError
from lamina.server.engine_client.open_prompts import PromptRefusedError
from lamina.server.engine_client.reply_queue import ReplyQueue
from lamina.server.metrics.http_metrics import PromptMeter

from .journal import Journal
from .journal_entry import JournalEntry
from .journal_records import FailedRecord

MAX_RESTARTS = 3  # servers that one request may end, in addition to the one that accepted it

log = logging.getLogger(__name__)


async def finish_all(service: Service, journal: Journal, left: Sequence[JournalEntry]) -> None:
    """Have the engine finish all requests of ``left``. A request that it does not finish stays for the next server.

    One of these requests may have ended the earlier server. So all start together the first time. The next time, the
    remaining ones run one by one, until the guilty request is known.
    """
    if left:
        log.info("--journal: finishing %s of an earlier server", count_text(len(left), "request"))
        together, alone = [e for e in left if not e.num_restarts], [e for e in left if e.num_restarts]
        ends = await asyncio.gather(*(_finish(service, journal, entry) for entry in together))
        ends += [await _finish(service, journal, entry) for entry in alone]
        log.info("--journal: finished %d of %s", sum(ends), count_text(len(left), "request"))


async def _finish(service: Service, journal: Journal, entry: JournalEntry) -> bool:
    """Finish an entry's request. Returns True if the reply is whole now."""
    if entry.num_restarts >= MAX_RESTARTS:
        text = f"{MAX_RESTARTS} servers have ended while they computed this request again"
        return _refuse(journal, entry, 500, text, "server_error")
    if service.client.failure is not None:
        return False
    journal.restart(entry)
    try:
        return await _compute(service, entry)
    except PromptRefusedError as e:
        return _refuse(journal, entry, 400 if e.blame is ErrorOrigin.CLIENT else 500, str(e), "invalid_value")
    except EngineGoneError:
        return False
    except asyncio.CancelledError:
        journal.defer(entry)
        raise


def _refuse(journal: Journal, entry: JournalEntry, status: int, message: str, code: str) -> bool:
    log.error("--journal: %s cannot be finished: %s", entry.accepted.id, message)
    journal.refuse(FailedRecord(id=entry.accepted.id, status=status, message=message, code=code))
    return False


async def _compute(service: Service, entry: JournalEntry) -> bool:
    """Compute the rest of the reply. Returns True if it is whole. Raises PromptRefusedError, EngineGoneError."""
    replies, client = ReplyQueue(), service.client
    unfinished = sum(map(entry.unfinished_of, entry.keys))
    ticket = service.queue_limit.readmit(unfinished, tenant_of(entry.accepted.salt))
    try:
        accepted = entry.accepted
        cache_options = CacheOptions(accepted.salt, priority=accepted.priority, discard_ranges=accepted.discard)
        for number, key in enumerate(entry.keys):
            if entry.unfinished_of(key):
                ids, params = entry.prompts[number].ids, entry.params_of(number)
                meter = PromptMeter(service.metrics, time.monotonic(), len(ids), params)
                received = entry.received_of(key)
                client.add(
                    ids,
                    params,
                    replies,
                    meter,
                    key=key,
                    received=received,
                    cache_options=cache_options,
                    name=accepted.log_name,
                )
        while not entry.ended:
            for delta in await replies.get():
                if delta.finish_reason is not None:
                    ticket.on_completion_finished()
        return entry.failed is None
    finally:
        for key in entry.keys:
            client.cancel(key)
        ticket.close()
