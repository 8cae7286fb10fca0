"""docs/rdma.md can be followed: its commands are taken, and its examples of output are the product's. README and
SECURITY mention RDMA only with a word for how far it is shown.
"""

from __future__ import annotations

import re
import shlex

import pytest
from wiring import KEY, ROOT

from lamina.cli import launch
from lamina.netstack.bench import command as bench

PAGE = (ROOT / "docs" / "rdma.md").read_text()
LABELS = re.compile(r"proven|compiled|unverified", re.IGNORECASE)
OF_RDMA = re.compile(r"\bRDMA\b|`(?:verbs|mlx5|gin)`|\bConnectX\b|\*\*(?:verbs|mlx5|gin)\b")
SOURCES = [p for kind in ("netstack/**/*.py", "csrc/netstack/**/*.h") for p in ROOT.glob(kind)]


def commands(first: str) -> list[list[str]]:
    """Returns the lines of code that follow ``first``, as arguments."""
    lines = re.findall(rf"^\$ {re.escape(first)} (.*)$", PAGE, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def statements(text: str) -> list[str]:
    """Paragraphs and items of a list, their tables with them."""
    return re.split(r"\n\s*\n(?!  )|\n(?=- )", text)


@pytest.mark.parametrize("arguments", commands("python -m lamina.netstack bench"), ids=" ".join)
def test_its_measurements_are_taken(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAMINA_CLUSTER_KEY", KEY.hex())
    assert bench.main([*arguments, "--dry-run"]) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("arguments", commands("lamina-launch"), ids=" ".join)
def test_its_other_commands_are_taken(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.main([*arguments, "--dry-run"]) == 0
    assert capfd.readouterr().err == ""


def test_it_has_both_transports_from_both_sides() -> None:
    measured = commands("python -m lamina.netstack bench")
    ways = {(words[words.index("--transport") + 1], "--listen" in words) for words in measured}
    assert ways == {(scheme, listens) for scheme in ("verbs", "mlx5") for listens in (True, False)}


def test_what_one_may_see_is_what_the_product_says() -> None:
    said = "\n".join(path.read_text() for path in SOURCES)
    said_by = "(?:bench: |`opens`: |the log(?: of `auto`)?: )?"
    rows = re.findall(rf"^\| {said_by}`([^`]+)`", PAGE.partition("## What goes wrong")[2], re.MULTILINE)
    assert len(rows) >= 8
    for row in rows:
        words = re.sub(r"mlx5_0:1|DOWN|\b3\b|/sys/class/infiniband", "\0", row)
        assert all(part.strip() in said for part in re.split(r"\0|\.\.\.", words)), row


def test_its_steps_take_ten_minutes() -> None:
    minutes = [int(n) for n in re.findall(r"^\*\*\d\. .*?\((\d+) minutes?[;)]", PAGE, re.MULTILINE)]
    assert sum(minutes) <= 10
    assert len(minutes) == 6


@pytest.mark.parametrize("name", ["README.md", "SECURITY.md"])
def test_what_is_said_of_rdma_says_how_far_it_is_shown(name: str) -> None:
    """Its first sentence of it does, or the words before, for all that follow."""
    told = [text for text in statements((ROOT / name).read_text()) if OF_RDMA.search(text)]
    assert told
    assert not [text for text in told if not LABELS.search(begun(text))]


def begun(text: str) -> str:
    """A statement as far as the end of the first sentence that names RDMA."""
    named = OF_RDMA.search(text)
    assert named
    end = re.compile(r"\.\s").search(text, named.end())
    return text[: end.start()] if end else text


def test_a_word_far_behind_is_none() -> None:
    assert not LABELS.search(begun("- **A** is so. `gin` does it. That is proven."))
    assert LABELS.search(begun("- **verbs** (proven here) does it. And more."))


def test_its_rungs_are_those_of_the_ladder() -> None:
    ladder = (ROOT / "CONTRIBUTING.md").read_text()
    assert "docs/rdma.md" in ladder
    named = {int(n) for rungs in re.findall(r"rungs? ([\d, ]+)", PAGE) for n in rungs.replace(",", " ").split()}
    assert named
    assert named <= {int(n) for n in re.findall(r"^\| (\d) \|", ladder, re.MULTILINE)}
