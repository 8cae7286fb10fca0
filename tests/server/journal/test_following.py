"""The segment that follows a full one: no request waits for the disk, and a request that ends meanwhile
loses nothing.
"""

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
from test_journal import accepted, delta, files, opened, request, shown, snapshot, turn_over

SOON_S = 20.0


class SlowDisk:
    """Waits for it end once the test says so, all by the journal's thread; no other thread may wait."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.goes_on, self.waits = threading.Event(), threading.Event()
        self.error: OSError | None = None
        self._right = os.fdatasync
        patch.setattr(os, "fdatasync", self._sync)

    def _sync(self, fd: int) -> None:
        assert threading.current_thread().name.startswith("lamina-journal"), "all streams pause for as long"
        self.waits.set()
        assert self.goes_on.wait(SOON_S)
        error, self.error = self.error, None
        if error is not None:
            raise error
        self._right(fd)


def test_no_stream_waits_for_the_disk_as_a_segment_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path / "j", size=8000)
    first, goes = accepted(journal), accepted(journal)
    disk = SlowDisk(monkeypatch)
    turn_over(journal, tmp_path / "j")
    assert disk.waits.wait(SOON_S)
    journal.add_deltas([delta(0, 2), delta(1, 3)])
    journal.drop(goes.accepted.id)
    snapshot(tmp_path / "j", tmp_path / "copy")
    was = shown(journal)
    assert files(tmp_path / "copy") == ["segment-00000000", "segment-00000001"]
    disk.goes_on.set()
    late = accepted(journal)
    journal.add_deltas([delta(late.keys[0], 6, end="stop")])
    for place, then in ((tmp_path / "copy", was), (tmp_path / "j", shown(journal))):
        journal.close()
        again = opened(place, size=8000)
        assert shown(again) == then
        assert [e.accepted.id for e in again.unfinished()] == [first.accepted.id]
        again.close()


def test_a_journal_that_is_closed_meanwhile_waits_for_the_thread_and_has_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path / "j", size=8000)
    accepted(journal)
    with monkeypatch.context() as patched:
        disk = SlowDisk(patched)
        turn_over(journal, tmp_path / "j")
        journal.add_deltas([delta(0, 3)])
        was = shown(journal)
        disk.goes_on.set()
        journal.close()
    again = opened(tmp_path / "j", size=8000)
    assert shown(again) == was
    again.close()


def test_without_a_thread_for_it_what_is_under_way_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(tmp_path / "j", size=3000)
    accepted(first)
    first.close()
    journal = opened(tmp_path / "j", size=3000)
    with monkeypatch.context() as none:
        none.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no thread")))
        for token in range(200):
            journal.add_deltas([delta(0, token)])
        assert files(tmp_path / "j") == ["segment-00000000", "segment-00000001"]  # of these, nothing may be removed
        with pytest.raises(OSError, match="no thread"):
            accepted(journal)
    accepted(journal)
    was = shown(journal)
    journal.close()
    again = opened(tmp_path / "j", size=3000)
    assert shown(again) == was
    again.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_then_has_all_in_another_one(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full segment's content is unknown, so an answer that had ended stands in the next one, too."""
    journal = opened(tmp_path / "j", size=8000, retry_s=0.0)
    accepted(journal)
    ended = accepted(journal)
    journal.add_deltas([delta(1, 9, end="stop")])
    disk = SlowDisk(monkeypatch)
    turn_over(journal, tmp_path / "j")
    disk.error = OSError(code, "no")
    disk.goes_on.set()
    token = 0
    while files(tmp_path / "j")[0] < "segment-00000002":
        journal.add_deltas([delta(0, token)])
        token += 1
    assert journal.error == "no"
    was = shown(journal)
    journal.close()
    again = opened(tmp_path / "j", size=8000)
    assert shown(again) == was
    assert again.find(ended.accepted.id) is not None
    again.close()


