"""Structured output by a logits processor: in a wrapped model and in transformers' own loop, the same tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from shipped import MODEL
from transformers import AutoModelForCausalLM, AutoTokenizer

import lamina
from lamina import StructuredOutputsParams, StructuredOutputsProcessor

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}},
    "required": ["age", "on"],
    "additionalProperties": False,
}
ENDS = [1]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL, padding_side="left")


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def split(model: Any) -> Iterator[Any]:
    with lamina.wrap(model, memory_workers=2) as wrapped:
        yield wrapped


def texts_of(model: Any, tokenizer: Any, processors: list[Any], **options: Any) -> list[str]:
    inputs = tokenizer(["import os\n", "class Door:"], return_tensors="pt", padding=True)
    ids = model.generate(**inputs, max_new_tokens=120, eos_token_id=ENDS, logits_processor=processors, **options)
    found: list[str] = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return found


def test_texts_follow_the_schema_and_are_those_of_transformers(model: Any, split: Any, tokenizer: Any) -> None:
    processor = StructuredOutputsProcessor(tokenizer, StructuredOutputsParams(json=SCHEMA), end_token_ids=ENDS)
    texts = texts_of(split, tokenizer, [processor], do_sample=False)
    for text in texts:
        value = json.loads(text)
        assert set(value) == {"age", "on"}
        assert value["age"] in range(100)
        assert type(value["on"]) is bool
    assert texts_of(model, tokenizer, [processor], do_sample=False) == texts
    for text in texts_of(split, tokenizer, [], do_sample=False):
        with pytest.raises(ValueError):
            json.loads(text)


def test_the_processor_serves_one_call_after_another(split: Any, tokenizer: Any) -> None:
    asked = StructuredOutputsParams(regex=r"\d{3}-[a-c]{2}")
    processor = StructuredOutputsProcessor(tokenizer, asked, end_token_ids=ENDS)
    for seed in range(3):
        torch.manual_seed(seed)
        for text in texts_of(split, tokenizer, [processor], do_sample=True):
            assert re.fullmatch(r"\d{3}-[a-c]{2}", text)


def test_a_structure_that_cannot_be_enforced_is_refused_at_once(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r'Unimplemented keys: \["not"\]'):
        StructuredOutputsProcessor(tokenizer, StructuredOutputsParams(json={"type": "object", "not": {}}))
