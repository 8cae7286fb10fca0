"""Programs that tests start, forked from the warm process of these tests: see tests/support/models/forked_program.py.

They are to a test what a user's are, workers and warm process included, for a tenth of the CPU time.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Protocol

from lamina.executor.launchers.local import worker_environment
from lamina.executor.launchers.zygote_client import START, ForkedProcess, NoForkError

ROOT = Path(__file__).resolve().parents[2]
FOR_EVER_S = 600.0
TRIES = 5  # of a minute each, for the warm process of a busy machine to have imported all


class Program(Protocol):
    """The interface of subprocess.Popen, for a program that prints lines of text."""

    pid: int
    stdout: IO[str] | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


class ForkedProgram:
    """`lamina-launch` with these words, in the repository's root; with ``code``, Python that has them as sys.argv[1:].

    ``stderr``: a file; None = nowhere. ``env``: variables in addition to those of this process.
    """

    def __init__(
        self, words: Sequence[str], *, code: str = "", stderr: IO[bytes] | None = None, env: Mapping[str, str] = {}
    ) -> None:
        own = {**worker_environment(0), **env}
        self._control, theirs = socket.socketpair()
        read, write = os.pipe()
        with ExitStack() as after:
            after.enter_context(theirs)
            after.callback(os.close, write)
            error = stderr or after.enter_context(open(os.devnull, "wb"))
            self._process = forked(own, theirs)
            told = json.dumps({"words": list(words), "code": code}).encode()
            socket.send_fds(self._control, [told], [write, error.fileno()])
        self.pid, self.kill = self._process.pid, self._process.kill
        self.stdout: IO[str] | None = os.fdopen(read)

    def poll(self) -> int | None:
        return self._process.exit_status if self._process.has_ended() else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._process.has_ended(FOR_EVER_S if timeout is None else timeout):
            raise subprocess.TimeoutExpired("lamina-launch", timeout or FOR_EVER_S)
        assert self._process.exit_status is not None
        return self._process.exit_status

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


def forked(own: Mapping[str, str], control: socket.socket) -> ForkedProcess:
    """The process of a program that learns over ``control`` what to be."""
    warm = START.get(own)
    assert warm is not None
    for _ in range(TRIES - 1):
        with suppress(NoForkError):
            return warm.fork("forked_program:serve_program", (), own, control)
    return warm.fork("forked_program:serve_program", (), own, control)


def launch(*words: str, code: str = "", env: Mapping[str, str] = {}) -> str:
    """Returns the output of `lamina-launch`, or of ``code``, with these words; it must end well."""
    with TemporaryFile() as stderr:
        program = ForkedProgram(words, code=code, stderr=stderr, env=env)
        assert program.stdout is not None
        with program.stdout:
            out = program.stdout.read()
        status = program.wait()
        stderr.seek(0)
        assert status == 0, f"exit status {status}: {stderr.read().decode()}"
    return out
