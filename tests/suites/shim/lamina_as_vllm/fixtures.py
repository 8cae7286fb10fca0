"""In place of vLLM's ``tests/conftest.py``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from .absent import make_absent
from .models import made
from .runners import HfRunner, VllmRunner

__all__ = ["HfRunner", "VllmRunner", "example_prompts", "hf_runner", "local_asset_server", "vllm_runner"]


_load = AutoTokenizer.from_pretrained


def _of_made(name: str, *args: Any, **options: Any) -> Any:
    """No hub here: any name is a made model's."""
    return _load(made(str(name)), *args, **options)


AutoTokenizer.from_pretrained = _of_made  # type: ignore[assignment]


@pytest.fixture(scope="session")
def vllm_runner() -> type[VllmRunner]:
    return VllmRunner


@pytest.fixture(scope="session")
def hf_runner() -> type[HfRunner]:
    return HfRunner


@pytest.fixture
def example_prompts() -> list[str]:
    folder = Path(os.environ["LAMINA_SUITES"]) / "vllm" / "tests" / "prompts"
    return (folder / "example.txt").read_text().splitlines()


@pytest.fixture(scope="session")
def local_asset_server() -> Any:
    """No pictures here; some tests ask for it and use none."""
    return make_absent("pictures")
