"""Engines whose slices are compiled: the same tokens."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lamina import LLM, SamplingParams


@pytest.mark.slow  # building the units of a model takes 40 s
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
@pytest.mark.parametrize(
    "options",
    [{}, {"transport": "shm", "memory_workers": 2}, {"pipeline": 3}, {"tensor_parallel_size": 2, "memory_workers": 2}],
    ids=["loopback", "processes", "replicas", "ranks"],
)
def test_tokens_are_those_of_transformers(
    options: dict[str, Any],
    llama_path: Path,
    prompts: list[list[int]],
    reference: Callable[[list[int], int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    cache = tmp_path_factory.getbasetemp() / "compiled"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(str(llama_path), compile=True, **{"transport": "loopback", **options}) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, greedy)] == [reference(p, 12) for p in prompts]
    assert list((cache / "lamina" / "units").glob("*.pt2"))


def test_a_gpu_is_refused_in_one_line(llama_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^--compile is for CPUs: leave it out with --compute-device cuda$"):
        LLM(str(llama_path), compile=True, compute_device="cuda")
