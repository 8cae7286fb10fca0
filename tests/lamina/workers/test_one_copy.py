"""One copy that processes share: who makes it, who gets it, and that nothing stays behind."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch import Tensor

from lamina.compute import one_copy
from lamina.compute.one_copy import SEALS, own_memory, share

ROOT = Path(__file__).resolve().parents[3]
SIZE = 3 * mmap.PAGESIZE + 64
SOON_S = 30.0


@pytest.fixture
def place() -> str:
    return f"lamina-test-{secrets.token_hex(8)}"


def nothing() -> None:
    pass


def count_up(memory: Tensor) -> None:
    memory.copy_(torch.arange(len(memory)) % 251)


def refuse(*_: object) -> None:
    raise OSError(12, "there is no room")


def counted(memory: Tensor) -> bool:
    return torch.equal(memory, (torch.arange(SIZE) % 251).to(torch.uint8))


def never(_: Tensor) -> None:
    raise AssertionError("it is there already")


def mapped() -> bool:
    return "memfd:lamina-packed" in Path("/proc/self/maps").read_text()


def start(place: str, fill: str) -> subprocess.Popen[str]:
    """A process that shares a copy, says whether it has made it and what it begins with, and waits to be ended.
    ``fill``: the body of that function.
    """
    code = f"""
        import signal, sys, torch
        from lamina.compute.one_copy import share

        def fill(memory):
            {fill}

        copy = share({place!r}, {SIZE}, lambda: None, fill, {SOON_S})
        print(copy.made, *copy.memory[:3].tolist(), flush=True)
        signal.pause()
    """
    command = [sys.executable, "-c", dedent(code)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


@pytest.fixture
def started() -> Iterator[Callable[[str, str], subprocess.Popen[str]]]:
    children = list[subprocess.Popen[str]]()

    def begin(place: str, fill: str) -> subprocess.Popen[str]:
        children.append(start(place, fill))
        return children[-1]

    yield begin
    for child in children:
        child.kill()
        child.communicate()


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout
    return child.stdout.readline().strip()


def test_memory_of_a_process_alone_is_filled_and_lies_as_huge_pages_want_it() -> None:
    memory = own_memory(SIZE, nothing, count_up)
    assert counted(memory)
    assert memory.data_ptr() % one_copy.HUGE == 0
    with pytest.raises(OSError, match="no room"):
        own_memory(SIZE, refuse, never)


def test_the_second_gets_what_the_first_has_made_and_cannot_write_to_it(place: str) -> None:
    first, second = share(place, SIZE, nothing, count_up, SOON_S), share(place, SIZE, refuse, never, SOON_S)
    assert (first.made, second.made) == (True, False)
    assert counted(first.memory)
    assert counted(second.memory)
    maps = [row for row in Path("/proc/self/maps").read_text().splitlines() if "memfd:lamina-packed" in row]
    assert [row.split()[1] for row in maps] == ["r--s", "r--s"]
    assert len({row.split()[4] for row in maps}) == 1, "one file"
    first.close()
    first.close()
    assert counted(second.memory), "whoever has it keeps it"
    third = share(place, SIZE, nothing, count_up, SOON_S)
    assert third.made, "the place is free"
    third.close()
    del first, second, third
    assert not mapped()


def test_another_process_gets_it_and_keeps_it_when_the_maker_is_killed(
    place: str, started: Callable[[str, str], subprocess.Popen[str]]
) -> None:
    maker = started(place, "memory.fill_(7)")
    assert line(maker) == "True 7 7 7"
    copy = share(place, SIZE, nothing, never, SOON_S)
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    assert copy.memory.eq(7).all()
    again = share(place, SIZE, nothing, count_up, SOON_S)
    assert again.made
    again.close()


def test_who_waits_takes_the_place_of_a_maker_that_ends_before_it_is_done(
    place: str, started: Callable[[str, str], subprocess.Popen[str]]
) -> None:
    maker = started(place, "print('filling', flush=True); signal.pause()")
    assert line(maker) == "filling"
    waiting = started(place, "memory.fill_(9)")
    maker.kill()
    assert line(waiting) == "True 9 9 9"


@pytest.mark.parametrize("check", [True, False], ids=["no room", "cannot fill"])
def test_a_maker_that_fails_leaves_the_place_to_others(place: str, *, check: bool) -> None:
    with pytest.raises(OSError, match="no room") as caught:
        share(place, SIZE, refuse if check else nothing, refuse, SOON_S)
    copy = share(place, SIZE, nothing, count_up, SOON_S)
    assert copy.made, "also while somebody looks at the error, which holds all that was open"
    copy.close()
    del caught, copy
    assert not mapped()


def test_nobody_waits_longer_than_the_deadline(place: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(f"\0{place}")
        silent.listen()
        with pytest.raises(TimeoutError):
            share(place, SIZE, nothing, never, 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as deaf:
        deaf.bind(f"\0{place}")
        with pytest.raises(TimeoutError, match=r"in 0\.05 s"):
            share(place, SIZE, nothing, never, 0.05)


@pytest.mark.parametrize(
    ("size", "seals"), [(SIZE, SEALS & ~fcntl.F_SEAL_WRITE), (SIZE - 64, SEALS)], ids=["unsealed", "too short"]
)
def test_what_is_no_sealed_copy_is_refused(place: str, size: int, seals: int) -> None:
    memory = os.memfd_create("lamina-packed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, size)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as liar:
        liar.bind(f"\0{place}")
        liar.listen()

        def lie() -> None:
            sock, _ = liar.accept()
            with sock:
                socket.send_fds(sock, [b"M"], [memory])

        thread = threading.Thread(target=lie)
        thread.start()
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match="no sealed copy"):
            share(place, SIZE, nothing, never, SOON_S)
        thread.join()
        assert len(os.listdir("/proc/self/fd")) == before
    os.close(memory)


def test_another_user_neither_gets_nor_gives_a_copy(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = share(place, SIZE, nothing, count_up, SOON_S)
    monkeypatch.setattr(one_copy.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="has the place"):
        share(place, SIZE, nothing, never, SOON_S)
    monkeypatch.undo()

    def refuse_who_comes(_: socket.socket) -> None:
        if threading.current_thread().name == "lamina-one-copy":
            raise PermissionError

    monkeypatch.setattr(one_copy, "_check_user", refuse_who_comes)
    with pytest.raises(TimeoutError):
        share(place, SIZE, nothing, never, 0.1)
    monkeypatch.undo()
    assert not share(place, SIZE, nothing, never, SOON_S).made
    copy.close()
