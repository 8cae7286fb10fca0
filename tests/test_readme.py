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
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked import ForkedProgram

from lamina.cli.launch import main
from lamina.ops import gemm

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
ALL = "\n".join(PAGES.values())
SNIPPETS = re.findall(r"```python\n(.*?)```", ALL, re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"  # of the server, as printed; the tests take a free port
COMMANDS = list(dict.fromkeys(re.findall(r"^lamina-launch (.+)$", ALL, re.MULTILINE)))


Printed = Callable[[], str]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Printed:
    """Gives what was printed since. Commands and snippets run in this process, from the root, as in one of their own:
    what a dozen processes would import costs half a minute.
    """
    monkeypatch.chdir(ROOT)

    def since() -> str:
        sys.stdout.flush()
        return capfd.readouterr().out

    return since


def run(code: str) -> None:
    """As ``python -c code`` would."""
    exec(compile(code, "<printed>", "exec"), {"__name__": "__main__"})


def test_there_is_something_to_run() -> None:
    assert len(SNIPPETS) >= 2
    assert len(COMMANDS) >= 2


CLIENTS = [code for code in SNIPPETS if ADDRESS in code]
LIBRARY = [code for code in SNIPPETS if ADDRESS not in code]


@pytest.mark.long(but=["0"])
@pytest.mark.parametrize("code", LIBRARY, ids=range(len(LIBRARY)))
def test_python(code: str, printed: Printed) -> None:
    run(code)
    assert "import os" in printed()


@pytest.mark.parametrize("command", [line for line in COMMANDS if not line.startswith("serve ")])
def test_command_lines(command: str, printed: Printed) -> None:
    assert main(shlex.split(command)) == 0
    assert printed().strip()


@pytest.mark.long(but=["serve examples/tiny_lm/model --port 8000"])
@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("serve ")])
def test_servers(command: str, printed: Printed) -> None:
    anywhere = re.sub(r"--port \d+", "--port 0", command)
    server = ForkedProgram(shlex.split(anywhere))
    assert server.stdout is not None
    try:
        url = server.stdout.readline().split()[-1]
        with urllib.request.urlopen(url + "/v1/models", timeout=60) as models:
            assert json.load(models)["data"]
        assert CLIENTS
        for code in CLIENTS:
            run(code.replace(ADDRESS, url))
            assert "import os" in printed()
        (curl,) = re.findall(r"^curl .*\\\n.*$", README, re.MULTILINE)
        if shutil.which("curl"):
            command = shlex.split(curl.replace("\\\n", "").replace(ADDRESS, url))
            got = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            assert "data: [DONE]" in got.stdout
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.stdout.close()


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


def test_paths_that_pages_name_are_there() -> None:
    """Programs of perf/ may lack their ending."""
    named = r"(?<![\w/.-])((?:lamina|converter|netstack|csrc|tests|perf|docs|examples)/[\w/.-]*\w)"
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("perf/*.md")):
        assert not [name for name in re.findall(named, page.read_text()) if not [*ROOT.glob(f"{name}*")]], page


def test_the_table_of_memory_is_a_true_print(printed: Printed) -> None:
    """But for what depends on the machine: the last three columns, the line below, and whether weights are packed."""
    shown = ALL[ALL.index("$ lamina-launch generate examples/tiny_lm/model --prompt x --dry-run") :]
    command, *lines = shown[: shown.index("```")].splitlines()
    assert main(shlex.split(command)[2:]) == 0
    found = printed().splitlines()
    assert found[0] == lines[0]
    assert len(found) == len(lines)
    cells = [[re.split(r"\s{2,}", line.strip())[:6] for line in text[1:5]] for text in (found, lines)]
    weights = [float(rows[1].pop(2).removesuffix(" MB")) for rows in cells]
    assert cells[0] == cells[1]
    packs = gemm.get("native", 1).packed_bytes(torch.bfloat16, 1, 1) > 0
    assert weights[0] == pytest.approx(weights[1] * (2 if packs else 1), rel=0.05)
