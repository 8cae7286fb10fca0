"""The code of README and docs runs as printed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
ALL = "\n".join(PAGES.values())
SNIPPETS = re.findall(r"```python\n(.*?)```", ALL, re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"  # of the server, as printed; the tests take a free port
COMMANDS = list(dict.fromkeys(re.findall(r"^lamina-launch (.+)$", ALL, re.MULTILINE)))


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_is_something_to_run() -> None:
    assert len(SNIPPETS) >= 2
    assert len(COMMANDS) >= 2


CLIENTS = [code for code in SNIPPETS if ADDRESS in code]
LIBRARY = [code for code in SNIPPETS if ADDRESS not in code]


@pytest.mark.parametrize("code", LIBRARY, ids=range(len(LIBRARY)))
def test_python(code: str) -> None:
    assert "import os" in run("-c", code)


@pytest.mark.parametrize("command", [line for line in COMMANDS if not line.startswith("serve ")])
def test_command_lines(command: str) -> None:
    assert run("-m", "lamina.cli.launch", *shlex.split(command)).strip()


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("serve ")])
def test_servers(command: str) -> None:
    anywhere = re.sub(r"--port \d+", "--port 0", command)
    with subprocess.Popen(
        [sys.executable, "-m", "lamina.cli.launch", *shlex.split(anywhere)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            with urllib.request.urlopen(url + "/v1/models", timeout=60) as models:
                assert json.load(models)["data"]
            assert CLIENTS
            for code in CLIENTS:
                assert "import os" in run("-c", code.replace(ADDRESS, url))
            (curl,) = re.findall(r"^curl .*\\\n.*$", README, re.MULTILINE)
            if shutil.which("curl"):
                got = subprocess.run(
                    shlex.split(curl.replace("\\\n", "").replace(ADDRESS, url)),
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=True,
                )
                assert "data: [DONE]" in got.stdout
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0


def test_the_tree_names_what_is_there() -> None:
    for line in README[README.index("## The tree") :].splitlines():
        name = line.split("  ")[0].strip()
        if name.endswith("/"):
            assert (ROOT / name).is_dir(), name


def test_readme_is_short_and_its_links_lead_somewhere() -> None:
    assert len(README.splitlines()) <= 180
    for name, text in PAGES.items():
        home = ROOT if name == "README.md" else ROOT / "docs"
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (home / target).exists(), f"{name}: {target}"


def test_the_table_of_memory_is_a_true_print() -> None:
    """But for what depends on the machine: the last three columns, and the line below."""
    printed = ALL[ALL.index("$ lamina-launch generate examples/tiny_lm/model --prompt x --dry-run") :]
    command, *lines = printed[: printed.index("```")].splitlines()
    found = run("-m", "lamina.cli.launch", *shlex.split(command)[2:]).splitlines()
    assert found[0] == lines[0]
    assert len(found) == len(lines)
    cells = [[re.split(r"\s{2,}", line.strip())[:6] for line in text[1:5]] for text in (found, lines)]
    assert cells[0] == cells[1]
