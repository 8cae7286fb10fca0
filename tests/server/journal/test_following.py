"""The segment that follows a full one: nobody waits for the disk, and whoever ends meanwhile loses nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from test_journal import accepted, delta, opened, request, shown

from lamina.server.journal.journal import Journal

SOON_S = 20.0


class SlowDisk:
    """Waits for it end once the test says so, by the thread that begins a segment; no other thread may wait."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.goes_on, self.waits = threading.Event(), threading.Event()
        self.error: OSError | None = None
        self._right = os.fdatasync
        patch.setattr(os, "fdatasync", self._sync)

    def _sync(self, fd: int) -> None:
        name = threading.current_thread().name
        assert name != "MainThread", "all streams pause for as long"
        if name.startswith("lamina-journal"):
            self.waits.set()
            assert self.goes_on.wait(SOON_S)
            if self.error is not None:
                raise self.error
        self._right(fd)


def grow_full(journal: Journal, key: int) -> int:
    """Until another segment is begun; the next token."""
    token = 0
    while journal._following is None:
        journal.add_deltas([delta(key, token)])
        token += 1
    return token


def test_no_stream_waits_for_the_disk_as_a_segment_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path / "j", size=8000)
    first, goes = accepted(journal), accepted(journal)
    disk = SlowDisk(monkeypatch)
    token = grow_full(journal, 0)
    assert disk.waits.wait(SOON_S)
    journal.add_deltas([delta(0, token), delta(1, 3)])
    journal.drop(goes.accepted.id)
    late = accepted(journal)
    journal.add_deltas([delta(late.keys[0], 5)])
    was, number = shown(journal), journal._number
    disk.goes_on.set()
    assert journal._following is not None
    journal._following.work.result(SOON_S)
    journal.add_deltas([delta(0, token + 1), delta(late.keys[0], 6, end="stop")])
    assert journal._number == number + 1
    assert shown(journal)[0][2][0][2] == [*range(token + 2)]
    assert len(was) == 2
    was = shown(journal)
    journal.close()
    again = opened(tmp_path / "j", size=8000)
    assert shown(again) == was
    assert [e.accepted.id for e in again.unfinished()] == [first.accepted.id]
    again.close()


def test_a_journal_that_is_closed_meanwhile_waits_for_the_thread_and_has_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path / "j", size=8000)
    accepted(journal)
    disk = SlowDisk(monkeypatch)
    token = grow_full(journal, 0)
    journal.add_deltas([delta(0, token)])
    was = shown(journal)
    disk.goes_on.set()
    journal.close()
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "j").glob("segment-*")] == ["segment-00000000"]
    again = opened(tmp_path / "j", size=8000)
    assert shown(again) == was
    again.close()


def test_without_a_thread_for_it_what_is_under_way_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path / "j", size=3000)
    accepted(journal)
    with monkeypatch.context() as none:
        none.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no thread")))
        for token in range(60):
            journal.add_deltas([delta(0, token)])
        assert (journal._number, journal._following) == (0, None)
    journal._next_try = 0.0
    grow_full(journal, 0)
    was = shown(journal)
    journal.close()
    again = opened(tmp_path / "j", size=3000)
    assert shown(again) == was
    again.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_then_has_all_in_another_one(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the full one nobody knows what is there; so an answer that had ended stands in the next one, too."""
    journal = opened(tmp_path / "j", size=8000)
    accepted(journal)
    ended = accepted(journal)
    journal.add_deltas([delta(1, 9, end="stop")])
    disk = SlowDisk(monkeypatch)
    token = grow_full(journal, 0)
    disk.error = OSError(code, "no")
    disk.goes_on.set()
    while (following := journal._following) is not None:
        disk.error = None if following.work.exception(SOON_S) else disk.error
        journal.add_deltas([delta(0, token)])
        token += 1
    was = shown(journal)
    assert [p.name for p in (tmp_path / "j").glob("segment-*")] == ["segment-00000001"]
    journal.close()
    again = opened(tmp_path / "j", size=8000)
    assert shown(again) == was
    assert again.find(ended.accepted.id) is not None
    again.close()


def test_requests_that_come_behind_a_failed_wait_share_the_next_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path / "j")
    accepted(journal)
    journal._unsynced = True
    disk = SlowDisk(monkeypatch)

    async def both() -> None:
        each = [asyncio.create_task(journal.accept(request(journal))) for _ in range(2)]
        await asyncio.to_thread(disk.waits.wait, SOON_S)
        assert not any(one.done() for one in each)
        journal.add_deltas([delta(0, 5)])
        disk.goes_on.set()
        await asyncio.wait_for(asyncio.gather(*each), SOON_S)

    asyncio.run(both())
    was = shown(journal)
    assert (len(was), journal._number) == (3, 1)
    journal.close()
    again = opened(tmp_path / "j")
    assert shown(again) == was
    again.close()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_a_server_that_ends_at_any_time_has_left_all_that_was_told(seed: int, tmp_path: Path) -> None:
    """Whatever comes between the begin of a segment and the way over to it."""
    rng, journal, copies = random.Random(seed), opened(tmp_path / "j", size=6000), 0

    def grow() -> None:
        if under_way := journal.unfinished():
            entry = rng.choice(under_way)
            journal.add_deltas([delta(entry.keys[0], rng.randrange(99), end=rng.choice([None, None, None, "stop"]))])

    def drop() -> None:
        if entries := list(journal._entries):
            journal.drop(rng.choice(entries))

    def go_over() -> None:
        if journal._following is not None:
            journal._go_over()

    acts: list[Callable[[], object]] = [grow, grow, grow, lambda: accepted(journal), drop, go_over, journal._follow]
    for _ in range(250):
        rng.choices(acts, [6, 6, 6, 2, 1, 1, 1])[0]()
        if rng.random() < 0.3:
            copies += 1
            place = tmp_path / f"copy-{copies}"
            shutil.copytree(tmp_path / "j", place)
            place.chmod(0o700)
            again = opened(place, size=6000)
            assert sorted(shown(again)) == sorted(shown(journal))
            again.close()
            shutil.rmtree(place)
    assert journal._number > 2
    journal.close()


@pytest.mark.parametrize("is_over", [True, False])
def test_a_host_that_ends_meanwhile_may_lack_the_end_of_the_full_one(
    is_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind what was on the disk as the next one was begun, which has the rest if it is whole."""
    journal = opened(tmp_path / "j")
    accepted(journal)
    journal.add_deltas([delta(0, 1)])
    file, was = tmp_path / "j" / "segment-00000000", shown(journal)
    size, disk = file.stat().st_size, SlowDisk(monkeypatch)
    journal._follow()
    journal.add_deltas([delta(0, 2)])
    disk.goes_on.set()
    if is_over:
        journal._go_over()
        was = shown(journal)
    place = tmp_path / "copy"
    shutil.copytree(tmp_path / "j", place)
    with (place / file.name).open("r+b") as torn:
        torn.truncate(size + 9)
    journal.close()
    monkeypatch.undo()
    again = opened(place)
    assert shown(again) == was
    again.close()
