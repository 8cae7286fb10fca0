"""A store of pages in files: restarts, damage, a full or broken disk, and who may open it.

Covers: lamina/kv/disk_store/encryption.py, lamina/kv/disk_store/index_schema.py, lamina/kv/disk_store/maintenance.py,
lamina/kv/disk_store/page_index.py, lamina/kv/disk_store/page_records.py, lamina/kv/disk_store/segments.py,
lamina/kv/disk_store/store_directory.py, lamina/kv/pages.py, lamina/kv/storage/file.py.
"""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.kv.disk_store.encryption import destroy_data_key
from lamina.kv.disk_store.maintenance import purge
from lamina.kv.disk_store.store_directory import INDEX, StoreDirectory, begin_era, store_era, store_secret
from lamina.kv.page_keys import tenant_tag
from lamina.kv.pages import PAGE, Page, PageFragment, Provenance
from lamina.kv.storage import FragmentLostError, StorageConfig, StorageError, StorageFullError, host
from lamina.kv.storage.file import FileStorage
from lamina.kv.storage.host import HostStorage

SECRET = b"s" * 32
SIZE = 1 << 20
ATOMS = {PageFragment(layer, head): os.urandom(3000) for layer in range(2) for head in range(3)}
Opener = Callable[..., FileStorage]


def page(number: int = 0, tenant: bytes = b"t" * 16) -> Page:
    return Page(bytes([number]) * 32, number, PAGE, tenant, Provenance("prompt", 256, "build", 1))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def opener(path: Path) -> Iterator[Opener]:
    opened: list[FileStorage] = []

    def open_one(**more: Any) -> FileStorage:
        place = StorageConfig(SIZE, b"i" * 32, directory=str(path), secret=SECRET, server="one")
        opened.append(FileStorage(place._replace(**more)))
        return opened[-1]

    yield open_one
    for medium in opened:
        medium.close()


def has(medium: FileStorage, what: Page, fragments: dict[PageFragment, bytes] | None = None) -> bool:
    """Returns whether it has all of a page's fragments as they were written; a wrong answer is an error."""
    fragments = ATOMS if fragments is None else fragments
    into = {fragment: bytearray(len(data)) for fragment, data in fragments.items()}
    try:
        medium.read(what.key, into)
    except FragmentLostError:
        return False
    assert into == fragments
    return True


def segment_of(path: Path) -> Path:
    (found,) = path.glob("segment-*")
    return found


def test_a_restart_finds_what_was_there(opener: Opener) -> None:
    first = opener()
    first.write(page(1), ATOMS)
    first.write(page(2), ATOMS)
    assert has(first, page(1))
    first.close()
    again = opener(server="two")
    assert [held.page.number for held in again.pages()] == [2, 1], "the most recently used last"
    assert has(again, page(1))
    assert has(again, page(2))


def test_two_workers_by_head_are_read_by_three_by_page(opener: Opener) -> None:
    writers = [opener(workers=2), opener(workers=2)]
    parts = [{a: d for a, d in ATOMS.items() if a.head < 2}, {a: d for a, d in ATOMS.items() if a.head == 2}]
    for number in range(3):
        for writer, part in zip(writers, parts, strict=True):
            writer.reserve(sum(map(len, part.values())))
            writer.write(page(number), part)
    assert has(writers[0], page(1)), "a worker reads what another one wrote"
    for writer in writers:
        writer.close()
    readers = [opener(workers=3, server="two") for _ in range(3)]
    assert all(has(reader, page(number)) for number, reader in enumerate(readers))


def test_keys_are_listed_without_their_records(opener: Opener, path: Path) -> None:
    """A start lists thousands of pages."""
    medium = opener()
    for number in range(3):
        medium.write(page(number), ATOMS)
    with closing(sqlite3.connect(path / "index.db")) as db, db:
        db.execute("UPDATE records SET atoms = x'00'")
    assert medium.keys(frozenset(ATOMS), 9) == [page(number).key for number in range(3)]
    with pytest.raises(struct.error):
        medium.pages()


def test_an_index_of_another_version_is_refused_in_one_line(opener: Opener, path: Path) -> None:
    opener().close()
    with closing(sqlite3.connect(path / "index.db")) as db:
        db.execute("PRAGMA user_version = 1")
    with pytest.raises(ValueError, match="has version 1, not 3: lamina-launch kv purge empties it$"):
        opener(server="two")
    with closing(StoreDirectory(str(path))) as folder:
        purge(folder)
    assert opener(server="three").pages() == []


