"""Lamina: decode Hugging Face causal LMs with attention and the KV cache on a pool of memory workers.

Public names load on first use, so that ``import lamina`` imports neither torch nor ray.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api.async_llm import AsyncLLM as AsyncLLM
    from .api.llm import LLM as LLM
    from .api.wrapped import StructuredOutputsProcessor as StructuredOutputsProcessor
    from .api.wrapped import wrap as wrap
    from .config.engine_config import EngineConfig as EngineConfig
    from .request import CompletionOutput as CompletionOutput
    from .request import RequestOutput as RequestOutput
    from .request import SamplingParams as SamplingParams
    from .request import StructuredOutputsParams as StructuredOutputsParams

# Public name -> module of this package. No module bears a name of this table: it would take its place.
_PUBLIC = {
    "LLM": "api.llm",
    "AsyncLLM": "api.async_llm",
    "EngineConfig": "config",
    "SamplingParams": "request",
    "StructuredOutputsParams": "request",
    "RequestOutput": "request",
    "CompletionOutput": "request",
    "wrap": "api.wrapped",
    "StructuredOutputsProcessor": "api.wrapped",
}
__version__ = "0.2.0.dev0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "StructuredOutputsProcessor",
    "__version__",
    "wrap",
]


def _check_build(folder: str) -> None:
    """Raises ImportError where ``folder`` has the sources of this package alone, as a fresh checkout does."""
    if not any(
        os.path.exists(os.path.join(folder, "ops", "attention", f"_attention{end}")) for end in EXTENSION_SUFFIXES
    ):
        raise ImportError(
            f"{folder} has no native modules for Python {sys.version_info.major}.{sys.version_info.minor}: run "
            f"`make demo` in {os.path.dirname(folder)}; or, where Lamina is installed, start Python with -P, which "
            "leaves out the current directory",
            name=__name__,  # so that `python -m lamina...` prints that line alone
        )


_check_build(os.path.dirname(os.path.abspath(__file__)))


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'lamina' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
