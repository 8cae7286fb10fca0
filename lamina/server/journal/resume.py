"""Requests that an earlier server has left in the journal are finished, or it is said why they cannot be."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from lamina.request import Blame
from lamina.server.calls import Service
from lamina.server.link.client import EngineGoneError, PromptRefusedError, ReplyFeed
from lamina.server.watch.metrics import PromptMeter

from .entry import Entry
from .journal import Journal
from .records import Unanswerable

log = logging.getLogger(__name__)


async def finish_all(service: Service, journal: Journal, left: Sequence[Entry]) -> None:
    """To the end of the last of ``left``. What the engine does not finish stays for the next server."""
    if left:
        log.info("--journal: %d requests of an earlier server are being finished", len(left))
        ends = await asyncio.gather(*(_finish(service, journal, entry) for entry in left))
        log.info("--journal: %d of these %d requests are finished", sum(ends), len(left))


async def _finish(service: Service, journal: Journal, entry: Entry) -> bool:
    """Whether its answer is whole now."""
    feed, client = ReplyFeed(), service.client
    ticket = service.admission.enter_again(sum(map(entry.open_of, entry.keys)))
    try:
        for number, key in enumerate(entry.keys):
            if entry.open_of(key):
                ids, params = entry.prompts[number].ids, entry.params_of(number)
                meter = PromptMeter(service.metrics, time.monotonic(), len(ids), params)
                client.add(ids, params, feed, meter, key=key, heard=entry.heard_of(key), salt=entry.accepted.salt)
        while not entry.ended:
            for delta in await feed.take():
                if delta.finish_reason is not None:
                    ticket.finished()
        return entry.failed is None
    except PromptRefusedError as e:
        log.error("--journal: %s cannot be finished: %s", entry.accepted.id, e)
        status = 400 if e.blame is Blame.CLIENT else 500
        journal.refuse(Unanswerable(id=entry.accepted.id, status=status, message=str(e), code="invalid_value"))
        return False
    except EngineGoneError:
        return False
    finally:
        for key in entry.keys:
            client.cancel(key)
        ticket.close()
