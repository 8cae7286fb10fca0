"""The package as a user installs it: sdist, wheel and an empty environment, for each Python that CI's machine has.

It is used from a folder that has poison of its own: modules with the names of those that Lamina imports.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from ranges import call, copy_tracked
from shipped import MODEL as SHIPPED
from shipped import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
MODEL = str(ROOT / SHIPPED)
VERSIONS = ("3.11", "3.12", "3.13")
TORCH = "torch==2.13.0"  # installed first, as README says
RUN_S = 900.0
SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
POISONED = ("msgspec", "numpy", "lamina")
WRAP = """
import sys
import lamina, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
inputs = tokenizer("import os", return_tensors="pt")
settings = {"max_new_tokens": 8, "do_sample": False}
wanted = model.generate(**inputs, **settings)
with lamina.wrap(model, max_model_len=256) as split:
    assert torch.equal(split.generate(**inputs, **settings), wanted)
print("equal", lamina.__file__)
"""


def interpreter(version: str) -> str:
    """Return a Python of this version, of PATH or of pyenv; else skip the test."""
    name, pyenv = f"python{version}", Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for found in filter(None, [shutil.which(name), *map(str, sorted(pyenv.glob(f"{version}.*/bin/{name}")))]):
        if subprocess.run([found, "-c", "import venv"], capture_output=True, timeout=60, check=False).returncode == 0:
            return found
    pytest.skip(f"this machine has no {name}")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    copy_tracked(ROOT, folder / "source")
    assert call(folder / "log", sys.executable, "-c", SDIST, folder, cwd=folder / "source"), (
        folder / "log"
    ).read_text()
    return next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module", params=VERSIONS)
def programs(request: pytest.FixtureRequest, sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of programs of an environment with the wheel of that sdist."""
    python, folder = interpreter(request.param), tmp_path_factory.mktemp(f"python{request.param}")
    log, programs = folder / "log", folder / "venv" / "bin"
    pip = [programs / "python", "-m", "pip", "--disable-pip-version-check"]
    more = shlex.split(os.environ.get("PIP_ARGS", ""))
    assert call(log, python, "-m", "venv", folder / "venv"), log.read_text()[-3000:]
    assert call(log, *pip, "install", *more, TORCH), log.read_text()[-3000:]
    assert call(log, *pip, "wheel", "--no-deps", *more, "--wheel-dir", folder, sdist), log.read_text()[-3000:]
    (wheel,) = folder.glob("*.whl")
    assert call(log, *pip, "install", *more, f"{wheel}[serve]"), log.read_text()[-3000:]
    yield programs
    shutil.rmtree(folder)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with poison."""
    for name in POISONED:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the current directory was imported')\n")
    for variable in ("PYTHONPATH", "LAMINA_TRANSPORTS"):  # of the tests
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*command: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_generate(programs: Path, elsewhere: Path) -> None:
    assert run(programs / "lamina-launch", "generate", MODEL, "--prompt", "import os", "--max-tokens", "8").strip()


def test_wrap(programs: Path, elsewhere: Path) -> None:
    word, file = run(programs / "python", "-P", "-c", WRAP, MODEL).split()[-2:]
    assert word == "equal"
    assert Path(file).is_relative_to(programs.parent)


def test_check(programs: Path, elsewhere: Path) -> None:
    assert run(programs / "lamina-launch", "check", MODEL, "--dry-run").strip()


def test_serve(programs: Path, elsewhere: Path) -> None:
    command = [str(programs / "lamina-launch"), "serve", MODEL, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().rsplit(" on ", 1)[1].strip()
            body = {"prompt": "import os", "max_tokens": 8}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=RUN_S).json()
            assert answer["usage"]["completion_tokens"] > 0
        finally:
            server.terminate()
        assert server.wait(60) == 0
