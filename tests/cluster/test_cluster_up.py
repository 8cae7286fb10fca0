"""`lamina-launch cluster`: its real orders to hosts, all of which are this one; only Ray itself is a stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lamina.cli.launch import main
from lamina.executor.hosts import ray_node

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = "10.255.255.254"
BROKEN = "127.0.0.9"  # Ray does not start there
RAY = f"""
import signal, sys
at = sys.argv[sys.argv.index("--node-ip-address") + 1]
if at == "{BROKEN}":
    sys.exit("no room for Ray")
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
print("Ray runtime started.", flush=True)
signal.pause()
"""
HEAD = "{address: 127.0.0.1, compute: 1}"
SECOND = "{address: 127.0.0.2, memory: 2}"


class Hosts:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        package = folder / "stand_in" / "ray" / "scripts"
        package.mkdir(parents=True)
        for file in (package.parent / "__init__.py", package / "__init__.py"):
            file.touch()
        (package / "scripts.py").write_text(RAY)

    def file(self, *hosts: str, more: str = "ssh: ['false']") -> str:
        path = self.folder / "hosts.yaml"
        path.write_text(f"{more}\nhosts:\n" + "".join(f"  - {host}\n" for host in hosts))
        return str(path)

    def up(self) -> set[str]:
        """Addresses where Ray runs."""
        folders = (self.folder / "state" / "lamina" / "hosts").glob("*")
        return {folder.name for folder in folders if ray_node.running_pid(folder) is not None}


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "stand_in"), str(ROOT)]))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    yield made
    for address in made.up():
        ray_node.down({"address": address})


def test_a_cluster_comes_up_and_goes(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    file = hosts.file(HEAD, SECOND)
    assert main(["cluster", "up", file]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[:2]] == ["started", "started"]
    assert hosts.up() == {"127.0.0.1", "127.0.0.2"}
    assert main(["cluster", "down", file]) == 0
    assert capsys.readouterr().out.count("ended") == 2
    assert not hosts.up()


@pytest.mark.long(but=["10.255.255.254-10.255.255.254 cannot be reached"])
@pytest.mark.parametrize(
    ("bad", "words"),
    [(NOWHERE, f"{NOWHERE} cannot be reached"), (BROKEN, f"{BROKEN}: Ray did not start: no room for Ray")],
)
def test_hosts_that_run_go_on_where_a_new_one_fails(
    bad: str, words: str, hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the workers that this call started are ended."""
    assert main(["cluster", "up", hosts.file(HEAD, SECOND)]) == 0
    pids = {a: ray_node.running_pid(ray_node.folder_of(a)) for a in hosts.up()}
    capsys.readouterr()
    new = "{address: 127.0.0.3, memory: 1}"
    assert main(["cluster", "up", hosts.file(HEAD, SECOND, new, f"{{address: {bad}}}")]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert "ended what this call has started: 127.0.0.3" in said.err
    assert {a: ray_node.running_pid(ray_node.folder_of(a)) for a in hosts.up()} == pids


def test_all_that_fails_is_told(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "up", hosts.file(HEAD, f"{{address: {NOWHERE}}}", f"{{address: {BROKEN}}}")]) == 2
    said = capsys.readouterr().err
    assert f"{NOWHERE} cannot be reached" in said
    assert f"{BROKEN}: Ray did not start" in said
    assert "ended what this call has started: 127.0.0.1" in said
    assert not hosts.up()


def test_a_head_that_fails_leaves_the_others_alone(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "up", hosts.file(HEAD, SECOND)]) == 0
    assert main(["cluster", "up", hosts.file(f"{{address: {NOWHERE}}}", HEAD, SECOND)]) == 2
    assert hosts.up() == {"127.0.0.1", "127.0.0.2"}
    assert "ended what" not in capsys.readouterr().err


def test_what_ray_keeps_is_told(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    """It reads its resources once, when it starts."""
    assert main(["cluster", "up", hosts.file(HEAD, SECOND)]) == 0
    capsys.readouterr()
    assert main(["cluster", "up", hosts.file(HEAD, SECOND)]) == 0
    same = capsys.readouterr().out
    assert same.count("was up already") == 2
    assert "Ray keeps" not in same
    assert main(["cluster", "up", hosts.file(HEAD, "{address: 127.0.0.2, memory: 3, rack: b}")]) == 0
    head, second, fix, *_ = capsys.readouterr().out.splitlines()
    assert "Ray keeps" not in head
    assert (
        second == "127.0.0.2  was up already  lamina_memory 2: Ray keeps what it was started with, not memory 3, rack b"
    )
    assert fix.startswith("to change that: lamina-launch cluster down ")


def test_a_host_that_does_not_answer_does_not_hide_the_others(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "up", hosts.file(SECOND)]) == 0
    capsys.readouterr()
    assert main(["cluster", "status", hosts.file(f"{{address: {NOWHERE}}}", SECOND)]) == 1
    said = capsys.readouterr()
    assert said.out == f"{NOWHERE}  does not answer  not in the cluster\n127.0.0.2  up  not in the cluster\n"
    assert f"{NOWHERE} cannot be reached" in said.err


def test_two_calls_at_once_start_one_ray(hosts: Hosts) -> None:
    command = [sys.executable, "-m", "lamina.cli.launch", "cluster", "up", hosts.file(HEAD)]
    calls = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(3)]
    said = [call.communicate(timeout=60)[0].split()[1] for call in calls]
    assert sorted(said) == ["started", "was", "was"]
    assert main(["cluster", "down", hosts.file(HEAD)]) == 0
    running = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in running.splitlines() if str(hosts.folder) in line and "ray" in line]


def test_an_order_to_end_what_another_call_started_is_none(hosts: Hosts) -> None:
    file = hosts.file(HEAD)
    assert main(["cluster", "up", file]) == 0
    order = {"order": "down", "address": "127.0.0.1", "call": "another"}
    done = subprocess.run(
        [sys.executable, "-m", "lamina.executor.hosts.ray_node"],
        input=json.dumps(order), capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == {"ended": False}
    assert hosts.up() == {"127.0.0.1"}
