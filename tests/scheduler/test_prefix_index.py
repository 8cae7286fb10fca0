"""The index of prefixes against naive sets of tuples of tokens."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.kv.page_keys import ChainRoot, page_key
from lamina.request import CompletionOutput, SamplingParams
from lamina.scheduler.prefix_index import POOL, PREFILL, Holding, KeyedTokens, PageKeys, PrefixIndex
from lamina.scheduler.sequence import Sequence
from lamina.tools.plan.simulator.bounded_index import BoundedPrefixIndex

SIZE = 3
Tokens = tuple[int, ...]


def sequence(tokens: list[int], number: int = 0, salt: bytes = b"") -> Sequence:
    made = Sequence(0, SamplingParams(), 0, tokens, CompletionOutput(0), 100, frozenset(), salt)
    made.id = number
    return made


def pages_of(tokens: list[int]) -> list[Tokens]:
    """All that stands before the end of each page, the last page as far as it goes."""
    stops = [*range(SIZE, len(tokens) + 1, SIZE), *([len(tokens)] if len(tokens) % SIZE else [])]
    return [tuple(tokens[:stop]) for stop in stops]


class Oracle:
    """A dict of token tuples: which sequences of a place begin with them."""

    def __init__(self) -> None:
        self.begun: dict[tuple[str, Tokens], list[int]] = {}

    def hold(self, place: str, number: int, tokens: list[int]) -> None:
        for page in pages_of(tokens):
            self.begun.setdefault((place, page), []).append(number)

    def release(self, place: str, number: int) -> None:
        for key in [key for key, numbers in self.begun.items() if key[0] == place and number in numbers]:
            self.begun[key].remove(number)
            if not self.begun[key]:
                del self.begun[key]

    def most_alike(self, place: str, before: Tokens, tokens: list[int]) -> int:
        """The most tokens in common of what goes on after ``before``."""
        after = [page[len(before) :] for at, page in self.begun if at == place and page[: len(before)] == before]
        after = [page for page in after if 0 < len(page) <= SIZE]
        alike = (takewhile(lambda pair: pair[0] == pair[1], zip(page, tokens, strict=False)) for page in after)
        return max((len(list(pairs)) for pairs in alike), default=0)


def chain_of(keys: PageKeys, of: Sequence) -> list[bytes]:
    """The keys of all its tokens."""
    whole = keys.whole(of, len(of.tokens))
    return [*whole, keys.partial(of, len(of.tokens))] if len(of.tokens) % SIZE else whole


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=11)
MOVES = st.lists(st.tuples(st.sampled_from([POOL, PREFILL]), TOKENS, st.integers(0, 9)), max_size=30)


@given(moves=MOVES, asked=st.lists(TOKENS, min_size=1, max_size=4))
def test_what_is_held_is_found_by_its_tokens_and_by_none_else(
    moves: list[tuple[str, list[int], int]], asked: list[list[int]]
) -> None:
    index, keys, oracle = PrefixIndex(), PageKeys(SIZE), Oracle()
    places = {kind: index.place(kind) for kind in (POOL, PREFILL)}
    for number, (kind, tokens, gone) in enumerate(moves):
        held = sequence(tokens, number)
        index.hold(places[kind], number, Holding(held, chain_of(keys, held), len(tokens), None, SIZE))
        oracle.hold(kind, number, tokens)
        if gone < number and gone in index.holdings(places[kind]):
            index.release(places[kind], gone)
            oracle.release(kind, gone)
    for kind, place in places.items():
        for tokens in asked:
            wanted, pages = chain_of(keys, sequence(tokens)), pages_of(tokens)
            found = [list(index.sequences(place, key)) for key in wanted]
            assert found == [oracle.begun.get((kind, page), []) for page in pages]
            (count,) = index.match([place], wanted)
            assert count == next((n for n, numbers in enumerate(found) if not numbers), len(found))
            for at in range(1, min(count, len(tokens) // SIZE) + 1):
                rest = tokens[at * SIZE : (at + 1) * SIZE]
                alike = index.nearest(place, wanted[at - 1], rest)
                assert max((n for n, _ in alike), default=0) == oracle.most_alike(kind, pages[at - 1], rest)
    for place in places.values():
        index.clear(place)
    assert index.num_known_pages == 0, "nothing is left of what nobody holds"


@given(st.lists(st.tuples(TOKENS, st.integers(0, 40)), max_size=20))
def test_a_leased_chain_is_found_where_it_ends(moves: list[tuple[list[int], int]]) -> None:
    index, keys, ends = PrefixIndex(), PageKeys(SIZE), dict[Tokens, int]()
    pool = index.place(POOL)
    for number, (tokens, gone) in enumerate(moves):
        held = sequence(tokens, number)
        index.hold(pool, number, Holding(held, chain_of(keys, held), len(tokens), 0.0, SIZE))
        ends[tuple(tokens)] = number
        if gone in index.holdings(pool):
            index.release(pool, gone)
            ends = {end: n for end, n in ends.items() if n != gone}
    for tokens, _ in moves:
        assert index.end(pool, chain_of(keys, sequence(tokens))[-1]) == ends.get(tuple(tokens))


def test_partial_pages_with_which_a_page_begins_are_found() -> None:
    index, keys = PrefixIndex(), PageKeys(SIZE)
    pool = index.place(POOL)
    for number, tokens in enumerate(([1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 5], [1, 2, 3, 4, 5, 6])):
        held = sequence(tokens, number)
        index.hold(pool, number, Holding(held, chain_of(keys, held), len(tokens), 0.0, SIZE))
    (first,) = keys.whole(sequence([1, 2, 3]), 3)
    assert [index.end(pool, key) for key in index.parts(pool, first, [4, 5, 6])] == [0, 1]
    assert [index.end(pool, key) for key in index.parts(pool, first, [4, 5])] == [0]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300), st.permutations([1, 3, 16, 32, 48, 64, 128]))
def test_a_prefix_has_one_key_whatever_the_size_of_pages(tokens: list[int], sizes: list[int]) -> None:
    root, known = ChainRoot(), sequence(tokens)
    wanted = {stop: page_key(root(b""), 0, tokens[:stop]) for stop in range(1, len(tokens) + 1)}
    for size in sizes:
        keys = PageKeys(size, root)
        assert keys.whole(known, len(tokens)) == [wanted[n] for n in range(size, len(tokens) + 1, size)]
        assert keys.whole(sequence(tokens), len(tokens) // 2) == keys.whole(known, len(tokens) // 2)
        assert keys.partial(known, len(tokens)) == wanted[len(tokens)]


def test_a_page_in_storage_and_in_the_pool_is_no_replica_of_one_that_a_prefill_worker_has() -> None:
    index, keys, held = PrefixIndex(), PageKeys(SIZE), sequence([1, 2, 3, 4, 5, 6], 7)
    worker, disk, chain = index.place(PREFILL), index.place("file"), keys.whole(held, 6)
    for place in (worker, disk):
        index.add(place, chain)
    index.hold(index.place(POOL), 7, Holding(held, chain, 6))
    assert index.match([index.place(POOL), worker, disk], chain) == [2, 2, 2]
    assert not index.is_replicated(PREFILL, chain[-1])
    assert index.num_replicas(PREFILL) == 0
    index.drop(worker, chain)
    assert index.num_replicas(PREFILL) == 0


def test_a_chain_that_lies_in_several_places_is_followed_from_one_to_the_next() -> None:
    index, keys = PrefixIndex(), [bytes([n]) for n in range(4)]
    one, other = (index.place("file", shard) for shard in range(2))
    index.add(one, [keys[0], keys[2]])
    index.add(other, [keys[1]])
    index.promise(other, [keys[3]])
    assert index.match_along([one, other, one, other], keys) == 3, "the last one is promised alone"
    assert index.match_along([one, one, one, one], keys) == 1
    assert index.match_along([0, one, one, one], keys) == 0, "no place"


@pytest.mark.parametrize("salt", [b"", b"a"])
def test_pages_of_another_salt_have_other_keys(salt: bytes) -> None:
    keys, tokens = PageKeys(SIZE), list(range(7))
    other = chain_of(keys, sequence(tokens, salt=b"b"))
    assert not {*other} & {*chain_of(keys, sequence(tokens, salt=salt))}
    assert keys.whole(KeyedTokens(b"b", tokens), 7) == other[:2]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 6), st.sampled_from("pcadw")), max_size=40)
)
def test_places_have_what_they_were_given(moves: list[tuple[int, int, int, str]]) -> None:
    """Against sets. Pages are chains of one of five beginnings: promised, confirmed, added, dropped, withdrawn."""
    index, held, ready = PrefixIndex(), [set[bytes](), set(), set()], [set[bytes](), set(), set()]
    places = [index.place(PREFILL, worker) for worker in range(3)]
    for worker, chain, length, move in moves:
        keys = [bytes([chain, n]) for n in range(length)]
        if move in "pa":
            index.promise(places[worker], keys)
            held[worker] |= set(keys)
        if move in "ca":
            index.confirm(places[worker], keys)
            ready[worker] |= set(keys) & held[worker]
        if move == "d":
            index.drop(places[worker], keys)
            held[worker] -= set(keys)
        if move == "w":
            index.drop(places[worker], keys, ready=False)
            held[worker] -= set(keys) - ready[worker]
        ready[worker] &= held[worker]
    for chain in range(5):
        keys = [bytes([chain, n]) for n in range(7)]
        for there, found in ((held, index.match(places, keys)), (ready, index.match(places, keys, ready=True))):
            assert found == [next((n for n, key in enumerate(keys) if key not in own), 7) for own in there]
        for key in keys:
            assert [index.has(place, key) for place in places] == [key in own for own in ready]
            assert index.is_replicated(PREFILL, key) == (sum(key in own for own in ready) > 1)
    assert [index.num_pages(place) for place in places] == [len(own) for own in held]
    assert index.num_replicas(PREFILL) == sum(map(len, held)) - len(set().union(*held))
    assert index.num_known_pages == len(set().union(*held))
    index.clear(sum(places), ready=False)
    assert [index.num_pages(place) for place in places] == [len(own) for own in ready], "promises alone are forgotten"
    assert index.keys(sum(places)) == set().union(*ready)
    index.clear(sum(places))
    assert (index.num_known_pages, index.num_replicas(PREFILL)) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 3), st.sets(st.sampled_from([b"a", b"b", b"c"]))), max_size=30))
def test_a_page_is_leased_by_the_sessions_that_have_it_the_first_one_first(moves: list[tuple[int, set[bytes]]]) -> None:
    """Each move ends a session's leases, and begins others."""
    index, oracle, own = PrefixIndex(), {key: list[int]() for key in (b"a", b"b", b"c")}, dict[int, set[bytes]]()
    for number, keys in moves:
        index.end_lease(number, own.get(number, set()))
        index.lease(number, keys)
        own[number] = keys
        for key, numbers in oracle.items():
            numbers[:] = [n for n in numbers if n != number] + [number] * (key in keys)
            assert list(index.leases(key)) == numbers
    index.clear(index.place(POOL))
    assert {key: list(index.leases(key)) for key in oracle} == oracle, "a session keeps its pages"


