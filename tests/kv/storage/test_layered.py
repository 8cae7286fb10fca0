"""Host memory before a directory: who is fetched, who gives way, and what neither loses."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lamina.kv.pages import PAGE, Page, PageFragment, Provenance
from lamina.kv.storage import (
    FragmentLostError,
    PageGoneError,
    StorageBackend,
    StorageConfig,
    StorageError,
    StorageFullError,
    open_storage,
)
from lamina.kv.storage import host as host_storage
from lamina.kv.storage.file import FileStorage
from lamina.kv.storage.file import open_storage as open_file
from lamina.kv.storage.host import HostStorage
from lamina.kv.storage.layered import TieredStorage

ATOM = PageFragment(0, 0)
SHARE = frozenset({ATOM})
SESSION = 4096  # bytes
WAIT_S = 30.0


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def put(medium: StorageBackend, number: int, data: bytes | None = None) -> list[bytes]:
    """A session of one page."""
    data = bytes([number]) * SESSION if data is None else data
    given = medium.reserve(len(data))
    medium.write(Page(key(number), 0, PAGE, b"t" * 16, Provenance("prompt")), {ATOM: data})
    return given


def read(medium: StorageBackend, number: int) -> bytes:
    into = bytearray(SESSION)
    medium.read(key(number), {ATOM: into})
    return bytes(into)


def has(medium: StorageBackend) -> set[int]:
    return {int.from_bytes(held.page.key, "big") for held in medium.pages()}


class Places:
    """``memory`` and ``disk``: of so many sessions."""

    def __init__(self, memory: int, disk: int, directory: Path | None = None) -> None:
        self.memory = HostStorage(StorageConfig(memory * SESSION))
        self.disk: Any = HostStorage(StorageConfig(disk * SESSION))
        if directory is not None:
            self.disk = open_file(StorageConfig(disk * SESSION, directory=str(directory), secret=b"s" * 32, server="a"))
        self.both = TieredStorage(self.memory, self.disk, spare=SESSION)

    def fetch_all(self) -> list[bytes]:
        gone = list[bytes]()
        while (given := self.both.prefetch_next(SHARE)) is not None:
            gone += given
        return gone


def figure_9(directory: Path | None = None) -> Places:
    """Job 1 runs, 2 to 9 wait. Memory has 2 and 4 and a slot besides; of the full disk the figure names 3 and 9."""
    places = Places(3, 4, directory)
    for number in (9, 3, 5, 7):
        put(places.disk, number)
    for number in (2, 4):
        put(places.both, number)
    for turn in range(2, 8):  # the eviction window has six
        places.both.hint(turn, [key(turn)])
    return places


@pytest.mark.parametrize("on_disk", [False, True])
def test_figure_9(tmp_path: Path, *, on_disk: bool) -> None:
    places = figure_9(tmp_path / "kv" if on_disk else None)
    disk = places.disk
    copies = list[set[int]]()
    right = disk.write

    def write(page: Page, fragments: Mapping[PageFragment, Any]) -> None:
        right(page, fragments)
        copies.append(has(disk))

    disk.write = write
    assert places.fetch_all() == [key(9)], "it is behind the window"
    assert has(places.memory) == {2, 3}, "the fetch window has two, and a slot stays free"
    assert copies == [{4, 3, 5, 7}], "4 takes the place of 9, and the copy of 3 keeps its own until it has arrived"
    assert [read(places.both, number)[0] for number in (2, 3, 4, 5, 7)] == [2, 3, 4, 5, 7]
    with pytest.raises(FragmentLostError):
        read(places.both, 9)
    places.both.close()


def test_a_page_that_is_damaged_in_memory_is_not_one_that_was_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places(4, 4)
    with monkeypatch.context() as patch:
        patch.setattr(host_storage, "checksum", bytes)  # of other bytes than those that are there
        put(places.both, 1)
    with pytest.raises(FragmentLostError) as lost:
        read(places.both, 1)
    assert not isinstance(lost.value, PageGoneError)
    with pytest.raises(FragmentLostError) as lost:
        places.both.read_page(key(1))
    assert not isinstance(lost.value, PageGoneError)
    with pytest.raises(PageGoneError):
        read(places.both, 2)
    with pytest.raises(PageGoneError):
        places.both.read_page(key(2))


def test_the_line_moves_on() -> None:
    """A turn that has been served is expected no more, so the next one is fetched."""
    places = figure_9()
    places.fetch_all()
    places.both.hint(2, [])
    read(places.both, 2)
    places.fetch_all()
    assert has(places.memory) == {3, 4}
    assert has(places.both) == {2, 3, 4, 5, 7}, "the copy of 3 has given way"


def test_nothing_is_fetched_where_nobody_waits() -> None:
    places = Places(3, 4)
    for number in range(5):
        put(places.both, number)
    assert (has(places.memory), has(places.disk)) == ({2, 3, 4}, {0, 1})
    assert places.both.prefetch_next(SHARE) is None
    read(places.both, 0)
    assert places.both.prefetch_next(SHARE) == [], "what was read goes where it is read faster"
    assert has(places.memory) == {4, 0}, "the least recently used have made room, and a slot besides"
    assert has(places.both) == set(range(5))


def test_who_was_used_last_stays_without_a_queue() -> None:
    """The order is that of LRU of both places together, but for copies."""
    places, gone = Places(2, 2), list[bytes]()
    for number in range(5):
        gone += put(places.both, number)
    assert gone == [key(0)]
    assert has(places.both) == {1, 2, 3, 4}


def test_what_was_fetched_and_written_anew_is_new() -> None:
    """Its copy on the disk is an old one."""
    places = Places(3, 4)
    for number in range(4):
        put(places.both, number)
    places.both.hint(1, [key(0)])
    places.fetch_all()
    assert 0 in has(places.memory)
    put(places.both, 0, b"n" * SESSION)
    places.both.hint(1, [])
    for number in range(5, 8):
        put(places.both, number)
    assert 0 not in has(places.memory)
    assert read(places.both, 0) == b"n" * SESSION


def test_a_page_of_a_full_disk_is_given_up_and_said() -> None:
    places = Places(1, 1)
    assert [put(places.both, number) for number in range(3)] == [[], [], [key(0)]]
    assert has(places.both) == {1, 2}


def test_a_disk_that_fails_loses_what_had_to_go_there() -> None:
    places = Places(1, 1)
    put(places.both, 1)

    def reserve(nbytes: int) -> list[bytes]:
        raise StorageFullError(f"no room for {nbytes} bytes")

    places.disk.reserve = reserve
    assert put(places.both, 2) == [key(1)]
    assert has(places.both) == {2}


def test_a_fetch_leaves_room_for_a_write_that_is_to_come() -> None:
    places = Places(3, 4)
    for number in (1, 2):
        put(places.disk, number)
    put(places.memory, 5)
    places.both.hint(1, [key(1)])
    places.both.hint(2, [key(2)])
    assert places.both.reserve(2 * SESSION) == []
    places.fetch_all()
    places.both.write(Page(key(7), 0, PAGE, b"t" * 16, Provenance("prompt")), {ATOM: bytes(2 * SESSION)})
    assert 7 in has(places.memory)


def test_a_read_does_not_wait_for_a_fetch() -> None:
    places = Places(3, 4)
    put(places.both, 1)
    put(places.disk, 2)
    came, may_go, right = threading.Event(), threading.Event(), places.disk.read_page

    def take(*args: Any) -> Any:
        came.set()
        assert may_go.wait(WAIT_S)
        return right(*args)

    places.disk.read_page = take
    places.both.hint(1, [key(2)])
    thread = threading.Thread(target=places.fetch_all)
    thread.start()
    assert came.wait(WAIT_S)
    assert read(places.both, 1) == b"\1" * SESSION
    places.both.hint(1, [])
    may_go.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_others_that_come_do_not_wait_for_the_disk() -> None:
    """All workers rest meanwhile. The next write finds room: what had to go for it is on the disk."""
    places = Places(4, 8)
    for number in range(4):
        put(places.both, number)
    places.both.set_num_workers(2)
    assert (has(places.memory), has(places.disk)) == ({0, 1, 2, 3}, set())
    put(places.both, 4)
    assert (has(places.memory), has(places.disk)) == ({3, 4}, {0, 1, 2})


def test_the_disk_has_all_behind_an_end(tmp_path: Path) -> None:
    """It has all pages that it has room for: the most recently used first."""
    place = StorageConfig(
        64 << 10, directory=str(tmp_path / "kv"), secret=b"s" * 32, server="a", memory_bytes=16 * SESSION, identity=b"i"
    )
    medium = open_storage("layered", place)
    for number in range(5):
        put(medium, number)
    medium.close()
    again = open_storage("layered", place)
    assert has(again) == set(range(5))
    assert read(again, 3) == b"\3" * SESSION
    again.close()


class Aging:
    """Two layers whose pages live for 100 s by one clock, with room for so many sessions in memory."""

    def __init__(self, directory: Path, memory: int = 8) -> None:
        self.now, self._directory, self._memory = 1000.0, directory, memory
        self.both = self.open()

    def open(self) -> TieredStorage:
        place = StorageConfig(8 * SESSION, directory=str(self._directory), secret=b"s" * 32, server="a", ttl_s=100.0)
        memory = HostStorage(place._replace(total_bytes=self._memory * SESSION), lambda: self.now)
        return TieredStorage(memory, FileStorage(place, lambda: self.now), spare=0)

    def restart(self) -> None:
        self.both.close()
        self.both = self.open()


def test_a_page_in_memory_goes_when_its_time_is_up_and_one_in_use_stays(tmp_path: Path) -> None:
    aging = Aging(tmp_path / "kv")
    for number in range(3):
        put(aging.both, number)
    aging.both.set_retention([key(2)], 1000.0)
    aging.now += 60.0
    read(aging.both, 1)
    assert aging.both.expire() == []
    aging.now += 40.0
    assert aging.both.expire() == [key(0)]
    assert has(aging.both) == {1, 2}
    aging.now += 60.0
    assert aging.both.expire() == [key(1)]
    assert has(aging.both) == {2}
    aging.both.close()


@pytest.mark.parametrize("moved", ["by others", "at the end"])
def test_the_age_of_a_page_counts_from_its_last_use_when_it_has_moved_to_the_disk(moved: str, tmp_path: Path) -> None:
    aging = Aging(tmp_path / "kv", memory=2 if moved == "by others" else 8)
    for number in range(2):
        put(aging.both, number)
    aging.now += 60.0
    read(aging.both, 1)
    aging.now += 30.0
    if moved == "by others":
        for number in (5, 6):
            put(aging.both, number)
    aging.restart()
    assert {0, 1} <= has(aging.both)
    aging.now += 11.0
    assert aging.both.expire() == [key(0)]
    assert 1 in has(aging.both)
    aging.now += 60.0
    assert key(1) in aging.both.expire()
    aging.both.close()


@pytest.mark.parametrize("broken", ["lookup", "expire"])
def test_keys_that_are_gone_from_memory_are_returned_if_the_disk_fails(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No later call would return them."""
    now = [1e9]
    places = Places(2, 2)
    memory = HostStorage(StorageConfig(4 * SESSION, ttl_s=100.0), lambda: now[0])
    both = TieredStorage(memory, places.disk, spare=0)
    put(both, 0)
    now[0] += 101.0

    def fail(*_: object) -> None:
        raise StorageError("the disk fails")

    with monkeypatch.context() as patch:
        patch.setattr(places.disk, broken, fail)
        assert both.expire() == [key(0)]
    assert both.expire() == []
    assert has(both) == set()