def test_a_foreign_identity_sees_nothing_and_its_room_can_be_had(opener: Opener) -> None:
    first = opener()
    while first.reserve(200_000) == []:
        first.write(page(len(first.pages())), {PageFragment(0, 0): bytes(200_000)})
    first.close()
    other = opener(identity=b"j" * 32)
    assert other.pages() == []
    assert not has(other, page(0), {PageFragment(0, 0): bytes(200_000)})
    other.delete([page(0).key])
    given = other.reserve(900_000)
    other.write(page(9), {PageFragment(0, 0): bytes(900_000)})
    other.close()
    assert given
    assert opener().pages() == []


@pytest.mark.parametrize("encrypt", [True, False])
@pytest.mark.parametrize("at", [0, 2999, 3000, 17_999])
def test_a_flipped_bit(opener: Opener, path: Path, at: int, encrypt: bool) -> None:
    medium = opener(encrypt=encrypt)
    medium.write(page(), ATOMS)
    assert has(medium, page())
    flip(segment_of(path), at)
    hit = sorted(ATOMS, key=lambda fragment: (fragment.head, fragment.layer))[at // 3000]
    assert not has(medium, page(), {hit: ATOMS[hit]})
    assert has(medium, page(), {fragment: data for fragment, data in ATOMS.items() if fragment != hit})
    medium.write(page(), ATOMS)
    assert has(medium, page()), "written again, it is whole"


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as f:
        f.seek(at)
        (byte,) = f.read(1)
        f.seek(at)
        f.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("encrypt", [True, False])
@pytest.mark.parametrize("other", [3000, 20_480], ids=["of this page", "of another page"])
def test_swapped_atoms(opener: Opener, path: Path, other: int, encrypt: bool) -> None:
    medium = opener(encrypt=encrypt)
    for number in range(2):
        medium.write(page(number), {fragment: data[number:] + data[:number] for fragment, data in ATOMS.items()})
    assert has(medium, page(0))
    with segment_of(path).open("r+b") as file:
        data = bytearray(file.read())
        data[0:3000], data[other : other + 3000] = data[other : other + 3000], data[0:3000]
        file.seek(0)
        file.write(data)
    assert [
        has(medium, page(0), {fragment: ATOMS[fragment]}) for fragment in (PageFragment(0, 0), PageFragment(1, 0))
    ] == [
        False,
        other > 3000,
    ]
    assert (
        not has(medium, page(1), {PageFragment(0, 0): ATOMS[PageFragment(0, 0)][1:] + ATOMS[PageFragment(0, 0)][:1]})
        or other == 3000
    )


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE pages SET tokens = 5", "UPDATE pages SET build = 'other'", "UPDATE pages SET number = 7",
        "UPDATE records SET salt = x'00112233445566778899aabbccddeeff'", "UPDATE records SET encrypted = 0",
        "UPDATE records SET at = 4096", "UPDATE records SET segment = (SELECT max(id) FROM segments)",
        "UPDATE pages SET key = x'" + "ab" * 32 + "' WHERE 0 = 1 OR key = x'" + "00" * 32 + "'",
    ],
)  # fmt: skip
def test_an_index_that_lies(opener: Opener, path: Path, change: str) -> None:
    import sqlite3

    medium = opener()
    medium.write(page(), ATOMS)
    medium.close()
    with sqlite3.connect(path / "index.db") as db:
        db.execute("INSERT INTO segments (size) VALUES (4096)")
        db.execute(change)
    db.close()
    (path / "segment-000002").touch(0o600)
    medium = opener()
    assert not has(medium, page())


def test_a_segment_that_is_cut_off(opener: Opener, path: Path) -> None:
    medium = opener()
    for number in range(2):
        medium.write(page(number), ATOMS)
    os.truncate(segment_of(path), 20_480 + 5000)
    assert [has(medium, page(number)) for number in range(2)] == [True, False]
    medium.close()
    medium = opener()
    assert [has(medium, page(number)) for number in range(2)] == [True, False]
    medium.write(page(1), ATOMS)
    assert has(medium, page(1))


