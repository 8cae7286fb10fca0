"""Accepted requests outlive the server: on disk whole or not at all, and readable by their owner alone.

Covers: lamina/server/journal/journal_directory.py, lamina/server/journal/journal_entry.py,
lamina/server/journal/journal_records.py, lamina/server/journal/segment.py.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from zlib import crc32

import msgspec
import pytest
from running import MODEL, ROOT

from lamina.cli.launch import main
from lamina.request import SamplingParams
from lamina.server.engine_client.messages import Delta, encode_scores
from lamina.server.journal.journal import RETRY_S, Journal
from lamina.server.journal.journal_directory import model_digest
from lamina.server.journal.journal_entry import JournalEntry
from lamina.server.journal.journal_records import FORMAT, AcceptedRecord, FailedRecord, HeaderRecord, JournalPrompt
from lamina.server.journal.segment import frame_record
from lamina.server.request.accepted_request import new_accepted_request
from lamina.server.request.openai_protocol import Sampling

PATH = str(ROOT / MODEL)
SIZE = 1 << 20


class RecordOfThen(msgspec.Struct, tag="synced"):
    """A kind of record that this version does not have."""

    size: int


def opened(path: Path, size: int = SIZE, model: str = PATH, retry_s: float = RETRY_S) -> Journal:
    return Journal(str(path), model, size, retry_s)


def request(journal: Journal, prompts: int = 1, n: int = 1) -> AcceptedRecord:
    kept = [JournalPrompt(key, [5, 6, key], "text", 40 + key) for key in journal.new_keys(prompts)]
    params = SamplingParams(n=n, temperature=0.5, stop=["x"], logit_bias={3: 1.0})
    asked = new_accepted_request("cmpl", "tiny", params, Sampling.model_validate({}), b"")
    return AcceptedRecord(**{f: getattr(asked, f) for f in asked.__struct_fields__ if f != "prompts"}, prompts=kept)


def accepted(journal: Journal, prompts: int = 1, n: int = 1) -> JournalEntry:
    return asyncio.run(journal.accept(request(journal, prompts, n)))


def files(path: Path) -> list[str]:
    return sorted(file.name for file in path.glob("segment-*"))


def turn_over(journal: Journal, path: Path, key: int = 0) -> None:
    """To another segment, by the size of what a request brings; its thread is waited for."""
    number = files(path)[-1]
    while files(path)[-1] == number:
        journal.add_deltas([delta(key, 1)])


def snapshot(place: Path, copy: Path) -> None:
    """Copies the folder as a server that is killed now would leave it; a thread may be removing old segments."""
    while True:
        before = files(place), (place / "lock").read_bytes()
        with suppress(shutil.Error):
            shutil.copytree(place, copy)
            if before == (files(place), (place / "lock").read_bytes()):
                copy.chmod(0o700)
                return
        shutil.rmtree(copy)


def delta(key: int, token: int, index: int = 0, end: str | None = None) -> Delta:
    return Delta(
        key=key,
        index=index,
        token_ids=[token],
        text=f"<{token}>",
        logprobs=[encode_scores([(token, -0.5, 1)])],
        finish_reason=end,
    )


def shown(journal: Journal) -> list[tuple[str, bool, list[tuple[int, int, list[int], str]]]]:
    return [
        (e.accepted.id, e.ended, [(d.key, d.index, [*d.token_ids], d.text) for d in e.deltas]) for e in journal.entries
    ]


def test_what_was_accepted_and_has_grown_is_there_for_the_next_server(tmp_path: Path) -> None:
    journal = opened(tmp_path / "j")
    first, second, gone = accepted(journal, prompts=2, n=2), accepted(journal), accepted(journal)
    journal.add_deltas([delta(0, 7), delta(1, 8, index=1), delta(2, 9, end="stop")])
    journal.add_deltas([delta(0, 10), delta(77, 1)])  # of no request here
    journal.drop(gone.accepted.id)
    journal.drop(second.accepted.id)  # has ended: its reader leaving changes nothing
    was = shown(journal)
    assert [(ended, deltas) for _, ended, deltas in was] == [
        (False, [(0, 0, [7, 10], "<7><10>"), (1, 1, [8], "<8>")]),
        (True, [(2, 0, [9], "<9>")]),
    ]
    journal.close()
    again = opened(tmp_path / "j")
    assert shown(again) == was
    (left,) = again.unfinished()
    assert left.accepted == first.accepted
    assert left.params_of(1).seed == 41
    assert [left.unfinished_of(key) for key in left.keys] == [2, 2]
    assert again.find(second.accepted.id) is not None
    assert again.new_keys(1) == [4]  # the one that was dropped counts, too
    again.refuse(FailedRecord(id=first.accepted.id, status=400, message="too long", code="invalid_value"))
    again.close()
    last = opened(tmp_path / "j")
    assert not last.unfinished()
    last.close()


def test_what_a_reader_does_with_a_delta_does_not_change_the_journal(tmp_path: Path) -> None:
    journal = opened(tmp_path / "j")
    entry = accepted(journal)
    given = delta(0, 7)
    journal.add_deltas([given])
    given.token_ids.append(99)
    assert given.logprobs is not None
    given.logprobs.append(encode_scores([(99, 0.0, 1)]))
    assert entry.deltas[0].token_ids == [7]
    assert entry.deltas[0].logprobs == [encode_scores([(7, -0.5, 1)])]
    journal.close()


def test_a_tail_that_was_not_written_whole_is_left_out_wherever_it_was_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = opened(tmp_path / "j")
    file = tmp_path / "j" / "segment-00000000"
    accepted(journal)
    journal.add_deltas([delta(0, 7)])
    whole, before = file.stat().st_size, shown(journal)
    journal.add_deltas([delta(0, 8)])
    journal.close()
    data = file.read_bytes()
    tails = [data[whole:][:cut] for cut in (1, 11, 12, 20)] + [data[whole:-1], bytes(100)]
    for tail in tails:
        file.write_bytes(data[:whole] + tail)
        caplog.clear()
        again = opened(tmp_path / "j")
        assert shown(again) == before
        assert f"the last {len(tail)} bytes" in caplog.text
        again.add_deltas([delta(0, 9)])
        again.close()
        last = opened(tmp_path / "j")
        assert shown(last)[0][2] == [(0, 0, [7, 9], "<7><9>")]
        last.close()


def test_holes_behind_the_last_wait_for_the_disk_are_a_tail_and_not_damage(tmp_path: Path) -> None:
    journal = opened(tmp_path / "j")
    accepted(journal)
    file = tmp_path / "j" / "segment-00000000"
    synced, before = file.stat().st_size, shown(journal)
    for token in range(400):
        journal.add_deltas([delta(0, token)])
    journal.close()
    whole = file.read_bytes()
    for hole in (synced, synced + 1, synced + 1000):
        data = bytearray(whole)
        data[hole : hole + 4096] = bytes(4096)  # a page that had not been written, before pages that had
        file.write_bytes(data)
        again = opened(tmp_path / "j")
        if hole < synced + 2:
            assert shown(again) == before
        else:
            ((_, _, tokens, _),) = shown(again)[0][2]
            assert 0 < len(tokens) < 400
            assert tokens == [*range(len(tokens))]
        again.close()
    data = bytearray(whole)
    data[synced - 60] ^= 1  # what a wait has covered
    file.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged at byte"):
        opened(tmp_path / "j")


def test_after_a_failed_wait_for_the_disk_another_segment_has_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal, right = opened(tmp_path / "j"), os.fdatasync
    first, ended = accepted(journal), accepted(journal)
    journal.add_deltas([delta(0, 7), delta(1, 8, end="stop")])
    before, fails = shown(journal), [OSError(errno.EIO, "Input/output error")]

    def sync(fd: int) -> None:
        if fails:
            raise fails.pop()
        right(fd)

    monkeypatch.setattr(os, "fdatasync", sync)
    with pytest.raises(OSError, match="Input/output error"):
        accepted(journal)
    assert journal.error == "Input/output error"
    assert f"--journal {tmp_path}/j cannot be written (Input/output error)" in caplog.text
    assert shown(journal) == before
    last = accepted(journal)  # in the segment that follows, of which Linux does not say again that it failed
    assert files(tmp_path / "j") == ["segment-00000001"]
    journal.retry()
    assert journal.error is None
    journal.add_deltas([delta(0, 9)])
    was = shown(journal)
    journal.close()
    again = opened(tmp_path / "j")
    assert shown(again) == was
    assert [e.accepted.id for e in again.unfinished()] == [first.accepted.id, last.accepted.id]
    assert again.find(ended.accepted.id) is not None
    again.close()


def test_while_no_wait_succeeds_requests_are_refused_and_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path / "j")
    accepted(journal)
    was = shown(journal)

    def sync(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", sync)
        for _ in range(3):
            with pytest.raises(OSError, match="."):
                accepted(journal)
            assert shown(journal) == was
    with pytest.raises(OSError, match="its disk has failed"):  # until it is tried again
        accepted(journal)
    journal.close()
    assert files(tmp_path / "j")[0] == "segment-00000000"
    again = opened(tmp_path / "j")
    assert shown(again) == was
    again.close()


def test_damage_in_the_midst_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    journal = opened(tmp_path / "j")
    accepted(journal)
    journal.add_deltas([delta(0, 7)])
    journal.close()
    file = tmp_path / "j" / "segment-00000000"
    data = file.read_bytes()
    flips = [data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :] for at in (0, 2, 14, 40, len(data) // 2)]
    cuts = [data[:at] for at in (0, 5, 40, len(data) // 2)]
    for bad in (*flips, *cuts, random.Random(1).randbytes(len(data)), bytes(len(data))):
        file.write_bytes(bad)
        with pytest.raises(ValueError, match=r"^--journal: .*segment-00000000 is damaged at byte \d+, and more of it"):
            opened(tmp_path / "j")
        assert file.read_bytes() == bad
    file.rename(tmp_path / "away")
    with pytest.raises(ValueError, match=r"^--journal .*/j: segment-00000000 is missing: restore it"):
        opened(tmp_path / "j")
    (tmp_path / "away").rename(file)
    file.write_bytes(data)
    opened(tmp_path / "j").close()
    strange = msgspec.msgpack.encode({"type": "of another version"})
    heads = len(strange).to_bytes(4, "little"), crc32(len(strange).to_bytes(4, "little")), crc32(strange)
    file.write_bytes(data + heads[0] + b"".join(x.to_bytes(4, "little") for x in heads[1:]) + strange)
    with pytest.raises(ValueError, match="is damaged at byte"):
        opened(tmp_path / "j")


def test_another_models_another_versions_and_anothers_journal_are_refused(tmp_path: Path) -> None:
    opened(tmp_path / "j").close()
    before = (tmp_path / "j" / "segment-00000000").read_bytes()
    with pytest.raises(ValueError, match=r"^--journal .*/j is of another model \(.*tiny_lm/model\): serve that one"):
        opened(tmp_path / "j", model="org/other")
    assert (tmp_path / "j" / "segment-00000000").read_bytes() == before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lamina.server.journal.journal.FORMAT", FORMAT + 1)
        with pytest.raises(ValueError, match="was written by another version of Lamina"):
            opened(tmp_path / "j")
    heading = HeaderRecord(format=FORMAT - 1, model=PATH, digest=model_digest(PATH))
    (tmp_path / "old").mkdir(mode=0o700)
    old = tmp_path / "old" / "segment-00000000"
    old.touch(mode=0o600)
    old.write_bytes(frame_record(heading) + frame_record(RecordOfThen(7)))
    with pytest.raises(
        ValueError, match=r"^--journal .*/old was written by another version of Lamina: finish it there"
    ):
        opened(tmp_path / "old")
    held = opened(tmp_path / "j")
    with pytest.raises(ValueError, match=r"^--journal .*/j: another server has it open; give each"):
        opened(tmp_path / "j")
    held.close()
    opened(tmp_path / "j").close()


def test_a_model_is_known_by_its_files_and_not_by_its_path(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(200_000) + b"x")
    assert model_digest(str(tmp_path / "a")) == model_digest(str(tmp_path / "b"))
    (tmp_path / "b" / "model.safetensors").write_bytes(bytes(200_000) + b"y")
    assert model_digest(str(tmp_path / "a")) != model_digest(str(tmp_path / "b"))
    assert model_digest("org/a") != model_digest("org/b")


def test_what_others_may_read_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "j"
    opened(place).close()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in place.iterdir()} == {0o600}
    for path, mode, good in ((place, 0o750, 700), (place / "segment-00000000", 0o604, 600)):
        was = path.stat().st_mode
        path.chmod(mode)
        with pytest.raises(ValueError, match=rf"other users may read .* \(mode {mode:o}\).*: chmod {good} "):
            opened(place)
        path.chmod(was)
    opened(place).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is not what a journal has there"):
        opened(tmp_path / "file")
    with pytest.raises(ValueError, match=r"^--journal .*: No such file or directory"):
        opened(tmp_path / "no" / "j")
    (tmp_path / "link").symlink_to(place)
    with pytest.raises(ValueError, match="is not what a journal has there"):
        opened(tmp_path / "link")


def test_a_dry_run_refuses_what_a_start_would_and_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(place: Path) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert main(["serve", str(tmp_path), "--journal", str(place), "--dry-run", "--port", "0"]) == 2
        assert sorted(tmp_path.rglob("*")) == before
        return capsys.readouterr().err.removeprefix("lamina-launch serve: ")

    place, no_model = tmp_path / "j", said(tmp_path / "other")
    assert "--journal" not in no_model
    assert said(place / "j").startswith(f"--journal {place}/j: it cannot be made in {place}: name one that you may")
    place.mkdir(mode=0o700)
    assert said(place) == no_model
    journal = opened(place)
    assert said(place) == f"--journal {place}: another server has it open; give each a directory of its own\n"
    journal.close()
    assert said(place) == no_model
    place.chmod(0o750)
    assert "other users may read" in said(place)
    (place / "lock").unlink()
    assert "other users may read" in said(place)


@contextmanager
def no_room_behind(path: Path, more: int) -> Iterator[None]:
    """Files may not grow to more than so many bytes above the size of ``path``: writes end midway, then fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_without_room_a_request_is_not_accepted_and_the_journal_stays_as_it_was(tmp_path: Path) -> None:
    journal, file = opened(tmp_path / "j"), tmp_path / "j" / "segment-00000000"
    accepted(journal)
    before, was = file.read_bytes(), shown(journal)
    with no_room_behind(file, 20):
        try:
            error = None
            accepted(journal)
        except OSError as e:
            error = e
    assert error is not None
    assert file.read_bytes() == before
    assert shown(journal) == was
    accepted(journal)
    journal.close()
    again = opened(tmp_path / "j")
    assert len(again.unfinished()) == 2
    again.close()


