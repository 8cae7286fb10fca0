"""In place of vLLM's ``tests/utils.py``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .absent import make_absent
from .server import RemoteOpenAIServer

VLLM_PATH = Path(os.environ["LAMINA_SUITES"]) / "vllm"
ROCM_EXTRA_ARGS: list[str] = []
ROCM_ENV_OVERRIDES: dict[str, str] = {}
__all__ = ["VLLM_PATH", "RemoteOpenAIServer"]


def _as_it_is(*args: Any, **options: Any) -> Any:
    """A decorator, with or without arguments, that changes nothing."""
    if len(args) == 1 and callable(args[0]) and not options:
        return args[0]
    return lambda function: function


create_new_process_for_each_test = fork_new_process_for_each_test = spawn_new_process_for_each_test = _as_it_is
single_gpu_only = _as_it_is


def large_gpu_mark(min_gb: int) -> Callable[..., Any]:
    return pytest.mark.large_gpu


large_gpu_test = large_gpu_mark


def multi_gpu_test(*, num_gpus: int) -> Any:
    return pytest.mark.skip(reason="several GPUs")


def multi_gpu_only(*, num_gpus: int = 2) -> Any:
    return multi_gpu_test(num_gpus=num_gpus)


def multi_gpu_marks(*, num_gpus: int) -> list[Any]:
    return [multi_gpu_test(num_gpus=num_gpus)]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return make_absent(f"tests.utils.{name}")
