"""The moments at which a worker is killed: at any time, or as it sends or gets a message. Each role takes its kinds in
turn.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from itertools import cycle, islice
from typing import NamedTuple

from lamina.observe.trace import Event

ANY = "any time"
SAVE, LOAD = "save", "load"
PAGES = SAVE, LOAD
KINDS = "plan", "Q", "KV", "O", "grant", "control", *PAGES


class FaultPoint(NamedTuple):
    """The moment of a fault. ``event``: None = at any time; ``times``: it comes so often first. ``before_prompt_end``:
    inject it before the first request is sent, as the event is over soon.
    """

    kind: str
    event: int | None = None
    times: int = 1
    before_prompt_end: bool = False


# role -> kind, event of that worker, most times. A grant is the K and V of a prefill worker. A control message is the
# round for which an idle worker waits. A page is saved to storage or loaded from there.
_OF: dict[str, tuple[tuple[str, Event, int], ...]] = {
    "compute": (
        ("plan", Event.SEND_PLAN, 20),
        ("Q", Event.SEND_Q, 100),
        ("KV", Event.SEND_KV, 100),
        ("O", Event.WAIT_O, 100),
        ("control", Event.WAIT_STEP, 1),
    ),
    "memory": (
        ("plan", Event.PLAN, 20),
        ("Q", Event.WAIT_Q, 100),
        ("KV", Event.WAIT_KV, 100),
        ("O", Event.SEND_O, 100),
        ("grant", Event.GRANT, 10),
        (SAVE, Event.SAVE, 20),
        (LOAD, Event.LOAD, 4),
    ),
    "prefill": (("grant", Event.SEND_KV, 10), ("control", Event.WAIT_STEP, 1)),
}
_EARLY = "grant", "control", *PAGES


class FaultPoints:
    """The sequence of moments for each role."""

    def __init__(self, rng: random.Random, *, grants: bool, pages: bool = False) -> None:
        """``grants``: whether there are prefill workers. ``pages``: whether there is offload."""
        self._rng = rng
        lacking = {*([] if grants else ["grant"]), *([] if pages else PAGES)}
        self._of = {role: self._turns(role, lacking) for role in _OF}

    def next(self, role: str) -> FaultPoint:
        """Return the next moment of a kill in ``role``; any time for roles that have no messages of layers."""
        return next(self._of[role]) if role in self._of else FaultPoint(ANY)

    def _turns(self, role: str, lacking: Collection[str]) -> Iterator[FaultPoint]:
        kinds = [x for x in _OF[role] if x[0] not in lacking]
        first = self._rng.randrange(len(kinds) + 1)
        for kind in islice(cycle([(ANY, None, 1), *kinds]), first, None):
            name, event, most = kind
            yield FaultPoint(name, event, self._rng.randint(1, most), name in _EARLY)
