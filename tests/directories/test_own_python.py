"""A child runs its parent's package, wherever that came from, and finds other modules as its parent does."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from poison import ROOT, child

from lamina.netstack.own_python import FOLDER, own_environment

HELPER = ROOT / "netstack" / "own_python.py"
COMPILER = ROOT / "netstack" / "gin" / "compiler.py"  # it starts nvcc
STARTS = re.compile(r"executable|subprocess|multiprocessing|runpy|\bpty\b|\bos\.|ProcessPool")
# What a child of the process, in a directory of its own choice, says of its package and of modules that it finds.
ASK_CHILD = """
import os, subprocess, sys
{before}
from lamina.netstack.own_python import own_python
code = "import argparse, lamina, sys; print(lamina.__file__, argparse.__file__, sys.flags.safe_path, sep=chr(10))"
command, environment = own_python("-c", code)
subprocess.run(command, env=environment, check=True, timeout=100)
"""


def checkout(folder: Path) -> Path:
    """A bare checkout with its native modules."""
    folder.mkdir()
    (folder / "lamina").symlink_to(ROOT / "lamina")
    return folder


def trap(folder: Path) -> Path:
    """A directory with another package of the same name."""
    (folder / "lamina").mkdir(parents=True)
    (folder / "lamina" / "__init__.py").write_text("raise ImportError('a trap')")
    return folder


def asked(directory: Path, variables: dict[str, str], *flags: str, before: str = "", python: str = "") -> list[str]:
    """The lines of that child."""
    code = ASK_CHILD.format(before=before)
    return child(code, directory, variables, *flags, python=python or sys.executable).splitlines()


def test_a_child_runs_the_package_of_its_parent_and_not_that_of_its_directory(tmp_path: Path) -> None:
    own, other = checkout(tmp_path / "own"), trap(tmp_path / "other")
    told = asked(other, {"PYTHONPATH": str(own)}, "-P")
    assert (told[0], told[2]) == (str(own / "lamina" / "__init__.py"), "True")


def test_a_checkout_in_which_python_was_started_is_the_childs_too(tmp_path: Path) -> None:
    """The parent finds the package in its current directory, and then changes to another one."""
    own, other = checkout(tmp_path / "own"), trap(tmp_path / "other")
    before = f"import lamina; os.chdir({str(other)!r})"
    assert asked(own, {}, before=before)[0] == str(own / "lamina" / "__init__.py")


def test_a_folder_that_the_parent_has_put_into_its_path_is_the_childs_too(tmp_path: Path) -> None:
    """PYTHONPATH names another package of the same name."""
    own, other = checkout(tmp_path / "own"), trap(tmp_path / "other")
    before = f"sys.path.insert(0, {str(own)!r})"
    assert asked(other, {"PYTHONPATH": str(other)}, before=before)[0] == str(own / "lamina" / "__init__.py")


def test_relative_entries_mean_the_directory_in_which_the_parent_began(tmp_path: Path) -> None:
    own, other = checkout(tmp_path / "own"), trap(tmp_path / "other")
    before = f"import lamina.netstack; os.chdir({str(other)!r})"
    told = asked(tmp_path, {"PYTHONPATH": os.pathsep.join(["own", "."])}, "-P", before=before)
    assert told[0] == str(own / "lamina" / "__init__.py")


@pytest.mark.parametrize("given", ["", ":", ":/a", "/a::", "/a:/b:/a", "/a/../b"])
def test_the_path_of_a_child_has_absolute_entries_and_no_current_directory(given: str) -> None:
    entries = own_environment({"PYTHONPATH": given})["PYTHONPATH"].split(os.pathsep)
    wanted = {"": [], ":": [], ":/a": ["/a"], "/a::": ["/a"], "/a:/b:/a": ["/a", "/b"], "/a/../b": ["/b"]}[given]
    assert [entry for entry in entries if entry != FOLDER] == wanted
    assert all(map(os.path.isabs, entries))


@pytest.mark.parametrize("given", ["", ".", "/a:/b", f"/a:{ROOT}"])
def test_a_childs_own_children_have_its_environment(given: str) -> None:
    """A server's engine uses the warm process that it was forked from only if their environments are equal."""
    once = own_environment({"PYTHONPATH": given, "HOME": "/h"})
    assert own_environment(once) == once
    assert once["HOME"] == "/h"


