"""A look for a GPU that torch can use, without the seconds that an import of torch takes."""

from __future__ import annotations

import ctypes
import re
from importlib.util import find_spec
from pathlib import Path

DRIVER = "libcuda.so.1"


def why_no_gpu() -> str:
    """Return why torch surely finds no GPU here; "" if it may find one."""
    text = _torch_version()
    if re.search(r"^hip\b.*= *'", text, re.MULTILINE):  # a build for AMD's GPUs
        return ""
    if re.search(r"^cuda\b.*= *None", text, re.MULTILINE):
        return "torch is built without CUDA"
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return f"this host has no driver of NVIDIA ({DRIVER})"
    return ""


def _torch_version() -> str:
    spec = find_spec("torch")
    path = Path(spec.origin).parent / "version.py" if spec is not None and spec.origin else None
    return path.read_text() if path is not None and path.is_file() else ""
