"""``lamina-launch chat``, over a real terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from running import Running
from shipped import MODEL, ROOT

from lamina.cli.launch import main

START_S = 240.0
pytestmark = [pytest.mark.timeout(600)]


class Terminal:
    """A program, and the terminal on which it runs. ``shown``: what it has printed there."""

    def __init__(self, *words: str) -> None:
        command = ["setsid", "--ctty", sys.executable, "-m", "lamina", "chat", *words]
        self._ours, theirs = pty.openpty()
        environ = {**os.environ, "TERM": "dumb", "OMP_NUM_THREADS": "1"}
        with os.fdopen(theirs, "rb", 0) as end:
            self.process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, cwd=ROOT, env=environ)
        self.shown = ""

    def until(self, pattern: str, start: int = 0) -> re.Match[str]:
        """Wait until what is shown from ``start`` on matches."""
        deadline = time.monotonic() + START_S
        while not (found := re.compile(pattern, re.DOTALL).search(self.shown, start)):
            if not select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise AssertionError(f"{pattern!r} is not in {self.shown!r}")
            try:
                self.shown += os.read(self._ours, 4096).decode(errors="replace").replace("\r\n", "\n")
            except OSError:  # the program has ended
                raise AssertionError(f"{pattern!r} is not in {self.shown!r}") from None
        return found

    def say(self, line: str) -> int:
        """Type a line. Returns where its answer begins."""
        os.write(self._ours, line.encode() + b"\n")
        return self.until(re.escape(line) + "\n", len(self.shown)).end()

    def key(self, control: int) -> None:
        """Press a key that the terminal handles, such as Ctrl-C."""
        os.write(self._ours, termios.tcgetattr(self._ours)[6][control])

    def end(self) -> int:
        """Wait for the program's end."""
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)
        os.close(self._ours)


@contextmanager
def terminal(*words: str) -> Iterator[Terminal]:
    shown = Terminal(*words)
    try:
        yield shown
    finally:
        shown.close()


def converse(shown: Terminal) -> None:
    """Do what a user can do, whatever answers."""
    shown.until("/quit or Ctrl-D ends.*\n> ")
    first = shown.until("(.*)\n> ", shown.say("Write a class."))[1]
    assert first.strip()
    again = shown.until("(.*)\n> ", shown.say("Write a class."))[1]
    shown.until("> ", shown.say("/new"))
    assert shown.until("(.*)\n> ", shown.say("Write a class."))[1] == first
    shown.until("> ", shown.say("/new"))
    shown.until("> ", shown.say("/system Answer in French, and at length."))
    assert shown.until("(.*)\n> ", shown.say("Write a class."))[1] not in (first, again)
    shown.until("/new begins anew.*> ", shown.say("/nonsense"))
    at = len(shown.shown)
    shown.key(termios.VINTR)
    shown.until("> ", at)
    shown.key(termios.VEOF)
    assert shown.end() == 0


def interrupt(shown: Terminal) -> None:
    """Press Ctrl-C within an answer, and go on."""
    shown.until("/quit or Ctrl-D ends.*\n> ")
    for _ in range(2):
        at = shown.say("Write a long, long text.")
        shown.until("\\S", at)
        shown.key(termios.VINTR)
        shown.until("\n> ", at)
    shown.say("/quit")
    assert shown.end() == 0


@pytest.mark.long
def test_a_chat_with_a_model(tmp_path: Path) -> None:
    with terminal(MODEL, "--temperature", "0", "--dtype", "float32") as shown:
        converse(shown)
    with terminal(MODEL, "--temperature", "2") as shown:
        interrupt(shown)


@pytest.mark.long
def test_a_chat_with_a_server_and_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Running(tmp_path / "log", "--dtype=float32", env={"LAMINA_API_KEY": "k"})
    try:
        with terminal(server.url, "--temperature", "0", "--api-key", "k") as shown:
            converse(shown)
        with terminal(server.url + "/v1", "--temperature", "2", "--api-key", "k") as shown:
            interrupt(shown)
        monkeypatch.setenv("LAMINA_API_KEY", "other")
        with terminal(server.url) as shown:
            shown.until("lamina-launch chat: a valid API key is needed")
            assert shown.end() == 2
    finally:
        server.kill()


def test_a_url_that_does_not_answer_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "http://127.0.0.1:9"]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert re.fullmatch(r"lamina-launch chat: http://127.0.0.1:9/v1/models does not answer: .*refused\n", err)


def test_a_model_without_a_chat_template_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for file in (ROOT / MODEL).iterdir():
        if file.name != "chat_template.jinja":
            shutil.copyfile(file, tmp_path / file.name)
    assert main(["chat", str(tmp_path)]) == 2
    line = f"lamina-launch chat: {tmp_path} has no chat template: complete prompts with `lamina-launch generate`\n"
    assert capfd.readouterr() == ("", line)


@pytest.mark.parametrize(("words", "line"), [(["--temperature", "-1"], "temperature"), (["--top-p", "7"], "top_p")])
def test_wrong_numbers_are_one_line(words: list[str], line: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", MODEL, *words]) == 2
    assert line in capfd.readouterr().err
