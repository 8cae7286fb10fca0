"""The index of prefixes: maps the hash of a chain of pages to the places that hold its K and V.

A *place* is the pool of the memory workers, a prefill worker or a KV shard of storage, as an int with one bit. Storage
and prefill workers *have* a page once it is promised there, and can provide it once it is *ready*. In the pool and on
prefill workers, sequences hold chains of pages. Sessions lease the pages of their last turns, wherever these are. A
prefix has one key in all places, whatever the size of their pages. Pure policy: no torch, no I/O, no clock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from lamina.kv.page_keys import KEY_TOKENS, STATE_PREFIX_BYTES, ChainRoot, page_key, prefix_keys, tokens_of_state

if TYPE_CHECKING:
    from .sequence import Sequence
    from .sessions.session_table import SessionState

Place = int
POOL, PREFILL = "pool", "prefill"  # kinds of places; storage is another


@dataclass
class KnownKeys:
    """The keys of prefixes of some tokens that are known: after each KEY_TOKENS of them, and by other lengths."""

    whole: list[bytes] = field(default_factory=list)
    partial: dict[int, bytes] = field(default_factory=dict)

    def forget(self) -> None:
        """Forget all keys, since they change."""
        self.whole.clear()
        self.partial.clear()


class Keyed(Protocol):
    """Tokens with the keys of their prefixes that are known."""

    salt: bytes
    known_keys: KnownKeys

    @property
    def tokens(self) -> Several[int]: ...


@dataclass
class KeyedTokens:
    """The tokens of no sequence, as Keyed has them."""

    salt: bytes
    tokens: Several[int]
    known_keys: KnownKeys = field(default_factory=KnownKeys)


class PageKeys:
    """Computes the keys of pages of one size (lamina.kv.page_keys). A sequence caches them for all sizes."""

    def __init__(self, page_size: int, root: ChainRoot | None = None) -> None:
        """``page_size``: tokens; 0: there are no pages. ``root``: of all keys that a sequence caches; None: one without
        a store.
        """
        self.page_size, self._root = page_size, root or ChainRoot()

    def whole(self, of: Keyed, length: int) -> list[bytes]:
        """Return the keys of the whole pages of its first ``length`` tokens."""
        page = self.page_size
        if not page or length < page:
            return []
        length = min(length, len(of.tokens))
        if page % KEY_TOKENS:
            return [self.partial(of, stop) for stop in range(page, length + 1, page)]
        step = page // KEY_TOKENS
        return self._chain(of, length)[step - 1 : length // page * step : step]

    def partial(self, of: Keyed, length: int) -> bytes:
        """Return the key of the page, whole or not, with which its first ``length`` tokens end."""
        chain = self._chain(of, length)
        if not length % KEY_TOKENS:
            return chain[length // KEY_TOKENS - 1]
        if (key := of.known_keys.partial.get(length)) is None:
            first = length // KEY_TOKENS * KEY_TOKENS
            parent = chain[first // KEY_TOKENS - 1] if first else self._root(of.salt)
            key = of.known_keys.partial[length] = page_key(parent, first, of.tokens[first:length])
        return key

    def _chain(self, of: Keyed, length: int) -> list[bytes]:
        """Return its keys after each KEY_TOKENS, those of the first ``length`` tokens at least."""
        known, stop = of.known_keys.whole, length // KEY_TOKENS * KEY_TOKENS
        first = len(known) * KEY_TOKENS
        if first < stop:
            known += prefix_keys(known[-1] if known else self._root(of.salt), first, of.tokens[first:stop])
        return known


@dataclass
class Holding:
    """The chain of a sequence in a place: the ``keys`` of its first ``length`` tokens; the last page may be partial.

    ``until``: the end of its lease, until when others are evicted first; None: it runs, and is not evicted.
    ``page_size``: in tokens, if the next pages are found by their tokens. ``session``: the session that it belongs to.
    ``snapshots``: the lengths after which its recurrent states are kept, with the number of the last whole page.
    """

    sequence: Sequence
    keys: list[bytes]
    length: int
    until: float | None = None
    page_size: int = 0
    session: SessionState | None = None
    snapshots: dict[int, int] = field(default_factory=dict)

    def tokens_of_page(self, number: int) -> list[int]:
        return self.sequence.tokens[number * self.page_size : min(self.length, (number + 1) * self.page_size)]


class _Begun:
    """The sequences of one place whose chains contain a page, in order of arrival.

    ``next``: the pages after it there, by their tokens. ``end``: the leased sequence whose chain ends with it.
    ``snapshots``: (length, sequence) of each snapshot of states within the page after it.
    """

    __slots__ = ("end", "next", "sequences", "snapshots")

    def __init__(self) -> None:
        self.sequences: dict[int, None] = {}
        self.next: list[tuple[list[int], bytes]] = []
        self.end: int | None = None
        self.snapshots: set[tuple[int, int]] = set()


class _Page:
    """A page: the places that have it, those where it is ready, and the chains that contain it, by place."""

    __slots__ = ("begun", "places", "ready")

    def __init__(self) -> None:
        self.places = self.ready = 0
        self.begun: dict[Place, _Begun] = {}


NOTHING = _Begun()


class PrefixIndex:
    """Pages by key. Keys of a chain are given from its first page on."""

    def __init__(self, root: ChainRoot | None = None) -> None:
        """``root``: of all chains; None: one without a store."""
        self.root = root or ChainRoot()
        self._pages: dict[bytes, _Page] = {}
        # First bytes of a page's key -> tokens -> keys of states.
        self._states: dict[bytes, dict[int, set[bytes]]] = {}
        self._leases: dict[bytes, int | dict[int, None]] = {}  # the session that leases a page, or several in order
        self._holdings: dict[Place, OrderedDict[int, Holding]] = {}
        self._places: dict[tuple[str, int], Place] = {}
        self._kinds: dict[Place, str] = {}
        self._of_kind = defaultdict[str, Place](int)  # all places of a kind
        self._num_pages = Counter[Place]()
        self._num_replicas = Counter[str]()  # by kind

    @property
    def num_known_pages(self) -> int:
        """The number of pages that some place has."""
        return len(self._pages)

    def place(self, kind: str, number: int = 0) -> Place:
        place = self._places.setdefault((kind, number), 1 << len(self._places))
        self._kinds[place] = kind
        self._of_kind[kind] |= place
        return place

    def promise(self, place: Place, keys: Several[bytes]) -> None:
        """Record that a place will have pages. Later prompts there can match them."""
        for key in keys:
            self._page_at(place, key)

    def _page_at(self, place: Place, key: bytes) -> _Page:
        """Return a page, which the place has from now on."""
        if (page := self._pages.get(key)) is None:
            page = self._pages[key] = _Page()
        if not page.places & place:
            kind = self._kinds[place]
            self._num_replicas[kind] += bool(page.places & self._of_kind[kind])
            self._num_pages[place] += 1
            page.places |= place
        return page

    def confirm(self, place: Place, keys: Iterable[bytes]) -> None:
        """Record that promised pages are ready, except those that were dropped since then."""
        for key in keys:
            if (page := self._pages.get(key)) is not None:
                page.ready |= page.places & place

    def add(self, place: Place, keys: Several[bytes]) -> None:
        """Record that pages are ready."""
        self.promise(place, keys)
        self.confirm(place, keys)

    def drop(self, places: Place, keys: Iterable[bytes], *, ready: bool = True) -> None:
        """Record that ``places`` have lost pages, except those of held sequences.

        With ``ready=False``, ready pages stay, too.
        """
        for key in keys:
            if (page := self._pages.get(key)) is None:
                continue
            gone = page.places & places & ~(0 if ready else page.ready)
            for place in _bits(gone):
                if place not in page.begun:
                    page.places, page.ready, kind = page.places & ~place, page.ready & ~place, self._kinds[place]
                    self._num_replicas[kind] -= bool(page.places & self._of_kind[kind])
                    self._num_pages[place] -= 1
            if not page.places:
                del self._pages[key]
                self._drop_state(key)

    def add_states(self, keys: Iterable[bytes]) -> None:
        """Let pages be found as the recurrent states after other pages, as long as a place has them."""
        for key in keys:
            self._states.setdefault(key[:STATE_PREFIX_BYTES], {}).setdefault(tokens_of_state(key), set()).add(key)

    def _drop_state(self, key: bytes) -> None:
        after, tokens = self.states_after(key), tokens_of_state(key)
        if key in after.get(tokens, ()):
            after[tokens].discard(key)
            if not after[tokens]:
                del after[tokens]
            if not after:
                del self._states[key[:STATE_PREFIX_BYTES]]

    def states_after(self, key: bytes) -> dict[int, set[bytes]]:
        """Return the keys of the states less than a page after a page, by their tokens. ``key``: of it, or of such
        states.
        """
        return self._states.get(key[:STATE_PREFIX_BYTES], {})

    def clear(self, places: Place, *, ready: bool = True) -> None:
        """Record that ``places`` have lost all pages. With ``ready=False``, ready pages stay."""
        for place in _bits(places if ready else 0):
            for number in list(self.holdings(place)):
                self.release(place, number)
        self.drop(places, list(self._pages), ready=ready)

    def keys(self, places: Place) -> set[bytes]:
        """Return the pages that are ready at some of ``places``."""
        return {key for key, page in self._pages.items() if page.ready & places}

    def has(self, places: Place, key: bytes) -> bool:
        """Return True if a page is ready at one of ``places``."""
        page = self._pages.get(key)
        return page is not None and bool(page.ready & places)

    def is_replicated(self, kind: str, key: bytes) -> bool:
        """Return True if a page is ready at several places of a kind."""
        page = self._pages.get(key)
        return page is not None and (page.ready & self._of_kind[kind]).bit_count() > 1

    def num_pages(self, place: Place) -> int:
        """The number of pages that a place has."""
        return self._num_pages[place]

    def num_replicas(self, kind: str) -> int:
        """The number of second and further copies of pages, over all places of a kind."""
        return self._num_replicas[kind]

    def match(self, places: Several[Place], keys: Several[bytes], *, ready: bool = False) -> list[int]:
        """Return for each of ``places`` how many of the first pages it has, or has ``ready``."""
        lengths, alive = dict.fromkeys(places, len(keys)), sum(places)
        for number, key in enumerate(keys):
            page = self._pages.get(key)
            here = 0 if page is None else alive & (page.ready if ready else page.places)
            if here != alive:
                lengths |= dict.fromkeys(_bits(alive & ~here), number)
                alive = here
                if not alive:
                    break
        return list(lengths.values())

    def match_along(self, places: Iterable[Place], keys: Several[bytes]) -> int:
        """Return how many of the first pages are ready, each at its own one of ``places``."""
        alike = (self.has(place, key) for place, key in zip(places, keys, strict=True))
        return next((number for number, has in enumerate(alike) if not has), len(keys))

    def hold(self, place: Place, number: int, holding: Holding) -> None:
        """Hold the chain of a sequence in a place, by the sequence's id."""
        self.holdings(place)[number] = holding
        before: _Begun | None = None
        for at, key in enumerate(holding.keys):
            page = self._page_at(place, key)
            begun = page.begun.get(place)
            if begun is None:
                begun = page.begun[place] = _Begun()
                if holding.page_size and before is not None:
                    insort(before.next, (holding.tokens_of_page(at), key))
            begun.sequences[number] = None
            before = begun
        if holding.until is not None and before is not None:
            before.end = number

    def release(self, place: Place, number: int) -> Holding:
        """Release a sequence. The place loses the pages that no other sequence there holds."""
        if self._holdings[place][number].snapshots:
            self.drop_snapshots(place, number)
        holding, gone = self._holdings[place].pop(number), list[bytes]()
        before: _Begun | None = None
        for at, key in enumerate(holding.keys):
            page = self._pages[key]
            begun = page.begun[place]
            del begun.sequences[number]
            if begun.end == number:
                begun.end = None
            if not begun.sequences:
                del page.begun[place]
                gone.append(key)
                if holding.page_size and before is not None and before.sequences:
                    del before.next[bisect_left(before.next, (holding.tokens_of_page(at), key))]
            before = begun
        self.drop(place, gone)
        return holding

    def lease(self, number: int, keys: Iterable[bytes]) -> None:
        """Let a session, by its number, lease pages, which may be nowhere."""
        for key in keys:
            held = self._leases.setdefault(key, number)
            if isinstance(held, dict):
                held[number] = None
            elif held != number:
                self._leases[key] = {held: None, number: None}

    def end_lease(self, number: int, keys: Iterable[bytes]) -> None:
        """End the lease of a session on pages."""
        for key in keys:
            held = self._leases[key]
            if isinstance(held, dict):
                del held[number]
                if len(held) == 1:
                    (self._leases[key],) = held
            else:
                del self._leases[key]

    def leases(self, key: bytes) -> Collection[int]:
        """Return the sessions that lease a page, in the order in which they began to."""
        held = self._leases.get(key, ())
        return (held,) if isinstance(held, int) else held

    def add_snapshot(self, place: Place, number: int, length: int, page_size: int) -> None:
        """Record that the states of a held sequence are kept after ``length`` tokens, one whole page at least."""
        holding, at = self._holdings[place][number], length // page_size - 1
        holding.snapshots[length] = at
        self._pages[holding.keys[at]].begun[place].snapshots.add((length, number))

    def drop_snapshots(self, place: Place, number: int) -> None:
        """Record that no states of a held sequence are kept."""
        holding = self._holdings[place][number]
        for length, at in holding.snapshots.items():
            self._pages[holding.keys[at]].begun[place].snapshots.discard((length, number))
        holding.snapshots.clear()

    def snapshots(self, place: Place, key: bytes) -> list[tuple[int, int]]:
        """Return (length, sequence) of the snapshots that are less than a page after a page, the shortest first."""
        return sorted(self._begun(place, key).snapshots)

    def holdings(self, place: Place) -> OrderedDict[int, Holding]:
        """Return the chains held in a place, the least recently used first."""
        return self._holdings.setdefault(place, OrderedDict())

    def _begun(self, place: Place, key: bytes) -> _Begun:
        page = self._pages.get(key)
        return NOTHING if page is None else page.begun.get(place, NOTHING)

    def sequences(self, place: Place, key: bytes) -> dict[int, None]:
        """Return the held sequences whose chains contain a page, in order of arrival."""
        return self._begun(place, key).sequences

    def end(self, place: Place, key: bytes) -> int | None:
        """Return the leased sequence whose chain ends with a page."""
        return self._begun(place, key).end

    def nearest(self, place: Place, key: bytes, tokens: list[int]) -> list[tuple[int, bytes]]:
        """Return the pages after that of ``key`` with the longest common prefix with ``tokens``, and its length.

        The best is last; pages without a common token are left out.
        """
        after = self._begun(place, key).next
        at = bisect_left(after, (tokens, b""))
        alike = [(common_length(some, tokens), other) for some, other in after[max(0, at - 1) : at + 1]]
        return sorted((each for each in alike if each[0]), key=lambda each: each[0])

    def parts(self, place: Place, key: bytes, tokens: list[int]) -> list[bytes]:
        """Return the partial pages after that of ``key`` that are proper prefixes of ``tokens``."""
        after = self._begun(place, key).next
        some = after[bisect_left(after, (tokens[:1], b"")) : bisect_left(after, (tokens, b""))]
        return [other for part, other in some if part == tokens[: len(part)]]


def common_length(one: Iterable[int], other: Iterable[int]) -> int:
    """Return the length of the common prefix."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def _bits(places: Place) -> Iterator[Place]:
    while places:
        low = places & -places
        yield low
        places ^= low
