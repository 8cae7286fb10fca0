"""A competitor in an environment and a process of its own: a question is a line of JSON, and so is its answer.

``Child`` is the benchmark's side, ``serve`` the other. Between its turns the process waits for the next line and
computes nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Fields = dict[str, Any]
PERF = Path(__file__).resolve().parents[1]


class Child:
    """``python script arguments``, in ``folder``: what it starts by ``python -m`` is of there before all else. It finds
    the modules of perf/ where it has no other PYTHONPATH. Raises OSError or RuntimeError, with the cause, where it
    cannot take part.
    """

    def __init__(
        self, python: str, script: str, arguments: list[str], folder: Path | None = None, **environment: str
    ) -> None:
        self._process = subprocess.Popen(
            [python, script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": str(PERF), **environment},
            cwd=folder,
        )
        try:
            self._answer()
        except RuntimeError:
            self.close()
            raise

    def ask(self, **fields: Any) -> Fields:
        """The answer to a question."""
        pipe = self._process.stdin
        if pipe is None:
            raise RuntimeError("its process has no stdin")
        try:
            pipe.write(json.dumps(fields) + "\n")
            pipe.flush()
        except BrokenPipeError as e:
            raise RuntimeError("its process has ended") from e
        return self._answer()

    def close(self) -> None:
        """End the process."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()

    def _answer(self) -> Fields:
        line = self._process.stdout.readline() if self._process.stdout else ""
        answer: Fields = json.loads(line or '{"error": "its process has ended"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


def serve(begin: Callable[[], Callable[[Fields], Fields]]) -> None:
    """The other side: ``begin()`` gives what answers questions, until stdin ends. What libraries print goes to
    stderr.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        reply = begin()
    except Exception as e:  # noqa: BLE001 - the benchmark reports it
        return answer(error=f"{type(e).__name__}: {e}")
    answer()
    for line in sys.stdin:
        answer(**reply(json.loads(line)))
    return None
