"""Affinity: a sequence begins where the last one with its affinity key has begun, if there is room. Pure policy."""

from __future__ import annotations

from collections import OrderedDict

from lamina.protocol.kv_placement import KvLocation

from .feature import Feature
from .starts import Candidates, KvStart

MAX_AFFINITY_KEYS = 1 << 14  # keys whose last place is remembered


class Affinity(Feature):
    """Remembers where sequences begin, by affinity key."""

    def __init__(self) -> None:
        self._locations = OrderedDict[bytes, KvLocation]()  # by key, the one that was used last at the end

    def find_starts(self, candidates: Candidates) -> None:
        candidates.near = self._locations.get(candidates.sequence.options.affinity_key)

    def on_started(self, candidates: Candidates, start: KvStart | None) -> tuple[()]:
        if key := candidates.sequence.options.affinity_key:
            self._locations[key] = candidates.sequence.location
            self._locations.move_to_end(key)
            if len(self._locations) > MAX_AFFINITY_KEYS:
                self._locations.popitem(last=False)
        return ()
