"""The Slurm job of examples/: a job of two nodes, which are network namespaces; only Slurm itself is a stand-in."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import ROOT
from local_text import ASK, MODEL, Known
from spaces import Space, two_spaces

JOB = ROOT / "examples" / "slurm" / "lamina.sbatch"
RUN_S = 110.0


class Slurm:
    """``sbatch`` of one job that has these nodes."""

    def __init__(self, folder: Path, *nodes: Space) -> None:
        self.folder, self.nodes = folder, nodes
        self._programs = folder / "bin"
        self._programs.mkdir()
        (folder / "nodes").write_text(json.dumps({node.host: node.enter for node in nodes}))
        for name in ("srun", "scontrol"):
            words = shlex.join(
                [sys.executable, str(ROOT / "tests" / "support" / "cluster" / "slurm_stand_in.py"), name]
            )
            (self._programs / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            (self._programs / name).chmod(0o700)

    def sbatch(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        """The job's script on its first node, as the batch step of a job."""
        path = [str(self._programs), str(Path(sys.executable).parent), os.environ["PATH"]]
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("LAMINA_", "SLURM_"))}
        own = {
            "SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": ",".join(node.host for node in self.nodes),
            "SLURM_NNODES": str(len(self.nodes)), "SLURM_SUBMIT_DIR": str(self.folder), "PATH": os.pathsep.join(path),
            "SLURM_STAND_IN": str(self.folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        return subprocess.run(
            [*self.nodes[0].enter, "bash", str(JOB), *words], cwd=ROOT, env={**kept, **own, **more},
            capture_output=True, text=True, timeout=RUN_S, check=False,
        )  # fmt: skip

    def steps(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.folder / "steps").read_text().splitlines()]


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Space, Space]]:
    with two_spaces() as spaces:
        yield spaces


@pytest.mark.no_retry
@pytest.mark.long
def test_a_job_of_two_nodes(nodes: tuple[Space, Space], known: Known, tmp_path: Path) -> None:
    """The text is that of one machine; nothing is left on either node, nor the key."""
    slurm = Slurm(tmp_path, *nodes)
    done = slurm.sbatch(*known.command, "--kv-cache-memory-bytes", "16MiB")
    assert done.returncode == 0, done.stderr
    assert done.stdout == known.text
    first, second = sorted(slurm.steps(), key=lambda step: str(step["node"]))
    assert (first["node"], second["node"]) == (nodes[0].host, nodes[1].host)
    assert [step["command"][2] for step in (first, second)] == ["compute", "memory"]  # type: ignore[index]
    assert f"memory has come to {nodes[0].host}:24242 from {nodes[1].address}" in done.stderr
    assert not [node.processes() for node in nodes if node.processes()]
    assert not list(tmp_path.glob(".lamina-*"))


@pytest.mark.long
def test_a_driver_that_cannot_start_ends_the_job(nodes: tuple[Space, Space], tmp_path: Path) -> None:
    """And its workers, which would wait for it for minutes."""
    done = Slurm(tmp_path, *nodes).sbatch(
        "generate", MODEL, *ASK, "--kv-cache-memory-bytes", "16MiB", DRIVER_ADDRESS="10.255.255.254:7000"
    )
    assert done.returncode == 2
    assert "cannot listen at 10.255.255.254:7000: " in done.stderr
    assert not [node.processes() for node in nodes if node.processes()]


def test_one_node_is_too_few(nodes: tuple[Space, Space], tmp_path: Path) -> None:
    done = Slurm(tmp_path, nodes[0]).sbatch("generate", MODEL, *ASK)
    assert done.returncode == 2
    assert "take two or more (sbatch --nodes=2)" in done.stderr


def test_the_job_asks_slurm_for_what_slurm_knows() -> None:
    """The names are those of sbatch(1)."""
    known = {"job-name", "nodes", "ntasks-per-node", "exclusive", "time"}
    text = JOB.read_text()
    asked = re.findall(r"^#SBATCH --([\w-]+)", text, re.MULTILINE)
    assert asked
    assert set(asked) <= known
    assert text.index("#SBATCH") < text.index("set -euo")  # sbatch reads no further than the first command
