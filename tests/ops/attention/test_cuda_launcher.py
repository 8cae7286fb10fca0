"""Kernels are compiled and launched through CuPy, with a stand-in for it; the error says what is missing.

Covers: lamina/ops/attention/cuda_kernels.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lamina.ops.attention import get
from lamina.ops.attention.cuda_geometry import Variant, choose
from lamina.ops.attention.cuda_kernels import CSRC, FLAGS, CupyKernels, options

GPU = torch.device("cuda", 0)
ATTRIBUTES = {"MaxSharedMemoryPerMultiprocessor": 228 << 10, "MaxSharedMemoryPerBlockOptin": 227 << 10}


class FakeCupy:
    """The used part of CuPy, written down."""

    def __init__(self) -> None:
        self.compiled: list[tuple[str, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.entered: list[tuple[int, ...]] = []
        self.cuda = SimpleNamespace(Device=self._device, ExternalStream=self._stream)

    def RawModule(self, *, code: str, options: tuple[str, ...]) -> Any:  # noqa: N802 - its name
        assert "lamina_attend" in code
        self.compiled.append(options)
        return SimpleNamespace(get_function=lambda name: _Kernel(self, name))

    def _device(self, index: int) -> Any:
        return _Context(self, (index,))

    def _stream(self, pointer: int, index: int) -> Any:
        return _Context(self, (pointer, index))


class _Context:
    attributes = ATTRIBUTES

    def __init__(self, cupy: FakeCupy, what: tuple[int, ...]) -> None:
        self._enter = lambda: cupy.entered.append(what)

    def __enter__(self) -> None:
        self._enter()

    def __exit__(self, *error: object) -> None:
        pass


class _Kernel:
    max_dynamic_shared_size_bytes = 0
    preferred_shared_memory_carveout = -1

    def __init__(self, cupy: FakeCupy, name: str) -> None:
        self._cupy, self._name = cupy, name

    def __call__(self, grid: Any, block: Any, arguments: Any, *, shared_mem: int) -> None:
        room = self.max_dynamic_shared_size_bytes, self.preferred_shared_memory_carveout
        self._cupy.launched.append((self._name, grid, block, arguments, shared_mem, room))


@contextmanager
def gpu(monkeypatch: pytest.MonkeyPatch, major: int = 9) -> Iterator[None]:
    """torch as if it saw one."""
    found = SimpleNamespace(major=major, minor=0, multi_processor_count=132)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_properties", lambda index: found)
        patch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=77))
        yield


def test_launches_are_on_the_current_stream_and_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with gpu(monkeypatch):
        kernels = CupyKernels(GPU)
        usual, common = choose("BFloat16", 128, 128, 4), Variant(element="BFloat16")
        for variant, name in ((usual, "lamina_attend"), (common, "lamina_plan"), (usual, "lamina_attend")):
            kernels.launch(variant, name, 5, (np.int32(1), np.uint64(2)))
        kernels.launch(common, "lamina_merge", 6, ())
    assert kernels.device.processors == 132
    assert len(cupy.compiled) == 2, "a module for each variant"
    assert cupy.compiled[0] == options(usual), "as tests compile them"
    assert "-DLAMINA_KEY_DIM=128" in cupy.compiled[0]
    assert cupy.compiled[1] == (*FLAGS, f"-I{CSRC}", "-DLAMINA_ELEMENT=BFloat16")
    names, grids, blocks, arguments, shared, room = zip(*cupy.launched, strict=True)
    assert names == ("lamina_attend", "lamina_plan", "lamina_attend", "lamina_merge")
    assert grids == ((5,), (5,), (5,), (6,))
    assert set(blocks) == {(32,)}
    assert arguments[0] == (1, 2)
    assert shared == (usual.shared_bytes, 0, usual.shared_bytes, 0)
    asked, as_it_comes = (usual.shared_bytes, 100), (0, -1)
    assert room == (asked, as_it_comes) * 2, "more than 48 KiB must be asked for, and what L1 would have"
    assert cupy.entered == [(0,), (77, 0)] * 4


def test_what_is_missing_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with (
        gpu(monkeypatch),
        pytest.raises(ImportError, match="'cuda' cannot be used here: it needs CuPy.*pip install cupy"),
    ):
        get("cuda", GPU, torch.bfloat16)
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy())
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with (
        gpu(monkeypatch),
        pytest.raises(ImportError, match="it needs FlashInfer.*pip install flashinfer-python") as error,
    ):
        get("flashinfer", GPU, torch.bfloat16)
    assert "\n" not in str(error.value)
    old = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=SimpleNamespace(plan=lambda indptr: None), __version__="0.1"
    )
    monkeypatch.setitem(sys.modules, "flashinfer", old)
    with gpu(monkeypatch), pytest.raises(ImportError, match="whose plan takes disable_split_kv, 0.1 does not"):
        get("flashinfer", GPU, torch.bfloat16)


def test_old_gpus_and_other_dtypes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy())
    with gpu(monkeypatch, major=7), pytest.raises(ValueError, match="sm_80 or later, not sm_70"):
        get("cuda", GPU, torch.bfloat16)
    with pytest.raises(ValueError, match="takes bfloat16 and float16, not float32"):
        get("flashinfer", GPU, torch.float32)
    with gpu(monkeypatch):
        assert type(get("auto", GPU, torch.bfloat16)).__name__ == "CudaAttention"
