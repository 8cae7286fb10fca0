"""Hybrid models keep KV and states in host memory and on disk. Prompts begin there, with transformers' tokens, after
eviction from the pool, after a restart, and on other memory workers.

Covers: lamina/workers/memory/offload/state_fragments.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import ROOT, Running
from support.models.hybrids import HYBRIDS, build_hybrid, each_hybrid, greedy, prompts, reused

from lamina import LLM, SamplingParams
from lamina.engine.scheduler_factory import check_kv_capacity
from lamina.kv.disk_store.page_index import PageIndex
from lamina.kv.disk_store.store_directory import StoreDirectory
from lamina.kv.pages import PAGE
from lamina.kv.storage import Bytes
from lamina.kv.storage.host import HostStorage

pytestmark = [pytest.mark.usefixtures("no_child_left"), pytest.mark.no_retry, pytest.mark.timeout(400)]
COUNT = 12
FIRST, SYSTEM, *QUESTIONS = prompts(300, 200, 60, 40, 50, 30)
TEXTS = [[*SYSTEM, *question] for question in QUESTIONS]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "enable_prefix_caching": True,
    "prefill_chunk": 64,
}
HOST = {"kv_offloading_size": "256MiB"}


def serve(llm: LLM, text: list[int], session_id: str | None = None) -> tuple[list[int], int]:
    """Return the tokens of a completion, and the cached tokens of the prompt."""
    params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    (done,) = llm.generate([{"prompt_token_ids": text}], params, session_id=session_id)
    return list(done.outputs[0].token_ids), done.num_cached_tokens or 0


def total(llm: LLM, name: str, role: str = "memory") -> float:
    return sum(stats[name] for worker, stats in llm.stats().items() if worker.startswith(role))


def forget_pool(llm: LLM) -> None:
    """Wait until all is saved, and drop what the pool retains."""
    llm.engine.finish_in_flight()
    llm.engine.release_idle_blocks()
    llm.engine.finish_in_flight()
    llm.engine.scheduler.evict_retained()
    llm.engine.release_idle_blocks()


def check_storage(name: str, **options: Any) -> None:
    """Evict each prompt from the pool before the next one comes."""
    model = build_hybrid(name)
    with LLM(model, **{**OPTIONS, **HOST, **options}) as llm:
        answer, cached = serve(llm, FIRST)
        assert (answer, cached) == (greedy(model, FIRST, COUNT), 0)
        forget_pool(llm)
        rows, other = total(llm, "rows", "compute"), [*FIRST, 9, 8, 7]
        assert serve(llm, other) == (greedy(model, other, COUNT), len(FIRST)), "the snapshot at the prompt's end"
        assert total(llm, "state_loaded_bytes") > 0
        replicas = options.get("pipeline", 1)
        assert total(llm, "rows", "compute") - rows <= replicas * (3 + COUNT), "no token before it was computed"
        forget_pool(llm)
        turn, kept = [*FIRST, *answer, 5, 6], reused(name, len(FIRST), COUNT)
        assert serve(llm, turn) == (greedy(model, turn, COUNT), kept), "and at the turn's end"
        forget_pool(llm)
        found = list[int]()
        for text in TEXTS:
            tokens, cached = serve(llm, text)
            assert tokens == greedy(model, text, COUNT)
            found.append(cached)
            forget_pool(llm)
        assert found == [0, 0, PAGE, PAGE], "the second prompt left the first after a page"
        assert serve(llm, TEXTS[0])[1] == PAGE, "its own snapshot has all of its tokens, and one has to be computed"
        assert total(llm, "kv_failed_transfers") == 0
        llm.engine.finish_in_flight()
        llm.engine.accounting.check_integrity()


def test_a_prompt_begins_with_states_of_host_memory() -> None:
    check_storage("bamba", memory_workers=1, transport="loopback")


def test_where_prompts_are_clamped_a_turn_begins_with_the_states_at_the_last_prompts_end() -> None:
    """The tokens of an answer are not clamped, and as a part of the next prompt they are."""
    model = build_hybrid("bamba", time_step_limit=(0.5, 0.9))
    with LLM(model, **OPTIONS, **HOST, memory_workers=1, transport="loopback") as llm:
        answer, _ = serve(llm, FIRST)
        assert answer == greedy(model, FIRST, COUNT) != greedy(build_hybrid("bamba"), FIRST, COUNT)
        turn = [*FIRST, *answer, 5, 6]
        for _ in range(2):
            assert serve(llm, turn) == (greedy(model, turn, COUNT), len(FIRST))
            forget_pool(llm)


@pytest.mark.long(but=["request"])
@pytest.mark.parametrize("partition", ["head", "request"])
def test_states_of_several_workers_are_stored(partition: str) -> None:
    check_storage("qwen3_next", memory_workers=3, partition=partition, transport="shm")


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["head", "request"])
@pytest.mark.parametrize("name", sorted(HYBRIDS))
def test_states_of_all_families_are_stored(name: str, partition: str, tmp_path: Path) -> None:
    check_storage(name, memory_workers=2, partition=partition, transport="tcp")
    disk = {"kv_offloading_size": "", "kv_store_dir": str(tmp_path / "kv")}
    check_storage(name, memory_workers=2, partition=partition, transport="tcp", **disk)


def is_of_states(fragments: Sequence[Any], model: Any) -> bool:
    """Return whether fragments are of recurrent layers, which are numbered after attention layers."""
    return min(fragment.layer for fragment in fragments) >= model.config.layer_types.count("full_attention")


def test_a_damaged_state_costs_a_hit_and_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model, right, damaged = build_hybrid("lfm2"), HostStorage.read, list[int]()
    other = [*FIRST, 9, 8, 7]

    def read(self: HostStorage, key: bytes, into: Any) -> None:
        held = self.lookup(key)
        if held is not None and is_of_states([*held.fragments], model) and not damaged:
            page, fragments = self.read_page(key)
            self.delete([key])
            first = min(fragments)
            damaged.append(len(fragments))
            fragments.pop(first)
            self.write(page, fragments)
        right(self, key, into)

    monkeypatch.setattr(HostStorage, "read", read)
    with LLM(model, **OPTIONS, **HOST, memory_workers=1, transport="loopback") as llm:
        serve(llm, FIRST)
        forget_pool(llm)
        assert serve(llm, other) == (greedy(model, other, COUNT), 0)
        assert total(llm, "kv_failed_transfers") == 1
        assert damaged


def test_tokens_depend_on_the_states_that_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: wrong states with right checksums give other tokens."""
    model, right, other = build_hybrid("bamba"), HostStorage.write, [*FIRST, 9, 8, 7]
    num_attention_layers, wrong = 1, list[bytes]()

    def write(self: HostStorage, page: Any, fragments: dict[Any, Bytes]) -> None:
        if min(fragment.layer for fragment in fragments) >= num_attention_layers:
            wrong.append(page.key)
            fragments = {fragment: bytes(len(memoryview(data).cast("B"))) for fragment, data in fragments.items()}
        right(self, page, fragments)

    monkeypatch.setattr(HostStorage, "write", write)
    with LLM(model, **OPTIONS, **HOST, memory_workers=1, transport="loopback") as llm:
        serve(llm, FIRST)
        forget_pool(llm)
        tokens, cached = serve(llm, other)
    assert wrong
    assert cached == len(FIRST)
    assert tokens != greedy(model, other, COUNT)