@pytest.mark.parametrize("flag", ["-E", "-I"])
def test_what_the_parent_ignores_its_child_ignores(flag: str, tmp_path: Path) -> None:
    own, other = checkout(tmp_path / "own"), trap(tmp_path / "other")
    told = asked(tmp_path, {"PYTHONPATH": str(other)}, flag, before=f"sys.path.insert(0, {str(own)!r})")
    assert told[0] == str(own / "lamina" / "__init__.py")


def test_packages_of_the_user_are_left_out_where_the_parent_leaves_them_out(tmp_path: Path) -> None:
    code = "from lamina.netstack.own_python import own_environment as own; print(own().get('PYTHONNOUSERSITE'))"
    variables = {"PYTHONPATH": str(ROOT)}
    assert [child(code, tmp_path, variables, "-P", *flags).strip() for flags in ((), ("-s",))] == ["None", "1"]


def test_an_installed_package_hides_no_module_of_python(tmp_path: Path) -> None:
    """The folder of installed packages may hold an old argparse, which must not become every worker's."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=100)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    (site / "lamina").symlink_to(ROOT / "lamina")
    (site / "argparse.py").write_text("raise ImportError('a trap')")
    told = asked(trap(tmp_path / "other"), {}, "-P", python=str(tmp_path / "venv" / "bin" / "python"))
    assert told[:2] == [str(site / "lamina" / "__init__.py"), sys.modules["argparse"].__file__]


def sources() -> Iterator[Path]:
    """All Python of the product, each file once."""
    for package in ("lamina", "converter", "netstack"):
        for folder, _, names in os.walk(ROOT / package):
            yield from (Path(folder) / name for name in sorted(names) if name.endswith(".py"))


def unguarded(code: str) -> Iterator[str]:
    """Starts of processes in ``code`` that ``own_python`` has no part in."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Attribute(attr="executable", value=ast.Name(id="sys")):
                yield "sys.executable"
            case ast.ImportFrom(module="sys" | "subprocess" | "os", names=names):
                yield from (alias.name for alias in names if alias.name in ("executable", "run", "system", "popen"))
            case ast.Import(names=names):
                bad = ("multiprocessing", "runpy", "pty")
                yield from (alias.name for alias in names if alias.name.split(".")[0] in bad)
            case ast.Attribute(attr=name, value=ast.Name(id="os")) if name.startswith(("exec", "spawn", "posix_spawn")):
                yield f"os.{name}"
            case ast.Attribute(attr="system" | "popen" as name, value=ast.Name(id="os")):
                yield f"os.{name}"
            case ast.Name(id="ProcessPoolExecutor") | ast.Attribute(attr="ProcessPoolExecutor"):
                yield "ProcessPoolExecutor"
            case ast.Call(func=ast.Attribute(attr=name, value=ast.Name(id="subprocess")), keywords=given):
                if "env" not in [keyword.arg for keyword in given]:
                    yield f"subprocess.{name} without env"


def test_every_python_process_is_started_by_one_function() -> None:
    texts = {path: path.read_text() for path in sources() if path not in (HELPER, COMPILER)}
    assert [f"{path}: {what}" for path, code in texts.items() if STARTS.search(code) for what in unguarded(code)] == []


@pytest.mark.parametrize(
    "code",
    [
        "command = [sys.executable, '-m', 'x']", "from sys import executable", "subprocess.run(['x'])",
        "subprocess.Popen(['x'], cwd='.')", "os.execv('x', [])", "os.posix_spawn('x', [], {})", "os.system('x')",
        "import multiprocessing.spawn", "from subprocess import run", "futures.ProcessPoolExecutor()",
    ],
)  # fmt: skip
def test_a_start_by_another_way_is_seen(code: str) -> None:
    assert STARTS.search(code)
    assert len([*unguarded(code)]) == 1
    assert [*unguarded("subprocess.Popen(command, env=environment); os.fork(); sys.exit()")] == []
