"""The Dockerfile's claims, compared with the product. The image itself is not built here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from lamina.cli.launch import main
from lamina.config.engine_config import Deadlines
from lamina.executor.hosts.cluster_file import SSH
from lamina.server.server_config import ServerConfig

ROOT = Path(__file__).resolve().parents[2]
TEXT = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
BUILD, FINAL = re.split(r"^FROM ", TEXT, flags=re.MULTILINE)[1:]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def words(name: str, text: str = FINAL) -> list[str]:
    """Returns the words of an instruction in JSON form."""
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


def test_the_network_stack_is_built_with_its_way_to_rdma_cards() -> None:
    """Its headers where it is built; the library, and the cards' own parts of it, where it runs."""
    assert "libibverbs-dev" in packages(BUILD)
    assert {"libibverbs1", "ibverbs-providers"} <= packages(FINAL)


def test_what_is_installed_is_what_the_project_has() -> None:
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', BUILD)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    for stage in (BUILD, FINAL):
        (version,) = re.findall(r"^python:3\.(\d+)-", stage)
        assert int(version) >= int(PROJECT["requires-python"].removeprefix(">=3."))
    assert words("ENTRYPOINT")[0] in PROJECT["scripts"]


def instructions(name: str, text: str) -> list[list[str]]:
    """The words of each of them, without its flags."""
    found = re.findall(rf"^{name} +(.*)$", text, re.MULTILINE)
    return [[w for w in line.split() if not w.startswith("--")] for line in found]


def ignored(path: Path) -> bool:
    """Returns whether .dockerignore keeps a path of the repository out of the image."""
    rules = (ROOT / ".dockerignore").read_text().split()
    parts = path.relative_to(ROOT).parts
    return any(
        fnmatch(parts[0], rule) or (rule.startswith("**/") and any(fnmatch(p, rule[3:]) for p in parts))
        for rule in rules
    )


def test_what_is_copied_is_there() -> None:
    """And nothing that the build needs is kept out: every file of the repository goes in."""
    for text, places in ((BUILD, instructions("COPY", BUILD)), (FINAL, instructions("COPY", FINAL)[1:])):
        assert places
        for *sources, target in places:
            assert all((ROOT / s).exists() and not ignored(ROOT / s) for s in sources if s != "."), text
            assert target == "." or target.startswith("/home/lamina/")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30)
    if tracked.returncode:
        pytest.skip("not a checkout of git")
    out = [f for f in tracked.stdout.splitlines() if ignored(ROOT / f)]
    assert out == []
    assert ignored(ROOT / ".git" / "HEAD")
    assert ignored(ROOT / "lamina" / "ops" / "gemm" / "_gemm.cpython-311-x86_64-linux-gnu.so"), "it is built there"


def test_what_is_built_is_what_runs() -> None:
    """The environment of the first stage lies where the second one looks for it, and both have one Python."""
    ((source, target),) = [words for words in instructions("COPY", FINAL) if words[0].startswith("/opt")]
    (made,) = re.findall(r"-m venv (\S+)", BUILD)
    assert source == target == made
    assert f"ENV PATH={made}/bin:$PATH" in BUILD
    assert f"ENV PATH={made}/bin:$PATH" in FINAL
    assert BUILD.split()[0] == FINAL.split()[0], "a virtual environment moves to the same Python alone"
    (user,) = re.findall(r"^USER (\S+)$", FINAL, re.MULTILINE)
    assert f"useradd --create-home {user}" in FINAL
    assert FINAL.index("useradd") < FINAL.index("USER ") < FINAL.index("ENTRYPOINT")


@pytest.mark.parametrize("line", re.findall(r"^RUN (.*)$", TEXT, re.MULTILINE))
def test_each_command_is_one_of_a_shell(line: str) -> None:
    assert not subprocess.run(["sh", "-n", "-c", line], capture_output=True, timeout=30, check=False).stderr
    programs = {part.split()[0] for part in line.split("&&")}
    assert programs <= {"apt-get", "rm", "useradd", "python", "pip"}
    for file in re.findall(r"-c (\S+)", line):
        assert (ROOT / file).exists()


@pytest.mark.long
def test_what_it_runs_makes_sense(capsys: pytest.CaptureFixture[str]) -> None:
    command = words("CMD")
    assert main([*command, "--port", "0", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "would serve examples/tiny_lm/model" in out
    size = r"[\d.]+ [MG]B"
    line = rf"^would hold at most {size} of bodies and prompts, and {size} of answers \(--limits\)$"
    assert re.search(line, out, re.MULTILINE)
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
