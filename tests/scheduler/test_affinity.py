"""Sequences with one affinity key begin where the last one has."""

from __future__ import annotations

import pytest

from lamina.protocol.kv_placement import KvLocation
from lamina.request import CompletionOutput, SamplingParams
from lamina.scheduler import affinity
from lamina.scheduler.affinity import Affinity
from lamina.scheduler.batch import ChunkPolicy
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.sessions.cache_options import CacheOptions
from lamina.scheduler.starts import Candidates


def begins(feature: Affinity, key: bytes, at: int) -> KvLocation | None:
    """The place that a new sequence with a key prefers; then it begins at another one."""
    options = CacheOptions(affinity_key=key)
    sequence = Sequence(0, SamplingParams(), 0, [1], CompletionOutput(0), 9, frozenset(), options=options)
    candidates = Candidates(sequence, [], ChunkPolicy(16, aligned=False))
    feature.find_starts(candidates)
    sequence.location = KvLocation(at)
    assert not feature.on_started(candidates, None)
    return candidates.near


def test_the_last_place_of_a_key_is_preferred() -> None:
    feature = Affinity()
    near = [begins(feature, key, at) for key, at in ((b"a", 1), (b"b", 2), (b"a", 3), (b"a", 0), (b"", 4), (b"", 5))]
    assert near == [None, None, KvLocation(1), KvLocation(3), None, None]


def test_the_key_that_was_used_the_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "MAX_AFFINITY_KEYS", 2)
    feature = Affinity()
    near = [begins(feature, key, at) for at, key in enumerate((b"a", b"b", b"a", b"c", b"b", b"c"))]
    assert near == [None, None, KvLocation(0), None, None, KvLocation(3)]
