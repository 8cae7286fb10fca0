"""--attention-backend auto means one backend for all memory workers, and for who merges what they return in parts."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from lamina import LLM, SamplingParams
from lamina.ops import attention

pytestmark = pytest.mark.usefixtures("no_child_left")
TWO = {"transport": "loopback", "memory_workers": 2}


def lacks(monkeypatch: pytest.MonkeyPatch, thread: str, *names: str) -> None:
    """On the host of the worker whose thread this is, these backends cannot be imported."""
    imported = attention.import_module

    def import_there(module: str) -> Any:
        name = module.rpartition(".")[2]
        if threading.current_thread().name == thread and name in names:
            raise ImportError("no compiler")
        return imported(module)

    monkeypatch.setattr(attention, "import_module", import_there)


@pytest.mark.parametrize(
    ("thread", "options", "words"),
    [
        ("lamina-memory-1", {}, "^memory worker 1: attention backend 'native' cannot be used here: no compiler; "),
        (
            "lamina-compute-0",
            {"partition": "token"},
            "^compute worker: attention backend 'native' .* partition other than token",
        ),
        ("lamina-prefill-0", {"prefill_workers": 1}, "^prefill worker: attention backend 'native' cannot be used here"),
    ],
)
def test_who_lacks_the_others_backend_is_named(
    thread: str, options: dict[str, Any], words: str, llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks(monkeypatch, thread, "native")
    with pytest.raises(ValueError, match=words) as caught:
        LLM(llama_path, **TWO, **options)
    assert "attention_backend" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_where_the_first_lacks_it_all_take_the_next(llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacks(monkeypatch, "lamina-memory-0", "native", "numba", "cuda", "flashinfer")
    with LLM(llama_path, **TWO, partition="token") as llm:
        assert llm.engine.worker_info.summary["attention"] == "reference"
        assert len(llm.generate([[3, 4]], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3


def test_a_compute_worker_that_merges_nothing_needs_none(llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacks(monkeypatch, "lamina-compute-0", "native", "numba")
    with LLM(llama_path, **TWO) as llm:
        assert llm.engine.worker_info.summary["attention"] == "native"
