"""The contract of lamina.kv.storage, run over every entry of the table but ``zeros``, which keeps nothing.

Covers: lamina/kv/storage/zeros.py.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from lamina.kv.pages import PAGE, Page, PageFragment, Provenance
from lamina.kv.storage import (
    PLUGINS,
    STORAGE_BACKENDS,
    FragmentLostError,
    PageGoneError,
    StorageBackend,
    StorageConfig,
    StorageError,
    StorageFullError,
    StoredPage,
    open_storage,
)

TENANT = b"t" * 16
RECIPE = Provenance("prompt", 256, "build", 1)
SIZE = 1 << 20
ATOM = 1000  # bytes
HEADS = {PageFragment(layer, head): bytes([layer * 16 + head]) * ATOM for layer in range(3) for head in range(2)}
Opener = Callable[..., StorageBackend]


def page(number: int, tokens: int = PAGE, **more: Any) -> Page:
    return Page(**{"key": bytes([number]) * 32, "number": number, "tokens": tokens, "tenant": TENANT,
                   "provenance": RECIPE} | more)  # fmt: skip


def filled(medium: StorageBackend, key: bytes, fragments: Mapping[PageFragment, bytes]) -> dict[PageFragment, bytes]:
    """Returns what the medium has of these fragments."""
    into = {fragment: bytearray(len(data)) for fragment, data in fragments.items()}
    medium.read(key, into)
    return {fragment: bytes(data) for fragment, data in into.items()}


@pytest.fixture(params=[*(name for name in STORAGE_BACKENDS if name != "zeros"), "emulated"])
def opener(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    """Opens the medium, each call another worker of one server; all are closed."""
    opened: list[StorageBackend] = []
    monkeypatch.setenv(PLUGINS, "emulated=emulated_medium")

    def open_one(**more: Any) -> StorageBackend:
        place = StorageConfig(SIZE, b"i" * 32, directory=str(tmp_path / "kv"), secret=b"s" * 32, server="one")
        if request.param == "layered":
            place = place._replace(total_bytes=SIZE // 2, memory_bytes=SIZE // 2)
        opened.append(open_storage(request.param, place._replace(**more)))
        return opened[-1]

    yield open_one
    for medium in opened:
        medium.close()


@pytest.fixture
def medium(opener: Opener) -> StorageBackend:
    return opener()


def put(medium: StorageBackend, what: Page, fragments: Mapping[PageFragment, bytes] = HEADS) -> list[bytes]:
    given = medium.reserve(sum(map(len, fragments.values())))
    medium.write(what, fragments)
    return given


def fill(medium: StorageBackend, nbytes: int) -> int:
    """Write pages of one fragment for as long as there is room; returns how many."""
    for number in itertools.count():
        try:
            medium.write(page(number % 250, key=number.to_bytes(32, "big")), {PageFragment(0, 0): bytes(nbytes)})
        except StorageFullError:
            return number
    raise AssertionError


def test_bytes_come_back(medium: StorageBackend) -> None:
    put(medium, page(1))
    assert filled(medium, page(1).key, HEADS) == HEADS
    some = dict(list(HEADS.items())[2:4])
    assert filled(medium, page(1).key, some) == some


def test_a_page_is_there_as_far_as_it_was_written(medium: StorageBackend) -> None:
    first, second = dict(list(HEADS.items())[:4]), dict(list(HEADS.items())[4:])
    put(medium, page(1), first)
    assert medium.pages() == [StoredPage(page(1), frozenset(first), medium.pages()[0].nbytes)]
    with pytest.raises(FragmentLostError) as lost:
        filled(medium, page(1).key, HEADS)
    assert not isinstance(lost.value, PageGoneError), "a part of it is there"
    put(medium, page(1), second)
    assert [held.fragments for held in medium.pages()] == [frozenset(HEADS)]
    assert filled(medium, page(1).key, HEADS) == HEADS


def test_keys_are_those_of_pages_that_have_certain_atoms(medium: StorageBackend) -> None:
    """The keys are those that were used last; a page has what all of its writes brought."""
    first, second = dict(list(HEADS.items())[:4]), dict(list(HEADS.items())[4:])
    for number, fragments in enumerate((HEADS, first, HEADS, second)):
        put(medium, page(number), fragments)
    whole, part = frozenset(HEADS), frozenset(first)
    assert medium.keys(whole, 9) == [page(0).key, page(2).key]
    assert medium.keys(part, 9) == [page(number).key for number in range(3)]
    assert medium.keys(part, 2) == [page(number).key for number in (1, 2)]
    assert len(medium.keys(frozenset(), 9)) == 4
    assert medium.keys(frozenset({PageFragment(99, 0)}), 9) == []
    put(medium, page(1), second)
    filled(medium, page(0).key, HEADS)
    assert medium.keys(whole, 9) == [page(number).key for number in (2, 1, 0)]
    medium.write(page(2)._replace(provenance=Provenance("decode")), first)
    assert medium.keys(whole, 9) == [page(1).key, page(0).key], "another recipe begins the page anew"
    medium.delete([page(0).key])
    assert medium.keys(whole, 9) == [page(1).key]


def test_what_is_written_last_is_there(medium: StorageBackend) -> None:
    put(medium, page(1))
    fragment = PageFragment(0, 0)
    put(medium, page(1), {fragment: b"n" * ATOM})
    assert filled(medium, page(1).key, HEADS) == HEADS | {fragment: b"n" * ATOM}


def test_pages_that_are_not_there(medium: StorageBackend) -> None:
    with pytest.raises(PageGoneError):
        filled(medium, page(1).key, HEADS)
    medium.delete([page(1).key])
    put(medium, page(1))
    put(medium, page(2))
    medium.delete([page(1).key, page(1).key])
    with pytest.raises(PageGoneError):
        filled(medium, page(1).key, HEADS)
    assert filled(medium, page(2).key, HEADS) == HEADS
    assert [held.page for held in medium.pages()] == [page(2)]


def test_a_partial_page_and_its_recipe(medium: StorageBackend) -> None:
    last = page(3, 17, provenance=Provenance("decode", 0, "another", 2))
    put(medium, last, {PageFragment(0, 0): b"x"})
    assert [held.page for held in medium.pages()] == [last]


@pytest.mark.parametrize("other", [{"number": 2}, {"tokens": 5}, {"tenant": b"u" * 16}])
def test_another_page_under_a_key(medium: StorageBackend, other: dict[str, Any]) -> None:
    put(medium, page(1))
    with pytest.raises(ValueError, match="another page"):
        medium.write(page(1)._replace(**other), HEADS)
    assert [held.page for held in medium.pages()] == [page(1)]


def test_another_recipe_begins_the_page_anew(medium: StorageBackend) -> None:
    put(medium, page(1))
    other, fragment = page(1, provenance=RECIPE._replace(chunk=512)), PageFragment(0, 0)
    put(medium, other, {fragment: b"n" * ATOM})
    assert [(held.page, held.fragments) for held in medium.pages()] == [(other, {fragment})]
    assert filled(medium, other.key, {fragment: b"n" * ATOM}) == {fragment: b"n" * ATOM}


def test_misuse(medium: StorageBackend) -> None:
    with pytest.raises(ValueError, match="at least one fragment"):
        medium.write(page(1), {})
    put(medium, page(1))
    with pytest.raises(ValueError, match=f"{ATOM - 1}"):
        medium.read(page(1).key, {PageFragment(0, 0): bytearray(ATOM - 1)})


def test_a_buffer_is_the_callers_again(medium: StorageBackend) -> None:
    data = bytearray(b"a" * ATOM)
    medium.reserve(ATOM)
    medium.write(page(1), {PageFragment(0, 0): data})
    data[:] = b"b" * ATOM
    assert filled(medium, page(1).key, {PageFragment(0, 0): bytes(ATOM)}) == {PageFragment(0, 0): b"a" * ATOM}


def test_a_page_is_taken(medium: StorageBackend) -> None:
    """It is taken with all of its bytes, or with those that are named."""
    put(medium, page(1))
    assert medium.read_page(page(1).key) == (page(1), HEADS)
    some = dict(list(HEADS.items())[2:4])
    assert medium.read_page(page(1).key, frozenset({*some, PageFragment(99, 0)})) == (page(1), some)
    with pytest.raises(FragmentLostError) as lost:
        medium.read_page(page(1).key, frozenset({PageFragment(99, 0)}))
    assert not isinstance(lost.value, PageGoneError), "other fragments of it are there"
    with pytest.raises(PageGoneError):
        medium.read_page(page(2).key)
    assert medium.lookup(page(1).key) == medium.pages()[0]
    assert medium.lookup(page(2).key) is None


def numbered(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_expected_pages_give_way_last(opener: Opener) -> None:
    """The page of the last turn goes first among them; once no turn waits, the order is that of other pages."""
    medium = opener(policy="lru")
    data = {PageFragment(0, 0): bytes(64 << 10)}
    for number in range(6):
        put(medium, page(0, key=numbered(number)), data)
    for turn, number in ((7, 1), (8, 0), (8, 3)):
        medium.hint(turn, [numbered(number)])
    medium.hint(9, [numbered(2)])
    medium.hint(9, [])
    given = list[bytes]()
    for number in itertools.count(6):
        medium.hint(number + 10, [numbered(number)])
        given += put(medium, page(0, key=numbered(number)), data)
        if numbered(2) in given and len(given) >= 4:
            break
    first = [int.from_bytes(key, "big") for key in given]
    assert first[:3] == [2, 4, 5], "nobody waits for them"
    assert not {0, 1, 3} & set(first), "those of the last turns go, and not those of the first"


def test_prolonged_pages_give_way_behind_others(opener: Opener) -> None:
    """And where all are prolonged, there is room for new ones all the same."""
    medium = opener(policy="lru")
    data = {PageFragment(0, 0): bytes(64 << 10)}
    for number in range(5):
        put(medium, page(0, key=numbered(number)), data)
    medium.set_retention([numbered(1), numbered(4), numbered(999)], 1e5)
    medium.set_retention([numbered(4)], 1.0)
    given, number = list[bytes](), 5
    while len(given) < 12:
        given += put(medium, page(0, key=numbered(number)), data)
        number += 1
    assert not {numbered(1), numbered(4)} & set(given)
    assert given[:4] == [numbered(n) for n in (0, 2, 3, 5)]
    medium.set_retention(map(numbered, range(number)), 1e5)
    while not {numbered(1), numbered(4)} <= set(given):
        given += put(medium, page(0, key=numbered(number)), data)
        medium.set_retention([numbered(number)], 1e5)
        number += 1
        assert number < 200


@pytest.mark.parametrize("size", [4 << 10, 64 << 10])
def test_the_least_recently_used_goes_first(opener: Opener, size: int) -> None:
    medium = opener(policy="lru")
    data = {PageFragment(0, 0): bytes(size)}
    last, given = 0, []
    while not given:
        last += 1
        given = put(medium, page(last % 250, key=last.to_bytes(32, "big")), data)
        filled(medium, (1).to_bytes(32, "big"), data)
    there = [held.page.key for held in medium.pages()]
    assert given[0] == (2).to_bytes(32, "big")
    assert (1).to_bytes(32, "big") in there
    assert not set(given) & set(there)
    assert sum(held.nbytes for held in medium.pages()) <= SIZE
    assert last * size > SIZE // 2, "most of the size is used"


def test_no_room(opener: Opener) -> None:
    medium = opener(workers=2)
    with pytest.raises(StorageFullError):
        medium.reserve(SIZE // 2 + 1)
    count = fill(medium, 100_000)
    assert 3 <= count <= 5
    assert len(medium.pages()) == count, "a write gives up no page"


def test_a_size_is_shared_by_those_that_there_are(opener: Opener) -> None:
    """One worker, then two, then one again: what is there stays as far as there is room, and each has its part."""
    data, one = {PageFragment(0, 0): bytes(60_000)}, opener()

    def write(medium: StorageBackend, first: int) -> set[bytes]:
        keys = [numbered(number) for number in range(first, first + 17)]
        for key in keys:
            put(medium, page(0, key=key), data)
        return {*keys}

    def there(*media: StorageBackend) -> set[bytes]:
        return {held.page.key for medium in media for held in medium.pages()}

    most = len(write(one, 0) & there(one))
    assert most >= 14
    one.set_num_workers(2)
    assert len(there(one)) >= most // 2 - 1
    other = opener(workers=2)
    first, second = write(one, 100), write(other, 200)
    assert all(len(keys & there(one, other)) >= most // 2 - 1 for keys in (first, second))
    assert len(there(one, other)) <= most + 1
    for medium, keys in ((one, first), (other, second)):
        assert all(filled(medium, key, data) == data for key in keys & there(medium))
    other.close()
    one.set_num_workers(1)
    assert len(write(one, 300) & there(one)) >= most - 1


def test_behind_close(medium: StorageBackend) -> None:
    put(medium, page(1))
    medium.close()
    medium.close()
    for call in (
        lambda: medium.reserve(1), lambda: medium.write(page(2), HEADS), lambda: filled(medium, page(1).key, HEADS),
        lambda: medium.delete([page(1).key]), medium.pages, lambda: medium.read_page(page(1).key),
        lambda: medium.lookup(page(1).key), lambda: medium.set_retention([page(1).key], 1.0),
    ):  # fmt: skip
        with pytest.raises(StorageError, match="closed"):
            call()


def test_many_threads(medium: StorageBackend) -> None:
    wrong: list[object] = []

    def work(first: int) -> None:
        try:
            for number in range(first, first + 10):
                fragments = {fragment: bytes([number]) * ATOM for fragment in HEADS}
                medium.write(page(number), fragments)
                if filled(medium, page(number).key, fragments) != fragments:
                    wrong.append(number)
                if number % 2:
                    medium.delete([page(number).key])
        except StorageError as e:
            wrong.append(e)

    threads = [threading.Thread(target=work, args=(at * 10,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert {held.page.number for held in medium.pages()} == set(range(0, 40, 2))


class Beside(RuleBasedStateMachine):
    """A medium that is compared with a dict of what was written."""

    open_one: Opener

    def __init__(self) -> None:
        super().__init__()
        self.medium = self.open_one()
        self.medium.delete([held.page.key for held in self.medium.pages()])
        self.known: dict[bytes, dict[PageFragment, bytes]] = {}

    pages = st.integers(0, 5)
    fragments = st.dictionaries(
        st.builds(PageFragment, st.integers(0, 2), st.integers(0, 2)), st.binary(min_size=1, max_size=3), min_size=1
    )

    @rule(number=pages, fragments=fragments, copies=st.integers(1, 40_000))
    def write(self, number: int, fragments: dict[PageFragment, bytes], copies: int) -> None:
        data = {fragment: each * copies for fragment, each in fragments.items()}
        nbytes = sum(map(len, data.values()))
        try:
            given = self.medium.reserve(nbytes)
        except StorageFullError:
            assert nbytes > SIZE // 2 - 1024, "a layered medium has two halves"
            return
        for key in given:
            del self.known[key]
        self.medium.write(page(number), data)
        self.known.setdefault(page(number).key, {}).update(data)

    @precondition(lambda self: self.known)
    @rule(choice=st.data())
    def read(self, choice: st.DataObject) -> None:
        key = choice.draw(st.sampled_from(sorted(self.known)))
        some = choice.draw(st.sets(st.sampled_from(sorted(self.known[key]))))
        fragments = {fragment: self.known[key][fragment] for fragment in some}
        assert filled(self.medium, key, fragments) == fragments

    @rule(numbers=st.lists(pages))
    def drop(self, numbers: list[int]) -> None:
        self.medium.delete([page(number).key for number in numbers])
        for number in numbers:
            self.known.pop(page(number).key, None)

    @invariant()
    def the_same(self) -> None:
        held = self.medium.pages()
        assert {each.page.key: each.fragments for each in held} == {k: frozenset(v) for k, v in self.known.items()}
        assert sum(each.nbytes for each in held) <= SIZE

    def teardown(self) -> None:
        self.medium.close()


@pytest.mark.long(but=["host"])
@pytest.mark.hypothesis
@pytest.mark.timeout(400)
def test_beside_a_dict(opener: Opener) -> None:
    machine = type("BesideADict", (Beside,), {"open_one": staticmethod(opener)})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=20, deadline=None))


def test_an_unknown_medium() -> None:
    with pytest.raises(ValueError, match="one of host, file, layered"):
        open_storage("tape", StorageConfig(SIZE))
