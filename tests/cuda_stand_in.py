"""The stand-in of the CUDA driver, for tests on machines without a GPU: built once, kept under build/, by content."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "tests" / "netstack" / "gpu" / "fake_cuda.cpp"
# Names of transports among parameters of tests: `cuda` over the stand-in; `loopback` whose ends compute on one GPU, and
# that over the stand-in.
STAND_IN = "cuda on a CPU"
ONE_GPU, ONE_STAND_IN = "loopback on one GPU", "loopback on one GPU on a CPU"
_REAL = {STAND_IN: "cuda", ONE_GPU: "loopback", ONE_STAND_IN: "loopback"}
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]  # nvcc's are none of g++'s
FLAGS = ["-std=c++17", "-O2", *WARNINGS, "-shared", "-fPIC", "-pthread", f"-I{ROOT / 'csrc'}"]


def build() -> Path:
    """The library. Skips the test where there is no compiler."""
    if shutil.which("g++") is None:
        pytest.skip("no g++: the stand-in of the CUDA driver cannot be built")
    digest = hashlib.sha256(repr(FLAGS).encode() + SOURCE.read_bytes())
    for path in sorted((ROOT / "csrc" / "netstack").rglob("*.*")):
        digest.update(path.read_bytes())
    library = ROOT / "build" / "cuda_stand_in" / f"libcuda-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", *FLAGS, str(SOURCE), "-o", str(partial)], check=True, timeout=110)
        partial.rename(library)
    return library


def environment() -> dict[str, str]:
    """What makes the product load it in place of libcuda and NVRTC."""
    library = str(build())
    return {"LAMINA_LIBCUDA": library, "LAMINA_LIBNVRTC": library}


@contextmanager
def scheme_of(transport: str) -> Iterator[str]:
    """The scheme of a transport, or of the names above, in the environment that it needs."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items() if transport in (STAND_IN, ONE_STAND_IN) else ():
            patch.setenv(name, value)
        yield _REAL.get(transport, transport)


def gpu_of(transport: str) -> int | None:
    """What to open its scheme with."""
    return 0 if transport in (ONE_GPU, ONE_STAND_IN) else None
