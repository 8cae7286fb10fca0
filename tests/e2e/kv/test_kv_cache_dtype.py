"""K and V in 8 bits, end to end: other bits than without, and the same however the work is spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lamina import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("no_child_left")
SCORED = SamplingParams(temperature=0.7, seed=1, max_tokens=10, logprobs=2, prompt_logprobs=0, ignore_eos=True)
PROMPTS = [[3 + (5 * i + j) % 300 for j in range(n)] for i, n in enumerate((60, 9, 1, 33))]
SPREADS: list[dict[str, Any]] = [
    {"memory_workers": 3, "partition": "token", "overlap": False},
    {"memory_workers": 2, "partition": "request", "pipeline": 2},
    {"memory_workers": 2, "prefill_workers": 1},
]


def answers(model: Path, **options: Any) -> list[Any]:
    with LLM(str(model), transport="loopback", prefill_chunk=16, deterministic=True, **options) as llm:
        outputs = llm.generate(PROMPTS, SCORED)
    return [(o.prompt_logprobs, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.fixture(scope="module")
def whole(gemma2_path: Path) -> list[Any]:
    return answers(gemma2_path, kv_cache_dtype="int8")


@pytest.mark.long
@pytest.mark.parametrize("spread", SPREADS, ids=str)
def test_the_bits_do_not_depend_on_how_the_work_is_spread(
    whole: list[Any], spread: dict[str, Any], gemma2_path: Path
) -> None:
    assert answers(gemma2_path, kv_cache_dtype="int8", **spread) == whole


def test_they_are_others_than_without(whole: list[Any], gemma2_path: Path) -> None:
    assert answers(gemma2_path, kv_cache_dtype="fp8") != whole


def test_a_wrong_name_is_refused(gemma2_path: Path) -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of auto, int8, fp8, not 'fp4'"):
        LLM(str(gemma2_path), kv_cache_dtype="fp4")


@pytest.mark.long
def test_a_backend_without_kernels_is_refused_by_name(gemma2_path: Path) -> None:
    with pytest.raises(ValueError, match='^attention_backend flashinfer does not go with kv_cache_dtype="int8" or fp8'):
        LLM(str(gemma2_path), memory_device="cuda", kv_cache_dtype="int8", attention="flashinfer")