def test_requests_that_come_after_a_failed_wait_share_the_next_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path / "j")
    accepted(journal)
    disk = SlowDisk(monkeypatch)
    disk.error = OSError(errno.EIO, "no")
    disk.goes_on.set()
    with pytest.raises(OSError, match="no"):
        accepted(journal)
    disk.goes_on.clear()
    disk.waits.clear()

    async def both() -> None:
        each = [asyncio.create_task(journal.accept(request(journal))) for _ in range(2)]
        await asyncio.to_thread(disk.waits.wait, SOON_S)
        assert not any(one.done() for one in each)
        journal.add_deltas([delta(0, 5)])
        disk.goes_on.set()
        await asyncio.wait_for(asyncio.gather(*each), SOON_S)

    asyncio.run(both())
    was = shown(journal)
    assert (len(was), files(tmp_path / "j")) == (3, ["segment-00000001"])
    journal.close()
    again = opened(tmp_path / "j")
    assert shown(again) == was
    again.close()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_a_server_that_ends_at_any_time_has_left_all_that_was_told(seed: int, tmp_path: Path) -> None:
    """Whatever comes between the begin of a segment and its being on disk."""
    rng, journal, copies = random.Random(seed), opened(tmp_path / "j", size=6000), 0

    def grow() -> None:
        if under_way := journal.unfinished():
            entry = rng.choice(under_way)
            journal.add_deltas([delta(entry.keys[0], rng.randrange(99), end=rng.choice([None, None, None, "stop"]))])

    def drop() -> None:
        if entries := journal.entries:
            journal.drop(rng.choice(entries).accepted.id)

    acts: list[Callable[[], object]] = [grow, lambda: accepted(journal), drop, journal.retry]
    for _ in range(250):
        rng.choices(acts, [18, 2, 1, 1])[0]()
        if rng.random() < 0.3:
            copies += 1
            place = tmp_path / f"copy-{copies}"
            snapshot(tmp_path / "j", place)
            again = opened(place, size=6000)
            assert sorted(shown(again)) == sorted(shown(journal))
            again.close()
            shutil.rmtree(place)
    assert files(tmp_path / "j")[-1] > "segment-00000002"
    journal.close()


def test_after_a_server_that_ended_meanwhile_the_next_one_waits_for_both_segments_and_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a request that it accepts would be lost with the segment before, when the host ends."""
    journal, place = opened(tmp_path / "j", size=8000), tmp_path / "copy"
    accepted(journal)
    with monkeypatch.context() as patched:
        disk = SlowDisk(patched)
        turn_over(journal, tmp_path / "j")
        snapshot(tmp_path / "j", place)
        disk.goes_on.set()
        journal.close()
    synced, again = set[str](), opened(place, size=8000)
    with monkeypatch.context() as patched:
        for name in ("fdatasync", "fsync"):
            real = getattr(os, name)
            patched.setattr(os, name, lambda fd, real=real: (synced.add(os.readlink(f"/proc/self/fd/{fd}")), real(fd)))
        accepted(again)
    assert synced == {str(place), *(str(place / name) for name in files(place))}
    assert len(files(place)) == 2
    again.close()


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_a_host_that_ends_meanwhile_may_lack_the_end_of_the_full_one(
    is_on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one counts only with all of the full one. Once it is on disk, the full one is there, too."""
    journal, place = opened(tmp_path / "j", size=8000), tmp_path / "copy"
    accepted(journal)
    size = (tmp_path / "j" / "segment-00000000").stat().st_size
    with monkeypatch.context() as patched:
        disk = SlowDisk(patched)
        turn_over(journal, tmp_path / "j")
        if not is_on_disk:
            snapshot(tmp_path / "j", place)
        disk.goes_on.set()
        journal.close()
    if is_on_disk:
        snapshot(tmp_path / "j", place)
    with (place / "segment-00000000").open("r+b") as torn:
        torn.truncate(size + 9)
    if is_on_disk:
        with pytest.raises(ValueError, match=f"segment-00000000 is damaged at byte {size}"):
            opened(place)
        return
    for _ in range(2):
        again = opened(place)
        assert [e.deltas for e in again.unfinished()] == [[]]
        assert files(place) == ["segment-00000000"]
        again.close()
