"""An engine that stands still, or waits for ever, is replaced; one that is idle, busy, or held up by another thread is
none. And what the server's process keeps of those that were.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hung_engine import FAILS, FOLDER, HANGS, HELD, SPINS
from msgspec.structs import replace
from running import MODEL, ROOT
from test_engine_link import Quiet
from test_flow import until

from lamina.config.flat_options import make_config
from lamina.executor.launchers import local
from lamina.executor.stall_detector import STALE_S, STOPPED_S, HangDetector
from lamina.request import SamplingParams
from lamina.server.engine_client import engine_client as client_module
from lamina.server.engine_client import engine_watchdog
from lamina.server.engine_client.engine_client import EngineClient
from lamina.server.engine_client.engine_restarts import EngineRestarts
from lamina.server.engine_client.engine_watchdog import EngineWatchdog
from lamina.server.engine_client.launch import launch_engine
from lamina.server.engine_client.messages import StartEngine
from lamina.server.engine_client.reply_queue import ReplyQueue
from lamina.utils.proc import voluntary_switches_of

pytestmark = pytest.mark.timeout(300)  # starting an engine on a busy machine takes its time
LIMIT_S = 2.0  # that an engine may sleep here; twice as long as an idle one does
LONG_S = 3 * LIMIT_S
SOON_S = 120.0
KILLS = 10
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=60, ignore_eos=True)


class ToldHandle:
    """The process as its handle shows it."""

    def __init__(self) -> None:
        self.pid, self.is_stopped = 7, False


class WatchInTime:
    """A watch in a time of its own, of an engine that goes to sleep as often as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **deadlines: float) -> None:
        self.now, self.engine = 100.0, ToldHandle()
        self.naps: int | None = 3  # it sleeps
        monkeypatch.setattr(engine_watchdog, "voluntary_switches_of", lambda pid: self.naps)
        given = replace(make_config({"step_timeout_s": 5.0, "start_timeout_s": 9.0}).deadlines, **deadlines)
        self.watch = EngineWatchdog(given, lambda: self.now)

    def looks(self, seconds: float, step_s: float = 0.25, **how: bool) -> float | None:
        """Seconds until it was to be ended; None: not in so many."""
        began = self.now
        while self.now - began < seconds:
            self.now += step_s
            if self.watch.check(self.engine, **{"wanted": True, "recovering": False, **how}):  # type: ignore[arg-type]
                return self.now - began
        return None


def test_one_that_never_wakes_up_is_ended_by_the_deadline_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    one = WatchInTime(monkeypatch)
    assert one.looks(20.0) == 5.25, "from the second look on"
    assert "hangs: it has not woken up for 5.0 s" in one.watch.check(one.engine, wanted=True, recovering=False)


def test_one_that_waits_for_a_worker_to_start_has_the_time_of_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WatchInTime(monkeypatch).looks(20.0, recovering=True) == 9.25


def test_one_that_wakes_up_is_not_however_seldom_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    one = WatchInTime(monkeypatch)
    for _ in range(20):
        assert one.looks(4.75) is None
        assert one.naps is not None
        one.naps += 1
    for _ in range(20):
        assert one.looks(4.75) is None
        one.naps = None  # it runs, waits for a core or a disk, or is stopped
        assert one.looks(0.25) is None
        one.naps = 3


def test_another_one_begins_anew_and_none_where_nobody_may_take_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    one = WatchInTime(monkeypatch)
    assert one.looks(4.75) is None
    one.engine.pid = 8
    assert one.looks(4.75) is None
    assert one.looks(60.0, wanted=False) is None
    assert one.looks(4.75) is None


def test_time_in_which_nobody_looked_hardly_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole machine may have stood still."""
    one = WatchInTime(monkeypatch)
    assert one.looks(3600.0, step_s=3600.0) is None
    assert one.looks(3600.0, step_s=3600.0) is None
    assert HangDetector(lambda: 0.0).update(7, 3) == 0.0
    assert one.looks(20.0) == 5.0 - STALE_S


def test_one_that_is_stopped_is_ended_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    one = WatchInTime(monkeypatch)
    one.engine.is_stopped, one.naps = True, None
    assert one.looks(20.0) == STOPPED_S + 0.25
    assert one.watch.check(one.engine, wanted=True, recovering=False) == "has been stopped for 1.75 s"


PROGRAM = """
import sys, time
sys.stdout.write("begun")
sys.stdout.flush()
while True:
    if sys.argv[1] == "sleeps":
        sys.stdin.read()
    elif sys.argv[1] == "wakes":
        time.sleep(0.01)
