"""A server loses workers, and its engine: streams stay open and get what they would have got, and /health says why they
wait."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import Running, alive, eventually

pytestmark = pytest.mark.timeout(300)
BODY: dict[str, Any] = {
    "prompt": "def f(", "max_tokens": 200, "ignore_eos": True, "stream": True, "temperature": 0.8, "seed": 5,
    "frequency_penalty": 0.3, "n": 2,
}  # fmt: skip


def texts(lines: list[str]) -> dict[int, str]:
    """Returns the text of each choice, from the events of a stream."""
    found: dict[int, str] = {}
    for line in lines:
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


@pytest.mark.long
def test_streams_go_on_when_workers_die(tmp_path: Path) -> None:
    # KV that is built again has the same tokens in float32; in half precision that depends on the processor.
    server = Running(tmp_path / "log", "--prefill-workers=1", "--max-recoveries=20", "--dtype=float32")
    try:
        with httpx.Client(base_url=server.url, timeout=120) as http:

            def stream(victim: str) -> dict[int, str]:
                lines = []
                with http.stream("POST", "/v1/completions", json=BODY) as response:
                    for line in response.iter_lines():
                        lines.append(line)
                        if victim and len(lines) == 40:
                            os.kill(worker(server, victim), signal.SIGKILL)
                            # A memory worker is there again before a busy machine has answered.
                            assert victim == "memory" or eventually(lambda: health(http) == (503, "recovering"), 20)
                assert lines[-2:] == ["data: [DONE]", ""]
                return texts(lines)

            wanted = stream("")
            assert len(wanted) == 2
            for victim in ("memory", "compute", "engine"):
                assert stream(victim) == wanted
                assert eventually(lambda: health(http) == (200, "ok"), 60)
            # A worker that dies while no request runs:
            os.kill(worker(server, "compute"), signal.SIGKILL)
            assert eventually(lambda: health(http) == (503, "recovering"), 20)
            assert eventually(lambda: health(http) == (200, "ok"), 60)
            assert stream("") == wanted
            # One that is stopped then, of each kind: a probe that waits for 200 would wait for ever.
            for victim in ("prefill", "memory", "compute", "engine"):
                os.kill(stopped := worker(server, victim), signal.SIGSTOP)
                assert eventually(partial(gone, stopped), 60), f"{victim}: nobody replaces it"
                assert eventually(lambda: health(http) == (200, "ok"), 60)
            assert stream("") == wanted
    finally:
        pids = server.descendants()
        server.kill()
    assert eventually(lambda: not alive(pids), 30), alive(pids)


def gone(pid: int) -> bool:
    return not alive([pid])


def health(http: httpx.Client) -> tuple[int, str]:
    answer = http.get("/health")
    return answer.status_code, answer.json()["status"]


def worker(server: Running, role: str) -> int:
    """One of them."""
    others = {"engine": "server.engine_client.engine_process", "prefill": "workers.prefill.main"}
    module = others.get(role, f"workers.{role}.main")
    wanted = f"lamina.{module}:".encode()
    return next(p for p in server.descendants() if wanted in Path(f"/proc/{p}/cmdline").read_bytes())


def descriptors(pid: int) -> Counter[str]:
    """Counts the descriptors of a process, by kind."""
    kinds = Counter[str]()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            kinds[os.readlink(f"/proc/{pid}/fd/{fd}").partition(":")[0]] += 1
    return kinds


@pytest.mark.no_retry
@pytest.mark.slow
@pytest.mark.parametrize("victims", [["engine"] * 11, ["memory", "compute", "prefill"] * 4], ids=["engines", "workers"])
def test_a_server_keeps_no_descriptor_of_those_that_died(victims: list[str], tmp_path: Path) -> None:
    """They are killed at rest, one after the other; a request is answered before each and after all."""
    server = Running(tmp_path / "log", "--prefill-workers=1", "--max-recoveries=100")
    try:
        counts = list[dict[str, Counter[str]]]()
        for victim in [*victims, ""]:
            with httpx.Client(base_url=server.url, timeout=120) as http:
                assert http.post("/v1/completions", json={**BODY, "max_tokens": 8, "stream": False}).is_success
            counts.append({"server": descriptors(server.process.pid), "engine": descriptors(worker(server, "engine"))})
            if victim:
                os.kill(dead := worker(server, victim), signal.SIGKILL)
                assert eventually(partial(is_replaced, server, victim, dead), 120)
        for name in counts[0]:  # the first deaths may open what stays, such as another warm process
            pid = server.process.pid if name == "server" else worker(server, "engine")
            assert eventually(lambda n=name, p=pid: not descriptors(p) - counts[3][n], 10), (  # type: ignore[misc]
                f"{name}: {descriptors(pid) - counts[3][name]} more"
            )
    finally:
        server.kill()


def is_replaced(server: Running, role: str, dead: int) -> bool:
    with suppress(OSError, StopIteration), httpx.Client(base_url=server.url, timeout=120) as http:
        return worker(server, role) != dead and health(http) == (200, "ok")
    return False
