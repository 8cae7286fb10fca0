"""KV of preempted sequences, beside the pool until they go on. Pure policy: no torch, no I/O, no clock.

All of it is saved, under keys that nobody else finds: what others have computed of the same tokens may differ in its
last bits. So a sequence that comes back goes on as if it had never been away, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from lamina.engine.sequence import Sequence
from lamina.protocol.placement import Place
from lamina.protocol.plan import Drop, Export

from .ahead import Load
from .tier import Tier

FORGETS = 0.7  # the weight of earlier measures beside each new one


@dataclass
class _Swapped:
    number: int  # of the sequence, when it ran
    keys: list[bytes]
    length: int  # tokens
    place: Place


class Swaps:
    """Whose KV is kept, and whether that is worth it: in ``auto`` mode as long as a token takes less time to be loaded
    than to be computed.
    """

    def __init__(self, tier: Tier, mode: str, nonce: bytes, *, fixed: bool = False) -> None:
        """``nonce``: no other engine has it. ``fixed``: times decide nothing."""
        self._tier, self._nonce = tier, nonce
        self._always, self._never = mode == "swap" or (mode == "auto" and fixed), mode == "recompute"
        self._kept: dict[Sequence, _Swapped] = {}
        self._load_s: float | None = None  # of a token
        self._compute_s: float | None = None  # the same, to be computed
        self.num_saved = 0  # sequences

    def computed(self, tokens: int, seconds: float) -> None:
        """Tokens of prompts took so long."""
        self._compute_s = _mixed(self._compute_s, seconds / tokens)

    def loaded(self, tokens: int, seconds: float) -> None:
        """Tokens came from a medium after so long."""
        self._load_s = _mixed(self._load_s, seconds / tokens)

    def compute_s(self, tokens: int) -> float:
        """How long tokens of a prompt will take; 0: nothing is known yet."""
        return tokens * (self._compute_s or 0.0)

    @property
    def worth_it(self) -> bool:
        """Whether the next one that is preempted is to be saved. Where nothing is known yet, it is: so that it will
        be.
        """
        if self._always or self._never:
            return self._always
        return self._load_s is None or self._compute_s is None or self._load_s < self._compute_s

    def save(self, sequence: Sequence) -> list[Export]:
        """The exports of a sequence that is preempted, in the plan that frees it. A row is left to draw behind."""
        length = min(sequence.num_scheduled, sequence.num_promised - 1)
        if length < 1 or not self.worth_it:
            return []
        root = b"preempted" + self._nonce + sequence.id.to_bytes(8, "little")
        keys, ops = self._tier.save_own(sequence, length, root)
        if ops:
            self._kept[sequence] = _Swapped(sequence.id, keys, length, sequence.place)
            self.num_saved += 1
        return ops

    def waits(self, sequence: Sequence) -> bool:
        """Whether KV of the sequence is still on its way to the medium."""
        kept = self._kept.get(sequence)
        return kept is not None and self._tier.is_saving(kept.number)

    def find(self, sequence: Sequence) -> Load | None:
        """The sequence's own KV, as far as the medium has it. Behind a loss some is of tokens that were drawn and never
        told: not of these, which are drawn again.
        """
        kept = self._kept.get(sequence)
        if kept is None:
            return None
        known = len(sequence.tokens) - 1  # a row is left to draw
        keys = kept.keys if kept.length <= known else kept.keys[: known // self._tier.page]
        there = {place: self._tier.num_there(keys, place) for place in self._tier.places(kept.place)}
        pages, whole = max(there.values()), self._tier.whole
        places = tuple(place for place, n in there.items() if n == pages)
        length = kept.length if pages == len(kept.keys) else pages * self._tier.page // whole * whole
        pages = -(-length // self._tier.page)
        return Load(length, places, tuple(kept.keys[:pages]), own=True) if length else None

    def forget(self, sequence: Sequence) -> list[Drop]:
        """The sequence runs again, or never will: its KV is given up."""
        kept = self._kept.pop(sequence, None)
        if kept is None:
            return []
        self._tier.drop(kept.keys)
        return [Drop(kept.number, kept.keys)]


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else FORGETS * before + (1 - FORGETS) * now
