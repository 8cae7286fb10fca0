"""The kernels of csrc/attention/cuda, compiled when first used (NVRTC, by CuPy, which caches them on disk)."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from .cuda_geometry import LANES, GpuLimits, Variant

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SOURCES = CSRC / "attention" / "cuda"
# Options of every compilation, in tests too. CuPy itself adds the second one: subnormal floats are zero in all it
# compiles.
FLAGS = ("-std=c++17", "-ftz=true")

Argument = np.int32 | np.float32 | np.uint64  # int, float and pointer of a kernel


class Kernels(Protocol):
    """Launches kernels on one device, in the order of its current stream."""

    device: GpuLimits

    def launch(self, variant: Variant, name: str, blocks: int, arguments: tuple[Argument, ...]) -> None:
        """Launch ``blocks`` warps of the kernel ``name``."""
        ...


class CupyKernels:
    """The kernels on a CUDA device, on torch's current stream."""

    def __init__(self, device: torch.device) -> None:
        """Raises ImportError, in one line, if something is missing; ValueError for a GPU that is too old."""
        if not torch.cuda.is_available():
            raise ImportError(f"it needs an NVIDIA GPU, and torch {torch.__version__} sees none here")
        try:
            import cupy
        except ImportError as error:
            raise ImportError(
                f"it needs CuPy, which did not load ({error}); pip install cupy-cuda13x (or cupy-cuda12x)"
            ) from error
        if not (SOURCES / "kernels.cu").is_file():
            raise ImportError(f"it needs its kernels' sources, and {SOURCES} is missing: install Lamina again")
        index = torch.cuda.current_device() if device.index is None else device.index
        gpu = torch.cuda.get_device_properties(index)
        if gpu.major < 8:
            raise ValueError(f"attention backend 'cuda' needs a GPU of sm_80 or later, not sm_{gpu.major}{gpu.minor}")
        self._cupy: Any = cupy
        self._index = index
        attributes = cupy.cuda.Device(index).attributes
        self.device = GpuLimits(
            processors=gpu.multi_processor_count,
            shared_bytes=attributes["MaxSharedMemoryPerMultiprocessor"],
            block_shared_bytes=attributes["MaxSharedMemoryPerBlockOptin"],
        )
        self._modules: dict[Variant, Any] = {}
        self._kernels: dict[tuple[Variant, str], Any] = {}

    def launch(self, variant: Variant, name: str, blocks: int, arguments: tuple[Argument, ...]) -> None:
        """Launch ``blocks`` warps of the kernel ``name``. The first launch of a variant compiles it, which takes
        seconds, and must not happen while a graph is captured.
        """
        stream = torch.cuda.current_stream(self._index).cuda_stream
        with self._cupy.cuda.Device(self._index), self._cupy.cuda.ExternalStream(stream, self._index):
            kernel = self._kernels.get((variant, name)) or self._compile(variant, name)
            kernel((blocks,), (LANES,), arguments, shared_mem=variant.shared_bytes if name == "lamina_attend" else 0)

    def _compile(self, variant: Variant, name: str) -> Any:
        if variant not in self._modules:
            self._modules[variant] = self._cupy.RawModule(code=source(), options=options(variant))
        kernel = self._modules[variant].get_function(name)
        if name == "lamina_attend" and variant.shared_bytes:
            kernel.max_dynamic_shared_size_bytes = variant.shared_bytes
            kernel.preferred_shared_memory_carveout = 100  # percent; else L1 may take memory that further warps need
        self._kernels[variant, name] = kernel
        return kernel


def options(variant: Variant) -> tuple[str, ...]:
    """Return the compiler's options for a variant, without the architecture."""
    return (*FLAGS, f"-I{CSRC}", *variant.defines())


@cache
def source() -> str:
    """Return the text to compile. It includes a digest of its headers, since CuPy finds a cached kernel by this text
    alone.
    """
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.cuh")):
        digest.update(path.read_bytes())
    return f"// with headers {digest.hexdigest()}\n" + (SOURCES / "kernels.cu").read_text()
