"""Early refusals: before torch is imported, and before any worker starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from shipped import MODEL, ROOT

from lamina.facts.gpus import why_no_gpu

pytestmark = pytest.mark.timeout(120)
CLOSED = "http://127.0.0.1:9"  # no hub is there


def refused(tmp_path: Path, *words: str) -> tuple[list[str], set[str]]:
    """The lines of a command that refuses, and the modules that its processes have imported."""
    command = [sys.executable, "-X", "importtime", "-P", "-m", "lamina.cli.launch", *words]
    env = {**os.environ, "HF_ENDPOINT": CLOSED, "HF_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    return [line for line in lines if not line.startswith("import time:")], imported


@pytest.mark.parametrize("name", ["nosuch", "no/such"])
def test_a_model_that_is_nowhere(name: str, tmp_path: Path) -> None:
    lines, imported = refused(tmp_path, "serve", name, "--port", "0")
    (line,) = lines
    assert line.startswith(f"lamina-launch serve: {name} is not a directory here, and the hub cannot be reached: ")
    assert "lamina.models.checkpoint" in imported
    assert not imported & {"torch", "transformers", "uvicorn"}


@pytest.mark.parametrize("command", ["serve MODEL --port 0", "generate MODEL --prompt x"])
@pytest.mark.parametrize("flag", ["--compute-device", "--memory-device"])
def test_a_gpu_that_is_not_there(command: str, flag: str, tmp_path: Path) -> None:
    if not (why := why_no_gpu()):
        pytest.skip("this host may have a GPU")
    lines, imported = refused(tmp_path, *command.replace("MODEL", str(ROOT / MODEL)).split(), flag, "cuda")
    name = command.split()[0]
    assert lines == [
        f"lamina-launch {name}: {flag} cuda: {why}: use cpu, or a torch built for CUDA on a host with a GPU"
    ]
    assert not imported & {"torch", "transformers", "uvicorn"}