"""


@pytest.mark.parametrize("what", ["sleeps", "wakes", "spins"])
def test_naps_are_counted_of_who_sleeps(what: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, what], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        assert program.stdout is not None
        program.stdout.read(1)
        try:
            while what != "spins" and voluntary_switches_of(program.pid) is None:
                pass
            while what == "spins" and voluntary_switches_of(program.pid) is not None:
                pass
            looks = {voluntary_switches_of(program.pid) for _ in range(200)}
            while what == "wakes" and len(looks) < 5:
                looks.add(voluntary_switches_of(program.pid))
            assert (looks == {None}) == (what == "spins")
            assert len(looks) == 1 or what == "wakes"
            os.kill(program.pid, signal.SIGSTOP)
            while voluntary_switches_of(program.pid) is not None:  # who stands still by a signal does not sleep
                pass
        finally:
            program.kill()
    assert voluntary_switches_of(program.pid) is None


class ServersEnd:
    """The server's end of a real engine, which may be replaced."""

    def __init__(self, client: EngineClient, folder: Path) -> None:
        self.client, self.folder = client, folder

    @property
    def pid(self) -> int:
        return self.client.handle.pid

    async def tokens(self, hit: signal.Signals | None = None) -> list[int]:
        """Returns the tokens of one stream, in the midst of which the engine gets that signal."""
        replies, told = ReplyQueue(), list[int]()
        self.client.add([5, 6, 7], PARAMS, replies, Quiet())
        while len(told) < PARAMS.max_tokens:
            told += [t for delta in await asyncio.wait_for(replies.get(), SOON_S) for t in delta.token_ids]
            if hit is not None and len(told) > 5:
                os.kill(self.pid, hit)
                hit = None
        assert hit is None
        return told

    async def has(self, signal_: signal.Signals, word: str) -> None:
        async with asyncio.timeout(SOON_S):
            while not (self.folder / f"{signal_.name}-{word}").exists():
                await asyncio.sleep(0.01)

    async def recovers(self, pid: int) -> None:
        """In the place of that process."""
        async with asyncio.timeout(SOON_S):
            while self.pid == pid or not self.client.is_ready:
                await asyncio.sleep(0.01)


def with_engine(monkeypatch: pytest.MonkeyPatch, folder: Path, work: Any, **options: Any) -> None:
    monkeypatch.setitem(local.ROLES, "engine", ("tests.support.server.hung_engine", "serve_engine"))
    monkeypatch.setenv(FOLDER, str(folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(ROOT)
    given = {"dtype": "float32", "deterministic": True, "start_timeout_s": 200.0, "compute_threads": 1, **options}
    start = StartEngine(model=MODEL, tokenizer="", config=make_config(given))

    async def run() -> None:
        restarts = EngineRestarts(start, launch_engine)
        client = await EngineClient.connect(launch_engine(start), lambda progress: None, restarts)
        try:
            await work(ServersEnd(client, folder))
        finally:
            await client.close()

    asyncio.run(run())


@pytest.mark.long
def test_one_that_hangs_is_replaced_and_streams_go_on_and_no_other_one_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    right = EngineWatchdog
    monkeypatch.setattr(client_module, "EngineWatchdog", lambda of: right(replace(of, step_timeout_s=LIMIT_S)))

    async def work(server: ServersEnd) -> None:
        wanted, pid = await server.tokens(), server.pid
        await asyncio.sleep(LONG_S)  # idle
        for how in (SPINS, HELD):
            assert await server.tokens(how) == wanted
            await server.has(how, "over")
        assert server.pid == pid
        assert "hangs" not in caplog.text
        assert await server.tokens(HANGS) == wanted
        assert server.pid != pid
        await server.has(HANGS, "begun")
        assert f"the engine process (pid {pid}) hangs: it has not woken up for 2." in caplog.text
        idle = server.pid
        os.kill(idle, HANGS)
        await server.recovers(idle)
        assert await server.tokens() == wanted

    with caplog.at_level(logging.WARNING):
        with_engine(monkeypatch, tmp_path, work)


@pytest.mark.long
def test_one_that_fails_by_a_mistake_of_its_own_is_replaced_and_streams_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is replaced like one that has died, whose workers leave with it. The log has the mistake."""

    async def work(server: ServersEnd) -> None:
        wanted, pid = await server.tokens(), server.pid
        assert await server.tokens(FAILS) == wanted
        assert server.pid != pid
        assert "engine: KeyError: 'a mistake'; another one replaces it" in caplog.text
        await server.has(FAILS, "begun")

    with caplog.at_level(logging.WARNING):
        with_engine(monkeypatch, tmp_path, work)
    said = capfd.readouterr().err
    assert said.count("Traceback") == said.count("KeyError: 'a mistake'") == 1


@pytest.mark.long
def test_one_that_may_not_be_replaced_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = EngineWatchdog
    monkeypatch.setattr(client_module, "EngineWatchdog", lambda of: right(replace(of, step_timeout_s=LIMIT_S)))

    async def work(server: ServersEnd) -> None:
        pid = server.pid
        os.kill(pid, HANGS)
        await server.has(HANGS, "begun")
        await asyncio.sleep(LONG_S)
        assert server.pid == pid
        assert server.client.seconds_without_progress > LIMIT_S, "/health says so"
        assert not server.client.lost.is_set()
        os.kill(pid, signal.SIGKILL)
        await until(server.client.lost.is_set)

    with_engine(monkeypatch, tmp_path, work, max_recoveries=0)


def descriptors() -> Counter[str]:
    """Open descriptors of this process, by kind."""
    kinds = Counter[str]()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{fd}")
            kinds[name.partition(":")[0] if ":[" in name else name] += 1
    return kinds


@pytest.mark.no_retry
@pytest.mark.long
def test_engines_that_are_killed_leave_no_descriptor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def work(server: ServersEnd) -> None:
        counts = list[Counter[str]]()
        for _ in range(KILLS + 1):
            await server.tokens()
            counts.append(descriptors())
            pid = server.pid
            os.kill(pid, signal.SIGKILL)
            await server.recovers(pid)
        more = counts[-1] - counts[1]  # the first death may open what stays, such as an executor's
        assert not more, f"after {KILLS - 1} more: {more}"

    with_engine(monkeypatch, tmp_path, work, max_recoveries=100)
