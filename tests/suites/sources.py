"""The sources of the suites, and the environment in which they run: all of it below build/suites."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("LAMINA_SUITES", ROOT / "build" / "suites"))
SHIM = Path(__file__).resolve().parent / "shim"
VLLM = "0.32.0"
NEEDS = ("pytest-asyncio==1.5.0", "unearth==0.19.0", "requests", "cloudpickle", "regex", "psutil", "pyzmq", "pybase64")
INSTALL_S = 1500.0


def environment() -> Path:
    """The Python of an environment that sees this one's packages and has those of the suites."""
    at = FOLDER / "env"
    if not (at / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(at)], check=True, timeout=INSTALL_S)
        inside = at / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        (inside / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
        more = shlex.split(os.environ.get("PIP_ARGS", ""))
        pip = [str(at / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *more, *NEEDS], check=True, timeout=INSTALL_S)
        (at / ".ready").touch()
    return at / "bin" / "python"


def vllm() -> Path:
    """The folder that has vLLM's ``tests``, with our ``utils.py`` and ``conftest.py`` in place of theirs."""
    at = FOLDER / "vllm"
    if not (at / ".ready").exists():
        archive = FOLDER / f"vllm-{VLLM}.tar.gz"
        if not archive.exists():
            _download(f"vllm=={VLLM}")
        _unpack(archive, at, ("tests/", "examples/"))
        (at / ".ready").touch()
    for name in ("utils", "conftest"):
        shutil.copyfile(SHIM / "lamina_as_vllm" / f"in_place_of_{name}.py", at / "tests" / f"{name}.py")
    return at


def _download(package: str) -> None:
    """The source package, unbuilt: pip would build it to know what it is."""
    unearth = environment().with_name("unearth")
    found = subprocess.run(
        [str(unearth), "--no-binary", package, "--download", str(FOLDER)],
        capture_output=True, text=True, timeout=INSTALL_S, check=False,
    )  # fmt: skip
    if found.returncode:
        raise ValueError(f"{package} cannot be had: {found.stderr.strip()[-300:]}")


def _unpack(archive: Path, at: Path, parts: Iterable[str]) -> None:
    """Unpacks, from a source package's one folder, what begins with one of ``parts``."""
    with tarfile.open(archive) as tar:
        for member in tar:
            inside = member.name.partition("/")[2]
            if inside.startswith(tuple(parts)) and (member.isfile() or member.isdir()):
                tar.extract(member.replace(name=inside), at, filter="data")
