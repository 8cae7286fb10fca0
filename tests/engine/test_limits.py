"""Limits, to the exact number: one more, or one less, is another product."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from scheduled import make

from lamina.executor.hosts import ray_node
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.control import ControlLink, LinkClosedError, Stop
from lamina.scheduler.scheduler import Scheduler
from lamina.utils.proc import start_time_of


@pytest.mark.parametrize("num_batches", [1, 2, 3])
def test_as_many_sequences_run_as_are_allowed_and_not_one_more(num_batches: int) -> None:
    allowed = 5
    scheduler = Scheduler(BlockTables([0], [999], 4), max_num_seqs=allowed, prefill_chunk=999, num_batches=num_batches)
    for i in range(allowed + 3):
        scheduler.add(make(i, 8, 50))
    most = 0
    for _ in range(4 * allowed):
        for step in scheduler.schedule():
            scheduler.on_step_done(step)
        most = max(most, scheduler.num_running)
    assert most == allowed
    assert scheduler.num_waiting == 3


def frame(size: int) -> bytes:
    """A Stop of ``size`` bytes, after its length: fields that a message does not have are passed over."""
    empty = msgspec.msgpack.encode({"type": "stop", "filler": ""})
    body = msgspec.msgpack.encode({"type": "stop", "filler": "x" * (size - len(empty) - 1)})  # a string of 32 and more
    assert len(body) == size
    return struct.pack("<I", size) + body


@pytest.mark.parametrize(("size", "fits"), [(128, True), (129, False)])
def test_a_frame_of_the_largest_size_is_read_and_a_longer_one_ends_the_link(size: int, fits: bool) -> None:
    ours, theirs = socket.socketpair()
    link = ControlLink(ours, Stop, 128)
    with theirs:
        theirs.sendall(frame(size))
        if fits:
            assert isinstance(link.recv(timeout_s=10.0), Stop)
        else:
            with pytest.raises(LinkClosedError, match="frame of 129 bytes"):
                link.recv(timeout_s=10.0)
    link.close()


def test_a_process_that_got_the_number_of_one_of_ours_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_node, "state_folder", lambda: tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as stranger:
        folder = ray_node.folder_of("10.0.0.1:6379")
        folder.mkdir(parents=True)
        birth = start_time_of(stranger.pid)
        (folder / "pid").write_text(f"{stranger.pid} {int(birth) - 1}")
        assert ray_node.down({"address": "10.0.0.1:6379"}) == {"ended": False}
        assert ray_node.status({"address": "10.0.0.1:6379", "token": "", "head": ""}) == {"pid": 0}
        assert stranger.poll() is None
        (folder / "pid").write_text(f"{stranger.pid} {birth}")  # the control: it is ours
        assert ray_node.down({"address": "10.0.0.1:6379"}) == {"ended": True}
        assert stranger.wait(10) != 0
