"""`make test` is quick, CI runs all: what is left out where is data of the Makefile, read here as make reads it."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import tomllib
from itertools import chain, combinations
from pathlib import Path

import pytest
from long_cases import BUT

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
MARKS = [re.split(r"[:(]", line)[0] for line in OPTIONS["markers"]]
KEPT = {"slow", "gpu", "rdma", "vm"}  # for once a week, and for devices
Marks = frozenset[str]
ALL = {frozenset(marks) for n in range(len(MARKS) + 1) for marks in combinations(MARKS, n)}  # that a test may carry

# Each subject's whole way through the product, which no quick run leaves out: file, test, and ids of cases.
WHOLE = {
    "a model over shm and tcp": ("e2e/test_llm.py", "test_tokens_are_those_of_transformers", ("shm", "tcp")),
    "a server and a client": ("server/test_openai_client.py", "test_a_stream_is_the_whole_in_pieces", ()),
    "a worker's death": ("e2e/changes/test_recovery.py", "test_every_request_goes_on", ("by head, spares",)),
    "a planned change": (
        "e2e/changes/test_elastic.py", "test_kv_moves_to_the_workers_that_there_are_bit_by_bit", ("token",),
    ),
    "a wrapped model": ("api/wrapped/test_wrap.py", "test_greedy", ()),
    "a plan": ("tools/plan/test_plan.py", "test_a_plan_that_splits", ()),
    "a simulated fleet": ("simulation/test_fleet.py", "test_every_stream_goes_on", ("0",)),
    "a transport": ("contract/test_transports.py", "test_messages_arrive_in_order_exactly_once_over_many_laps", ()),
}  # fmt: skip


def commands(target: str) -> list[list[str]]:
    """The words of each command of a target, without what it is made of."""
    ours = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(
        ["make", "-n", target, "READY="], cwd=ROOT, env=ours, capture_output=True, text=True, check=True, timeout=60
    )
    return [shlex.split(line) for line in done.stdout.splitlines()]


def selected(target: str) -> set[Marks]:
    """Returns the sets of marks that tests run by ``target`` may carry; its only command runs tests of all paths."""
    (words,) = commands(target)
    options = words[3:] if words[1:3] == ["-m", "pytest"] else words[words.index("tests/landing.py") + 1 :]
    given = dict(zip(options[::2], options[1::2], strict=True))  # no path, nothing that leaves out by name
    assert given.keys() <= {"-n", "--dist", "-m"}, f"make {target} leaves out tests by {words}"
    usual = shlex.split(OPTIONS["addopts"])
    expression = given.get("-m", usual[usual.index("-m") + 1])
    return {marks for marks in ALL if eval(expression, {}, {mark: mark in marks for mark in MARKS})}


def test_ci_runs_all_that_no_marker_keeps_for_later() -> None:
    assert re.findall(r"^make ([\w-]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE) == ["lint", "landing"]
    (landing,), (ray,), (rest,) = map(commands, ("landing", "test-ray", "test-all"))
    assert landing == [*ray, "--and", *rest[rest.index("tests/landing.py") + 1 :]]
    assert selected("test-all") == {marks for marks in ALL if not marks & KEPT}
    assert OPTIONS["testpaths"] == ["tests"]


def test_a_quick_run_leaves_out_long_tests_alone() -> None:
    assert selected("test") == {marks for marks in selected("test-all") if "long" not in marks}
    assert commands("check") == [*commands("lint"), *commands("test")]


def cases_left(file: str, test: str) -> tuple[str, ...] | None:
    """The ids of cases of ``test`` that a quick run has; None: of all, as it is not long."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    (function,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == test]
    of_all = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "pytestmark"]
    for mark in chain(function.decorator_list, *(ast.walk(value) for value in of_all)):
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.long":
            (but,) = mark.keywords
            return tuple(ast.literal_eval(but.value))
        if ast.unparse(mark) == "pytest.mark.long":
            return ()
    return None


@pytest.mark.parametrize("subject", WHOLE)
def test_a_quick_run_has_a_whole_path_of_each_subject(subject: str) -> None:
    file, test, cases = WHOLE[subject]
    left = cases_left(file, test)
    assert left is None or (left and set(cases) <= set(left)), f"{test} is long"


def test_cases_that_are_not_long_are_there(request: pytest.FixtureRequest) -> None:
    """Ids that no case has any more would make all cases long. Of the tests that are collected in this run."""
    there = request.config.stash[BUT]
    assert [test for test, (ids, cases) in there.items() if len(cases) > 1 and not ids & cases] == []


@pytest.mark.long(but=["short"])
@pytest.mark.parametrize("case", ["short", "long"])
def test_a_case_that_is_left_out_carries_no_mark(case: str, request: pytest.FixtureRequest) -> None:
    assert [m.name for m in request.node.iter_markers("long")] == ["long"] * (case == "long")


def test_names_of_cases_are_short(request: pytest.FixtureRequest) -> None:
    """Every process that runs tests sends the names of all: one of a plan, by ``ids=str``, had 11 MB."""
    assert [item.nodeid[:200] for item in request.session.items if len(item.nodeid) > 600] == []
