"""The CUDA kernels on a CPU: their own source, compiled by g++, warp by warp (csrc/attention/cuda/emulation.h)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from lamina.attention.cuda import Cuda
from lamina.attention.cuda_geometry import Device, Variant
from lamina.attention.cuda_kernels import CSRC, SOURCES, Argument

GXX = shutil.which("g++")
needs_gxx = pytest.mark.skipif(GXX is None, reason="no g++: the CUDA kernels cannot be emulated")
SMALL = Device(processors=2, shared_bytes=228 << 10, block_shared_bytes=227 << 10)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def build(variant: Variant, *flags: str, source: Path = SOURCES / "emulation.cpp") -> Path:
    """The shared library of one variant."""
    name = f"{abs(hash((variant, flags, source))):x}.so"
    output = Path(_folder().name) / name
    command = [str(GXX), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    command += [
        "-Wno-clobbered",
        "-U_FORTIFY_SOURCE",
        "-shared",
        "-fPIC",
        f"-I{CSRC}",
        *flags,
        *variant.defines(),
        str(source),
        "-o",
        str(output),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return output


@cache
def library(variant: Variant) -> ctypes.CDLL:
    return ctypes.CDLL(str(build(variant)))


@dataclass
class EmulatedKernels:
    """See ``cuda_kernels.Kernels``; counts what is launched."""

    device: Device = SMALL
    launched: Counter[str] = field(default_factory=Counter)

    def launch(self, variant: Variant, name: str, blocks: int, arguments: tuple[Argument, ...]) -> None:
        held = [np.array([x]) for x in arguments]
        addresses = (ctypes.c_void_p * len(held))(*(x.ctypes.data for x in held))
        emulate = library(variant).emulate
        emulate.restype = ctypes.c_bool
        shared = variant.shared_bytes if name == "lamina_attend" else 0
        assert emulate(name.encode(), blocks, shared, addresses, len(held)), (
            f"{name} does not take {len(held)} arguments"
        )
        self.launched[name] += 1
        if variant.columns:
            self.launched["tensor"] += 1


def emulated(dtype: torch.dtype, device: Device = SMALL) -> Cuda:
    return Cuda(EmulatedKernels(device), torch.device("cpu"), dtype)
