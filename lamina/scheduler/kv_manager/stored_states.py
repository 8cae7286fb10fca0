"""The recurrent states that storage has of a hybrid model, next to pages. Pure policy: no torch, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Several

from lamina.config.partition import KvShards
from lamina.kv.page_keys import STATE_PREFIX_BYTES, state_key, tokens_of_state
from lamina.scheduler.prefix_index import PageKeys
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.starts import Candidates, KvStart


class StoredStates:
    """Finds the keys of states (lamina.kv.page_keys), also of those that another server has saved."""

    def __init__(
        self, shards: Several[KvShards | None] = (), snapshots_of: Callable[[int], Several[int]] = lambda number: ()
    ) -> None:
        """``shards``: see ComputeReady; none for other models. ``snapshots_of``: returns the lengths of a retained
        sequence's snapshots.
        """
        self._snapshots_of, self.shards = snapshots_of, shards
        # First bytes of a page's key -> tokens -> keys of states.
        self._after: dict[bytes, dict[int, set[bytes]]] = {}
        self._keys, self._unit = PageKeys(1), 1

    @property
    def are_needed(self) -> bool:
        """True if a prompt cannot begin with pages alone."""
        return bool(self.shards)

    def use_pages(self, keys: PageKeys, unit: int) -> None:
        """Set the pages of storage. ``unit``: states are stored after its multiples only."""
        self._keys, self._unit = keys, unit

    def add_common(self, kv_shard: int, listed: Several[set[bytes]]) -> list[bytes]:
        """Add the states that a sequence in a KV shard can load, and return them. ``listed``: by memory worker."""
        owners = [keys for own, keys in zip(self.shards, listed, strict=True) if own is not None and kv_shard in own]
        common = list(set.intersection(*owners)) if owners else []
        self.add(common)
        return common

    def add(self, keys: Iterable[bytes]) -> None:
        """Add states that storage has, or is about to have."""
        for key in keys:
            lengths = self._after.setdefault(key[:STATE_PREFIX_BYTES], {})
            lengths.setdefault(tokens_of_state(key), set()).add(key)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Remove states. Keys of pages are ignored."""
        for key in keys:
            lengths, tokens = self._after.get(key[:STATE_PREFIX_BYTES], {}), tokens_of_state(key)
            if key in lengths.get(tokens, ()):
                lengths[tokens].discard(key)
                if not lengths[tokens]:
                    del lengths[tokens]
                if not lengths:
                    del self._after[key[:STATE_PREFIX_BYTES]]

    def clear(self) -> None:
        """Remove all states."""
        self._after.clear()

    def key_of(self, sequence: Sequence, length: int) -> bytes:
        """Return the key of the states after its first ``length`` tokens, a page at least."""
        whole, is_begun = self._keys.whole(sequence, length)[-1], length % self._keys.page_size
        return state_key(whole, self._keys.partial(sequence, length) if is_begun else whole, length)

    def lengths_of(self, sequence: Sequence) -> list[int]:
        """Return the lengths of a retained sequence's snapshots that storage can have."""
        return [length for length in self._snapshots_of(sequence.id) if self._can_be_stored(length)]

    def keys_of(self, sequence: Sequence) -> list[bytes]:
        """Return the keys of a retained sequence's snapshots, and of the partial pages that end with them."""
        lengths = self.lengths_of(sequence)
        parts = [self._keys.partial(sequence, length) for length in lengths if length % self._keys.page_size]
        return [*parts, *(self.key_of(sequence, length) for length in lengths)]

    def lengths_up_to(self, sequence: Sequence, whole: int, stop: int) -> Iterator[int]:
        """Yield the lengths after which storage may have states of a sequence, the most first. Its first ``whole``
        tokens are in stored pages.
        """
        for number, key in reversed([*enumerate(self._keys.whole(sequence, whole), 1)]):
            for length in sorted(self._after.get(key[:STATE_PREFIX_BYTES], ()), reverse=True):
                is_after = length // self._keys.page_size == number
                if is_after and length <= stop and self._can_be_stored(length):
                    yield length

    def take_snapshot(self, candidates: Candidates, load: KvStart | None, length: int) -> None:
        """Let a prompt take a snapshot after ``length`` tokens, where it leaves stored pages. It does not if it begins
        less than a page before that, or takes a later one. ``load``: what it can load.
        """
        sequence, known = candidates.sequence, max(candidates.num_stored_tokens, load.length if load else 0)
        if length >= known + self._keys.page_size and all(taken < length for taken in sequence.snapshot_lengths):
            sequence.add_snapshot_length(length)

    def _can_be_stored(self, length: int) -> bool:
        return length >= self._keys.page_size and length % self._unit == 0
