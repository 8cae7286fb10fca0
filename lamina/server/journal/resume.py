"""Finishes the requests that an earlier server has left in the journal, or records why it cannot."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from lamina.engine.conversations.terms import KVTerms
from lamina.facts.report import counted
from lamina.request import Blame
from lamina.server.calls import Service
from lamina.server.link.client import EngineGoneError
from lamina.server.link.open_prompts import PromptRefusedError
from lamina.server.link.reply_feed import ReplyFeed
from lamina.server.watch.metrics import PromptMeter

from .entry import Entry
from .journal import Journal
from .records import Unanswerable

MOST_BEGUN = 3  # servers that one request may end, beside the one that accepted it

log = logging.getLogger(__name__)


async def finish_all(service: Service, journal: Journal, left: Sequence[Entry]) -> None:
    """Have the engine finish all requests of ``left``. A request that it does not finish stays for the next server.

    One of these requests may have ended the server before. So all are begun together once; the next time, the ones that
    are left are begun one by one, until that request is known.
    """
    if left:
        log.info("--journal: finishing %s of an earlier server", counted(len(left), "request"))
        together, alone = [e for e in left if not e.times_begun], [e for e in left if e.times_begun]
        ends = await asyncio.gather(*(_finish(service, journal, entry) for entry in together))
        ends += [await _finish(service, journal, entry) for entry in alone]
        log.info("--journal: finished %d of %s", sum(ends), counted(len(left), "request"))


async def _finish(service: Service, journal: Journal, entry: Entry) -> bool:
    """Finish an entry's request; whether the answer is whole now."""
    if entry.times_begun >= MOST_BEGUN:
        text = f"{MOST_BEGUN} servers have ended while they computed this request again"
        return _refuse(journal, entry, 500, text, "server_error")
    if service.client.failure is not None:
        return False
    journal.begin_again(entry)
    try:
        return await _compute(service, entry)
    except PromptRefusedError as e:
        return _refuse(journal, entry, 400 if e.blame is Blame.CLIENT else 500, str(e), "invalid_value")
    except EngineGoneError:
        return False
    except asyncio.CancelledError:
        journal.put_off(entry)
        raise


def _refuse(journal: Journal, entry: Entry, status: int, message: str, code: str) -> bool:
    log.error("--journal: %s cannot be finished: %s", entry.accepted.id, message)
    journal.refuse(Unanswerable(id=entry.accepted.id, status=status, message=message, code=code))
    return False


async def _compute(service: Service, entry: Entry) -> bool:
    """To the end of the answer. Raises PromptRefusedError, EngineGoneError."""
    feed, client = ReplyFeed(), service.client
    ticket = service.admission.enter_again(sum(map(entry.open_of, entry.keys)))
    try:
        said = entry.accepted
        terms = KVTerms(said.salt, priority=said.priority, discard=said.discard)
        for number, key in enumerate(entry.keys):
            if entry.open_of(key):
                ids, params = entry.prompts[number].ids, entry.params_of(number)
                meter = PromptMeter(service.metrics, time.monotonic(), len(ids), params)
                heard = entry.heard_of(key)
                client.add(ids, params, feed, meter, key=key, heard=heard, terms=terms, name=said.log_name)
        while not entry.ended:
            for delta in await feed.take():
                if delta.finish_reason is not None:
                    ticket.finished()
        return entry.failed is None
    finally:
        for key in entry.keys:
            client.cancel(key)
        ticket.close()
