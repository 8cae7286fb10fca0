"""Compiles kernels.cu with links of NCCL's device API by nvcc, as NVRTC does not accept NCCL's headers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from lamina.netstack.cuda.driver import CSRC, FLAGS, KERNELS, Compiler
from lamina.netstack.cuda.kept_kernels import digest_of, kept_or_built, sources

from .nccl import LIBNCCL, package_folders

NVCC = "LAMINA_NVCC"  # another compiler to run instead of the installed one
READS = "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"  # environment variables that nvcc itself reads
VERSION_S, COMPILE_S = 60.0, 600.0


def header_folders() -> list[Path]:
    """Return the folders of NCCL's headers, next to the library, and of CUDA's packages; nvcc knows its own."""
    named = os.environ.get(LIBNCCL)
    places = [Path(named).parents[1] / "include"] if named else []
    places += [p for folder in package_folders() for p in (folder / "nccl/include", *folder.glob("cu1*/include"))]
    return [p for place in places for p in (place, place / "cccl") if p.is_dir()]


def why_no_compiler() -> str:
    """Return what is missing to compile kernels with NCCL's headers; "": nothing."""
    if not any((folder / "nccl_device.h").is_file() for folder in header_folders()):
        return "NCCL's headers are not there"
    return "" if _nvcc() else "nvcc, which compiles kernels with NCCL's headers, is not there"


def build(architecture: int) -> bytes:
    """Return the kernels for sm_``architecture``, kept or compiled. Raises ImportError for what is missing,
    RuntimeError with nvcc's message.
    """
    compiler = _nvcc()
    if (why := why_no_compiler()) or compiler is None:
        raise ImportError(why)
    facts = _facts(compiler, architecture)
    return (
        kept_or_built(facts, lambda: _compiled(compiler, architecture)) if facts else _compiled(compiler, architecture)
    )


BY_NVCC = Compiler("nvidia-cuda-nvcc", build)


def _nvcc() -> str | None:
    packaged = (str(path) for folder in package_folders() for path in folder.glob("cu1*/bin/nvcc"))
    places = os.environ.get(NVCC), *packaged, "nvcc", "/usr/local/cuda/bin/nvcc"
    return next((path for place in places if place and (path := shutil.which(place))), None)


def _flags(architecture: int) -> list[str]:
    includes = (f"-I{folder}" for folder in (CSRC, *header_folders()))
    return [f"-arch=sm_{architecture}", *FLAGS, "-DLAMINA_GIN", *includes]


def _compiled(compiler: str, architecture: int) -> bytes:
    with TemporaryDirectory() as folder:
        image = Path(folder) / "kernels.cubin"
        command = [compiler, *_flags(architecture), "-cubin", str(KERNELS), "-o", str(image)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{compiler}: {error}") from error
        if done.returncode:
            stderr = done.stderr.splitlines() or [f"{compiler} ended with {done.returncode}"]
            first = next((line for line in stderr if "error" in line), stderr[0])
            raise RuntimeError(f"{KERNELS.name} does not compile for sm_{architecture}: {first.strip()}")
        return image.read_bytes()


def _facts(compiler: str, architecture: int) -> list[str]:
    """Return all that determines the kernels; nothing if nvcc reports no version."""
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=VERSION_S, check=True).stdout
        code = digest_of(sources(CSRC))
        nccl = [
            digest_of(folder.glob("nccl*.h")) + digest_of(folder.glob("nccl_*/**/*.h")) for folder in header_folders()
        ]
    except (OSError, subprocess.SubprocessError):
        return []
    environment = [os.environ.get(name, "") for name in READS]
    return [compiler, version.hex(), *_flags(architecture), *environment, code, *nccl]
