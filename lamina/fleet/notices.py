"""Memory workers that somebody wants to end soon, with SIGTERM: others have their KV before they do."""

from __future__ import annotations

import logging
import time

from lamina.engine.wire import Clock
from lamina.protocol.recut import Leaving

from .elastic import Elastic
from .members import Member, Members

log = logging.getLogger(__name__)
GATHER_S = 0.25  # behind the first one, for all that are told to end with it: a host's are, one by one


class Notices:
    """Those that are told together go together. Who cannot be replaced so stays until it ends, and is lost then."""

    def __init__(self, members: Members, elastic: Elastic, clock: Clock = time.monotonic) -> None:
        self._members, self._elastic, self._clock = members, elastic, clock
        self._told: dict[Member, float] = {}  # who has said so, and when

    def heed(self) -> None:
        """Begin to replace workers that were told to end; not while memory workers come or go. Does not wait."""
        self._elastic.reap()
        self._gather()
        if self._elastic.under_way or not self._told or self._clock() - min(self._told.values()) < GATHER_S:
            return
        told, self._told = list(self._told), {}
        if (error := self._replace(told)) and len(told) > 1:
            self._told = dict.fromkeys(told[1:], 0.0)  # one by one, as their memory is not there twice for all
            told, error = told[:1], self._replace(told[:1])
        names = ", ".join(member.name for member in told)
        if error:
            log.warning("%s: told to end, and keeps its KV until it ends: %s", names, error)
        else:
            log.warning("%s: told to end; another one takes its KV, and all requests go on", names)

    def _gather(self) -> None:
        there = self._members.memory
        self._told = {member: at for member, at in self._told.items() if member in there}
        for member in there:
            said = [message for message in member.inbox if isinstance(message, Leaving)]
            for message in said:
                member.inbox.remove(message)
            if said:
                self._told.setdefault(member, self._clock())

    def _replace(self, told: list[Member]) -> str:
        """Why that cannot be; or nothing."""
        there = self._members.memory
        gone = sorted(there.index(member) for member in told)
        try:
            self._elastic.begin(self._elastic.plan(len(there), gone), gone, told=False, reason="leave")
        except (ValueError, OSError) as error:
            return str(error)
        return ""
