"""The drill finds what is wrong with a stream; and a server that recovers passes it, one that does not fails it.

Covers: lamina/cli/parent_watchdog.py, lamina/tools/drill/cut_connection.py, lamina/tools/drill/drill_report.py,
lamina/tools/drill/fault_points.py, lamina/tools/drill/injections.py, lamina/tools/drill/target.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from lamina.cli.launch import main
from lamina.request import SamplingParams
from lamina.server.journal.journal import Journal
from lamina.server.journal.journal_records import AcceptedRecord, JournalPrompt
from lamina.tools.drill import FAULTS
from lamina.tools.drill.client_streams import KINDS as STREAMS
from lamina.tools.drill.client_streams import StreamRecord, has_one_answer, seeds_of
from lamina.tools.drill.cut_connection import cut
from lamina.tools.drill.drill_report import FaultResult, report
from lamina.tools.drill.fault_points import ANY, KINDS, LOAD, PAGES, SAVE, FaultPoints
from lamina.tools.drill.injections import Drill
from lamina.tools.drill.target import Target, Victim, places_of
from lamina.utils.proc import is_alive

ROOT = Path(__file__).resolve().parents[3]
MODEL = "examples/tiny_lm/model"
TOLD = StreamRecord(times=[1.0, 2.0, 5.0])


def test_all_streams_but_the_last_have_one_answer() -> None:
    assert [has_one_answer(kind) for kind in STREAMS] == [True] * 6 + [False]


@pytest.mark.parametrize(
    ("grants", "pages", "missing"), [(True, True, set()), (False, True, {"grant"}), (True, False, {*PAGES})]
)
def test_each_kind_of_message_has_its_turn(grants: bool, pages: bool, missing: set[str]) -> None:
    moments = FaultPoints(random.Random(0), grants=grants, pages=pages)
    found = {role: [moments.next(role) for _ in range(8)] for role in ("compute", "memory", "prefill")}
    each = {role: {moment.kind for moment in of} for role, of in found.items()}
    assert each["compute"] | each["memory"] == {ANY, *KINDS} - missing
    assert each["prefill"] == {ANY, "grant", "control"} - missing
    assert len({m.times for of in found.values() for m in of}) > 3
    assert moments.next("engine").event is None


def test_a_worker_has_the_place_that_the_last_meeting_gave_it() -> None:
    lines = [
        "INFO epoch 1: memory-0 is pid 7, compute-0 is pid 8\n",
        "WARNING compute worker 0 (pid 8) was killed\n",
        "INFO epoch 3: memory-0 is pid 7, compute-0 is pid 19\n",
        "INFO epoch 3: all sequences continue after 0.1 s\n",
    ]
    assert places_of(lines) == {7: "memory-0", 19: "compute-0"}
    assert places_of([]) == {}


async def write_seed(folder: Path) -> None:
    """A journal in which the stream ``cmpl-1`` has the seed 1234."""
    journal = Journal(str(folder), MODEL, 1 << 20)
    prompts = [JournalPrompt(0, [5, 6], "ab", 1234)]
    asked = {"kind": "cmpl", "model": "m", "created": 1, "params": SamplingParams(), "prompts": prompts}
    await journal.accept(AcceptedRecord(id="cmpl-1", **asked))
    journal.close()


def test_the_journal_knows_the_seed_of_a_stream_that_has_none(tmp_path: Path) -> None:
    asyncio.run(write_seed(tmp_path / "journal"))
    assert seeds_of(tmp_path / "journal") == {"cmpl-1": 1234}


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
    assert [TOLD.pause_after(t) for t in (0.0, 1.5, 2.5, 5.0)] == [3.0, 3.0, 2.5, None]
    assert [TOLD.pause_after(0.0, until) for until in (0.5, 1.5, 2.0, 2.5)] == [1.0, 1.0, 1.0, 3.0], "not of the next"


class StoodStill(NamedTuple):
    """Hits of one fault."""

    noticed_s: float | None
    pause_s: float
    idle_s: float = 0.0

    def blow(self, fault: str, verdict: str = "right") -> FaultResult:
        victim = Victim("memory", 7, "memory-0")
        return FaultResult(fault, victim, ANY, self.noticed_s, self.pause_s, 12, Counter({verdict: 2}), self.idle_s)


@pytest.mark.parametrize(
    ("blows", "left", "status", "words"),
    [
        ([StoodStill(2.4, 9.0).blow("stop"), StoodStill(None, 1.0).blow("kill-spare")], 0, 0, ""),
        ([StoodStill(2.6, 9.0).blow("stop")], 0, 1, "stop: 1 of 1 above --noticed-s 2.5: 2.60 s at most"),
        ([StoodStill(None, 9.0).blow("stop")], 0, 1, "stop: 1 of 1 above --noticed-s 2.5: not noticed"),
        ([StoodStill(None, 9.0).blow("flip")], 0, 0, "noticed: 0 of 1"),
        ([StoodStill(5.1, 0.1, 2.8).blow("stop")], 0, 0, "1 owed nothing at first, noticed 5.10 to 5.10 s after the"),
        ([StoodStill(5.1, 0.1, 2.5).blow("stop")], 0, 1, "stop: 1 of 1 above --noticed-s 2.5: 2.60 s at most"),
        ([StoodStill(2.55, 0.1, 0.09).blow("stop")], 0, 1, "stop: 1 of 1 above --noticed-s 2.5: 2.55 s at most"),
        ([StoodStill(0.1, 10.5).blow("flip")], 0, 1, "flip: 1 of 1 above --pause-s 10: 10.50 s at most"),
        ([StoodStill(0.1, 1.0).blow("flip", "twice")], 0, 1, "2 streams harmed"),
        ([StoodStill(0.1, 1.0).blow("flip")], 1, 1, "1 process left"),
    ],
)
def test_what_takes_too_long_is_told_and_fails_a_drill(
    blows: list[FaultResult], left: int, status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = argparse.Namespace(noticed_s=2.5, pause_s=10.0, count=len(blows), streams=2, json=False)
    assert report(args, blows, Counter(right=2), left) == status
    told = capsys.readouterr().out
    assert words in told
    assert ("above" in told) == ("above" in words)
    args.noticed_s = args.pause_s = 0.0
    assert report(args, blows, Counter(right=2), left) == (status if "above" not in words else 0)


def test_a_stop_counts_from_when_somebody_waits() -> None:
    target = object.__new__(Target)
    waited = "memory worker 0 (pid 7) has been stopped for 1.75 s while it is waited for, {} s at most; lost"
    words = f"{waited} workers are replaced, and all requests go on"
    target.log = [(10.0, words.format("1.00")), (25.0, words.format("2.26")), (40.0, words.format("300.10"))]
    assert target.noticed_s(20.0, 30.0) == 5.0
    assert target.idle_s(20.0, 30.0) == pytest.approx(2.74)
    assert (target.noticed_s(37.7), target.idle_s(37.7)) == (pytest.approx(2.3), 0.0), "it owed a step all the time"
    target.log = [(25.0, "memory worker 0 (pid 7) was killed by SIGKILL; all requests go on")]
    assert (target.noticed_s(20.0), target.idle_s(20.0)) == (5.0, 0.0)


def test_a_hit_before_the_first_request_is_the_first_of_a_reading() -> None:
    drill = Drill(NoServer(), argparse.Namespace(seed=0, streams=2, tokens=8), FAULTS)  # type: ignore[arg-type]
    readings = [drill.due_of(["kill-memory", "kill-compute", "stop"]) for _ in range(12)]
    assert all(not moment.before_prompt_end for due in readings for _, moment in due[1:])
    assert {len(due) for due in readings} == {1, 3}
    kinds = {moment.kind for due in readings for fault, moment in due if fault != "stop"}
    assert kinds == {ANY, *KINDS} - {"grant", *PAGES}


def test_kv_that_a_hit_has_damaged_is_not_read_by_the_run_that_judges(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that answers from damaged KV where a request's salt is that of the streams that were hit."""
    drill = Drill(NoServer(journal=tmp_path), argparse.Namespace(seed=0, streams=8, tokens=2), FAULTS)  # type: ignore[arg-type]

    def read(bodies: list[dict[str, object]], *_: object) -> list[StreamRecord]:
        ids = [[5, 6] if body.get("cache_salt") else [5, 7] for body in bodies]
        return [StreamRecord({0: "a"}, {0: x}, {}, {0: "length"}, 2, "", [1.0], "cmpl-1") for x in ids]

    drill.read_streams = read  # type: ignore[method-assign,assignment]
    drill.wanted = read(drill.bodies)
    asyncio.run(write_seed(tmp_path))
    assert drill.judged(read(drill.bodies), well=True) == {"right": 7, "wrong": 1}
    assert "stream 6 received tokens {0: [5, 7]}; wanted are {0: [5, 6]}" in caplog.text


