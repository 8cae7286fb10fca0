"""The examples of ``generate`` in transformers' own documentation strings: each is run on a model and on its wrap, and
its statements must print the same. The packages that transformers publishes have no tests of ``generate``.

Whatever model an example names is the made one, in fp32.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from lamina_as_vllm.models import made

import lamina

MODULES = ("configuration_utils", "logits_process", "stopping_criteria", "streamers", "utils", "watermarking")
PARTS = [*(f"generation.{name}" for name in MODULES), "pipelines.text_generation"]
LONGEST = 512  # tokens of a text
RAISED = "raises "
_TOKENIZERS = ("AutoTokenizer", "GPT2Tokenizer")


def examples() -> dict[str, list[str]]:
    """Returns statements by documented name."""
    finder, found = doctest.DocTestFinder(), {}
    for part in PARTS:
        module = importlib.import_module(f"transformers.{part}")
        found |= {test.name: statements(test.examples) for test in finder.find(module, part) if test.examples}
    return found


def statements(lines: list[doctest.Example]) -> list[str]:
    """Sources, of which one that is indented goes on with the one before."""
    found: list[str] = []
    for line in lines:
        if line.source.startswith(" "):
            found[-1] += line.source
        else:
            found.append(line.source)
    return found


EXAMPLES = examples()


@pytest.fixture(scope="module")
def models() -> Iterator[list[Any]]:
    """A model, and its wrap."""
    torch.set_num_threads(1)
    plain = transformers.AutoModelForCausalLM.from_pretrained(made("any"), dtype=torch.float32).eval()
    with lamina.wrap(plain, max_model_len=LONGEST) as split:
        yield [plain, split]


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, models: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    load = transformers.AutoTokenizer.from_pretrained
    for kind in _TOKENIZERS:
        named = getattr(transformers, kind)
        monkeypatch.setattr(named, "from_pretrained", lambda _, **options: load(made("any"), **options))
    pipe = transformers.pipeline
    there, here = [], []
    for model, lines in zip(models, (there, here), strict=True):
        given = {"model": model, "tokenizer": load(made("any"))}
        monkeypatch.setattr(transformers, "pipeline", lambda *_, given=given, **__: pipe("text-generation", **given))
        lines += printed(EXAMPLES[name], model, monkeypatch)
    for number, (statement, theirs, ours) in enumerate(zip(EXAMPLES[name], there, here, strict=True)):
        if theirs.startswith(RAISED):  # also of a model that is not wrapped: it asks for a device, for sound, ...
            if not any("generate(" in line or "generator(" in line for line in EXAMPLES[name][:number]):
                pytest.skip(f"an example for another model: {theirs.removeprefix(RAISED)[:80].strip()}")
            return
        assert ours == theirs, f"{statement.strip()} is {theirs!r} there, and here {ours!r}"


def printed(lines: list[str], model: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the output of each statement, with ``model`` for any model that it loads; an exception stands for its
    statement.
    """
    auto = transformers.AutoModelForCausalLM
    monkeypatch.setattr(auto, "from_pretrained", lambda *_, **__: model)
    monkeypatch.setattr(model, "generation_config", transformers.GenerationConfig.from_model_config(model.config))
    scope: dict[str, Any] = {"__name__": "example"}
    torch.manual_seed(0)
    found = []
    for line in lines:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            try:
                exec(compile(line, "<example>", "single"), scope)
            except Exception as e:  # noqa: BLE001 - whatever refuses
                print(f"{RAISED}{type(e).__name__}: {e}", file=out)
        found.append(out.getvalue())
    return found
