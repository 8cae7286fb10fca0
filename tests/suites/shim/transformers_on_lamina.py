"""A pytest plugin: ``generate`` of the Llama models that transformers' tests make goes through ``lamina.wrap``.

Models that tests ask a hub for are the shipped one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import transformers
from lamina_as_vllm.models import made
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import lamina

TEXT = 512  # tokens of the longest text
_wrapped: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_inside = threading.local()
_plain = LlamaForCausalLM.generate
_load_model, _load_tokenizer = AutoModelForCausalLM.from_pretrained, AutoTokenizer.from_pretrained


def _generate(model: Any, *args: Any, **settings: Any) -> Any:
    if getattr(_inside, "yes", False):  # wrap itself calls it
        return _plain(model, *args, **settings)
    split = _wrapped.get(model)
    if split is None:
        length = min(TEXT, model.config.max_position_embeddings)
        split = _wrapped[model] = lamina.wrap(model, max_model_len=length)
    _inside.yes = True
    try:
        return split.generate(*args, **settings)
    finally:
        _inside.yes = False


def _of_made(load: Any) -> Any:
    return lambda name, *args, **options: load(made(str(name)))


@pytest.fixture(autouse=True)
def _workers_end() -> Iterator[None]:
    yield
    for split in _wrapped.values():
        split.close()
    _wrapped.clear()


def pytest_configure() -> None:
    transformers.LlamaForCausalLM.generate = _generate
    AutoModelForCausalLM.from_pretrained = _of_made(_load_model)
    AutoTokenizer.from_pretrained = _of_made(_load_tokenizer)