def test_a_page_that_memory_serves_outlives_its_copy_on_the_disk(tmp_path: Path) -> None:
    aging = Aging(tmp_path / "kv")
    put(aging.both, 0)
    aging.restart()
    assert read(aging.both, 0) == bytes(SESSION)
    assert aging.both.prefetch_next(SHARE) == []  # a copy in memory
    for _ in range(3):
        aging.now += 60.0
        read(aging.both, 0)
        assert aging.both.expire() == []
    aging.restart()
    assert read(aging.both, 0) == bytes(SESSION)
    aging.both.close()


def split(places: Places) -> None:
    """Page 1: half of it on the disk, half in memory."""
    put(places.both, 1)
    assert places.both.reserve(2 * SESSION) == []  # to the disk with it
    places.both.write(Page(key(1), 0, PAGE, b"t" * 16, Provenance("prompt")), {PageFragment(1, 0): bytes(SESSION)})


def test_a_page_whose_part_on_the_disk_goes_as_others_come_is_nowhere() -> None:
    places = Places(2, 1)
    split(places)
    put(places.both, 2)
    places.disk.set_num_workers = lambda workers: [key(1), key(2)]  # its segment is larger than any part
    assert places.both.set_num_workers(2) == [key(1)]
    assert has(places.memory) == {2}


@pytest.mark.parametrize("demoted", ["the page itself", "another page"])
def test_a_page_whose_part_on_the_disk_gives_way_is_nowhere(demoted: str) -> None:
    """The disk has room for one half."""
    places = Places(2, 1)
    split(places)
    if demoted == "another page":
        put(places.both, 2)
        places.memory.hint(0, [key(1)])  # so that 2 is the one to go
    assert places.both.reserve(2 * SESSION if demoted == "the page itself" else SESSION) == [key(1)]
    assert 1 not in has(places.both)
    with pytest.raises(FragmentLostError):
        places.both.read_page(key(1))
