"""A look for GPUs without torch agrees with torch."""

from __future__ import annotations

import ctypes
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from lamina.facts import gpus

CUDA, CPU, ROCM = "cuda: Optional[str] = '13.0'\n", "cuda: Optional[str] = None\n", "hip: Optional[str] = '7.1'\n"


def test_a_host_where_torch_finds_a_gpu_is_not_said_to_have_none() -> None:
    why = gpus.why_no_gpu()
    assert not (why and torch.cuda.is_available())
    assert why or torch.version.cuda or torch.version.hip


@pytest.mark.parametrize(
    ("version", "has_driver", "words"),
    [
        (CPU, True, "torch is built without CUDA"),
        (CUDA, False, "this host has no driver of NVIDIA (libcuda.so.1)"),
        (CUDA, True, ""),
        (CPU + ROCM, False, ""),
    ],
)
def test_each_reason_is_named(
    version: str, has_driver: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(version)
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(gpus, "find_spec", lambda name: spec)
    monkeypatch.setattr(gpus, "DRIVER", gpus.DRIVER if not has_driver else None)  # None: this program itself
    monkeypatch.setattr(ctypes, "CDLL", _only(None))
    assert gpus.why_no_gpu() == words


def _only(known: object) -> object:
    def load(name: object) -> object:
        if name != known:
            raise OSError(name)
        return object()

    return load
