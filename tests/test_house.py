"""The house keeps its shape: arrows between packages, light imports, no code-bearing formats, small files."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("lamina", "converter", "netstack")
POLICY = (
    "engine/scheduler.py", "engine/prefill.py", "engine/steps.py", "engine/sequence.py", "engine/pipeline.py",
    "engine/tuner.py", "protocol/tables.py", "protocol/layout.py", "protocol/partition.py", "request.py", "config.py",
    "cores.py", "cluster/placement.py",
)  # fmt: skip


def sources(package: str) -> Iterator[Path]:
    for path in sorted((ROOT / package).rglob("*.py")):
        if not any(p.is_symlink() for p in path.parents if p != ROOT and ROOT in p.parents):
            yield path


def imported(path: Path) -> Iterator[str]:
    package = list(path.relative_to(ROOT).with_suffix("").parts)
    if package[0] != "lamina":
        package.insert(0, "lamina")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level] if node.level else []
            yield ".".join([*base, *([node.module] if node.module else [])])


@pytest.mark.parametrize(("package", "other"), [("converter", "netstack"), ("netstack", "converter")])
def test_converter_and_netstack_know_nobody(package: str, other: str) -> None:
    own = f"lamina.{package}"
    for path in sources(package):
        for name in imported(path):
            assert name.split(".")[0] not in (package, other), f"{path.name} imports a second copy: {name}"
            if name.split(".")[0] == "lamina":
                assert name == own or name.startswith(own + "."), f"{path.name} imports {name}"


def test_netstack_needs_no_torch() -> None:
    assert not [
        p.name for p in sources("netstack") for n in imported(p) if n.split(".")[0] in ("torch", "transformers")
    ]


@pytest.mark.parametrize("policy", POLICY)
def test_policy_imports_no_torch_and_no_io(policy: str) -> None:
    names = {n.split(".")[0] for n in imported(ROOT / "lamina" / policy)}
    assert not names & {"torch", "socket", "subprocess", "os", "threading", "time", "select"}


def test_workers_import_no_engine_loop_and_no_command_line() -> None:
    for path in (ROOT / "lamina" / "workers").glob("*.py"):
        for name in imported(path):
            assert not name.startswith(
                ("lamina.engine.engine", "lamina.engine.pools", "lamina.cluster", "lamina.llm")
            ), path


def test_import_is_light() -> None:
    code = (
        "import sys, lamina, lamina.netstack; print(*(m for m in ('torch', 'ray', 'transformers') if m in sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.split() == []


def test_top_level_folders_are_not_second_packages() -> None:
    for name in ("converter", "netstack"):
        run = subprocess.run(
            [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert run.returncode == 1
        assert f"import lamina.{name}" in run.stderr


def test_no_code_bearing_format() -> None:
    for package in PACKAGES:
        for path in sources(package):
            names = {n.split(".")[0] for n in imported(path)}
            assert not names & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, path
            assert "weights_only=False" not in path.read_text(), path


def test_models_are_named_in_models_only() -> None:
    families = ("llama", "gpt2", "gpt_neox", "mistral", "qwen", "gemma", "falcon", "bloom", "mixtral", "deepseek")
    for path in [*sources("converter"), *(ROOT / "lamina" / "workers").glob("*.py"), *sources("netstack")]:
        code = ast.unparse(ast.parse(path.read_text())).lower()
        assert not [f for f in families if f in code], path


def test_schemes_are_named_in_netstack_only() -> None:
    for path in sources("lamina"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                text = ast.unparse(node)
                assert not any(s in text for s in ("'shm'", "'tcp'", "'loopback'")), f"{path}: {text}"


@pytest.mark.parametrize("package", PACKAGES)
def test_files_are_small(package: str) -> None:
    long = {p.name: n for p in sources(package) if (n := len(p.read_text().splitlines())) > 400}
    assert not long


def test_architecture_is_short() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 80


def test_modules_of_tests_have_names_of_their_own() -> None:
    """pytest imports them by these alone: of two with one name, the second would not run."""
    names = [p.name for p in (ROOT / "tests").rglob("*.py") if p.name != "conftest.py"]
    assert [n for n in sorted(set(names)) if names.count(n) > 1] == []
