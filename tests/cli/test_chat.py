"""``lamina-launch chat``, over a real terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import ssl
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

import pytest
from running import Running, certificate
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
    shown.until("unknown command /nonsense: /new begins anew.*> ", shown.say("/nonsense"))
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
    with terminal(MODEL, "--temperature", "2", "--max-tokens", "500") as shown:  # whose text may look like a prompt
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
            shown.until("a valid API key is needed: set LAMINA_API_KEY to a key of that server")
            assert shown.end() == 2
    finally:
        server.kill()


def test_a_url_that_does_not_answer_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "http://127.0.0.1:9"]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert re.fullmatch(r"lamina-launch chat: http://127.0.0.1:9/v1/models does not answer: .*refused\n", err)


class Foreign(ThreadingHTTPServer):
    """A server of another make. ``chunks``: its stream. ``keys``: those it was given. ``to``: redirects of methods."""

    def __init__(self, chunks: bytes = b"", models: object = ({"id": "m"},), **to: str) -> None:
        self.key = ""  # that requests must bear
        self.chunks, self.models, self.to, self.keys = chunks, json.dumps({"data": models}).encode(), to, list[str]()
        self.bodies = list[bytes]()
        super().__init__(("127.0.0.1", 0), ForeignHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class ForeignHandler(BaseHTTPRequestHandler):
    server: Foreign

    def do_GET(self) -> None:
        self._answer(self.server.models)

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(self.server.chunks)

    def _answer(self, body: bytes) -> None:
        self.server.keys.append(self.headers.get("Authorization", ""))
        if self.server.key not in ("", self.server.keys[-1]):
            self.send_response(401)
            body = b'{"error": {"message": "no key"}}'
        elif to := self.server.to.get(self.command):
            self.send_response(302)
            self.send_header("Location", to + self.path)
        else:
            self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""


def chunk(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def said(text: str) -> bytes:
    return chunk(choices=[{"delta": {"content": text}}])


END = b"data: [DONE]\n\n"


def chat_with(server: Foreign, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    return main(["chat", server.url + "/v1"])


@pytest.mark.parametrize(
    ("chunks", "shown", "why"),
    [
        (said("a") + said("b") + END, "ab", ""),
        ((said("a") + b": ping\n\nevent: x\n" + END).replace(b": {", b":{").replace(b": [", b":["), "a", ""),
        ((said("a") + END).replace(b"\n", b"\r\n"), "a", ""),
        (said("a\x1b]52;c;aGk=\x07\x9bb\u200d\t\nc") + END, "a]52;c;aGk=b\u200d\t\nc", ""),
        (chunk(error={"message": "no \x1b[31m"}), "", r"no \[31m"),
        (said("a"), "a", "the connection ended before the answer did"),
        (chunk(choices=[{"index": 0}]), "", "the server has sent what is no chunk of a chat: .*`delta`.*"),
        (chunk(choices=None), "", "the server has sent what is no chunk of a chat: .*"),
        (chunk(error="no"), "", "the server has sent what is no chunk of a chat: .*"),
        (b"data: {oops\n\n", "", "the server has sent what is no chunk of a chat: .*"),
        (
            b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n',
            "",
            "the server has sent what is no chunk of a chat: .*",
        ),
    ],
)
def test_whatever_a_server_streams_is_text_or_one_line(
    chunks: bytes, shown: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Foreign(chunks) as server:
        assert chat_with(server, monkeypatch) == 0
    out, err = capsys.readouterr()
    assert out == f"{shown}\n"
    assert re.fullmatch(f"lamina-launch chat: {why}\n" if why else "", err)


def test_an_answer_of_a_server_has_at_most_the_tokens_of_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    with Foreign(said("a") + END) as server:
        monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n/bogus\n"))
        assert main(["chat", server.url, "--max-tokens", "7"]) == 0
        assert json.loads(server.bodies[-1])["max_tokens"] == 7


def test_an_unknown_command_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with Foreign(said("a") + END) as server:
        monkeypatch.setattr(sys, "stdin", io.StringIO("/bogus\n"))
        assert main(["chat", server.url]) == 0
    assert capsys.readouterr().err.startswith("unknown command /bogus: /new begins anew")


def test_a_certificate_that_is_not_trusted_brings_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["ssl_certfile"], files["ssl_keyfile"])
    server = Foreign(said("a") + END)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url = f"https://localhost:{server.server_port}"
    with server:
        assert main(["chat", url]) == 2
        assert capsys.readouterr().err.endswith(": set SSL_CERT_FILE to its certificate\n")
        monkeypatch.setenv("SSL_CERT_FILE", files["ssl_certfile"])
        monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
        assert main(["chat", url]) == 0


def test_a_dry_run_with_a_url_checks_it_and_asks_no_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Foreign(said("a") + END) as server:
        monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
        assert main(["chat", server.url, "--dry-run"]) == 0
        assert (server.keys, capsys.readouterr().out) == ([], f"would chat with the server at {server.url}\n")
    assert main(["chat", "http://host:0", "--dry-run"]) == 2
    assert main(["chat", server.url, "--dry-run", "--api-key", "\u00e9"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize("models", [[], "m", [{"name": "m"}]])
def test_a_server_without_a_model_is_one_line(
    models: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Foreign(models=models) as server:
        assert chat_with(server, monkeypatch) == 2
    assert re.fullmatch(r"lamina-launch chat: \S+/v1/models names no model: .*\n", capsys.readouterr().err)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_no_redirect_leads_a_key_to_another_address(
    method: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAMINA_API_KEY", "secret")
    with Foreign(said("a") + END) as other, Foreign(**{method: other.url}) as server:
        chat_with(server, monkeypatch)
        assert (server.keys[-1], other.keys) == ("Bearer secret", [])
    assert re.search(f"redirects to '{other.url}.*': give the address", capsys.readouterr().err)


def test_the_first_of_a_servers_keys_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINA_API_KEY", " a , b")
    with Foreign(said("a") + END) as server:
        assert chat_with(server, monkeypatch) == 0
        assert server.keys == ["Bearer a"] * 2


def test_a_server_that_wants_a_key_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LAMINA_API_KEY", raising=False)
    with Foreign(said("a") + END) as server:
        server.key = "Bearer a"
        assert chat_with(server, monkeypatch) == 2
        line = "lamina-launch chat: a valid API key is needed: set LAMINA_API_KEY to a key of that server\n"
        assert capsys.readouterr().err == line
        monkeypatch.setenv("LAMINA_API_KEY", "a")
        assert chat_with(server, monkeypatch) == 0


def test_a_key_that_no_request_bears_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAMINA_API_KEY", "secret\nkey")
    assert main(["chat", "http://127.0.0.1:9"]) == 2
    err = capsys.readouterr().err
    assert (err.count("\n"), "secret" in err) == (1, False)


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
