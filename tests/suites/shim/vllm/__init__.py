"""The names of vLLM that its tests import, over Lamina; any other is a stand-in that skips its test."""

from __future__ import annotations

import sys

from lamina_as_vllm.absent import Finder, absent_of
from lamina_as_vllm.names import NAMES

if not any(isinstance(f, Finder) for f in sys.meta_path):
    sys.meta_path.append(Finder("vllm", NAMES))
__path__: list[str] = []
__getattr__ = absent_of("vllm", NAMES["vllm"])
