"""NVRTC, as CuPy calls it, for tests that kernels compile. Nothing is run."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

CUPY_FLAGS = ("-ftz=true", "--device-as-default-execution-space")  # that it adds (cupy/cuda/compiler.py of 14.2)


@cache
def _library() -> ctypes.CDLL | None:
    """Return the library of the package nvidia-cuda-nvrtc, or the system's."""
    spec = find_spec("nvidia")
    folders = [Path(p) for p in (spec.submodule_search_locations or [] if spec else [])]
    found = [path for folder in folders for path in sorted(folder.glob("**/libnvrtc.so.*"))]
    for name in [*map(str, found), "libnvrtc.so.13", "libnvrtc.so.12", "/usr/local/cuda/lib64/libnvrtc.so"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def check_nvrtc(source: str, architecture: int, flags: Iterable[str]) -> None:
    """Check that NVRTC compiles ``source``; skip the test if there is none here."""
    nvrtc = _library()
    if nvrtc is None:
        pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc")
    program = ctypes.c_void_p()
    assert not nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
    words = [f"--gpu-architecture=sm_{architecture}", *flags, *CUPY_FLAGS]
    given = (ctypes.c_char_p * len(words))(*(x.encode() for x in words))
    failed = nvrtc.nvrtcCompileProgram(program, len(words), given)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    assert not failed, log.value.decode()