def test_files_and_index_are_one_again(opener: Opener, path: Path) -> None:
    medium = opener()
    medium.write(page(), ATOMS)
    medium.close()
    for name in ("segment-000099", "new-0123"):
        (path / name).touch(0o600)
    medium = opener()
    assert has(medium, page())
    assert not (path / "segment-000099").exists()
    assert not (path / "new-0123").exists()
    medium.close()
    segment_of(path).unlink()
    medium = opener()
    assert medium.pages() == []
    assert list(path.glob("segment-*")) == []
    medium.write(page(), ATOMS)
    assert has(medium, page())
    medium.close()
    (path / "index.db").write_bytes(b"no database at all" * 500)
    with pytest.raises(ValueError, match="the index cannot be read .* lamina-launch kv purge empties it"):
        opener()


def test_a_smaller_size(opener: Opener, path: Path) -> None:
    medium = opener()
    medium.write(page(), ATOMS)
    medium.close()
    medium = opener(total_bytes=64 << 10)
    assert medium.pages() == []
    medium.write(page(), ATOMS)
    assert sum(file.stat().st_size for file in path.glob("segment-*")) <= 64 << 10


def test_a_write_that_fits_no_segment(opener: Opener) -> None:
    """Many small ones have cut the store into small segments."""
    medium = opener()
    for number in range(200):
        medium.reserve(4000)
        medium.write(page(number), {PageFragment(0, 0): bytes(4000)})
    large = {PageFragment(0, 0): os.urandom(700_000)}
    given = medium.reserve(700_000)
    medium.write(page(201), large)
    assert has(medium, page(201), large)
    there = {held.page.key for held in medium.pages()}
    assert given
    assert there == {page(number).key for number in [*range(200), 201]} - set(given)
    assert all(has(medium, page(n), {PageFragment(0, 0): bytes(4000)}) for n in range(200) if page(n).key in there)


