"""Chooses between prefill and compute workers when a sequence begins. Pure policy: no torch, no I/O, no clock."""

from __future__ import annotations

from .feature import Feature
from .kv_manager.prefix_cache import PrefixCache
from .prefill_dispatch import PrefillDispatcher
from .sequence import Sequence
from .starts import Candidates, KvStart, Verdict


class PrefillPlacement(Feature):
    """Filters the starts of a sequence: its prefill worker must have all tokens with KV on the memory workers."""

    def __init__(self, prefill: PrefillDispatcher, prefix_cache: PrefixCache) -> None:
        self._prefill, self._prefix_cache = prefill, prefix_cache

    def find_starts(self, candidates: Candidates) -> None:
        """Remove starts that the sequence's prefill worker cannot use, or let the sequence wait for that worker."""
        sequence, known = candidates.sequence, candidates.num_stored_tokens
        if not self._prefill.is_for_prefill_worker(sequence, known):
            return
        if self._prefix_cache.num_shared_tokens(sequence) > 0 and self._prefill.will_be_cached(sequence, known):
            candidates.verdict = Verdict.STEPS_ASIDE  # an earlier prompt will give it a longer prefix
            return
        common = self._common_hit(sequence, known) if known else None
        candidates.starts, candidates.may_begin_anew = [common] if common else [], True
        candidates.on_prefill_worker = True
        if not self._prefill.can_accept(sequence):
            candidates.verdict = Verdict.STEPS_ASIDE if self._prefill.has_free_worker else Verdict.HOLDS_UP

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
        if candidates.placement is not None and not sequence.is_hidden:
            admission.on_placed(sequence, candidates.placement, by_prefill_worker=candidates.on_prefill_worker)
        if candidates.on_prefill_worker:
            self._prefill.assign(sequence)
        else:
            self._prefill.skip(sequence)
        return ()
