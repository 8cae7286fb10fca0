"""The checks of `lamina-launch` before it starts anything, and how it ends what it has started.

Covers: lamina/cli/common/preflight.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from worker_processes import WARM, workers_of

from lamina.cli.launch import main

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "examples/tiny_lm/model")


@pytest.mark.parametrize("command", [["serve", MODEL], ["generate", MODEL, "--prompt", "x"]])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--kv-cache-memory-bytes", "1KiB"],
            "--kv-cache-memory-bytes 1KiB on 2 memory workers cannot hold one sequence of 2048 tokens",
        ),
        (["--memory-workers", "100000"], "--memory-workers must be at most 1024, not 100000"),
        (["--prefill-workers", "2000"], "--prefill-workers must be at most 1024"),
        (["--pipeline", "5000"], "--pipeline must be at most 1025"),
        (["--trace", "/proc/x"], "--trace /proc/x cannot be written"),
        (["--trace", "/nowhere/x"], "--trace /nowhere/x cannot be written"),
    ],
)
def test_one_line_before_anything_starts(
    command: list[str], flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--dry-run", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.long
def test_a_trace_that_can_be_written_is_left_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("kept")
    for path in (new, old):
        assert main(["serve", MODEL, "--port", "0", "--dry-run", "--trace", str(path)]) == 0
    assert old.read_text() == "kept"
    assert not new.exists()


@pytest.mark.long
def test_tokens_for_which_there_is_no_room_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["generate", MODEL, "--prompt", "def f(", "--max-model-len", "64", "--dry-run", "--max-tokens"]
    assert main([*ask, "200"]) == 0
    said = capsys.readouterr().err
    assert "--max-tokens 200 is cut to 6" in said
    assert "at most 64 (--max-model-len)" in said
    assert main([*ask, "32"]) == 0
    assert not capsys.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(300)
def test_sigterm_ends_generate_and_its_workers_before_it() -> None:
    command = [sys.executable, "-m", "lamina.cli.launch", "generate", MODEL, "--prompt", "x", "--ignore-eos"]
    with subprocess.Popen(
        [*command, "--max-tokens", "2000"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1), "it generates"
        workers = [pid for pid, command in workers_of(process.pid) if not command.startswith(WARM)]
        assert len(workers) == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
        assert not [pid for pid in workers if os.path.exists(f"/proc/{pid}")]
