"""Recurrent layers on an NVIDIA GPU, by the kernel of csrc/recurrence/cuda, which CuPy compiles when it is first used.

HARDWARE-UNVERIFIED: compiled for sm_80, sm_90 and sm_100, and run warp by warp on a CPU, not on a GPU.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from . import RecurrenceBackend, check_operands
from .segments import Segments
from .spec import Kind, RecurrenceSpec

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SOURCE = CSRC / "recurrence" / "cuda" / "kernels.cu"
INCLUDED = CSRC / "attention" / "cuda" / "warp.cuh"
FLAGS = ("-std=c++17", f"-I{CSRC}")
LANES, FLOAT_BYTES = 32, 4
MAX_SHARED = 48 << 10  # bytes of a block that every GPU has
KEPT = 256  # layers whose operands are kept

Argument = np.int32 | np.int64 | np.uint64  # int, long long and pointer of the kernel


class Kernel(Protocol):
    """Launches the kernel, in the order of the device's current stream."""

    def launch(self, blocks: int, shared_bytes: int, arguments: tuple[Argument, ...]) -> None:
        """Launch ``blocks`` warps, each with ``shared_bytes`` of shared memory."""
        ...


class CupyKernel:
    """The kernel on a CUDA device, on torch's current stream."""

    def __init__(self, device: torch.device) -> None:
        """Raises ImportError, in one line, if something is missing."""
        if not torch.cuda.is_available():
            raise ImportError(f"it needs an NVIDIA GPU, and torch {torch.__version__} sees none here")
        try:
            import cupy
        except ImportError as error:
            raise ImportError(
                f"it needs CuPy, which did not load ({error}); pip install cupy-cuda13x (or cupy-cuda12x)"
            ) from error
        self._cupy: Any = cupy
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._kernel: Any = None

    def launch(self, blocks: int, shared_bytes: int, arguments: tuple[Argument, ...]) -> None:
        """Launch ``blocks`` warps. The first launch compiles the kernel, which takes seconds."""
        stream = torch.cuda.current_stream(self._index).cuda_stream
        with self._cupy.cuda.Device(self._index), self._cupy.cuda.ExternalStream(stream, self._index):
            if self._kernel is None:
                self._kernel = self._cupy.RawModule(code=source(), options=FLAGS).get_function("lamina_recur")
            self._kernel((blocks,), (LANES,), arguments, shared_mem=shared_bytes)


@cache
def source() -> str:
    """Return the text to compile. It includes a digest of its header, since CuPy finds a cached kernel by this text."""
    return f"// with a header {hashlib.sha256(INCLUDED.read_bytes()).hexdigest()}\n{SOURCE.read_text()}"


def open_backend(device: torch.device) -> CudaRecurrence:
    """Open the backend on a GPU. Raises ValueError for another device, ImportError if something is missing."""
    if device.type != "cuda":
        raise ValueError(f"recurrence backend 'cuda' computes on NVIDIA GPUs, not on {device}")
    return CudaRecurrence(CupyKernel(device), device)


class CudaRecurrence(RecurrenceBackend):
    """The ``RecurrenceBackend`` of csrc/recurrence/cuda."""

    def __init__(self, kernel: Kernel, device: torch.device) -> None:
        self._kernel, self._device = kernel, device
        self._layers: dict[int, tuple[RecurrenceSpec, dict[str, Tensor], dict[str, Tensor]]] = {}  # by id of static
        self._waves: tuple[Segments, list[Tensor]] | None = None  # of the last step, whose layers share them

    def update(
        self,
        spec: RecurrenceSpec,
        static: dict[str, Tensor],
        inputs: dict[str, Tensor],
        segments: Segments,
        states: Tensor,
    ) -> Tensor:
        rows = check_operands(spec, static, inputs, segments, states)
        shared = FLOAT_BYTES * spec.key_dim * (LANES + 3)
        if shared > MAX_SHARED:
            raise ValueError(
                f"recurrence backend 'cuda' takes keys of up to {MAX_SHARED // FLOAT_BYTES // (LANES + 3)}"
            )
        own = self._layer(spec, static)
        x, *others = (inputs[name].float().contiguous() for name in spec.input_columns)
        gate, beta = [*others, None, None][:2]
        out = torch.zeros(rows, spec.output_columns, dtype=torch.float32, device=states.device)
        parts = -(-spec.heads // LANES) if spec.kind == "convolution" else spec.heads * -(-spec.value_dim // LANES)
        named = (own.get(name) for name in ("weight", "bias", "A", "D", "dt_bias"))
        tensors = [_address(t) for t in (x, gate, beta, *named)]
        ends = _address(states), np.int64(states.stride(0)), _address(out)
        for wave in self._tables(segments):
            begun = _address(wave), _address(own["layer"]), np.int32(parts)
            self._kernel.launch(len(wave) * parts, shared, (*begun, *tensors, *ends))
        return out.to(inputs["x"].dtype)

    def _tables(self, segments: Segments) -> list[Tensor]:
        """Return the segments on the device, by wave."""
        if self._waves is None or self._waves[0] is not segments:
            tables = [torch.from_numpy(segments.table[wave]).to(self._device) for wave in segments.waves]
            self._waves = segments, tables
        return self._waves[1]

    def _layer(self, spec: RecurrenceSpec, static: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a layer's operands in fp32, and its spec as the kernel reads it, on the device."""
        kept = self._layers.get(id(static))
        if kept is None or kept[0] != spec:
            if len(self._layers) >= KEPT:
                self._layers.clear()
            made = {name: t.to(self._device).float().contiguous() for name, t in static.items()}
            made["layer"] = torch.from_numpy(_as_struct(spec)).to(self._device)
            kept = self._layers[id(static)] = (spec, static, made)
        return kept[2]


def _as_struct(spec: RecurrenceSpec) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the kernel's ``Layer``."""
    firsts = [spec.channel_ranges[name].first if name in spec.channel_ranges else 0 for name in "qkv"]
    whole = [get_args(Kind).index(spec.kind), spec.heads, spec.heads_per_group, spec.first_head, spec.key_dim]
    whole += [spec.value_dim, spec.width, spec.channels, *firsts, spec.history_size]
    whole += [spec.silu, spec.normalised, spec.softplus]
    factors = np.array([spec.scale, spec.prompt_dt_least, spec.prompt_dt_most], dtype=np.float32)
    return np.concatenate([np.array(whole, dtype=np.int32), factors.view(np.int32)])


def _address(t: Tensor | None) -> np.uint64:
    return np.uint64(t.data_ptr() if t is not None else 0)
