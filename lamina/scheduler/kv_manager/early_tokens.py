"""Tokens that were drawn while KV of their sequence was still being loaded: nobody sees them before that ended well.
Pure policy: no torch, no I/O, no clock.
"""

from __future__ import annotations

from lamina.protocol.control import SampledToken
from lamina.scheduler.sequence import Sequence


class EarlyTokens:
    """Tokens that rows have drawn before their KV was wholly loaded, by sequence. Where the load fails, these rows
    attended KV that was never there, and their tokens are dropped.
    """

    def __init__(self) -> None:
        self._held_back: dict[Sequence, list[SampledToken]] = {}

    def hold_back(self, sequence: Sequence, drawn: SampledToken) -> bool:
        """Whether a token is kept here, or dropped; else it counts now."""
        if sequence.num_discarded_samples:
            sequence.num_discarded_samples -= 1
            return True
        if sequence.num_loading_tokens:
            self._held_back.setdefault(sequence, []).append(drawn)
            return True
        return False

    def on_load_done(self, sequence: Sequence, *, failed: bool) -> list[tuple[Sequence, SampledToken]]:
        """A load has ended: the tokens that count now."""
        kept = self._held_back.pop(sequence, [])
        if failed:
            sequence.num_discarded_samples -= len(kept)
            return []
        return [(sequence, drawn) for drawn in kept]

    def reset(self) -> None:
        """Behind a loss they are drawn again."""
        self._held_back.clear()
