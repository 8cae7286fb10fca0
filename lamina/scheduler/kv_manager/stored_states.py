"""The recurrent states that storage has of a hybrid model, next to pages. Pure policy: no torch, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several

from lamina.config.partition import KvShards
from lamina.kv.page_keys import STATE_PREFIX_BYTES, state_key, tokens_of_state
from lamina.scheduler.prefix_index import Keyed, PageKeys, PrefixIndex
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.starts import Candidates, KvStart


class StoredStates:
    """Finds the keys of states (lamina.kv.page_keys), also of those that another server has saved."""

    def __init__(
        self,
        keys: PageKeys,
        index: PrefixIndex,
        unit: int,
        shards: Several[KvShards | None] = (),
        snapshots_of: Callable[[int], Several[int]] = lambda number: (),
    ) -> None:
        """``keys``: of the pages of storage, which are in ``index``. ``unit``: states are stored after its multiples
        only. ``shards``: see ComputeReady; none for other models. ``snapshots_of``: returns the lengths of the
        snapshots of a sequence in the pool.
        """
        self._keys, self._index, self._unit, self._snapshots_of, self.shards = keys, index, unit, snapshots_of, shards
        self._seen: dict[int, list[int]] = {}  # running sequence -> its snapshots

    @property
    def are_needed(self) -> bool:
        """True if a prompt cannot begin with pages alone."""
        return bool(self.shards)

    def common(self, kv_shard: int, listed: Several[set[bytes]]) -> list[bytes]:
        """Return the states that a sequence in a KV shard can load. ``listed``: by memory worker."""
        owners = [keys for own, keys in zip(self.shards, listed, strict=True) if own is not None and kv_shard in own]
        return list(set.intersection(*owners)) if owners else []

    def key_of(self, of: Keyed, length: int) -> bytes:
        """Return the key of the states after its first ``length`` tokens, a page at least."""
        whole, is_begun = self._keys.whole(of, length)[-1], length % self._keys.page_size
        return state_key(whole, self._keys.partial(of, length) if is_begun else whole, length)

    def lengths_of(self, sequence: Sequence) -> list[int]:
        """Return the lengths of a sequence's snapshots in the pool that storage can have."""
        return [length for length in self._snapshots_of(sequence.id) if self._can_be_stored(length)]

    def has_new_snapshots(self, sequence: Sequence) -> bool:
        """Return whether a running sequence has other snapshots than when this was called last. The steps that they end
        are scheduled.
        """
        before, now = self._seen.get(sequence.id, []), self.lengths_of(sequence)
        if before != now:
            self._seen[sequence.id] = now
        return before != now

    def forget(self, number: int) -> None:
        """Forget the snapshots of a sequence that has left."""
        self._seen.pop(number, None)

    def forget_sequences(self) -> None:
        """Forget the snapshots of all sequences, which may not have been saved."""
        self._seen.clear()

    def along(self, of: Keyed, stop: int) -> Iterator[tuple[int, list[bytes]]]:
        """Yield lengths, up to ``stop``, after which storage has states of these tokens, each with the keys of the
        states and of the partial page that ends there.
        """
        for key in self._keys.whole(of, stop) if self.are_needed else ():
            for length in self._index.states_after(key):
                if self._keys.page_size <= length <= stop and self.has(self.key_of(of, length)):
                    yield length, self._keys_at(of, length)

    def keys_along(self, of: Keyed) -> list[bytes]:
        """Return the keys of states that storage has of some tokens, and of the partial pages that end with them."""
        return [key for _, keys in self.along(of, len(of.tokens)) for key in keys]

    def keys_of(self, state: bytes, of: Keyed) -> list[bytes]:
        """Return the keys of states and of the partial page that ends with them, if they are of these tokens."""
        length = tokens_of_state(state)
        keys = self._keys_at(of, length) if self._keys.page_size <= length <= len(of.tokens) else []
        return keys if state in keys else []

    def _keys_at(self, of: Keyed, length: int) -> list[bytes]:
        state = self.key_of(of, length)
        return [self._keys.partial(of, length), state] if length % self._keys.page_size else [state]

    def pages_before(self, keys: Several[bytes]) -> dict[bytes, bytes]:
        """Return by key of states the key of the whole page before them, both out of ``keys``."""
        pages = {key[:STATE_PREFIX_BYTES]: key for key in keys if not self.has(key)}
        states = {key: pages.get(key[:STATE_PREFIX_BYTES]) for key in keys if self.has(key)}
        return {key: page for key, page in states.items() if page is not None}

    def has(self, state: bytes) -> bool:
        """Return whether storage has states, or is about to have them."""
        return state in self._index.states_after(state).get(tokens_of_state(state), ())

    def lengths_up_to(self, sequence: Sequence, whole: int, stop: int) -> Iterator[int]:
        """Yield the lengths after which storage may have states of a sequence, the most first. Its first ``whole``
        tokens are in stored pages.
        """
        for number, key in reversed([*enumerate(self._keys.whole(sequence, whole), 1)]):
            for length in sorted(self._index.states_after(key), reverse=True):
                is_after = length // self._keys.page_size == number
                if is_after and length <= stop and self._can_be_stored(length):
                    yield length

    def take_snapshot(self, candidates: Candidates, load: KvStart | None, length: int) -> None:
        """Let a prompt take a snapshot after ``length`` tokens, where it leaves stored pages. It does not if it begins
        less than a page before that, or takes a later one. ``load``: what it can load.
        """
        sequence, known = candidates.sequence, max(candidates.num_stored_tokens, load.length if load else 0)
        if length >= known + self._keys.page_size and all(taken < length for taken in sequence.step_ends):
            sequence.add_step_end(length)

    def _can_be_stored(self, length: int) -> bool:
        return length >= self._keys.page_size and length % self._unit == 0
