"""Memory workers that somebody wants to end soon, with SIGTERM: another one has their KV before they do."""

from __future__ import annotations

import logging

from lamina.protocol.recut import Leaving

from .elastic import Elastic
from .members import Members

log = logging.getLogger(__name__)


class Notices:
    """One after the other. Who cannot be replaced so stays until it ends, and is lost then."""

    def __init__(self, members: Members, elastic: Elastic) -> None:
        self._members, self._elastic = members, elastic

    def heed(self) -> None:
        """Begin to replace one that has said so; not while memory workers come or go. Nobody waits."""
        self._elastic.reap()
        if self._elastic.under_way:
            return
        for worker, member in enumerate(self._members.memory):
            said = [message for message in member.inbox if isinstance(message, Leaving)]
            for message in said:
                member.inbox.remove(message)
            if not said:
                continue
            try:
                count = len(self._members.memory)
                self._elastic.begin(self._elastic.plan(count, [worker]), [worker], told=False, reason="leave")
            except (ValueError, OSError) as error:
                log.warning("%s is to end, and keeps its KV until it ends: %s", member.name, error)
                continue
            log.warning("%s is to end: another one takes its KV, and all requests go on", member.name)
            return
