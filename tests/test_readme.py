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
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in (*sorted(ROOT.glob("*.md")), *DOCS)}
ALL = "\n".join(PAGES.values())
LOOKED_UP = (
    "README",
    "conflicts",
    "environment",
    "families",
    "flags",
    "glossary",
    "metrics",
    "together",
    "wrap-features",
)
LISTS = {f"docs/{name}.md" for name in LOOKED_UP}
SNIPPETS = re.findall(r"```python\n(.*?)```", ALL, re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"  # of the server, as printed; the tests take a free port
BLOCKS = [
    re.findall(r"^lamina-launch (.+)$", code, re.MULTILINE) for code in re.findall(r"```\w*\n(.*?)```", ALL, re.DOTALL)
]
SERVERS = list(
    dict.fromkeys(line for lines in BLOCKS for line in lines if line.startswith("serve ") and "--dry-run" not in line)
)
COMMANDS = [
    list(lines)
    for lines in dict.fromkeys(tuple(line for line in block if line not in SERVERS) for block in BLOCKS)
    if lines
]


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
    """Run code as ``python -c code`` does."""
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


@pytest.mark.long(but=[" ".join(lines) for lines in COMMANDS if all("--dry-run" in line for line in lines)])
@pytest.mark.parametrize("commands", COMMANDS, ids=" ".join)
def test_command_lines(commands: list[str], printed: Printed) -> None:
    """The commands of a block run one after another: a later one may read the files of an earlier one."""
    for command in commands:
        words = shlex.split(command)
        port = ["--port", "0"] if words[0] == "serve" and "--port" not in words else []  # 8000 may be in use here
        assert main([*words, *port]) == 0
        assert printed().strip()


@pytest.mark.long(but=["serve examples/tiny_lm/model --port 8000"])
@pytest.mark.parametrize("command", SERVERS)
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
    for line in PAGES["ARCHITECTURE.md"].splitlines():
        name = line.split("  ")[0].strip()
        if name.endswith("/"):
            assert (ROOT / name).is_dir(), name


def test_readme_is_short_and_its_links_lead_somewhere() -> None:
    assert len(README.splitlines()) <= 120
    for name, text in PAGES.items():
        for target, heading in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", text):
            page = (ROOT / name).parent / target if target else ROOT / name
            assert page.exists(), f"{name}: {target}"
            assert not heading or heading in headings(page.read_text()), f"{name}: {target}#{heading}"


def headings(text: str) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", [name for name in PAGES if name.startswith("docs/") and name not in LISTS])
def test_a_page_begins_with_an_example_that_is_run(name: str) -> None:
    first = re.search(r"```(\w*)\n(.*?)```", PAGES[name], re.DOTALL)
    assert first, "no example"
    assert first[1] == "python" or re.search("^lamina-launch ", first[2], re.MULTILINE), first[0]
    assert len(PAGES[name][: first.start()].split()) <= 100


@pytest.mark.parametrize("name", [name for name in PAGES if name not in LISTS])
def test_tables_are_read_at_a_glance(name: str) -> None:
    tables = re.findall(r"(?:^ *\|.*\n)+", PAGES[name], re.MULTILINE)
    assert [table for table in tables if len(table.splitlines()) > 14] == []  # with a head and a rule


def test_the_index_leads_to_a_page_that_explains_the_flag() -> None:
    rows = re.findall(r"^\| (\[.*?) \| (`--.*) \|$", PAGES["docs/README.md"], re.MULTILINE)
    listed = {
        flag: re.findall(r"\]\((.*?)\)", links) for links, cell in rows for flag in re.findall(r"`--([a-z-]+)`", cell)
    }
    assert {*listed} == {*re.findall(r"^\| `--([a-z-]+)`", PAGES["docs/flags.md"], re.MULTILINE)}
    for flag, links in listed.items():
        pages = [((ROOT / "docs" / link).resolve()).read_text() for link in links]
        assert any(re.search(rf"--(?:no-)?{flag}(?![\w-])", page) for page in pages), flag


def test_the_index_and_the_site_name_each_page() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    links = {(ROOT / "docs" / link).resolve() for link in re.findall(r"\]\(([^)#]+)", PAGES["docs/README.md"])}
    for name in PAGES:
        assert re.search(rf"[-:] {re.escape(name)}$", site, re.MULTILINE), f"mkdocs.yml: {name}"
        assert name == "docs/README.md" or ROOT / name in links, f"docs/README.md: {name}"


def test_documents_are_short() -> None:
    pages = {*PAGES} - LISTS - {"CHANGELOG.md"} | {"docs/README.md"}
    assert sum(len(PAGES[name].split()) for name in pages) <= 28_000


def test_the_ranking_of_devices_is_a_true_print(printed: Printed) -> None:
    page = PAGES["docs/planner.md"]
    command, shown = page.split("```")[1], page.split("```")[3]
    assert main(shlex.split(command)[1:]) == 0
    found = printed().splitlines()
    assert [line for line in shown.splitlines() if line not in (*found, "")] == []


def test_paths_that_pages_name_are_there() -> None:
    """Programs of perf/ may lack their ending."""
    named = r"(?<![\w/.-])((?:lamina|converter|netstack|csrc|tests|perf|docs|examples)/[\w/.-]*\w)"
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("perf/*.md")):
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
