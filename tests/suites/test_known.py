"""The judgement of a suite's run: a new difference is red, a known one is not, and a mended one is reported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from known import Known, Ran, judge, matches, read  # noqa: E402 - needs the path above

LIST = """
# what is run
run tests/test_a.py
run tests/test_b.py
passes 1
[no adapters here]
says *404*
says *no such model*
tests/test_a.py::test_lora[*]
[!vLLM's own classes]
tests/test_b.py::test_class
"""


@pytest.fixture
def known(tmp_path: Path) -> Known:
    (tmp_path / "list.txt").write_text(LIST)
    return read(tmp_path / "list.txt")


def test_a_list_is_read(known: Known) -> None:
    assert known.files == ["tests/test_a.py", "tests/test_b.py"]
    assert known.passes == 1
    assert known.reason(Ran("tests/test_a.py::test_lora[1]", "failed", "a 404 of theirs")) == "no adapters here"
    assert known.reason(Ran("tests/test_a.py::test_lora[1]", "failed", "no such model")) == "no adapters here"
    assert known.reason(Ran("tests/test_a.py::test_lor", "failed", "a 404 of theirs")) == ""
    assert known.left_out("tests/test_b.py::test_class")
    assert not known.left_out("tests/test_a.py::test_lora[1]")


def test_only_a_star_is_special() -> None:
    assert matches("t.py::test_x[a-*]", "t.py::test_x[a-b]")
    assert not matches("t.py::test_x[a-*]", "t.py::test_xa")
    assert not matches("t.py::test_x", "tapy::test_x")


def test_a_line_under_no_reason_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("tests/test_a.py::test_x\n")
    with pytest.raises(ValueError, match=r"list.txt:1: a test stands under no \[reason\]"):
        read(tmp_path / "list.txt")


def test_a_failure_that_nobody_knows_is_red(known: Known) -> None:
    ran = [Ran("tests/test_a.py::test_x", "passed"), Ran("tests/test_a.py::test_lora[1]", "failed", "404")]
    verdict = judge(known, ran)
    assert (verdict.passed, verdict.differs, verdict.red) == (1, {"no adapters here": 1}, False)
    new = Ran("tests/test_b.py::test_y", "failed", "assert 1 == 2")
    verdict = judge(known, [*ran, new])
    assert verdict.new == [new]
    assert verdict.red


def test_a_known_difference_for_another_cause_is_red(known: Known) -> None:
    crashed = Ran("tests/test_a.py::test_lora[1]", "failed", "ConnectionError: the server is gone")
    verdict = judge(known, [Ran("tests/test_a.py::test_x", "passed"), crashed])
    assert (verdict.differs, verdict.new, verdict.red) == ({}, [crashed], True)


@pytest.mark.parametrize(
    ("text", "wrong"), [("[why]\nt.py::x", "says CAUSE"), ("[!why]\nsays *\nt.py::x", "explains no")]
)
def test_a_reason_says_how_its_failures_read(tmp_path: Path, text: str, wrong: str) -> None:
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(ValueError, match=wrong):
        read(tmp_path / "list.txt")


def test_fewer_that_pass_are_red(known: Known) -> None:
    skipped = [Ran("tests/test_a.py::test_x", "skipped", "Skipped: a device")]
    assert judge(known, skipped).red
    assert judge(known, skipped).skipped == {"a device": 1}
    assert not judge(known, skipped, whole=False).red


def test_a_known_difference_that_passes_is_told(known: Known) -> None:
    one, other = Ran("tests/test_a.py::test_lora[1]", "passed"), Ran("tests/test_a.py::test_lora[2]", "failed", "404")
    assert judge(known, [one]).mended == ["tests/test_a.py::test_lora[*]"]
    assert judge(known, [one, other]).mended == []
    assert not judge(known, [one]).red


def test_a_test_whose_end_fails_has_failed(known: Known) -> None:
    name = "tests/test_b.py::test_y"
    verdict = judge(known, [Ran(name, "passed"), Ran(name, "failed", "at its end")])
    assert (verdict.passed, len(verdict.new)) == (0, 1)


@pytest.mark.parametrize("path", sorted(HERE.glob("*.txt")), ids=lambda p: p.stem)
def test_lists_of_this_folder_can_be_read(path: Path) -> None:
    known = read(path)
    assert known.files
    assert known.passes > 0
    assert all(p.partition("::")[0] in known.files for p in (*known.differs, *known.silent) if "*" not in p)


@pytest.mark.parametrize("name", ["vllm-server", "vllm-offline", "transformers"])
def test_the_table_says_what_the_lists_ask_for(name: str) -> None:
    """The rule of a row: applied = passed + known, and passed is what a run must reach."""
    table = (HERE.parents[1] / "perf" / "FEATURES.md").read_text().splitlines()
    row = next(line for line in table if line.startswith(f"| {name}, "))
    apply, passed, differ, absent = (int(cell) for cell in row.strip("| ").split(" | ")[1:])
    assert passed == read(HERE / f"{name}.txt").passes
    assert apply == passed + differ
    assert absent <= differ
