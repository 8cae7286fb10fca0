"""``make ranges``: the ends of all version ranges are declared, and an end that was not run or that fails is seen."""

from __future__ import annotations

import itertools
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
import ranges
from packaging.requirements import Requirement

pytestmark = pytest.mark.timeout(300)  # environments are made, with pip as a process of its own
ROOT = Path(__file__).resolve().parents[1]
# Builds a wheel of one module without setuptools, so that no test needs an index.
BACKEND = """
import tomllib, zipfile

def build_wheel(folder, settings=None, metadata=None):
    project = tomllib.load(open("pyproject.toml", "rb"))["project"]
    needs = [*project["dependencies"], *(f"{r}; extra == 'test'" for r in project["optional-dependencies"]["test"])]
    name = "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.write("tiny.py")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "\\n".join(["Metadata-Version: 2.1", "Name: tiny", "Version: 1.0",
            "Provides-Extra: test", *(f"Requires-Dist: {r}" for r in needs)]) + "\\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    return name
"""


def release(links: Path, name: str, version: str, *needs: str) -> None:
    """A wheel with a module that knows its version."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(links / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        head = [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            f"Version: {version}",
            *(f"Requires-Dist: {n}" for n in needs),
        ]
        wheel.writestr(f"{info}/METADATA", "\n".join(head) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project that needs alpha>=1.0,<3 and, for its tests, beta>=1,<2, which are in a folder of releases."""
    links, project = tmp_path / "links", tmp_path / "project"
    links.mkdir()
    project.mkdir()
    for version in ("0.9", "1.0", "1.5", "2.0", "3.0"):
        release(links, "alpha", version)
    release(links, "beta", "1.0")
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "tiny"\nversion = "1.0"\ndependencies = ["alpha>=1.0,<3"]\n'
        '[project.optional-dependencies]\ntest = ["beta>=1,<2"]\n'
    )
    (project / "backend.py").write_text(BACKEND)
    (project / "tiny.py").write_text("import alpha, beta\n")
    (project / ".gitignore").write_text("build\n")
    for command in ("init -q", "add ."):
        subprocess.run(["git", *command.split()], cwd=project, check=True, timeout=60)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.delenv("PIP_ARGS", raising=False)
    return project


def cells(output: str) -> list[list[str]]:
    """The table, without its head."""
    lines = output.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("range "))
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[head + 1 :]]


@pytest.mark.long
def test_each_end_is_installed_and_run(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "tiny.py").write_text("import alpha, beta\nassert alpha.VERSION in ('1.0', '2.0')\n")
    assert ranges.main([], project, [["-c", "import tiny"], ["-c", "import beta"]]) == 0
    assert cells(capsys.readouterr().out) == [
        ["alpha>=1.0,<3", "lowest", "1.0", "passed"],
        ["beta>=1,<2", "lowest", "1.0", "passed"],
        ["alpha>=1.0,<3", "newest", "2.0", "passed"],
        ["beta>=1,<2", "newest", "1.0", "passed"],
    ]
    left = sorted(path.name for path in (project / "build" / "ranges" / "newest").iterdir())
    assert left == ["constraints.txt", "log"], "an environment that passes is removed"
    assert "alpha==2.0" in (project / "build" / "ranges" / "newest" / "log").read_text()


@pytest.mark.long
def test_an_end_that_fails_is_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "tiny.py").write_text("import alpha\nassert alpha.VERSION < '2'\n")
    assert ranges.main([], project, [["-c", "import tiny"], ["-c", "import beta"]]) == 1
    assert cells(capsys.readouterr().out) == [
        ["alpha>=1.0,<3", "lowest", "1.0", "passed"],
        ["beta>=1,<2", "lowest", "1.0", "passed"],
        ["alpha>=1.0,<3", "newest", "2.0", "tests fail: -c import tiny"],
        ["beta>=1,<2", "newest", "1.0", "tests fail: -c import tiny"],
    ]
    assert "AssertionError" in (project / "build" / "ranges" / "newest" / "log").read_text()


@pytest.mark.long
def test_an_end_that_another_package_keeps_from_being_run_is_named(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release(project.parent / "links", "beta", "1.1", "alpha<2")
    assert ranges.main(["newest"], project, []) == 1
    assert cells(capsys.readouterr().out) == [
        ["alpha>=1.0,<3", "newest", "1.5", "2.0 is allowed, and other packages hold it back"],
        ["beta>=1,<2", "newest", "1.1", "passed"],
    ]


@pytest.mark.long
def test_an_end_that_cannot_be_installed_is_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project.parent / "links" / "alpha-1.0-py3-none-any.whl").unlink()
    assert ranges.main(["lowest"], project, []) == 1
    assert [row[-1] for row in cells(capsys.readouterr().out)] == ["cannot be installed"] * 2
    (project / "backend.py").write_text("")
    assert ranges.main(["lowest"], project, []) == 1
    assert "no wheel can be built" in capsys.readouterr().out


def test_every_dependency_has_both_ends() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        table = tomllib.load(file)
    extras = table["project"]["optional-dependencies"]
    named = [*table["build-system"]["requires"], *table["project"]["dependencies"], *itertools.chain(*extras.values())]
    for text in named:
        operators = {s.operator for s in Requirement(text).specifier}
        assert operators == {">=", "<"} or text.startswith("lamina["), text
    run = ranges.declared(ROOT)
    assert {"torch", "transformers", "numpy", "ray", "fastapi", "pydantic", "starlette", "openai"} <= set(run)


@pytest.mark.parametrize("text", ["alpha", "alpha>=1", "alpha<2", "alpha>=1,<2,<3"])
def test_a_range_without_one_of_its_ends_is_refused(tmp_path: Path, text: str) -> None:
    dependencies = f'[project]\nname = "tiny"\ndependencies = ["{text}"]\noptional-dependencies.test = []\n'
    (tmp_path / "pyproject.toml").write_text(dependencies)
    with pytest.raises(ValueError, match="lacks an end: write alpha>=LOWEST,<FIRST_NOT_TRIED"):
        ranges.declared(tmp_path)


def test_the_pinned_versions_are_within_the_ranges() -> None:
    """constraints.txt has what `make test` installs."""
    pinned = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] != "#"]
    found = ranges.declared(ROOT)
    for each in pinned:
        version = next(iter(each.specifier)).version
        name = ranges.canonicalize_name(each.name)
        assert name not in found or found[name].requirement.specifier.contains(version), f"{each}"
