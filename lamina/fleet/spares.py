"""Workers that are started and loaded, and have met nobody: one of them takes the place of a worker that is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from lamina.protocol.control import Failed, LinkClosedError

from .members import Member, Members

log = logging.getLogger(__name__)
END_S = 2.0  # for all of them to end with their links


class Spares:
    """Spare workers, so many of each role, for the ranks of a replica in turn. Nobody listens to a spare until it is
    taken.
    """

    def __init__(self, members: Members, counts: dict[str, int], start: Callable[[str, int], Member]) -> None:
        """``start``: a worker of a role, as if for the place with that number."""
        self._members, self._counts, self._start = members, counts, start
        self._there: dict[tuple[str, int], Member] = {}  # role and number among the spares

    def __iter__(self) -> Iterator[Member]:
        return iter(self._there.values())

    def fill(self) -> None:
        """Start those that there should be; they load while others work. Raises OSError, ValueError."""
        for role, count in self._counts.items():
            for number in range(count):
                if (role, number) in self._there:
                    continue
                spare = self._start(role, number)
                with self._members.ending:
                    if self._members.closed:  # by another thread, which does not know of it
                        self._members.fence(spare)
                        return
                    self._there[role, number] = spare

    def dead(self) -> list[Member]:
        """The spares that have ended, and take no place any more."""
        gone = {key: member for key, member in self._there.items() if member.handle.fate() is not None}
        for key, member in gone.items():
            log.warning("the spare %s %s", member.name, member.handle.fate())
            self._there.pop(key, None)
            self._members.fence(member)
        return list(gone.values())

    def take(self, role: str, index: int, ranks: int) -> Member | None:
        """One for place ``index``, which it has from now on; None where there is none that lives. ``ranks``: of a
        compute worker's replica; it has the weights of its own rank alone.
        """
        for (kind, number), member in list(self._there.items()):
            if kind == role and (role != "compute" or number % ranks == index % ranks):
                del self._there[kind, number]
                if not (why := self._defect(member)):
                    log.info("a spare takes the place of %s worker %d (pid %d)", role, index, member.handle.pid)
                    member.handle.index = index
                    return member
                log.warning("the spare %s cannot take a place: %s", member.name, why)
                self._members.fence(member)
        return None

    def _defect(self, member: Member) -> str:
        """Why it takes no place; or nothing. What it has said is kept for who listens to it from now on."""
        try:
            while (message := self._members.hear(member)) is not None:
                if isinstance(message, Failed):
                    return message.text
                member.inbox.append(message)
        except (LinkClosedError, TimeoutError):
            return member.handle.fate() or "its control link has ended"
        return member.handle.fate() or ("stopped" if member.handle.stopped else "")

    def close(self) -> None:
        """End them. Idempotent."""
        there, self._there = list(self._there.values()), {}
        for member in there:
            member.link.close()
        for member in there:
            member.handle.join(END_S)
