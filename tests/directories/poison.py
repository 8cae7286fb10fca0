"""A current directory in which every module is a trap: its import leaves a line in a file, and fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "examples" / "tiny_lm" / "model")
PROMPT, TOKENS = "class Stack:", 12
ASK = ("--prompt", PROMPT, "--max-tokens", str(TOKENS), "--ignore-eos", "--dtype", "float32")
END_S = 240.0
# This package, packages that its processes import, and modules of Python that they import early.
TRAPS = (
    "lamina/__init__.py", "msgspec.py", "torch.py", "ray.py", "numpy.py", "transformers.py", "nvidia/__init__.py",
    "argparse.py", "socket.py", "json/__init__.py", "sitecustomize.py",
)  # fmt: skip


class PoisonedDirectory:
    """``path`` is the directory; ``environment`` is for programs in it, which find a bare checkout by PYTHONPATH."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.path, self._marker = folder / "poisoned", folder / "imported"
        code = (
            f"import sys\nwith open({str(self._marker)!r}, 'a') as file:\n"
            "    file.write(f'{__name__} by {sys.orig_argv}\\n')\nraise ImportError(f'{__name__} is a trap')\n"
        )
        for trap in TRAPS:
            (self.path / trap).parent.mkdir(parents=True, exist_ok=True)
            (self.path / trap).write_text(code)
        self.environment = bare(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **variables)

    @property
    def imported(self) -> str:
        """A line for each trap that was imported, with the command of the process."""
        return self._marker.read_text() if self._marker.exists() else ""

    def program(self, *words: str, **kwargs: object) -> subprocess.Popen[str]:
        """`lamina-launch` with ``words``, as its console script starts it."""
        return self.start(console(words), **kwargs)

    def start(self, command: Sequence[str], **kwargs: object) -> subprocess.Popen[str]:
        """``command`` here. Its output is text in pipes unless ``kwargs`` of Popen say otherwise."""
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": self.environment}
        return subprocess.Popen(command, cwd=self.path, **{**given, **kwargs})  # type: ignore[call-overload,no-any-return]

    def launch(self, *words: str) -> str:
        """The standard output of `lamina-launch` with ``words``, which must end well."""
        return self.output(self.program(*words))

    def output(self, started: subprocess.Popen[str]) -> str:
        """The standard output of a process of this directory, which must end well."""
        with started as process:
            try:
                out, err = process.communicate(timeout=END_S)
            finally:
                process.kill()
        assert process.returncode == 0, err
        return str(out)


def bare(**variables: str) -> dict[str, str]:
    """The environment of a user who has set ``variables``: no import path of tests, and none of their modules."""
    ours = ("PYTHON", "LAMINA_TRANSPORTS", "LAMINA_MEDIA")
    return {**{name: value for name, value in os.environ.items() if not name.startswith(ours)}, **variables}


def console(words: Sequence[str]) -> list[str]:
    """The script that pip makes of `lamina-launch` has its own folder in front of the path, never the current one."""
    return [sys.executable, "-P", "-m", "lamina.cli.launch", *words]


def child(code: str, directory: Path, variables: Mapping[str, str], *flags: str, python: str = sys.executable) -> str:
    """The output of ``code`` in a process of its own, which must end well."""
    done = subprocess.run(
        [python, *flags, "-c", code], cwd=directory, env=bare(**variables), capture_output=True, text=True,
        timeout=END_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
