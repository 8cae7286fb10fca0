"""The room for recurrent states: versions of running sequences, and snapshots for later prompts."""

from __future__ import annotations

from lamina.protocol.mixers import num_state_slots, versions_of_sequence


def test_several_batches_need_one_more_version_and_prefix_caching_needs_snapshots() -> None:
    assert (versions_of_sequence(1), versions_of_sequence(2)) == (3, 4)
    assert [num_state_slots(5, n, caches_prefixes=False) for n in (1, 2)] == [15, 20]
    assert [num_state_slots(5, n, caches_prefixes=True) for n in (1, 2)] == [25, 30]