def test_a_segment_that_is_larger_than_any_part_goes(opener: Opener, path: Path) -> None:
    """It goes once others have come; its room is theirs, too."""
    first, large = opener(), {PageFragment(0, 0): os.urandom(SIZE * 3 // 5)}
    first.reserve(SIZE * 3 // 5)
    first.write(page(1), large)
    assert first.set_num_workers(2) == [page(1).key]
    assert not first.pages()
    assert not list(path.glob("segment-*"))
    second, small = opener(workers=2), {PageFragment(0, 0): os.urandom(SIZE // 3)}
    for number, medium in enumerate((first, second)):
        assert medium.reserve(SIZE // 3) == []
        medium.write(page(number), small)
    assert has(first, page(1), small)
    assert has(second, page(0), small)


def test_space_that_another_worker_gave_up(opener: Opener) -> None:
    first, second = opener(workers=2), opener(workers=2)
    while True:
        try:
            first.write(page(len(first.pages())), ATOMS)
        except StorageFullError:
            break
    second.delete([page(3).key])
    first.write(page(200), ATOMS)
    assert has(second, page(200))
    assert not has(second, page(3))


def test_two_servers_on_one_directory(opener: Opener) -> None:
    first = opener()
    with pytest.raises(ValueError, match=r"--kv-offload dir=.*: another server has it open; end that, or name"):
        opener(server="two")
    second = opener()
    first.close()
    with pytest.raises(ValueError, match="another server has it open"):
        opener(server="two")
    second.close()
    opener(server="two")


@pytest.mark.parametrize("encrypt", [True, False])
def test_what_lies_there(opener: Opener, path: Path, encrypt: bool) -> None:
    medium = opener(encrypt=encrypt)
    data = b"a prompt that nobody else may read" * 100
    medium.write(page(), {PageFragment(0, 0): data})
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}
    kinds = {file.name.partition("-")[0] for file in path.iterdir()}
    assert kinds == {"index.db", "key", "lock", "segment"}
    assert any(data[:20] in file.read_bytes() for file in path.iterdir()) != encrypt


def test_equal_atoms_and_records_lie_there_as_different_bytes(opener: Opener, path: Path) -> None:
    """A stream of AES-GCM that is used twice tells both of what it hides."""
    medium = opener()
    for _ in range(2):
        medium.write(
            page(1), {PageFragment(0, 0): bytes(4096), PageFragment(1, 0): bytes(4096), PageFragment(0, 1): bytes(4096)}
        )
    data = segment_of(path).read_bytes()
    blocks = {data[at : at + 4096] for at in range(0, 6 * 4096, 4096)}
    assert len(blocks) == 6


def test_directories_that_are_refused(opener: Opener, path: Path, tmp_path: Path) -> None:
    path.mkdir(0o750)
    path.chmod(0o750)
    with pytest.raises(ValueError, match=r"others may read .* \(mode 750\), and KV reveals prompts: chmod 700"):
        opener()
    path.chmod(0o700)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ValueError, match="name a directory, no link"):
        opener(directory=str(tmp_path / "link"))
    with pytest.raises(ValueError, match="No such file"):
        opener(directory=str(tmp_path / "none" / "kv"))
    opener().close()
    (path / "index.db").chmod(0o644)
    with pytest.raises(ValueError, match=r"others may read .*index.db \(mode 644\)"):
        opener()
    (path / "index.db").rename(tmp_path / "moved.db")
    (path / "index.db").symlink_to(tmp_path / "moved.db")
    with pytest.raises((ValueError, OSError), match="symbolic|link"):
        opener()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root: a directory of another user")
def test_another_users_directory(opener: Opener, path: Path) -> None:
    path.mkdir(0o700)
    os.chown(path, 12345, 12345)
    with pytest.raises(ValueError, match="is another user's: name a directory of your own"):
        opener()


def test_secrets(path: Path, tmp_path: Path) -> None:
    folder = StoreDirectory(str(path))
    own = store_secret(folder)
    assert (len(own), store_secret(folder)) == (32, own)
    file = tmp_path / "key"
    file.write_text("0a" * 32 + "\n")
    file.chmod(0o640)
    with pytest.raises(ValueError, match=r"--kv-offload key=.*: others may read it \(mode 640\): chmod 600"):
        store_secret(folder, str(file))
    file.chmod(0o600)
    assert store_secret(folder, str(file)) == b"\n" * 32
    file.write_text("0a" * 31)
    with pytest.raises(ValueError, match="64 hexadecimal digits: make one by openssl rand -hex 32"):
        store_secret(folder, str(file))
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(ValueError, match="--kv-offload key="):
        store_secret(folder, str(tmp_path / "link"))
    folder.close()


def test_the_era_is_that_of_the_last_reset(path: Path) -> None:
    with closing(StoreDirectory(str(path))) as folder:
        assert store_era(folder) == b""
        eras = [begin_era(folder) for _ in range(2)]
        assert store_era(folder) == eras[1] != eras[0]
        assert folder.list_names() == ["era"], "no draft is left"
        (path / "era").write_text("0a" * 15)
        with pytest.raises(ValueError, match="/era is damaged: remove it"):
            store_era(folder)


def test_a_data_key_that_is_destroyed(opener: Opener, path: Path) -> None:
    tags = [tenant_tag(SECRET, name) for name in (b"a", b"b")]
    medium = opener()
    for number, tag in enumerate(tags):
        medium.write(page(number, tag), ATOMS)
    medium.close()
    folder = StoreDirectory(str(path))
    copy = os.open(path / f"key-{tags[0].hex()}", os.O_RDONLY)
    before = os.pread(copy, 4096, 0)
    assert destroy_data_key(folder, tags[0])
    assert not destroy_data_key(folder, tags[0])
    assert os.pread(copy, 4096, 0)[:8] != before[:8], "the file's bytes are overwritten"
    os.close(copy)
    folder.close()
    medium = opener()
    assert [has(medium, page(number, tag)) for number, tag in enumerate(tags)] == [False, True]
    medium.write(page(0, tags[0]), ATOMS)
    assert has(medium, page(0, tags[0])), "with a new key"


def test_another_secret_reads_nothing(opener: Opener) -> None:
    medium = opener()
    medium.write(page(), ATOMS)
    medium.close()
    medium = opener(secret=b"x" * 32)
    assert not has(medium, page())


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_errors_of_the_disk(opener: Opener, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    """The fault is put in where the kernel answers."""
    medium = opener()
    medium.write(page(1), ATOMS)
    real, broken = getattr(os, call), True

    def answer(*args: Any) -> int:
        if broken:
            raise OSError(code, os.strerror(code))
        done: int = real(*args)
        return done

    monkeypatch.setattr(os, call, answer)
    kind = StorageFullError if code == errno.ENOSPC else StorageError
    if call == "pwritev":
        with pytest.raises(kind, match=os.strerror(code)):
            medium.write(page(2), ATOMS)
    else:
        with pytest.raises(kind, match=os.strerror(code)):
            has(medium, page(1))
    broken = False
    assert [held.page.number for held in medium.pages()] == [1]
    medium.write(page(2), ATOMS)
    assert has(medium, page(1))
    assert has(medium, page(2))


def test_a_write_that_the_disk_takes_in_parts(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pwritev", "preadv"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda fd, parts, at, real=real: real(fd, [parts[0][:8192]], at))
    medium = opener()
    medium.write(page(), ATOMS)
    assert has(medium, page())


def test_a_file_system_without_direct_access(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses O_DIRECT when a file is opened, or when the first bytes are asked for."""
    import fcntl

    real_open = os.open
    for late in (False, True):
        for name in ("pwritev", "preadv"):
            real = getattr(os, name)

            def refuse(fd: int, parts: list[memoryview], at: int, real: Any = real) -> int:
                if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                    raise OSError(errno.EINVAL, "Invalid argument")
                done: int = real(fd, parts, at)
                return done

            monkeypatch.setattr(os, name, refuse)
        if not late:

            def refuse_open(path: Any, flags: int, *args: Any, **more: Any) -> int:
                if flags & os.O_DIRECT:
                    raise OSError(errno.EINVAL, "Invalid argument")
                return real_open(path, flags, *args, **more)

            monkeypatch.setattr(os, "open", refuse_open)
        medium = opener()
        medium.write(page(int(late)), ATOMS)
        assert has(medium, page(int(late)))
        medium.close()
        monkeypatch.undo()


FULL = """
import sys
import threading
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_disk_store import PageFragment, StorageConfig, StorageFullError, SECRET, has, page, FileStorage
medium = FileStorage(StorageConfig(64 << 20, b"i" * 32, directory={path!r} + "/kv", secret=SECRET, server="one"))
for number in range(255):
    try:
        medium.write(page(number), {{PageFragment(0, 0): bytes([number]) * 100_000}})
    except StorageFullError as e:
        break
large = {{PageFragment(0, 0): b"l" * 100_000}}
given = medium.reserve(100_000)
medium.write(page(255), large)
there = [held.page.number for held in medium.pages()]
print(20 < number < 80, len(given) > 0, there == [*range(len(given), number), 255])
small = (has(medium, page(n), {{PageFragment(0, 0): bytes([n]) * 100_000}}) for n in there[:-1])
print(all(small), has(medium, page(255), large))
other = FileStorage(StorageConfig(64 << 20, b"i" * 32, directory={path!r} + "/kv", secret=SECRET, server="one"))
try:
    other.reserve(100_000)
except StorageFullError as e:
    print(e)
"""


def _run_on_small_disk(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with a file system of 8 MiB in memory at ``path``, in a namespace of its own."""
    mounted = ["unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o size=8m none {path} && exec "$@"', "sh"]
    if subprocess.run([*mounted, "true"], capture_output=True, timeout=30, check=False).returncode:
        pytest.skip("unshare -rm and mount -t tmpfs do not work here")
    code = code.format(tests=str(Path(__file__).parent), path=str(path))
    return subprocess.run(
        [*mounted, sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_full_disk(tmp_path: Path) -> None:
    run = _run_on_small_disk(FULL, tmp_path)
    said = ["True True True", "True True", "the KV store: No space left on device", ""]
    assert run.stdout.split("\n") == said, run.stderr


START = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_disk_store import FileStorage, SECRET, StorageConfig
from lamina.executor.kv_storage import KvStorage
from lamina.config.engine_config import EngineConfig
from lamina.config.flat_options import replace_options
place = {path!r} + "/kv"
Path(place).mkdir(mode=0o700)
full = Path({path!r} + "/full").open("wb", buffering=0)
try:
    while full.write(bytes(4096)):
        pass
except OSError:
    pass
for start in (
    lambda: KvStorage(replace_options(EngineConfig(), {{"kv_store_dir": place}}), "one"),
    lambda: FileStorage(StorageConfig(64 << 20, b"i" * 32, directory=place, secret=SECRET, server="one")),
):
    try:
        start()
    except ValueError as e:
        print(e)
"""


def test_a_disk_that_is_full_at_the_start(tmp_path: Path) -> None:
    """The driver's start without a secret, and a memory worker's start without an index."""
    run = _run_on_small_disk(START, tmp_path)
    line = f"--kv-offload dir={tmp_path}/kv: no space is left on its disk: free some, or name another directory"
    assert run.stdout.splitlines() == [line, line], run.stderr


@pytest.mark.parametrize("is_full", [False, True])
def test_a_start_that_fails_says_that_space_lacks_only_if_it_does(
    is_full: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota or a lack of inodes shows in the error alone, and a full disk may have other faults."""
    monkeypatch.setattr(StoreDirectory, "is_full", is_full)

    def fail(code: int) -> None:
        raise OSError(code, os.strerror(code))

    with closing(StoreDirectory(str(path))) as folder:
        for code in (errno.ENOSPC, errno.EDQUOT):
            with pytest.raises(ValueError, match="no space is left on its disk"):
                folder.write_at_start(lambda code=code: fail(code))  # type: ignore[misc]
        with pytest.raises(PermissionError):
            folder.write_at_start(lambda: fail(errno.EACCES))


def test_segments_that_another_server_removes_are_no_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that still ends may have the directory while the next one starts."""
    with closing(StoreDirectory(str(path))) as folder:
        before = folder.room_bytes()
        names = [*folder.list_names(), "segment-000009"]
        monkeypatch.setattr(folder, "list_names", lambda: names)
        assert folder.room_bytes() == pytest.approx(before, rel=0.5)


def test_reads_while_another_worker_takes_the_space(opener: Opener) -> None:
    """A page that goes while it is read counts as absent, not as damaged."""
    writer, reader = opener(), opener(workers=2)
    wrong: list[str] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            for number in range(3):
                try:
                    has(reader, page(number), {PageFragment(0, 0): bytes([number]) * 200_000})
                except AssertionError:
                    wrong.append("other bytes")
                try:
                    reader.read(page(number).key, {PageFragment(0, 0): bytearray(200_000)})
                except FragmentLostError as e:
                    wrong.extend([str(e)] if "damaged" in str(e) else [])

    thread = threading.Thread(target=read)
    thread.start()
    for turn in range(150):
        writer.reserve(200_000)
        writer.write(page(turn % 3), {PageFragment(0, 0): bytes([turn % 3]) * 200_000})
        writer.delete([page((turn + 1) % 3).key])
    done.set()
    thread.join(60)
    assert not wrong


def test_behind_a_record_lies_nothing_of_another_one(opener: Opener, path: Path) -> None:
    medium = opener(encrypt=False)
    medium.write(page(1), {PageFragment(0, 0): b"p" * 8192})
    medium.write(page(2), {PageFragment(0, 0): b"q"})
    assert segment_of(path).read_bytes()[8192:12_288] == b"q" + bytes(4095)


def test_a_flipped_bit_in_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum is of the bytes as they were."""
    medium, fragment, right = HostStorage(StorageConfig(SIZE)), PageFragment(0, 0), host.checksum
    with monkeypatch.context() as patch:
        patch.setattr(host, "checksum", lambda data: right(bytes([data[0] ^ 1]) + bytes(data[1:])))
        medium.write(page(), ATOMS)
    with pytest.raises(FragmentLostError, match="damaged: layer 0, head 0"):
        medium.read(page().key, {fragment: bytearray(3000)})


def aging(folder: str, clock: Callable[[], float], ttl_s: float = 100.0) -> FileStorage:
    os.chmod(folder, 0o700)
    place = StorageConfig(SIZE, b"i" * 32, directory=folder, secret=SECRET, server="one", ttl_s=ttl_s)
    return FileStorage(place, clock)


def numbers(medium: FileStorage) -> list[int]:
    return [held.page.number for held in medium.pages()]


def test_an_age_counts_from_the_last_use_over_a_restart(tmp_path: Path) -> None:
    """No call came between the use and the restart, and none while the store was closed."""
    now, fragments = 1000.5, {PageFragment(0, 0): bytes(100)}
    with closing(aging(str(tmp_path), lambda: now)) as medium:
        for number in range(3):
            medium.write(page(number), fragments)
        now = 1050.5
        medium.read(page(1).key, {PageFragment(0, 0): bytearray(100)})
    now = 1100.0
    with closing(aging(str(tmp_path), lambda: now)) as medium:
        assert sorted(numbers(medium)) == [0, 1, 2]
        medium.read(page(2).key, {PageFragment(0, 0): bytearray(100)})
    now = 1100.6
    with closing(aging(str(tmp_path), lambda: now)) as medium:
        assert numbers(medium) == [1, 2]
    now = 1150.6
    with closing(aging(str(tmp_path), lambda: now)) as medium:
        assert numbers(medium) == [2]
    now = 1200.1
    with closing(aging(str(tmp_path), lambda: now)) as medium:
        assert numbers(medium) == []


def test_an_idle_store_deletes_what_is_old_when_it_is_asked(tmp_path: Path) -> None:
    now, fragments = 1000.0, {PageFragment(0, 0): bytes(100)}
    with closing(aging(str(tmp_path), lambda: now)) as medium:
        for number in range(2):
            medium.write(page(number), fragments)
        now += 60.0
        medium.read(page(1).key, {PageFragment(0, 0): bytearray(100)})
        assert medium.expire() == []
        now += 40.0
        assert medium.expire() == [page(0).key]
        assert medium.expire() == []
        now += 60.0
        assert medium.expire() == [page(1).key]


def test_pages_of_a_store_that_knew_no_ages_count_from_the_first_start(tmp_path: Path) -> None:
    now = 1000.0
    with closing(aging(str(tmp_path), lambda: now)) as medium:
        medium.write(page(0), {PageFragment(0, 0): bytes(100)})
    with closing(sqlite3.connect(tmp_path / INDEX)) as index, index:
        index.execute("ALTER TABLE pages DROP COLUMN used_at")
        index.execute("CREATE TABLE ages (at INTEGER PRIMARY KEY, tick INTEGER NOT NULL)")
    now = 5000.0
    with closing(aging(str(tmp_path), lambda: now)) as medium:
        assert numbers(medium) == [0]
    now = 5100.0
    with closing(aging(str(tmp_path), lambda: now)) as medium:
        assert numbers(medium) == []


@pytest.mark.long
@given(seed=st.integers(0, 10**6))
def test_what_nobody_has_used_for_long_goes(seed: int) -> None:
    """A dict has the time when each page was used last: nothing goes earlier, and what is older is gone
    after a look.
    """
    order, now, ttl = random.Random(seed), 1000.0, 100.0
    used, fragments = dict[int, float](), {PageFragment(0, 0): bytes(100)}

    def clock() -> float:
        return now

    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        place = StorageConfig(SIZE, b"i" * 32, directory=folder, secret=SECRET, server="one", ttl_s=ttl)
        medium = FileStorage(place, clock)
        for _ in range(order.randint(5, 40)):
            now += order.choice([0.0, 1.0, 30.0, 120.0])
            match order.choice(["write", "read", "restart"]):
                case "write":
                    number = order.randrange(6)
                    gone = [key[0] for key in medium.reserve(100)]
                    assert all(now - used.pop(each) >= ttl for each in gone)
                    medium.write(page(number), fragments)
                    used[number] = now
                case "read" if used:
                    number = order.choice(sorted(used))
                    if has(medium, page(number), fragments):
                        used[number] = now
                    else:
                        assert now - used.pop(number) >= ttl
                case "restart":
                    medium.close()
                    medium = FileStorage(place, clock)
            there = {held.page.number for held in medium.pages()}
            assert there >= {number for number, at in used.items() if now - at < ttl}
            used = {number: at for number, at in used.items() if number in there}
        now = max([now, *(at + ttl for at in used.values())]) + max(1.0, ttl / 64)
        medium.reserve(100)
        assert medium.pages() == []
        medium.close()


def test_a_page_that_is_prolonged_outlives_the_age_limit_and_a_restart() -> None:
    now, fragments = 1000.0, {PageFragment(0, 0): bytes(100)}

    def clock() -> float:
        return now

    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        place = StorageConfig(SIZE, b"i" * 32, directory=folder, secret=SECRET, server="one", ttl_s=100.0)
        medium = FileStorage(place, clock)
        for number in range(2):
            medium.write(page(number), fragments)
        medium.set_retention([page(1).key], 1000.0)
        now += 50.0
        medium.reserve(100)  # a look
        medium.close()
        now += 900.0
        medium = FileStorage(place, clock)
        assert [held.page.number for held in medium.pages()] == [1]
        now += 200.0
        medium.reserve(100)
        assert medium.pages() == [], "its time has passed"
        medium.close()
