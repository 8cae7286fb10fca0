"""Every module's test is found by its name: a test file has the name too, or its docstring says what it covers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from test_house import FACES, PACKAGES, ROOT, module_of, sources, targets

SMALL = 40  # lines of a module that needs no test of its own


def covered(docstring: str) -> Iterator[str]:
    """Yields the paths after "Covers:" in a docstring."""
    for said in re.findall(r"^Covers: ([^:]*?)\.$", docstring, re.MULTILINE):
        yield from re.split(r",\s+", said)


@cache
def files_of_names() -> Mapping[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        found.setdefault(path.stem.removeprefix("test_"), []).append(path)
    return found


@cache
def claims() -> Mapping[str, list[Path]]:
    """Returns the test files that cover each path."""
    found: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for claimed in covered(ast.get_docstring(ast.parse(path.read_text())) or ""):
            found.setdefault(claimed, []).append(path)
    return found


def is_found(module: Path, named: Mapping[str, list[Path]], claimed: Mapping[str, list[Path]]) -> bool:
    """Returns True if a test covers ``module``, or has its name and imports it or lies in a folder of its package."""
    name = str(module.relative_to(ROOT))
    tests = named.get(module.stem, [])
    near = {*module.relative_to(ROOT).parts[:-1]}
    return name in claimed or any(test.parent.name in near or module_of(module) in targets(test) for test in tests)


def modules() -> Iterator[Path]:
    for package in PACKAGES:
        for path in sources(package):
            if path.stem not in FACES and len(path.read_text().splitlines()) > SMALL:
                yield path


def test_every_modules_test_is_found_by_its_name() -> None:
    lost = [str(path.relative_to(ROOT)) for path in modules() if not is_found(path, files_of_names(), claims())]
    assert lost == [], "call its test test_NAME.py, or name it in the docstring of its test: Covers: PATH."


def test_what_is_covered_is_there_and_is_claimed_once() -> None:
    assert [path for path in claims() if not (ROOT / path).is_file()] == []
    assert {path: tests for path, tests in claims().items() if len(tests) > 1} == {}


@pytest.mark.parametrize(
    ("named", "claimed", "found"),
    [
        ({}, {}, False),
        ({"allocator": ["e2e/test_allocator.py"]}, {}, False),  # of another allocator
        ({"allocator": ["scheduler/kv_manager/test_allocator.py"]}, {}, True),
        ({}, {"lamina/scheduler/kv_manager/allocator.py": ["e2e/test_llm.py"]}, True),
        ({}, {"lamina/kv/allocator.py": ["e2e/test_llm.py"]}, False),
    ],
)
def test_a_module_whose_test_has_no_name_of_it_is_lost(
    named: dict[str, list[str]], claimed: dict[str, list[str]], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("test_found_by_name.targets", lambda path: ())
    tests = [{name: [Path("tests", x) for x in paths] for name, paths in given.items()} for given in (named, claimed)]
    assert is_found(ROOT / "lamina/scheduler/kv_manager/allocator.py", *tests) is found


def test_a_docstring_of_several_lines_is_read_whole() -> None:
    text = "What it tests.\n\nCovers: lamina/a.py, lamina/b/c.py,\nnetstack/d.py.\n\nMore."
    assert list(covered(text)) == ["lamina/a.py", "lamina/b/c.py", "netstack/d.py"]
    assert list(covered("It covers: lamina/a.py.")) == []