def test_pages_of_held_sequences_are_not_dropped() -> None:
    index, keys, held = PrefixIndex(), PageKeys(SIZE), sequence([1, 2, 3, 4, 5, 6], 7)
    worker, chain = index.place(PREFILL), keys.whole(held, 6)
    index.add(worker, chain)
    index.hold(worker, 7, Holding(held, chain[:1], SIZE, 0.0))
    index.drop(worker, chain)
    assert index.match([worker], chain) == [1]
    index.release(worker, 7)
    assert index.match([worker], chain) == [0]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(1, 6)), max_size=40))
def test_a_bounded_place_gives_up_what_was_used_the_longest_ago(moves: list[tuple[int, int, int]]) -> None:
    index, used = BoundedPrefixIndex(8), [list[bytes](), [], []]  # by worker, the last use last
    places = [index.place(PREFILL, worker) for worker in range(3)]
    for worker, chain, length in moves:
        keys = [bytes([chain, n]) for n in range(length)]
        index.add(places[worker], keys)
        used[worker] = [*(key for key in used[worker] if key not in keys), *reversed(keys)][-8:]
        for chain in range(5):
            keys = [bytes([chain, n]) for n in range(7)]
            assert [index.has(places[worker], key) for key in keys] == [key in used[worker] for key in keys]


def test_a_page_that_was_given_up_before_it_came_stays_away() -> None:
    index, early, late = BoundedPrefixIndex(2), [b"a", b"b"], [b"c", b"d"]
    worker = index.place(PREFILL)
    index.promise(worker, early)
    index.promise(worker, late)
    index.confirm(worker, early)
    assert index.match([worker], early, ready=True) == [0]
    index.confirm(worker, late)
    assert index.match([worker], late, ready=True) == [2]
