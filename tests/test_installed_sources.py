"""The sources that are compiled when they are first used must come with an installation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WHERE = """
from lamina import __file__ as lamina
from lamina.ops.attention.cuda_kernels import CSRC, SOURCES, source
from lamina.netstack.cuda.driver import KERNELS
print(lamina, CSRC, SOURCES / "kernels.cu", KERNELS, len(source()), sep="\\n")
"""


@pytest.mark.long
@pytest.mark.timeout(200)
def test_sources_of_kernels_are_where_an_installation_looks(tmp_path: Path) -> None:
    site = tmp_path / "site"
    build = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib"]
    subprocess.run([*build, str(site)], cwd=ROOT, capture_output=True, timeout=150, check=True)
    for native in (ROOT / "lamina" / "ops" / "attention").glob("_attention*.so"):  # nothing here takes longer to build
        shutil.copy(native, site / "lamina" / "ops" / "attention")
    found = subprocess.run(
        [sys.executable, "-c", WHERE], cwd=tmp_path, env={"PYTHONPATH": str(site)}, capture_output=True, timeout=100,
        text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for path in map(Path, found[:4]):
        assert path.exists(), path
        assert path.is_relative_to(site), "not those of the checkout"
    here = {p.relative_to(ROOT) for end in ("h", "cu", "cuh") for p in (ROOT / "csrc").rglob(f"*.{end}")}
    assert here == {p.relative_to(site / "lamina") for p in (site / "lamina" / "csrc").rglob("*.*")}


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_without_a_compiler_the_build_fails_and_its_last_line_says_so(compiler: str, tmp_path: Path) -> None:
    """An installation without native modules would fail later, and elsewhere."""
    build = [sys.executable, "setup.py", "-q", "build_ext", "--build-temp", "temp", "--build-lib", "lib"]
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "csrc").symlink_to(ROOT / "csrc")
    environ = {**os.environ, "CC": compiler, "CXX": compiler}
    done = subprocess.run(build, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode
    fix = "install g++, or name another one by CC and CXX"
    assert done.stderr.splitlines()[-1] == f"Lamina needs a C++17 compiler, and {compiler} failed: {fix}"
    assert not list(tmp_path.rglob("*.so"))


def test_another_kind_of_machine_needs_no_native_module(tmp_path: Path) -> None:
    """Kernels are written for x86, which no compiler of another machine takes."""
    (tmp_path / "csrc").symlink_to(ROOT / "csrc")
    arm = f"import platform, runpy; platform.machine = lambda: 'aarch64'; runpy.run_path({str(ROOT / 'setup.py')!r})"
    build = [sys.executable, "-c", arm, "-q", "build_ext", "--build-temp", "temp", "--build-lib", "lib"]
    environ = {**os.environ, "CC": "false", "CXX": "false"}
    done = subprocess.run(build, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert "lamina.ops.gemm._gemm" in done.stderr
