"""Compiles kernels.cu with links of NCCL's device API by nvcc, as NVRTC does not accept NCCL's headers. Compiled
kernels are kept from one start to the next, in the folder of LAMINA_CACHE. A digest of all that determines them is the
name of their file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from lamina.netstack.cached_file import CachedFile, cache_directory
from lamina.netstack.cuda.driver import CSRC, FLAGS, KERNELS, Compiler

from .nccl import LIBNCCL, package_folders

NVCC = "LAMINA_NVCC"  # another compiler to run instead of the installed one
READS = "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"  # environment variables that nvcc itself reads
VERSION_S, COMPILE_S = 60.0, 600.0
MOST_FILES = 16  # kept
LARGEST = 256 << 20  # bytes of a file


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
    kept = _place(compiler, architecture)
    image = kept.read() if kept else None
    if not image:
        image = _compiled(compiler, architecture)
        if kept:
            kept.write(image)
    return image


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


def _place(compiler: str, architecture: int) -> CachedFile | None:
    """Return the place of kept kernels, by all that determines them; None if there is no cache, or nvcc reports no
    version.
    """
    folder = cache_directory("kernels")
    if folder is None:
        return None
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=VERSION_S, check=True).stdout
        code = _digest(path for path in (CSRC / "netstack").rglob("*") if path.suffix in (".cu", ".h"))
        nccl = [_digest(folder.glob("nccl*.h")) + _digest(folder.glob("nccl_*/**/*.h")) for folder in header_folders()]
    except (OSError, subprocess.SubprocessError):
        return None
    environment = [os.environ.get(name, "") for name in READS]
    return kept_image(folder, [compiler, version.hex(), *_flags(architecture), *environment, code, *nccl])


def kept_image(folder: Path, facts: Sequence[str]) -> CachedFile:
    """Return the file of the kernels that ``facts`` determine."""
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return CachedFile(folder / f"{name}.cubin", largest=LARGEST, most_files=MOST_FILES)


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        text = path.read_bytes()
        digest.update(f"{path}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()
