"""The stand-ins of the CUDA driver and of NCCL, as one library, for tests on machines without a GPU: built once, kept
under build/, by content.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "netstack" / "gpu"
SOURCE, NCCL, HEADERS = HERE / "fake_cuda.cpp", HERE / "fake_nccl.cpp", HERE / "nccl"
# Names of transports among parameters of tests: `cuda` and `gin` over the stand-ins; `loopback` whose ends compute on
# one GPU, and that over the stand-in.
STAND_IN, GIN_STAND_IN = "cuda on a CPU", "gin on a CPU"
ONE_GPU, ONE_STAND_IN = "loopback on one GPU", "loopback on one GPU on a CPU"
_REAL = {STAND_IN: "cuda", GIN_STAND_IN: "gin", ONE_GPU: "loopback", ONE_STAND_IN: "loopback"}
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]  # nvcc's are none of g++'s
NVCC = """#!/bin/sh
# as its NVRTC compiles anything, to a file behind -o; nothing of it is kept, as it tells no version
[ "$1" != --version ] || exit 1
while [ "$1" != -o ]; do shift; done
printf 'image\\0' > "$2"
"""
FLAGS = ["-std=c++17", "-O2", *WARNINGS, "-shared", "-fPIC", "-pthread", f"-I{ROOT / 'csrc'}", f"-I{HEADERS}"]


def build() -> Path:
    """The library. Skips the test where there is no compiler."""
    if shutil.which("g++") is None:
        pytest.skip("no g++: the stand-in of the CUDA driver cannot be built")
    digest = hashlib.sha256(repr((FLAGS, NVCC)).encode())
    for path in [SOURCE, NCCL, *sorted(HEADERS.iterdir()), *sorted((ROOT / "csrc" / "netstack").rglob("*.*"))]:
        digest.update(path.read_bytes())
    folder = ROOT / "build" / "cuda_stand_in" / digest.hexdigest()[:16]
    library = folder / "lib" / "libcuda.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", *FLAGS, str(SOURCE), str(NCCL), "-o", str(partial)], check=True, timeout=110)
        with suppress(FileExistsError):
            # in the folder that they have next to the library in NCCL's package
            (folder / "include").symlink_to(HEADERS)
        compiler = partial.with_name(f"nvcc.{os.getpid()}")
        compiler.write_text(NVCC)
        compiler.chmod(0o755)
        compiler.rename(library.with_name("nvcc"))
        partial.rename(library)
    return library


def environment() -> dict[str, str]:
    """The variables that make the product load it in place of libcuda and NVRTC."""
    library = str(build())
    places = dict.fromkeys(("LAMINA_LIBCUDA", "LAMINA_LIBNVRTC", "LAMINA_LIBNCCL"), library)
    return places | {"LAMINA_NVCC": str(Path(library).with_name("nvcc"))}


@contextmanager
def scheme_of(transport: str) -> Iterator[str]:
    """The scheme of a transport, or of the names above, in the environment that it needs."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items() if transport in (STAND_IN, GIN_STAND_IN, ONE_STAND_IN) else ():
            patch.setenv(name, value)
        yield _REAL.get(transport, transport)


def gpu_of(transport: str) -> int | None:
    """Returns the name by which its scheme is opened."""
    return 0 if transport in (ONE_GPU, ONE_STAND_IN) else None
