"""Tokens that were drawn while KV of their sequence was still being loaded: nobody sees them before that ended well.
Pure policy: no torch, no I/O, no clock.
"""

from __future__ import annotations

from lamina.engine.sequence import Sequence
from lamina.protocol.control import Drawn


class EarlyDraws:
    """Tokens that rows have drawn before their KV was wholly loaded, by sequence. Where the load fails, these rows
    attended KV that was never there, and their tokens are dropped.
    """

    def __init__(self) -> None:
        self._kept: dict[Sequence, list[Drawn]] = {}

    def take(self, sequence: Sequence, drawn: Drawn) -> bool:
        """Whether a token is kept here, or dropped; else it counts now."""
        if sequence.num_spoiled:
            sequence.num_spoiled -= 1
            return True
        if sequence.num_loading:
            self._kept.setdefault(sequence, []).append(drawn)
            return True
        return False

    def end(self, sequence: Sequence, *, failed: bool) -> list[tuple[Sequence, Drawn]]:
        """A load has ended: the tokens that count now."""
        kept = self._kept.pop(sequence, [])
        if failed:
            sequence.num_spoiled -= len(kept)
            return []
        return [(sequence, drawn) for drawn in kept]

    def forget(self) -> None:
        """Behind a loss they are drawn again."""
        self._kept.clear()