def flip_states(folder: Path, num_attention_layers: int) -> Iterator[bytes]:
    """Flip a bit of each state in a directory. Yields their keys."""
    with closing(StoreDirectory(str(folder), make=False)) as store, closing(PageIndex(store)) as index:
        for entry in list(index.entries()):
            for record in entry.records:
                if min(fragment.layer for fragment in record.fragments) < num_attention_layers:
                    continue
                extent = record.extent
                with (folder / f"segment-{extent.segment:06d}").open("r+b") as file:
                    file.seek(extent.at)
                    (byte,) = file.read(1)
                    file.seek(-1, 1)
                    file.write(bytes([byte ^ 1]))
                yield entry.page.key


@pytest.mark.long
def test_other_workers_load_what_an_earlier_engine_has_stored(tmp_path: Path) -> None:
    """Two workers by head save, three by head and two by request load. Damage on the disk costs no token."""
    model, disk, other = build_hybrid("bamba"), {"kv_store_dir": str(tmp_path / "kv")}, [*FIRST, 9, 8, 7]
    expected = greedy(model, other, COUNT)
    with LLM(model, **OPTIONS, **disk, memory_workers=2, partition="head", transport="loopback") as llm:
        serve(llm, FIRST)
        forget_pool(llm)
    for workers, partition in ((3, "head"), (2, "request")):
        with LLM(model, **OPTIONS, **disk, memory_workers=workers, partition=partition, transport="loopback") as llm:
            assert serve(llm, other) == (expected, len(FIRST))
            assert total(llm, "state_loaded_bytes") > 0
    assert len(list(flip_states(tmp_path / "kv", 1))) >= 2
    with LLM(model, **OPTIONS, **disk, memory_workers=1, transport="loopback") as llm:
        assert serve(llm, other) == (expected, 0)
        assert total(llm, "kv_failed_transfers") >= 1


