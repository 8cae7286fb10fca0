"""Prompts whose K and V are zeros that are loaded: a step's rows are its running sequences, and none is of a prompt."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from lamina import LLM, SamplingParams
from lamina.kv.pages import PageFragment
from lamina.kv.storage import FragmentLostError, StorageConfig, open_storage
from lamina.observe.perfetto import read
from lamina.observe.trace import Event

pytestmark = pytest.mark.usefixtures("no_child_left")
LENGTHS = (1, 2, 40, 128, 129, 200, 300)  # below a page, pages, and more
ANSWERS = (60, 61, 62, 63, 64, 65, 66)
PROMPTS = [[(7 * i + n) % 90 + 5 for i in range(n)] for n in LENGTHS]
TINY: dict[str, Any] = {"dtype": "float32", "prefill_chunk": 16, "max_model_len": 384}
WAYS: list[dict[str, Any]] = [
    {"memory_workers": 2, "transport": "shm"},
    {"memory_workers": 2, "partition": "request", "pipeline": 2, "transport": "loopback"},
    {"memory_workers": 3, "partition": "token", "kv_cache_dtype": "int8", "transport": "loopback"},
    {"memory_workers": 1, "kv_memory": "330KB", "transport": "loopback"},  # some are preempted
]


def rows_of(trace: str) -> list[tuple[int, int]]:
    """Returns the rows of each step: those of its first slice, and those that its last one samples."""
    steps = defaultdict[tuple[int, int], dict[int, int]](dict)
    for span in read(trace).spans:
        if span.event is Event.SLICE and span.device.startswith("compute"):
            steps[span.batch, span.step][span.layer] = span.value
    last = max(max(layers) for layers in steps.values())
    return [(layers[0], layers.get(last, 0)) for layers in steps.values() if layers.get(0)]


def replayed(path: Path, trace: str, options: dict[str, Any]) -> tuple[list[tuple[int, int]], list[int], int]:
    """Rows of all steps, tokens of a prompt that were loaded, preemptions: of answers of several lengths."""
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in ANSWERS]
    with LLM(str(path), trace=trace, **TINY, **options) as llm:
        outputs = llm.generate(PROMPTS, params)
        preempted = llm.engine.scheduler.num_preemptions
    assert [len(o.outputs[0].token_ids) for o in outputs] == [p.max_tokens for p in params]
    return rows_of(trace), [o.num_cached_tokens or 0 for o in outputs], preempted


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_no_step_has_rows_of_a_prompt(llama_path: Path, tmp_path: Path, way: dict[str, Any]) -> None:
    rows, cached, preempted = replayed(llama_path, str(tmp_path / "run.json"), {**way, "decode_only": True})
    assert all(all_rows == draws for all_rows, draws in rows)
    assert max(all_rows for all_rows, _ in rows) <= len(PROMPTS)
    total = sum(all_rows for all_rows, _ in rows)
    assert sum(ANSWERS) <= total <= sum(ANSWERS) + len(PROMPTS) + preempted, "one too many of each at most"
    assert cached == [n - 1 for n in LENGTHS]
    assert bool(preempted) == ("kv_memory" in way)


@pytest.mark.long
def test_without_it_some_are(llama_path: Path, tmp_path: Path) -> None:
    """The control: what the test above looks for is there where prompts are computed."""
    rows, cached, _ = replayed(llama_path, str(tmp_path / "run.json"), WAYS[0])
    assert any(all_rows > draws for all_rows, draws in rows)
    assert cached == [0] * len(PROMPTS)


@pytest.mark.long
def test_what_lies_before_the_last_token_is_zeros(llama_path: Path) -> None:
    """So prompts of one length that end alike are answered alike, and those of another length see as much: nothing."""
    ask = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    ends = [[*prompt, 7] for prompt in ([5] * 150, list(range(10, 85)) * 2)]
    answers = dict[bool, list[list[int]]]()
    for only in (True, False):
        with LLM(str(llama_path), transport="loopback", **TINY, decode_only=only) as llm:
            answers[only] = [llm.generate([end], ask)[0].outputs[0].token_ids for end in ends]
    assert answers[True][0] == answers[True][1]
    assert answers[False][0] != answers[False][1]


def test_zeros_are_read_whatever_was_written() -> None:
    medium = open_storage("zeros", StorageConfig(0))
    buffer = bytearray(b"x" * 10)
    medium.read(b"k" * 32, {PageFragment(0, 0): buffer})
    assert buffer == bytes(10)
    assert (medium.reserve(1 << 40), medium.pages(), medium.keys(frozenset(), 9),
        medium.prefetch_next(frozenset())) == ( [], [], [], None,
    )  # fmt: skip
    with pytest.raises(FragmentLostError):
        medium.read_page(b"k" * 32)


@pytest.mark.long
def test_layers_with_a_window(gemma2_path: Path) -> None:
    with pytest.raises(ValueError, match="^decode_only does not go with a model with windowed layers"):
        LLM(str(gemma2_path), transport="loopback", decode_only=True)
