"""Swapping: the KV of preempted sequences is offloaded until they resume. Pure policy: no torch, no I/O, no clock.

All of it is saved under keys that no other sequence finds, since KV of the same tokens may differ in its last bits. So
a resumed sequence continues bit for bit as if it had not been preempted. The index of prefixes knows where the pages
are; this policy only remembers which keys a sequence has, as these do not follow from its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.step_plan import DeletePages, SaveKv
from lamina.scheduler.feature import Feature, Leaving
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.starts import Candidates, KvStart, Verdict

from .offload_index import OffloadIndex

DECAY = 0.7  # the weight of earlier measures; a new one has the rest


@dataclass
class _Swapped:
    number: int  # of the sequence, when it ran
    keys: list[bytes]
    length: int  # tokens
    place: KvLocation


class SwapPolicy(Feature):
    """Swaps preempted sequences. In ``auto`` mode it does while loading a token takes less time than computing it."""

    def __init__(self, offload_index: OffloadIndex, mode: str, nonce: bytes, *, fixed: bool = False) -> None:
        """``nonce``: unique to this engine. ``fixed``: decisions do not depend on measured times."""
        self._offload_index, self._nonce = offload_index, nonce
        self._always, self._never = mode == "swap" or (mode == "auto" and fixed), mode == "recompute"
        self._swapped: dict[Sequence, _Swapped] = {}
        self.load_s: float | None = None  # of a token
        self._compute_s: float | None = None  # the same, to be computed
        self.num_swapped_sequences = 0

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Record the seconds of computing prompt tokens."""
        self._compute_s = _moving_average(self._compute_s, seconds / tokens)

    def record_load(self, tokens: int, seconds: float) -> None:
        """Record the seconds of loading tokens from storage."""
        self.load_s = _moving_average(self.load_s, seconds / tokens)

    def prefill_estimate_s(self, tokens: int) -> float:
        """Return the predicted seconds of computing prompt tokens; 0: unknown."""
        return tokens * (self._compute_s or 0.0)

    @property
    def is_worthwhile(self) -> bool:
        """True if the next preempted sequence should be saved; also while times are unknown, to measure them."""
        if self._always or self._never:
            return self._always
        return self.load_s is None or self._compute_s is None or self.load_s < self._compute_s

    def may_start(self, sequence: Sequence) -> bool:
        """True for every sequence, since it may have been preempted."""
        return True

    def find_starts(self, candidates: Candidates) -> None:
        """Let a preempted sequence begin only with its own KV, once all of it is saved."""
        candidates.rows.token_s = self.prefill_estimate_s(1)
        if self.is_saving(candidates.sequence):
            candidates.verdict = Verdict.STEPS_ASIDE
        elif (own := self.find_loadable(candidates.sequence)) is not None:
            candidates.starts, candidates.may_begin_anew = [own], candidates.alone
            candidates.is_settled = True

    def on_started(self, candidates: Candidates, start: KvStart | None) -> list[DeletePages]:
        """Delete its saved KV, unless it is being loaded."""
        return [] if start is not None and start.is_swapped else self.drop(candidates.sequence)

    def on_leave(self, leaving: Leaving) -> None:
        """Save a preempted sequence that has computed KV of its own. Delete the saved KV of one that has ended."""
        sequence = leaving.sequence
        goes_on = leaving.is_preempted and not sequence.kept.drops_blocks and not sequence.finished
        if goes_on and sequence.num_computed_tokens > sequence.num_cached_tokens:
            leaving.own += self.save_ops(sequence)
        elif leaving.op is None:
            leaving.first += self.drop(sequence)

    def on_loaded(self, sequence: Sequence) -> list[DeletePages]:
        """Delete its saved KV, since it is in the pool again."""
        return self.drop(sequence)

    def save_ops(self, sequence: Sequence) -> list[SaveKv]:
        """Save a preempted sequence in the plan that frees it, except its last token, whose logits are needed."""
        length = min(sequence.num_computed_tokens, sequence.num_tokens_with_placeholders - 1)
        if length < 1 or not self.is_worthwhile:
            return []
        root = b"preempted" + self._nonce + sequence.id.to_bytes(8, "little")
        keys, ops = self._offload_index.save_all_ops(sequence, length, root)
        if ops:
            self._swapped[sequence] = _Swapped(sequence.id, keys, length, sequence.location)
            self.num_swapped_sequences += 1
        return ops

    def is_saving(self, sequence: Sequence) -> bool:
        """Return True while KV of the sequence is being saved."""
        kept = self._swapped.get(sequence)
        return kept is not None and self._offload_index.is_saving(kept.number)

    def find_loadable(self, sequence: Sequence) -> KvStart | None:
        """Return the sequence's own saved KV.

        After a loss, tokens that no reader has seen are sampled again, so their KV is left out.
        """
        kept = self._swapped.get(sequence)
        if kept is None:
            return None
        known = len(sequence.tokens) - 1  # a row is left to draw
        keys = kept.keys if kept.length <= known else kept.keys[: known // self._offload_index.page_size]
        pages, places = self._offload_index.most_loadable(keys, kept.place)
        whole = self._offload_index.whole_page_tokens
        length = kept.length if pages == len(kept.keys) else pages * self._offload_index.page_size // whole * whole
        pages = -(-length // self._offload_index.page_size)
        return KvStart(length, places, tuple(kept.keys[:pages]), is_swapped=True) if length else None

    def drop(self, sequence: Sequence) -> list[DeletePages]:
        """Delete the saved KV of a sequence that runs again, or never will."""
        kept = self._swapped.pop(sequence, None)
        if kept is None:
            return []
        self._offload_index.remove(kept.keys)
        return [DeletePages(kept.number, kept.keys)]


def _moving_average(before: float | None, now: float) -> float:
    return now if before is None else DECAY * before + (1 - DECAY) * now