class NoServer(NamedTuple):
    """The answers that a drill needs from its target before the first hit."""

    has_prefill: bool = False
    has_pages: bool = False
    journal: Path = Path()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--faults", "kill-all"], "--faults: there is no 'kill-all'; there are kill-compute"),
        (["--faults", "partition"], "--faults partition needs --flags '--transport tcp', because "),
        (["--count", "0"], "--count must be at least 1"),
        (["--streams", "0"], "--streams must be at least 1"),
        (["--noticed-s", "nan"], "--noticed-s must be a number of seconds, at least 0, not nan"),
        (["--pause-s", "-1"], "--pause-s must be a number of seconds, at least 0, not -1"),
        (["--timeout-s", "0"], "--timeout-s must be a number of seconds, more than 0, not 0"),
        (["--flags", "--a 'b"], "--flags --a 'b: No closing quotation"),
        (["--per-reading", "0"], "--per-reading must be at least 1"),
        (["--flags", "--launcher ray"], "lamina-launch drill does not go with --launcher ray, because "),
        (["--flags=--cluster=auto"], "lamina-launch drill does not go with --cluster, because "),
        (["--flags", "--journal x"], "lamina-launch drill does not go with --journal, because "),
    ],
)
def test_bad_input_is_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", MODEL, *argv]) == 2
    assert words in capsys.readouterr().err


