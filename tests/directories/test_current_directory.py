"""Processes import nothing from the current directory: those of every launcher, and those that commands start."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_cluster import FakeCluster
from poison import ASK, END_S, MODEL, PROMPT, ROOT, TOKENS, PoisonedDirectory, console

from lamina.executor.launchers import LAUNCHERS

pytestmark = pytest.mark.timeout(300)
WORKERS = ("--memory-workers", "2", "--kv-cache-memory-bytes", "16MiB")


@pytest.fixture
def poisoned(tmp_path: Path) -> Iterator[PoisonedDirectory]:
    """Asserts, after the test, that no trap was imported."""
    made = PoisonedDirectory(tmp_path)
    yield made
    assert made.imported == ""


@pytest.fixture(scope="module")
def continuation() -> str:
    """The greedy text of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
    return str(tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :]))


def locally(poisoned: PoisonedDirectory, folder: Path) -> str:
    """Workers are forked from the warm process."""
    return poisoned.launch("generate", MODEL, *ASK, *WORKERS, "--temperature", "0", "--json")


def by_hand(poisoned: PoisonedDirectory, folder: Path) -> str:
    """The printed commands are run in the directory, too."""
    key, hosts = folder / "key", folder / "hosts.yaml"
    key.write_text("5e" * 32)
    key.chmod(0o600)
    hosts.write_text(f"python: {sys.executable}\nhosts:\n  - {{address: 127.0.0.2, compute: 1, memory: 2}}\n")
    poisoned.environment["LAMINA_CLUSTER_KEY_FILE"] = str(key)
    where = ("--launcher", "static", "--driver", "127.0.0.1:0", "--cluster", str(hosts))
    workers = list[subprocess.Popen[str]]()
    with poisoned.program("generate", MODEL, *ASK, *WORKERS, "--temperature", "0", "--json", *where) as driver:
        try:
            assert driver.stderr is not None
            while len(workers) < 3:
                line = driver.stderr.readline()
                assert line, "the driver has ended"
                if " worker " in line and not line.startswith("#"):
                    workers.append(poisoned.start(shlex.split(line), stdout=None, stderr=None))
            out, err = driver.communicate(timeout=END_S)
            assert driver.returncode == 0, err
            assert [worker.wait(END_S) for worker in workers] == [0, 0, 0]
        finally:
            for process in (driver, *workers):
                process.kill()
                process.wait()
    return str(out)


def over_ray(poisoned: PoisonedDirectory, folder: Path) -> str:
    """Ray runs elsewhere, and would have its workers import from the driver's directory. The driver is one of `uv run`:
    Ray would copy that directory to all hosts.
    """
    pytest.importorskip("ray")
    nodes = ({}, {"resources": {"lamina_compute": 1, "lamina_memory": 2}})
    cluster = FakeCluster(folder, *nodes)
    poisoned.environment.update(cluster.environment)
    try:
        (poisoned.path / "run").write_text('"$@"\n')
        words = ("generate", MODEL, *ASK, *WORKERS, "--temperature", "0", "--json", "--cluster", cluster.address)
        return poisoned.output(poisoned.start(["uv", "run", *console(words)], executable="/bin/sh"))
    finally:
        cluster.close()


STARTS: dict[str, Callable[[PoisonedDirectory, Path], str]] = {
    "local": locally,
    "static": by_hand,
    "ray": over_ray,
}
MARKS = {"static": [pytest.mark.long], "ray": [pytest.mark.slow]}


@pytest.mark.parametrize("launcher", [pytest.param(name, marks=MARKS.get(name, ())) for name in LAUNCHERS])
def test_workers_of_every_launcher_import_nothing_from_the_current_directory(
    launcher: str, poisoned: PoisonedDirectory, tmp_path: Path, continuation: str
) -> None:
    told = json.loads(STARTS[launcher](poisoned, tmp_path))
    assert told["outputs"][0]["text"] == continuation


@pytest.mark.long
def test_workers_that_are_not_forked_import_nothing_from_the_current_directory(
    poisoned: PoisonedDirectory, tmp_path: Path, continuation: str
) -> None:
    """OpenMP lays its threads on cores as it is loaded: such workers are fresh processes."""
    poisoned.environment["OMP_PROC_BIND"] = "false"
    assert json.loads(locally(poisoned, tmp_path))["outputs"][0]["text"] == continuation


