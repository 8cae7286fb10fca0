"""The CUDA kernels on a CPU: their own source, compiled by g++, warp by warp (emulation.h)."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from lamina.ops.attention.cuda import CudaAttention
from lamina.ops.attention.cuda_geometry import GpuLimits, Variant
from lamina.ops.attention.cuda_kernels import CSRC, Argument
from lamina.ops.attention.cuda_kernels import FLAGS as PRODUCT_FLAGS

GXX = shutil.which("g++")
HERE = Path(__file__).resolve().parent
BUILD = CSRC.resolve().parent / "build" / "cuda_emulation"
needs_gxx = pytest.mark.skipif(GXX is None, reason="no g++: the CUDA kernels cannot be emulated")
SMALL = GpuLimits(processors=2, shared_bytes=228 << 10, block_shared_bytes=227 << 10)
FLAGS = (
    "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-clobbered", "-U_FORTIFY_SOURCE",
    "-shared", "-fPIC", *(("-DLAMINA_FTZ",) if "-ftz=true" in PRODUCT_FLAGS else ()),
)  # fmt: skip


@cache
def library(variant: Variant, csrc: Path = CSRC) -> ctypes.CDLL:
    """One variant of the kernels; ``csrc``: the folder of the sources. Kept under build/, by content."""
    sources = csrc / "attention" / "cuda"
    digest = hashlib.sha256(repr((variant.defines(), FLAGS, sys.version)).encode())
    for path in [*sorted(sources.iterdir()), *sorted(HERE.glob("*.h")), HERE / "emulation.cpp"]:
        digest.update(path.read_bytes())
    output = BUILD / f"{digest.hexdigest()[:32]}.so"
    if not output.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        ours = output.with_suffix(f".{os.getpid()}")  # others may build the same
        includes = (f"-I{csrc}", f"-I{HERE.parent}")
        command = [str(GXX), *FLAGS, *includes, *variant.defines(), str(HERE / "emulation.cpp"), "-o", str(ours)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
        if done.returncode != 0:
            pytest.exit(done.stderr)  # no test of these kernels can pass
        ours.replace(output)
    return ctypes.CDLL(str(output))


@dataclass
class EmulatedKernels:
    """See ``cuda_kernels.Kernels``; counts what is launched."""

    device: GpuLimits = SMALL
    csrc: Path = CSRC
    first_is_fast: bool = False  # the first warp takes all tasks that a warp may take
    launched: Counter[str] = field(default_factory=Counter)

    def launch(self, variant: Variant, name: str, blocks: int, arguments: tuple[Argument, ...]) -> None:
        held = [np.array([x]) for x in arguments]
        addresses = (ctypes.c_void_p * len(held))(*(x.ctypes.data for x in held))
        built = library(variant, self.csrc)
        built.emulate_first_is_fast(ctypes.c_bool(self.first_is_fast))
        emulate = built.emulate
        emulate.restype = ctypes.c_bool
        shared = variant.shared_bytes if name == "lamina_attend" else 0
        assert emulate(name.encode(), blocks, shared, addresses, len(held)), (
            f"{name} does not take {len(held)} arguments"
        )
        self.launched[name] += 1
        if variant.columns:
            self.launched["tensor"] += 1


def emulated(
    dtype: torch.dtype, device: GpuLimits = SMALL, csrc: Path = CSRC, store: torch.dtype | None = None
) -> CudaAttention:
    return CudaAttention(EmulatedKernels(device, csrc), torch.device("cpu"), dtype, store)
