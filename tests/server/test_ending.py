"""The end of a server: in order, or by force, with nothing left over."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from running import Running, alive, certificate, eventually
from shipped import MODEL

pytestmark = pytest.mark.timeout(300)  # starting a server on a busy machine takes its time
BODY = {"prompt": "def f(", "max_tokens": 60, "ignore_eos": True, "stream": True}
PAUSE_S = 5.0  # that a worker of an idle server may stand still: less than --step-timeout-s
COUNTED = {**BODY, "stream_options": {"include_usage": True}}


@pytest.mark.long
def test_a_signal_lets_streams_finish_and_takes_no_more(tmp_path: Path) -> None:
    """Over TLS, so that this is tried too, and of a process as a user's."""
    tls = certificate(tmp_path)
    flags = (f"--ssl-keyfile={tls['ssl_keyfile']}", f"--ssl-certfile={tls['ssl_certfile']}")
    more = ("--transport=loopback", "--shutdown-timeout=60")
    server = Running(tmp_path / "log", *flags, *more, env={"LAMINA_API_KEY": "k"}, fresh=True)
    assert server.url.startswith("https://")

    async def work() -> tuple[list[str], httpx.Response, httpx.Response]:
        headers = {"authorization": "Bearer k"}
        async with httpx.AsyncClient(base_url=server.url, timeout=60, verify=False, headers=headers) as client:
            async with asyncio.timeout(60):
                assert (await client.get("/load")).json()["server_load"] == 0
                streams = [asyncio.create_task(client.post("/v1/completions", json=COUNTED)) for _ in range(8)]
                while (await client.get("/load")).json()["server_load"] < 8:
                    await asyncio.sleep(0.01)
                server.signal(signal.SIGTERM)
                while (health := await client.get("/health")).status_code == 200:
                    await asyncio.sleep(0.01)
                refused = await client.post("/v1/completions", json=BODY)
                return [(await s).text for s in streams], refused, health

    try:
        texts, refused, health = asyncio.run(work())
        assert all('"completion_tokens":60' in t and t.endswith("data: [DONE]\n\n") for t in texts), texts
        assert refused.status_code == health.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert server.wait(30) == 0
    finally:
        server.kill()


@contextmanager
def ended_all(log: Path, *flags: str) -> Iterator[tuple[Running, list[int]]]:
    """A server and its processes, of which none is left at the end."""
    server = Running(log, *flags)
    pids = server.descendants()
    try:
        yield server, pids
    finally:
        server.kill()
        for pid in alive(pids):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_who_tells_all_processes_to_end_at_once_has_streams_finish_too(tmp_path: Path) -> None:
    """The server's own process drains and ends the others, as when systemd signals all processes of a service."""
    with ended_all(tmp_path / "log", "--shutdown-timeout=60", "--prefill-workers=1") as (server, pids):
        body = {**COUNTED, "max_tokens": 600}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            for pid in (*pids, server.process.pid):
                os.kill(pid, signal.SIGTERM)
            rest = list(lines)
        assert any('"completion_tokens":600' in line for line in rest), rest[-5:]
        assert server.wait(60) == 0
        said = (tmp_path / "log").read_text()
        assert "another one replaces it" not in said
        assert "is replaced" not in said
        assert eventually(lambda: not alive(pids), 30), alive(pids)


def silence_s(http: httpx.Client) -> float:
    """Returns the seconds since the engine last made progress, as /health says; 0 where it does not."""
    said = re.search(r"no progress for ([\d.]+) s", http.get("/health").text)
    return float(said[1]) if said else 0.0


@pytest.mark.long
def test_ill_while_a_worker_hangs_and_ends_when_one_is_lost(tmp_path: Path) -> None:
    """Over a Unix socket, so that this is tried too."""
    place = tmp_path / "socket"
    with ended_all(tmp_path / "log", f"--uds={place}", "--timeouts=health=2", "--max-recoveries=0") as (server, pids):
        assert len(pids) >= 4, "the engine, a compute worker, two memory workers"
        workers = [p for p in pids if b"lamina.workers.memory.main:" in Path(f"/proc/{p}/cmdline").read_bytes()]
        transport = httpx.HTTPTransport(uds=str(place))
        with httpx.Client(base_url="http://server", transport=transport, timeout=30) as http:
            assert http.get("/health").status_code == 200
            os.kill(workers[0], signal.SIGSTOP)
            assert eventually(lambda: server.process.poll() is not None or silence_s(http) >= PAUSE_S, 30)
            assert http.get("/health").status_code == 503
            os.kill(workers[0], signal.SIGCONT)
            assert eventually(lambda: http.get("/health").status_code == 200, 15), "it has only stood still"
            assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
            os.kill(workers[1], signal.SIGKILL)
            said = "ERROR .*the engine is gone.*memory worker . .*was killed by SIGKILL"
            assert eventually(lambda: bool(re.search(said, (tmp_path / "log").read_text())), 60)
            health = http.get("/health")
            assert (health.status_code, "was killed by SIGKILL" in health.text) == (503, True)
        assert server.wait(15) == 1, "a supervisor must see that it failed"
        assert eventually(lambda: not alive(pids), 30), alive(pids)


@pytest.mark.no_retry
@pytest.mark.long(but=["signals1"])
@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGKILL,)])
def test_a_second_signal_or_kill_9_ends_a_busy_server_at_once(
    signals: tuple[signal.Signals, ...], tmp_path: Path
) -> None:
    with ended_all(tmp_path / "log", "--shutdown-timeout=60") as (server, pids):
        body = {**BODY, "max_tokens": 1900}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            server.signal(signals[0])
            if len(signals) > 1:
                assert eventually(lambda: "draining" in (tmp_path / "log").read_text(), 10)
                server.signal(signals[1])
            server.wait(45)
            try:
                rest = list(lines)
            except httpx.RemoteProtocolError:  # it has no time for the end of what is chunked
                rest = []
            assert not [x for x in rest if '"finish_reason":"length"' in x], "it has waited for the end of the stream"
        assert eventually(lambda: not alive(pids), 20), alive(pids)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["m", "--ssl-keyfile", "x"], "--ssl-certfile"),
        (["m", "--metrics-compat", "x"], "--metrics-compat"),
        (["m", "--limits", "body=x"], "--limits body="),
        ([MODEL, "--host", "203.0.113.1"], "--host"),
    ],
)
def test_bad_flags_are_one_line(flags: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    from lamina.cli.launch import main

    assert main(["serve", *flags, "--port", "0"]) == 2
    lines = [x for x in capfd.readouterr().err.splitlines() if x.startswith("lamina-launch")]
    assert len(lines) == 1
    assert words in lines[0]
