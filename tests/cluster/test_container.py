"""What the Dockerfile says, held against the product. The image itself is not built here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from lamina.cli.launch import main
from lamina.fleet.hosts.cluster_file import SSH
from lamina.protocol.options import Deadlines
from lamina.server.config import ServerConfig

ROOT = Path(__file__).resolve().parents[2]
TEXT = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
BUILD, FINAL = re.split(r"^FROM ", TEXT, flags=re.MULTILINE)[1:]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def words(name: str, text: str = FINAL) -> list[str]:
    """Of an instruction in JSON form."""
    (found,) = re.findall(rf"^{name} .*?(\[.*\])$", text, re.MULTILINE)
    parsed: list[str] = json.loads(found)
    return parsed


def packages(text: str) -> set[str]:
    (found,) = re.findall(r"apt-get install -y --no-install-recommends ([^&]*)", text)
    return set(found.split())


def seconds(name: str) -> float:
    (found,) = re.findall(rf"^HEALTHCHECK .*--{name}=(\d+)s", FINAL, re.MULTILINE)
    return float(found)


def test_programs_that_are_called_are_there() -> None:
    """In the image that runs, not only in the one that builds."""
    assert "g++" in packages(BUILD) - packages(FINAL)
    assert {"libgomp1", "openssh-client"} <= packages(FINAL)
    assert SSH[0] == "ssh"


def test_what_is_installed_is_what_the_project_has() -> None:
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', BUILD)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    for stage in (BUILD, FINAL):
        (version,) = re.findall(r"^python:3\.(\d+)-", stage)
        assert int(version) >= int(PROJECT["requires-python"].removeprefix(">=3."))
    assert words("ENTRYPOINT")[0] in PROJECT["scripts"]


def test_what_it_runs_makes_sense(capsys: pytest.CaptureFixture[str]) -> None:
    command = words("CMD")
    assert main([*command, "--port", "0", "--dry-run"]) == 0
    assert "would serve examples/tiny_lm/model" in capsys.readouterr().out
    assert "COPY examples /home/lamina/examples" in FINAL
    assert "WORKDIR /home/lamina" in FINAL


class Answers(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    made = HTTPServer(("127.0.0.1", 0), type("Own", (Answers,), {}))
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def healthy(port: int, **more: str) -> bool:
    program, *rest = words("HEALTHCHECK")
    assert program == "python"
    at = [word.replace(f":{ServerConfig().port}/", f":{port}/") for word in rest]
    assert at != rest, "it asks where a server is by default"
    command, environment = [sys.executable, *at], {**os.environ, **more}
    return not subprocess.run(command, capture_output=True, timeout=30, env=environment, check=False).returncode


def test_health_is_that_of_the_server(server: HTTPServer) -> None:
    port = server.server_port
    assert healthy(port)
    assert healthy(port, http_proxy="http://127.0.0.1:9", HTTP_PROXY="http://127.0.0.1:9")
    server.RequestHandlerClass.status = 503  # type: ignore[attr-defined]
    assert not healthy(port)
    assert not healthy(1)


def test_a_server_may_take_its_time_to_start() -> None:
    assert seconds("start-period") >= Deadlines().start_timeout_s
    (limit,) = re.findall(r"timeout=(\d+)\)", words("HEALTHCHECK")[-1])
    assert float(limit) < seconds("timeout")
    assert f"EXPOSE {ServerConfig().port}" in FINAL
