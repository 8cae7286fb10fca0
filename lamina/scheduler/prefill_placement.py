"""Chooses between prefill and compute workers when a sequence begins. Pure policy: no torch, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Several

from lamina.kv.pages import PAGE

from .feature import Feature
from .kv_manager.prefix_cache import PrefixCache
from .prefill_dispatch import PrefillDispatcher
from .sequence import Sequence
from .starts import Candidates, KvStart, Verdict


class PrefillPlacement(Feature):
    """Filters the starts of a sequence: its prefill worker must have all tokens with KV on the memory workers, or fetch
    them from there.
    """

    def __init__(self, prefill: PrefillDispatcher, prefix_cache: PrefixCache) -> None:
        self._prefill, self._prefix_cache = prefill, prefix_cache

    def reset(self, era: bytes, sequences: Several[Sequence]) -> tuple[()]:
        """Tell the Conductor the new keys of the prompts that prefill workers will have, if there is storage."""
        if era:
            self._prefill.slo_admission.rename_pages()
        return ()

    def find_starts(self, candidates: Candidates) -> None:
        """Remove starts that the sequence's prefill worker cannot use, or let the sequence wait for that worker."""
        sequence, known = candidates.sequence, candidates.num_stored_tokens
        longest = max((start.length for start in candidates.starts), default=0)
        if not self._may_choose(candidates) or not self._prefill.is_for_prefill_worker(sequence, longest):
            return
        if self._prefix_cache.num_shared_tokens(sequence) > 0 and self._prefill.will_be_cached(sequence, longest):
            candidates.verdict = Verdict.STEPS_ASIDE  # an earlier prompt will give it a longer prefix
            return
        if candidates.is_settled:
            start = next(iter(candidates.starts), None)
        else:
            start = self._common_hit(sequence, known) if known else None
            for stored in self._stored_starts(candidates):
                if self._prefill.takes_stored(sequence, stored, start.length if start else 0):
                    start = stored
            candidates.may_begin_anew = True
        candidates.starts = [start] if start else []
        candidates.rows.on_prefill_worker = True
        length = start.length if start else 0
        chunk = candidates.next_chunk_after(length)
        candidates.rows.first_chunk_s = self._prefill.slo_admission.stored_start_s(length, chunk)
        if not self._prefill.can_accept(sequence):
            candidates.verdict = Verdict.STEPS_ASIDE if self._prefill.has_free_worker else Verdict.HOLDS_UP

    def _may_choose(self, candidates: Candidates) -> bool:
        """Return whether a prefill worker may compute the rest. A truncated turn begins with all of its session's KV,
        which has moved, or with none.
        """
        if not candidates.is_settled:
            return True
        swapped = any(start.is_swapped for start in candidates.starts)
        fetched = self._prefill.stored_block > 0 or not candidates.starts
        return bool(candidates.sequence.turn.discarded_ranges) and fetched and not swapped

    def _stored_starts(self, candidates: Candidates) -> Iterator[KvStart]:
        """Yield the starts in whole blocks, which its prefill worker can fetch from memory workers."""
        for start in reversed(candidates.starts if (block := self._prefill.stored_block) else []):
            length = start.length // block * block
            if start.source is None:
                pages = [n for n in range(len(start.keys)) if (n + 1) * PAGE <= start.length]
                if pages:
                    yield start._replace(length=len(pages) * PAGE, keys=start.keys[: len(pages)])
            elif length:
                yield from self._hits(candidates.sequence, length)

    def _hits(self, sequence: Sequence, length: int) -> Iterator[KvStart]:
        """Yield the hit of ``length`` tokens in the pool, if there is one."""
        both = self._prefix_cache.longest_cached([x for x in self._prefix_cache.lookup(sequence) if x.length <= length])
        if both is not None and both.length % self._prefill.stored_block == 0:
            yield both

    def _common_hit(self, sequence: Sequence, known: int) -> KvStart | None:
        """The longest hit within the ``known`` tokens that its worker has, too."""
        length = self._prefill.num_cached_tokens(sequence, known)
        if not length:
            return None
        both = self._prefix_cache.longest_cached([x for x in self._prefix_cache.lookup(sequence) if x.length <= length])
        return both if both and both.length == length else None

    def on_started(self, candidates: Candidates, start: KvStart | None) -> tuple[()]:
        """Queue its prompt at its worker, or record that compute workers run it."""
        sequence, admission = candidates.sequence, self._prefill.slo_admission
        if candidates.placement is not None and sequence.follows is None:
            admission.on_placed(sequence, candidates.placement, by_prefill_worker=candidates.rows.on_prefill_worker)
        if candidates.rows.on_prefill_worker and start is not None and start.source is None:
            self._prefill.assign_when_loaded(sequence)
        elif candidates.rows.on_prefill_worker:
            self._prefill.assign(sequence)
        else:
            self._prefill.skip(sequence)
        return ()
