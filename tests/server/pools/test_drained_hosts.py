"""A host whose workers people have started, by commands that the server prints, is drained and can be taken away."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from running import ROOT, Running, eventually

from lamina.cli.launch import main

pytestmark = pytest.mark.timeout(300)
KEY = "the-operator"
BODY = {"prompt": "def main(", "max_tokens": 24, "temperature": 0.0, "logprobs": 0}
HOSTS = "hosts:\n  - {address: 127.0.0.2, compute: 1, memory: 1}\n  - {address: 127.0.0.3, memory: 1}\n"
SOON_S = 60.0


@pytest.mark.long
def test_a_host_whose_workers_people_started_is_drained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts, key, log = tmp_path / "hosts.yaml", tmp_path / "key", tmp_path / "log"
    hosts.write_text(HOSTS)
    key.write_text("ab" * 32)
    key.chmod(0o600)
    log.touch()
    env = {"LAMINA_ADMIN_KEY": KEY, "LAMINA_CLUSTER_KEY_FILE": str(key)}
    commands = list[subprocess.Popen[str]]()

    def printed() -> list[str]:
        return [line for line in log.read_text().splitlines() if line.startswith("env ") and " worker " in line]

    def start_workers() -> None:
        if eventually(lambda: len(printed()) == 3, SOON_S):
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
            given = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            commands.extend(subprocess.Popen(x, shell=True, cwd=ROOT, env=given, text=True) for x in printed())

    by_hand = threading.Thread(target=start_workers)
    by_hand.start()
    flags = ("--launcher", "static", "--driver", "127.0.0.1:0", "--cluster", str(hosts))
    server = Running(
        log, *flags, "--memory-workers", "2", "--kv-cache-memory-bytes", "16MiB", "--deterministic", env=env
    )
    try:
        by_hand.join(SOON_S)
        with httpx.Client(base_url=server.url, timeout=120) as client:
            wanted = client.post("/v1/completions", json=BODY).json()["choices"]
            assert main(["scale", server.url, "--memory-workers", "1", "--admin-key", KEY]) == 2
            assert main(["drain", server.url, "--host", "127.0.0.2", "--admin-key", KEY]) == 2
            assert main(["drain", server.url, "--host", "127.0.0.3", "--admin-key", KEY]) == 0
            said, refused = capsys.readouterr()
            assert "the memory workers on 127.0.0.3 have gone, 1 left; streams paused for" in said
            assert "workers of --launcher static are started by hand: drain some" in refused
            assert "--host 127.0.0.2: compute-0 is there, too" in refused
            (gone,) = [x for x, line in zip(commands, printed(), strict=True) if line.endswith("--host 127.0.0.3")]
            assert gone.wait(SOON_S) == 0
            assert client.post("/v1/completions", json=BODY).json()["choices"] == wanted
            assert [x.poll() for x in commands if x is not gone] == [None, None]
    finally:
        server.kill()
        for command in commands:
            command.kill()
            command.wait()