def resize(llm: LLM, count: int) -> None:
    """Let there come to be so many memory workers while a request runs."""
    llm.engine.add(SYSTEM, SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
    resizer, outcome, is_begun = llm.pools.resizer, None, False
    while llm.engine.has_work:
        llm.engine.step()
        outcome = resizer.take_outcome() or outcome
        if not is_begun:
            is_begun, wanted = True, resizer.plan(count)
            check_kv_capacity(llm.engine.scheduler, llm.engine.worker_info, wanted.capacity)
            resizer.begin(wanted, [])
            while resizer.is_preparing:
                llm.pools.registry.check()
    assert outcome is not None
    assert outcome.error == ""


@pytest.mark.long
def test_states_are_found_after_memory_workers_came_and_went(tmp_path: Path) -> None:
    model, disk, other = build_hybrid("falcon_h1"), {"kv_store_dir": str(tmp_path / "kv")}, [*FIRST, 9, 8, 7]
    with LLM(model, **OPTIONS, **disk, memory_workers=2, transport="loopback") as llm:
        serve(llm, FIRST)
        for count in (3, 1):
            forget_pool(llm)  # a change cancels saves that are due
            resize(llm, count)
            before = total(llm, "state_loaded_bytes")
            assert serve(llm, other) == (greedy(model, other, COUNT), len(FIRST))
            assert total(llm, "state_loaded_bytes") > before


def test_a_session_is_dropped_with_its_states() -> None:
    model = build_hybrid("lfm2")
    with LLM(model, **OPTIONS, **HOST, memory_workers=1, transport="loopback") as llm:
        answer, _ = serve(llm, FIRST, "mine")
        forget_pool(llm)
        assert [(each.turns, each.tier) for each in llm.sessions()] == [(1, "host")]
        turn = [*FIRST, *answer, 5, 6]
        tokens, cached = serve(llm, turn, "mine")
        assert (tokens, cached) == (greedy(model, turn, COUNT), len(FIRST) + COUNT - 1)
        forget_pool(llm)
        assert llm.drop_session("mine")
        assert serve(llm, [*turn, *tokens, 7])[1] == 0


def ask(server: Running, text: list[int], **more: Any) -> tuple[list[int], int]:
    """Return the tokens of a completion, and the cached tokens of the prompt."""
    body = {"prompt": text, "max_tokens": COUNT, "ignore_eos": True, "temperature": 0.0, "return_token_ids": True}
    answer = httpx.post(f"{server.url}/v1/completions", json={**body, **more}, timeout=200).raise_for_status().json()
    details = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["token_ids"], details.get("cached_tokens", 0)


@each_hybrid("qwen3_next")
def test_a_session_goes_on_after_the_server_was_restarted(name: str, tmp_path: Path) -> None:
    model = build_hybrid(name)
    model.save_pretrained(tmp_path / "model")
    for file in (ROOT / "examples" / "tiny_lm" / "model").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "model")
    flags = ["--dtype=float32", "--max-model-len=512", "--kv-offload", f"dir={tmp_path / 'kv'}", "--transport=shm"]
    server = Running(tmp_path / "log", *flags, "--memory-workers=2", model=str(tmp_path / "model"))
    try:
        answer, cached = ask(server, FIRST, session_id="mine")
    finally:
        server.kill()
    assert (answer, cached) == (greedy(model, FIRST, COUNT), 0)
    turn = [*FIRST, *answer, 5, 6]
    server = Running(tmp_path / "log2", *flags, "--memory-workers=3", model=str(tmp_path / "model"))
    try:
        more, cached = ask(server, turn, session_id="mine")
    finally:
        server.kill()
    assert (more, cached) == (greedy(model, turn, COUNT), reused(name, len(FIRST), COUNT))