def drill(*flags: str) -> tuple[int, str]:
    """However long it takes: other work may have all cores."""
    command = [sys.executable, "-m", "lamina.cli.launch", "drill", MODEL, "--noticed-s", "0", "--pause-s", "0", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_passes_it() -> None:
    status, out = drill("--count", "7", "--json")
    found = json.loads(out)
    assert (status, found["hits"], found["left"]) == (0, 7, 0), out
    assert len(found["faults"]) == 7
    for row in found["faults"].values():
        assert (row["right"] + row["edge"], row["wrong"], row["lost"], row["twice"]) == (32, 0, 0, 0)
    assert found["faults"]["stop"]["noticed_s"][0] > 1.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_are_killed_at_each_kind_of_message_and_spares_when_asked() -> None:
    flags = "--memory-workers 2 --prefill-workers 1 --spare-memory 2 --dtype float32 --deterministic"
    faults = "kill-compute,kill-memory,kill-prefill,kill-spare"
    much = ["--count", "24", "--streams", "14", "--per-reading", "3", "--tokens", "192"]
    status, out = drill(*much, "--faults", faults, "--json", "--flags", flags)
    found = json.loads(out)
    assert (status, found["hits"], found["left"]) == (0, 24, 0), out
    assert not {ANY, *KINDS} - {*PAGES} - set(found["kinds"]), out
    for fault, row in found["faults"].items():
        role = fault.removeprefix("kill-")
        assert {place.partition("-")[0] for place in row["victims"]} == {role}
        assert sum(row["victims"].values()) == row["hits"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_that_may_not_recover_fails_it() -> None:
    status, out = drill("--count", "2", "--streams", "4", "--flags", "--max-recoveries 0")
    assert status == 1
    assert re.search(r"did not recover from hit 1, of (compute|memory) worker", out), out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_memory_workers_are_killed_while_pages_are_saved_and_loaded(tmp_path: Path) -> None:
    """The pool is too small for what all streams leave."""
    flags = "--memory-workers 2 --dtype float32 --deterministic --kv-cache-memory-bytes 8MiB "
    flags += f"--kv-offload dir={tmp_path / 'kv'},size=64MiB"
    sizes = ("--count", "8", "--streams", "14", "--tokens", "48")
    status, out = drill(*sizes, "--faults", "kill-memory", "--json", "--flags", flags)
    found = json.loads(out)
    assert (status, found["hits"], found["left"]) == (0, 8, 0), out
    assert {SAVE, LOAD} <= set(found["kinds"]), out
    assert main(["kv", "verify", str(tmp_path / "kv")]) == 0


HELD = """
import os, signal, subprocess, sys
from lamina.cli import launch
from lamina.cli import parent_watchdog
def serve():
    child = subprocess.Popen(["sleep", "1000"])
    os.kill(child.pid, signal.SIGSTOP)
    print(*sys.argv[1:], child.pid, flush=True)
    signal.pause()
launch.run_program = serve
parent_watchdog.main(int(sys.argv[1]), sys.argv[2])
"""


@pytest.mark.no_retry
def test_who_is_held_by_a_leash_ends_with_its_other_end_and_so_do_its_children(tmp_path: Path) -> None:
    """They end by force: a child that is stopped hears of no other process's end."""
    own = tmp_path / "own"
    own.mkdir()
    held, line = os.pipe()
    command = [sys.executable, "-c", HELD, str(held), str(own)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, pass_fds=[held]) as process:
        os.close(held)
        assert process.stdout is not None
        child = int(process.stdout.readline().split()[-1])
        assert process.poll() is None
        assert is_alive(child)
        os.close(line)
        assert process.wait() == -signal.SIGKILL
    while is_alive(child):
        time.sleep(0.01)
    assert not own.exists()
    assert tmp_path.exists()


DRILL = """
import sys
from lamina.tools.drill.target import Target
target = Target(sys.argv[1], ["--dtype", "float32"], journal=True)
print(target._folder, *target.pids(), flush=True)
sys.stdin.read()
"""


@pytest.mark.no_retry
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_ends_with_its_drill_however_that_ends(how: signal.Signals) -> None:
    """Also who was stopped, and hears of nothing."""
    command = [sys.executable, "-c", DRILL, MODEL]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder, *words = process.stdout.readline().split()
        pids = list(map(int, words))
        engine = next(p for p in pids if b"engine_process:" in Path(f"/proc/{p}/cmdline").read_bytes())
        os.kill(engine, signal.SIGSTOP)
        assert Path(folder, "journal").exists()
        process.send_signal(how)
        process.wait()
    for pid in pids:
        while is_alive(pid):  # until the test's own deadline
            time.sleep(0.02)
    assert not Path(folder).exists()