def test_without_room_what_is_under_way_goes_on_and_is_written_once_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal, file = opened(tmp_path / "j"), tmp_path / "j" / "segment-00000000"
    accepted(journal), accepted(journal), accepted(journal)
    journal.add_deltas([delta(0, 7)])
    with no_room_behind(file, 8):
        journal.add_deltas([delta(0, 8)])
        journal.add_deltas([delta(1, 4, end="stop")])
        journal.retry()
        assert journal.error == "File too large"
    assert caplog.text.count(f"--journal {tmp_path}/j cannot be written (File too large)") == 1
    journal.add_deltas([delta(0, 9), delta(2, 5)])  # there is room again
    was = shown(journal)
    assert [tokens for _, _, ((_, _, tokens, _),) in was] == [[7, 8, 9], [4], [5]]
    journal.retry()
    assert journal.error is None
    journal.close()
    again = opened(tmp_path / "j")
    assert shown(again) == was
    again.close()


@pytest.mark.parametrize("how", ["retry", "turn over", "close"])
def test_what_has_ended_while_there_was_no_room_is_not_computed_again(how: str, tmp_path: Path) -> None:
    journal, file = opened(tmp_path / "j", size=4000), tmp_path / "j" / "segment-00000000"
    ended, dropped, last = accepted(journal), accepted(journal), accepted(journal)
    with no_room_behind(file, 8):
        journal.add_deltas([delta(0, 7, end="stop")])
        journal.drop(dropped.accepted.id)
        journal.retry()
    if how == "retry":
        journal.retry()
        assert journal.error is None
    elif how == "turn over":
        turn_over(journal, tmp_path / "j", last.keys[0])
    was = shown(journal)
    if how == "close":
        journal.close()
    snapshot(tmp_path / "j", tmp_path / "copy")
    journal.close()
    again = opened(tmp_path / "copy")
    assert shown(again) == was
    assert [e.accepted.id for e in again.unfinished()] == [last.accepted.id]
    assert again.find(ended.accepted.id) is not None
    again.close()


