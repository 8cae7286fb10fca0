"""The second start of a model reads the capture of the first, and decodes the same bits."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from families import MAX_LEN, Case, each_family
from forked import ForkedProgram
from tiny import llama

from lamina import LLM, SamplingParams
from lamina.converter import SlicedProgram
from lamina.models.convert import convert_model

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, ignore_eos=True)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each capture from now on."""
    module, made = sys.modules["lamina.converter.convert"], list[Any]()
    capture = module.capture  # type: ignore[attr-defined]

    def note(*args: Any, **options: Any) -> Any:
        made.append(args)
        return capture(*args, **options)

    monkeypatch.setattr(module, "capture", note)
    return made


def bits(model: Any, prompts: list[list[int]], **options: Any) -> list[Any]:
    with LLM(model, transport="loopback", **options) as llm:
        return [o.outputs[0].logprobs for o in llm.generate(prompts, PARAMS)]


@pytest.mark.long
def test_a_checkpoint_is_traced_once(
    llama_path: Path, prompts: list[list[int]], traced: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAMINA_CACHE", str(tmp_path))
    first = bits(str(llama_path), prompts)
    assert len(traced) == 1
    assert bits(str(llama_path), prompts) == first
    assert len(traced) == 1
    bits(str(llama_path), prompts, max_model_len=100)  # which the capture of another length cannot promise to suit
    assert len(traced) == 2
    monkeypatch.setenv("LAMINA_CACHE", "")
    assert bits(str(llama_path), prompts) == first
    assert len(traced) == 3


@pytest.mark.long
def test_a_module_and_code_of_its_own_are_traced_each_time(
    llama_path: Path, prompts: list[list[int]], traced: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user may have changed the module; code that comes with a model may be anything."""
    monkeypatch.setenv("LAMINA_CACHE", str(tmp_path))
    bits(llama(), prompts[:1])
    bits(str(llama_path), prompts[:1], trust_remote_code=True)
    assert len(traced) == 2
    assert not list(tmp_path.iterdir())


def told(program: SlicedProgram) -> object:
    """All of a program but the weights' numbers; R by one name."""
    codes = [re.sub(r"\bs\d+\b", "R", piece.code) for piece in program]
    return codes, [(c.index, c.name, c.q, c.k, c.v, c.out, c.rest[:2]) for c in program.calls], program.cuts


@pytest.mark.long(but=["starcoder2", "olmo2", "cohere", "cohere2", "opt-post-ln", "llama-gqa"])
@each_family()
def test_the_program_of_a_family_is_the_same(
    case: Case, captures: Path, traced: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model, program = case
    monkeypatch.setenv("LAMINA_CACHE", str(captures))
    again = convert_model(model, max_model_len=MAX_LEN, keep=True)
    assert not traced
    assert told(again) == told(program)
    for one, other in zip(program, again, strict=True):
        assert list(one.weights) == list(other.weights)
        assert all(a.equal(b) for a, b in zip(one.weights.values(), other.weights.values(), strict=True))


def test_workers_have_made_and_leave_undone_what_takes_a_process_long() -> None:
    """They have the tables by which transformers renames weights, half of the CPU time of loading a small model. They
    do not finalize what imports have made, which took as long again.
    """
    code = (
        "import weakref; from transformers import conversion_mapping as m; "
        "print(bool(m._checkpoint_conversion_mapping_cache), sum(f.atexit for f in weakref.finalize._registry))"
    )
    made = ForkedProgram((), code=code)
    assert made.stdout is not None
    with made.stdout:
        assert made.stdout.read() == "True 0\n"
