"""A program that is compiled for tests is kept, and made anew where anything that it was made of is another."""

from __future__ import annotations

import shutil
from pathlib import Path

import compiled
import pytest
from compiled import made_by

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the command of a program in two folders, which includes one header by way of another."""
    monkeypatch.setattr(compiled, "KEPT", tmp_path / "kept")
    headers = tmp_path / "headers"
    (headers / "room").mkdir(parents=True)
    (tmp_path / "main.cpp").write_text("#include <room/first.h>\nint answer() { return second; }\n")
    (headers / "room" / "first.h").write_text('#ifdef NEVER\n# include "third.h"\n#endif\n#include "second.h"\n')
    for name in ("second", "third", "other"):
        (headers / "room" / f"{name}.h").write_text(f"constexpr int {name} = 1;\n")
    return ["g++", f"-I{headers}", "-c", str(tmp_path / "main.cpp")]


def test_it_is_made_once(command: list[str], tmp_path: Path) -> None:
    first, again = (made_by(command, "-o", "{}/main.o") for _ in range(2))
    assert first.status == 0, first.said
    assert again == first
    assert [f.name for f in (tmp_path / "kept").iterdir()] == [first.folder.name]
    assert made_by([*command, "-O1"], "-o", "{}/main.o").folder != first.folder


@pytest.mark.parametrize(("name", "anew"), [("first", True), ("second", True), ("third", True), ("other", False)])
def test_what_it_includes_makes_it_another(command: list[str], tmp_path: Path, name: str, anew: bool) -> None:
    """The file may be in any branch, in any depth; a file in its folder that is not included does not count."""
    first = made_by(command, "-o", "{}/main.o")
    with (tmp_path / "headers" / "room" / f"{name}.h").open("a") as header:
        header.write("// more\n")
    assert (made_by(command, "-o", "{}/main.o").folder != first.folder) is anew


def test_a_file_of_its_own_goes_before(command: list[str]) -> None:
    """A header with a mistake shows it."""
    compiler, *others = command
    right = made_by([compiler], "-I{}", *others, "-o", "{}/main.o")
    wrong = made_by(
        [compiler], "-I{}", *others, "-o", "{}/main.o", files={"room/first.h": "constexpr int first = 1;\n"}
    )
    assert (right.status, wrong.status) == (0, 1)
    assert "second" in wrong.said


def test_an_include_without_a_name_is_refused(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "main.cpp").write_text("#define WHICH <cstdio>\n#include WHICH\n")
    with pytest.raises(ValueError, match="an include has no name"):
        made_by(command, "-o", "{}/main.o")