@pytest.mark.long
def test_a_server_and_its_engine_import_nothing_from_the_current_directory(
    poisoned: PoisonedDirectory, continuation: str
) -> None:
    with poisoned.program("serve", MODEL, "--port", "0", "--dtype", "float32", *WORKERS, stderr=None) as server:
        try:
            assert server.stdout is not None
            assert select.select([server.stdout], [], [], END_S)[0], "the server did not start"
            url = server.stdout.readline().split()[-1]
            body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            headers = {"Content-Type": "application/json"}
            asked = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(asked, timeout=END_S) as answer:
                assert json.load(answer)["choices"][0]["text"] == continuation
            server.send_signal(signal.SIGINT)
            assert server.wait(END_S) == 0
        finally:
            server.kill()


@pytest.mark.long
def test_check_imports_nothing_from_the_current_directory(poisoned: PoisonedDirectory) -> None:
    out = poisoned.launch("check", MODEL, "--axis", "memory workers", "--max-tokens", "4")
    assert "memory workers" in out


@pytest.mark.long
def test_a_drill_imports_nothing_from_the_current_directory(poisoned: PoisonedDirectory) -> None:
    few = ("--count", "1", "--streams", "4", "--noticed-s", "0", "--pause-s", "0", "--json")
    told = json.loads(poisoned.launch("drill", MODEL, *few, "--faults", "kill-memory"))
    assert (told["hits"], told["left"]) == (1, 0)


def test_benchmarks_import_nothing_from_the_current_directory(poisoned: PoisonedDirectory) -> None:
    few = ("--transport", "shm", "--sizes", "64", "--count", "100", "--warm-up", "10", "--json")
    rows = [json.loads(line) for line in poisoned.launch("bench", "pingpong", *few).splitlines()]
    assert rows


RAY = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
code = "import sys; print('Ray runtime started.', sys.flags.safe_path, flush=True)"
subprocess.run([sys.executable, "-c", code], check=True)
signal.pause()
"""


@pytest.mark.parametrize("python", ["", sys.executable], ids=["its own python", "the file's python"])
def test_orders_to_hosts_import_nothing_from_the_current_directory(
    python: str, poisoned: PoisonedDirectory, tmp_path: Path
) -> None:
    """Ray is a stand-in. One host is this one, the other has a login that begins in the same directory."""
    package = tmp_path / "stand_in" / "ray" / "scripts"
    package.mkdir(parents=True)
    for file in (package.parent / "__init__.py", package / "__init__.py"):
        file.touch()
    (package / "scripts.py").write_text(RAY)
    ssh, hosts = tmp_path / "ssh", tmp_path / "hosts.yaml"
    ssh.write_text('#!/bin/sh\nexec sh -c "$2"\n')
    ssh.chmod(0o700)
    file = [f"ssh: [{ssh}]", *([f"python: {python}"] if python else []), "hosts:"]
    hosts.write_text("\n".join([*file, "  - {address: 127.0.0.1, compute: 1}", "  - {address: 10.255.255.254}\n"]))
    poisoned.environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "stand_in"), str(ROOT)])
    poisoned.environment["XDG_STATE_HOME"] = str(tmp_path / "state")
    try:
        assert poisoned.launch("cluster", "up", str(hosts)).count("  started  ") == 2
    finally:
        assert poisoned.launch("cluster", "down", str(hosts)).count("  ended") == 2
    logs = [log.read_text().split()[-1] for log in (tmp_path / "state" / "lamina" / "hosts").glob("*/log")]
    assert logs == ["True", "True"], "what Ray starts in turn is safe, too"


@pytest.mark.slow
def test_a_cluster_that_was_started_there_imports_nothing_from_the_current_directory(
    poisoned: PoisonedDirectory, tmp_path: Path, continuation: str
) -> None:
    """Ray's own processes, a bare checkout's workers, and what these start."""
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text(f"port: {port}\nhosts:\n  - {{address: 127.0.0.1, compute: 1, memory: 2, cores: 3}}\n")
    poisoned.environment["XDG_STATE_HOME"] = str(tmp_path / "state")
    try:
        assert "  started  " in poisoned.launch("cluster", "up", str(hosts))
        over = ("--temperature", "0", "--json", "--cluster", str(hosts))
        told = json.loads(poisoned.launch("generate", MODEL, *ASK, *WORKERS, *over))
        assert told["outputs"][0]["text"] == continuation
    finally:
        assert "  ended" in poisoned.launch("cluster", "down", str(hosts))
