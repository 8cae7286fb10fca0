"""The drill finds what is wrong with a stream; and a server that recovers passes it, one that does not fails it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lamina.cli.drill.cut import cut
from lamina.cli.drill.streams import KINDS, StreamTold, has_one_answer, verdict
from lamina.cli.launch import main

ROOT = Path(__file__).resolve().parents[2]
MODEL = "examples/tiny_lm/model"
TOLD = StreamTold(
    {0: "abc", 1: "de"}, {0: [("a", -0.5), ("bc", -1.0)]}, {0: "length", 1: "stop"}, 5, "", [1.0, 2.0, 5.0]
)


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (TOLD, "right"),
        (replace(TOLD, scores={0: [("a", -0.501), ("bc", -1.0)]}), "right"),
        (replace(TOLD, scores={0: [("a", -0.6), ("bc", -1.0)]}), "wrong"),
        (replace(TOLD, scores={0: [("a", -0.5), ("b", -1.0)]}), "wrong"),
        (replace(TOLD, scores={}), "wrong"),
        (replace(TOLD, texts={0: "abd", 1: "de"}), "wrong"),
        (replace(TOLD, reasons={0: "length", 1: "length"}), "wrong"),
        (replace(TOLD, tokens=4, texts={0: "abc", 1: "d"}), "lost"),
        (replace(TOLD, tokens=6, texts={0: "abcc", 1: "de"}), "twice"),
        (replace(TOLD, error="status 503"), "lost"),
        (StreamTold(), "lost"),
    ],
)
def test_what_a_stream_was_told_is_judged(found: StreamTold, word: str) -> None:
    assert verdict(found, TOLD) == word


def test_of_a_stream_without_a_seed_the_length_is_judged() -> None:
    other = replace(TOLD, texts={0: "xyz", 1: "uv"}, scores={0: [("x", -0.1), ("yz", -3.0)]})
    assert verdict(other, TOLD) == "wrong"
    assert verdict(other, TOLD, exactly=False) == "right"
    assert verdict(replace(other, scores={0: [("x", -0.1)]}), TOLD, exactly=False) == "wrong"
    assert verdict(replace(other, tokens=4), TOLD, exactly=False) == "lost"
    assert verdict(replace(other, tokens=6), TOLD, exactly=False) == "twice"
    assert verdict(replace(other, error="gone"), TOLD, exactly=False) == "lost"
    assert [has_one_answer(kind) for kind in KINDS] == [True] * 6 + [False]


PEER = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as end:
    print("here", flush=True)
    print(end.recv(1), flush=True)
"""


def test_a_connection_of_two_that_live_is_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        command = [sys.executable, "-c", PEER, str(door.getsockname()[1])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as peer:
            end, _ = door.accept()
            assert peer.stdout is not None
            assert peer.stdout.readline() == "here\n"
            assert not cut(peer.pid, peer.pid)
            assert cut(peer.pid, os.getpid())
            assert peer.stdout.readline() == "b''\n"
            assert end.recv(1) == b""
            end.close()


def test_a_pause_is_of_what_came_behind_the_hit() -> None:
    assert [TOLD.pause_behind(t) for t in (0.0, 1.5, 2.5, 5.0)] == [3.0, 3.0, 2.5, None]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--faults", "kill-all"], "--faults: there is no 'kill-all'; there are kill-compute"),
        (["--faults", "partition"], "--faults partition cuts a TCP connection: give --flags with --transport tcp"),
        (["--count", "0"], "--count must be at least 1"),
        (["--streams", "0"], "--streams must be at least 1"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", MODEL, *argv]) == 2
    assert words in capsys.readouterr().err


def drill(*flags: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "lamina.cli.launch", "drill", MODEL, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_passes_it() -> None:
    status, out = drill("--count", "6", "--json")
    found = json.loads(out)
    assert (status, found["hits"], found["left"]) == (0, 6, 0), out
    assert len(found["faults"]) == 6
    for row in found["faults"].values():
        assert (row["right"], row["wrong"], row["lost"], row["twice"]) == (32, 0, 0, 0)
    assert found["faults"]["stop"]["noticed_s"][0] > 1.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_that_may_not_recover_fails_it() -> None:
    status, out = drill("--count", "2", "--streams", "4", "--flags", "--max-recoveries 0")
    assert status == 1
    assert re.search(r"did not recover from hit 1, of (compute|memory) worker", out), out
