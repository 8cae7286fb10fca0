"""A real server process for tests: started with the shipped model, found by the line that it prints."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from forked import ForkedProgram, Program
from shipped import MODEL as MODEL
from shipped import ROOT as ROOT

from lamina.utils.proc import descendants_of, is_alive

START_S = 240.0


def certificate(folder: Path) -> dict[str, str]:
    """A key and a certificate of localhost, in ``folder``; by the name of their option."""
    made = {"ssl_keyfile": str(folder / "key.pem"), "ssl_certfile": str(folder / "cert.pem")}
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-keyout", made["ssl_keyfile"], "-out", made["ssl_certfile"]],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return made


def _fresh(words: Sequence[str], stderr: IO[bytes], env: dict[str, str]) -> Any:
    command = [sys.executable, "-m", "lamina.cli.launch", *words]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, env={**os.environ, **env}, text=True
    )


class Running:
    """``url`` is where it serves; ``log`` is a file with all that it wrote to stderr. ``fresh``: in a process that has
    imported nothing, as a user's; else forked, which is the same to all that a test sees, for a tenth of the CPU time.
    """

    def __init__(
        self, log: Path, *flags: str, env: dict[str, str] | None = None, fresh: bool = False, model: str = MODEL
    ) -> None:
        self.log = log
        words, own = ["serve", model, "--port", "0", *flags], {"OMP_NUM_THREADS": "1", **(env or {})}
        with log.open("wb") as stderr:
            self.process: Program = (
                _fresh(words, stderr, own) if fresh else ForkedProgram(words, stderr=stderr, env=own)
            )
        self.url = self._await_url()

    def _await_url(self) -> str:
        out: IO[str] | None = self.process.stdout
        assert out is not None
        readable, _, _ = select.select([out], [], [], START_S)
        line = out.readline() if readable else ""
        if " on " not in line:
            self.kill()
            raise AssertionError(f"the server did not start: {line!r} {self.log.read_text()}")
        return line.rsplit(" on ", 1)[1].strip()

    def descendants(self) -> list[int]:
        """All processes that it has started, and theirs."""
        return descendants_of(self.process.pid)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """The end, in any case."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def alive(pids: list[int]) -> list[int]:
    """Returns the running processes of ``pids``; zombies, which only wait to be reaped, do not count."""
    return [pid for pid in pids if is_alive(pid)]


def eventually(condition: object, timeout_s: float) -> bool:
    """Returns whether ``condition()`` becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        select.select([], [], [], 0.02)
    return bool(condition())  # type: ignore[operator]
