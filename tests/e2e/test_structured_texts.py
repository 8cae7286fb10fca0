"""Text that follows its schema, expression or grammar: on any worker that draws, and when one dies meanwhile.

Covers: lamina/grammar/rules.py, lamina/engine/vocabulary_delivery.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina import LLM, SamplingParams, StructuredOutputsParams

pytestmark = [pytest.mark.usefixtures("no_child_left"), pytest.mark.timeout(300)]
PROMPT = "class Stack:"
COMPACT = {"disable_any_whitespace": True}  # else a model of this size takes most of its tokens for spaces
NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        "kind": {"enum": ["ä", "😀", "plain", 7, None]},
        "sizes": {
            "type": "array",
            "items": {"type": "integer", "minimum": -5, "maximum": 99},
            "minItems": 1,
            "maxItems": 3,
        },
        "inner": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}, "note": {"type": "string", "maxLength": 6}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
    "required": ["id", "kind", "sizes", "inner"],
    "additionalProperties": False,
}  # fmt: skip


def is_nested(v: Any) -> bool:
    return (
        set(v) == {"id", "kind", "sizes", "inner"}
        and re.fullmatch("[A-Z]{2}-[0-9]{3}", v["id"]) is not None
        and v["kind"] in ("ä", "😀", "plain", 7, None)
        and 1 <= len(v["sizes"]) <= 3
        and all(type(n) is int and -5 <= n <= 99 for n in v["sizes"])
        and {"on"} <= set(v["inner"]) <= {"on", "note"}
        and type(v["inner"]["on"]) is bool
        and len(v["inner"].get("note", "")) <= 6
    )


SHAPES: list[tuple[dict[str, Any], Callable[[Any], bool]]] = [
    (NESTED, is_nested),
    ({"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 4},
     lambda v: 2 <= len(v) <= 4 and set(v) <= {"a", "b"}),
    ({"anyOf": [{"type": "integer", "minimum": 10, "maximum": 12}, {"const": "no"}]},
     lambda v: v in (10, 11, 12, "no")),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, lambda v: 0 < v <= 1),
    ({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 50}, lambda v: v in range(0, 51, 7)),
    ({"type": "string", "format": "date"}, lambda v: re.fullmatch(r"\d{4}-\d\d-\d\d", v) is not None),
]  # fmt: skip


@pytest.fixture(scope="module")
def llm(tiny_lm: Path) -> Iterator[LLM]:
    with LLM(str(tiny_lm), dtype="float32") as made:
        yield made


def structured(asked: dict[str, Any], **more: Any) -> SamplingParams:
    options = {"max_tokens": 160, "temperature": 1.0, "seed": 5, **more}
    return SamplingParams(structured_outputs=StructuredOutputsParams(**asked), **options)


def texts(llm: LLM, params: SamplingParams) -> list[tuple[str, str | None]]:
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    return [(one.text, one.finish_reason) for one in output.outputs]


@pytest.mark.parametrize(("schema", "holds"), SHAPES)
def test_text_that_ends_is_json_that_the_schema_allows(llm: LLM, schema: Any, holds: Any) -> None:
    ended = 0
    for options in ({"n": 4}, {"temperature": 0.0}, {"n": 2, "top_k": 5, "top_p": 0.9, "frequency_penalty": 1.5}):
        for text, reason in texts(llm, structured({"json": schema, **COMPACT}, **options)):
            if reason == "stop":
                ended += 1
                assert holds(json.loads(text)), text
            else:
                assert reason == "length"
    assert ended >= 2, "a number may grow digits until max_tokens"


def test_without_the_mask_the_model_writes_no_json(llm: LLM) -> None:
    for text, _ in texts(llm, SamplingParams(n=4, seed=5, max_tokens=60)):
        with pytest.raises(ValueError):
            json.loads(text)


def test_an_expression_a_choice_and_a_grammar(llm: LLM) -> None:
    pattern = r"[a-c]{1,4}=\d{2}(;[x-z])?"
    for text, reason in texts(llm, structured({"regex": f"^{pattern}$"}, n=4)):
        assert reason == "stop"
        assert re.fullmatch(pattern, text), text
    for text, reason in texts(llm, structured({"choice": ["yes", "no 😀", "é"]}, n=4)):
        assert (text in ("yes", "no 😀", "é"), reason) == (True, "stop")
    lark = 'start: sum\nsum: NUMBER ("+" NUMBER){1,3}\nNUMBER: /[0-9]{1,3}/'
    for text, reason in texts(llm, structured({"grammar": lark}, n=4)):
        assert reason == "stop"
        assert re.fullmatch(r"\d{1,3}(\+\d{1,3}){1,3}", text), text
    for text, reason in texts(llm, structured({"json_object": True, **COMPACT}, n=3, max_tokens=300)):
        assert reason == "length" or isinstance(json.loads(text), dict)


def test_the_grammar_wins_over_min_tokens_and_ignored_ends(llm: LLM) -> None:
    asked = {"choice": ["ab"]}
    assert texts(llm, structured(asked, min_tokens=30)) == [("ab", "stop")]
    assert texts(llm, structured(asked, ignore_eos=True, max_tokens=12)) == [("ab", "length")]


def test_log_probabilities_and_stop_strings_are_as_ever(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, structured({"regex": "[0-9]{8}"}, logprobs=3, temperature=0.0), use_tqdm=False)
    one = output.outputs[0]
    assert one.logprobs is not None
    best = {token for entry in one.logprobs for token in entry}
    assert not {*one.token_ids} >= best, "the best tokens of the model are no digits"
    assert texts(llm, structured({"regex": "[0-9]{6}x"}, stop=["x"]))[0][1] == "stop"


def test_bans_that_leave_nothing_end_the_request_alone(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, structured({"choice": ["a"]}, allowed_token_ids=[9]), use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    assert str(output.outputs[0].stop_reason).startswith("allowed_token_ids and structured_outputs forbid every token")
    assert texts(llm, structured({"choice": ["a"]})) == [("a", "stop")]


def test_bad_schemas_are_refused_in_one_line(llm: LLM) -> None:
    with pytest.raises(ValueError, match="uniqueItems"):
        llm.generate(PROMPT, structured({"json": {"type": "array", "uniqueItems": True}}))


def test_without_a_tokenizer_they_are_refused(llama_path: Path) -> None:
    with LLM(str(llama_path)) as bare, pytest.raises(ValueError, match="structured_outputs need a tokenizer"):
        bare.generate([[5, 6]], structured({"choice": ["a"]}))


MIXED = [
    structured({"json": NESTED, **COMPACT}, temperature=0.0),
    structured({"json": NESTED, **COMPACT}, n=2, repetition_penalty=1.2),
    structured({"regex": r"[a-z]{10,40}!"}, top_k=4, logprobs=2),
    SamplingParams(max_tokens=40, seed=3),
]


def tokens(llm: LLM, kill: str = "") -> list[list[int]]:
    found, killed = dict[str, Any](), not kill
    with llm.stream([PROMPT] * len(MIXED), MIXED) as stream:
        for output in stream:
            found[output.request_id] = output
            if not killed and sum(len(one.token_ids) for o in found.values() for one in o.outputs) > 20:
                os.kill(llm.pools.pids[kill], signal.SIGKILL)
                killed = True
    assert killed
    return [one.token_ids for name in stream.request_ids for one in found[name].outputs]


@pytest.mark.long
@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"pipeline": 3}, {"prefill_workers": 1}], ids=str)
def test_ranks_replicas_and_prefill_workers_draw_the_same(llm: LLM, tiny_lm: Path, options: dict[str, int]) -> None:
    with LLM(str(tiny_lm), dtype="float32", **options) as other:
        assert tokens(other) == tokens(llm)


@pytest.mark.no_retry
@pytest.mark.long(but=["compute-0"])
@pytest.mark.parametrize("victim", ["compute-0", "memory-0"])
def test_a_worker_dies_in_the_midst_of_texts(llm: LLM, tiny_lm: Path, victim: str) -> None:
    with LLM(str(tiny_lm), dtype="float32", memory_workers=2, transport="shm") as other:
        assert tokens(other, kill=victim) == tokens(llm)
