"""An installed package in a checkout that was never built: commands run the former, `import` refuses the latter."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from poison import END_S, ROOT, bare, child

COMMANDS = re.findall(r"^lamina-launch (.+)$", (ROOT / "README.md").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def unbuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh checkout: sources alone."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "lamina", folder / "lamina", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment in which the package is installed."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=100)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    (site / "lamina").symlink_to(ROOT / "lamina")
    return str(folder / "bin" / "python")


@pytest.mark.long
@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith(("generate", "explain"))])
def test_commands_of_an_installed_package_work_in_a_checkout(command: str, unbuilt: Path, python: str) -> None:
    done = subprocess.run(
        [python, "-P", "-m", "lamina.cli.launch", *shlex.split(command)], cwd=unbuilt, env=bare(),
        capture_output=True, text=True, timeout=END_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def refused(directory: Path, python: str, *words: str) -> list[str]:
    """The lines of the error."""
    done = subprocess.run(
        [python, *words], cwd=directory, env=bare(), capture_output=True, text=True, timeout=END_S, check=False
    )
    assert done.returncode == 1
    return done.stderr.splitlines()


def test_a_checkout_without_a_build_says_what_to_do(unbuilt: Path, python: str) -> None:
    """Python itself prefers the current directory to what is installed, unless it is started with -P."""
    line = refused(unbuilt, python, "-c", "import lamina")[-1]
    version = ".".join(map(str, sys.version_info[:2]))
    assert line == (
        f"ImportError: {unbuilt}/lamina has no native modules for Python {version}: run `make demo` in {unbuilt}; or, "
        "where Lamina is installed, start Python with -P, which leaves out the current directory"
    )
    (only,) = refused(unbuilt, python, "-m", "lamina.cli.launch", "--version")
    assert line in only
    told = child("import lamina; print(lamina.__file__)", unbuilt, {}, "-P", python=python)
    assert not told.startswith(str(unbuilt))


@pytest.mark.long
def test_options_of_numba_are_not_taken_from_the_current_directory(tmp_path: Path) -> None:
    """They may name a folder from which it loads compiled code."""
    (tmp_path / ".numba_config.yaml").write_text(f"cache_dir: {tmp_path}/theirs\n")
    code = (
        "import torch\nfrom lamina.ops.attention import get\n"
        "try:\n    get('numba', torch.device('cpu'), torch.float32)\nexcept ImportError as error:\n    print(error)\n"
    )
    assert child(code, tmp_path, {"PYTHONPATH": str(ROOT)}, "-P") == (
        f"attention backend 'numba' cannot be used here: numba would take options from {tmp_path}/.numba_config.yaml: "
        "start Lamina in another directory\n"
    )
    assert not (tmp_path / "theirs").exists()