def test_what_could_not_be_cut_off_a_full_disk_is_cut_off_before_the_next_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk that copies files as they are written has no room to make one shorter."""
    journal, right = opened(tmp_path / "j"), os.write
    accepted(journal)
    journal.add_deltas([delta(0, 7)])

    def half(fd: int, data: memoryview) -> int:
        right(fd, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    def none(fd: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "write", half)
        full.setattr(os, "ftruncate", none)
        for token in (8, 9):
            journal.add_deltas([delta(0, token)])
    second = accepted(journal)
    journal.close()
    again = opened(tmp_path / "j")
    assert [d.token_ids for e in again.unfinished() for d in e.deltas] == [[7, 8, 9]]
    assert again.find(second.accepted.id) is not None
    again.close()


def test_a_full_segment_is_followed_by_another_and_the_oldest_goes(tmp_path: Path) -> None:
    journal = opened(tmp_path / "j", size=4000)
    stays = accepted(journal)
    journal.add_deltas([delta(0, 7)])
    ended = []
    while files(tmp_path / "j")[-1] != "segment-00000003":
        entry = accepted(journal)
        ended.append(entry.accepted.id)
        journal.add_deltas([delta(entry.keys[0], 8, end="stop")])
        assert os.listdir(tmp_path / "j").__len__() <= 4  # the lock, two segments, and one that begins
    was = shown(journal)
    assert journal.find(ended[0]) is None
    assert journal.find(ended[-1]) is not None
    journal.close()  # waits for the thread, which removes
    assert sorted(p.name for p in (tmp_path / "j").iterdir()) == ["lock", "segment-00000002", "segment-00000003"]
    again = opened(tmp_path / "j", size=4000)
    assert sorted(shown(again)) == sorted(was)
    assert [e.accepted for e in again.unfinished()] == [stays.accepted]
    again.close()


@pytest.mark.long
def test_a_host_that_ends_as_a_segment_begins_loses_nothing_that_was_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever its bytes end on the disk: the segment before has all that the new one begins with."""
    place = tmp_path / "j"
    journal = opened(place, size=8000)
    first, second = accepted(journal, n=2), accepted(journal)
    journal.restart(first)
    journal.add_deltas([delta(0, 7), delta(0, 8, index=1), delta(1, 9)])
    accepted(journal, prompts=9)
    mark = (place / "lock").read_bytes()
    turn_over(journal, place)
    was = shown(journal)
    journal.close()
    (place / "lock").write_bytes(mark)  # no wait for the second one has ended
    older, file = place / "segment-00000000", place / "segment-00000001"
    old, whole = older.read_bytes(), file.read_bytes()
    for cut in (*range(0, len(whole), 11), len(whole) - 1, len(whole)):
        older.write_bytes(old)
        file.write_bytes(whole[:cut])
        file.chmod(0o600)
        caplog.clear()
        again = opened(place)
        assert shown(again) == was, f"{cut} bytes were written"
        assert [e.num_restarts for e in again.unfinished()] == [1, 0, 0]
        assert ("was not begun whole" in caplog.text) == (cut < len(whole))
        assert file.exists() == (cut == len(whole))
        again.add_deltas([delta(1, 11)])
        again.close()
        last = opened(place)
        grown = last.find(second.accepted.id)
        assert grown is not None
        assert grown.deltas[0].token_ids == [9, 11]
        last.close()
        (place / "lock").write_bytes(mark)
    (place / "lock").write_bytes(b"x" * len(mark))
    with pytest.raises(ValueError, match=r"^--journal .*/j: lock is damaged: restore it"):
        opened(place)


def test_files_that_are_no_segments_and_old_ones_that_cannot_go_end_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = opened(tmp_path / "j", size=4000)
    (tmp_path / "j" / "segment-00000000.bak").write_bytes(b"moved away")
    (tmp_path / "j" / "segment-00000000").chmod(0o640)
    while files(tmp_path / "j")[-1] != "segment-00000002":
        entry = accepted(journal)
        journal.add_deltas([delta(entry.keys[0], 8, end="stop")])
    journal.close()
    assert "old segments stay" in caplog.text
    (tmp_path / "j" / "segment-00000000").chmod(0o600)
    opened(tmp_path / "j", size=4000).close()


def test_requests_that_come_at_once_wait_for_the_disk_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, right, waits = opened(tmp_path / "j"), os.fdatasync, list[int]()

    def counted(fd: int) -> None:
        waits.append(os.fstat(fd).st_size)
        right(fd)

    async def many() -> None:
        await asyncio.gather(*(journal.accept(request(journal)) for _ in range(50)))

    monkeypatch.setattr(os, "fdatasync", counted)
    asyncio.run(many())
    assert waits[-1] == (tmp_path / "j" / "segment-00000000").stat().st_size
    assert len(waits) <= 5, "2 on a quiet machine"
    journal.close()
