"""Quantised checkpoints served by whole engines: tokens of the formats' own libraries, through packed weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lamina import LLM, SamplingParams

pytestmark = [pytest.mark.usefixtures("no_child_left"), pytest.mark.no_retry]
CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
NAMES = sorted(path.parent.name for path in CHECKPOINTS.glob("*/oracle.json"))


def tokens_are_due(name: str, **options: Any) -> None:
    known = json.loads((CHECKPOINTS / name / "oracle.json").read_text())
    greedy = SamplingParams(temperature=0.0, max_tokens=len(known["tokens"]), ignore_eos=True)
    with LLM(str(CHECKPOINTS / name), dtype="float32", memory_workers=2, **options) as llm:
        outputs = llm.generate([known["prompt"]] * 3, greedy)
    assert [output.outputs[0].token_ids for output in outputs] == [known["tokens"]] * 3


@pytest.mark.long(but=["llama_int4_group"])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_formats_own_library(name: str) -> None:
    tokens_are_due(name, transport="loopback")


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama_int4_channel", "llama_int4_zeros", "llama_int8_zeros", "llama_fp8_channel"])
def test_ranks_have_parts_of_packed_weights(name: str) -> None:
    tokens_are_due(name, transport="loopback", tensor_parallel_size=2)
