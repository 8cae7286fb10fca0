"""KV outside the pools: evicted and loaded again, saved by one engine and loaded by another, always bit for bit.

Covers: lamina/kv/storage/host.py.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lamina import LLM, RequestOutput, SamplingParams
from lamina.kv.disk_store.maintenance import store_summary
from lamina.kv.disk_store.page_index import PageIndex
from lamina.kv.disk_store.store_directory import StoreDirectory
from lamina.kv.pages import PAGE, Provenance
from lamina.kv.storage import FragmentLostError
from lamina.kv.storage.file import FileStorage
from lamina.kv.storage.host import HostStorage
from lamina.protocol.kv_placement import FIRST_LOCATION
from lamina.scheduler.kv_manager.offload_index import OffloadIndex
from lamina.scheduler.kv_manager.swap import SwapPolicy
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.memory_worker import MemoryWorker
from lamina.workers.memory.offload import page_transfers

pytestmark = pytest.mark.usefixtures("no_child_left")
Reference = Callable[[list[int], int], list[int]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3)
PROMPT = [(7 * i + 3) % 90 + 5 for i in range(300)]
OTHERS = [[(k * 13 + 11 * i) % 90 + 5 for i in range(300)] for k in range(1, 7)]
TINY = {"dtype": "float32", "prefill_chunk": 64, "enable_prefix_caching": True, "transport": "loopback"}


def ask(llm: LLM, prompt: list[int]) -> RequestOutput:
    return llm.generate([prompt], PARAMS)[0]


def told(output: RequestOutput) -> Any:
    return [(o.token_ids, o.logprobs) for o in output.outputs]


def loaded(llm: LLM) -> float:
    return sum(stats.get("kv_loaded_bytes", 0.0) for stats in llm.stats().values())


WAYS: list[dict[str, Any]] = [
    {"memory_workers": 2, "kv_memory": "260KB", "transport": "shm"},
    {"memory_workers": 3, "partition": "token", "kv_memory": "230KB"},
    {"memory_workers": 2, "partition": "request", "kv_memory": "500KB", "pipeline": 2},
    {"memory_workers": 1, "kv_memory": "250KB", "kv_cache_dtype": "int8"},
]
TIGHT: list[dict[str, Any]] = [  # room for one of two sequences
    {"memory_workers": 2, "kv_memory": "200KB", "transport": "shm"},
    {"memory_workers": 3, "kv_memory": "200KB", "partition": "token"},
    {"memory_workers": 1, "kv_memory": "130KB", "kv_cache_dtype": "int8"},
]


@pytest.mark.long
@pytest.mark.parametrize(("way", "medium"), [*((way, "host") for way in WAYS), (WAYS[0], "file")], ids=str)
def test_what_was_evicted_comes_back_bit_for_bit(
    way: dict[str, Any], medium: str, llama_path: Path, tmp_path: Path
) -> None:
    where = {"kv_offloading_size": "64MiB"} if medium == "host" else {"kv_store_dir": str(tmp_path / "kv")}
    roomy = {**TINY, **way, "kv_memory": "4MB"}
    with LLM(str(llama_path), **roomy) as llm:
        ask(llm, PROMPT)
        never = ask(llm, [*PROMPT[:256], *PROMPT[:40]])  # forked after 256 tokens
    with LLM(str(llama_path), **{**TINY, **way, **where}) as llm:
        for prompt in (PROMPT, *OTHERS):
            assert ask(llm, prompt).num_cached_tokens == 0
        again = ask(llm, [*PROMPT[:256], *PROMPT[:40]])
        assert again.num_cached_tokens == 256
        assert loaded(llm) > 0
    assert told(again) == told(never)


@pytest.mark.long
def test_from_the_disk_by_way_of_memory(llama_path: Path, tmp_path: Path) -> None:
    """Memory has room for one prompt of seven; the turns that wait have theirs fetched, and lose no bit."""
    where = {"kv_store_dir": str(tmp_path / "kv"), "kv_offloading_size": "300KB"}
    with LLM(str(llama_path), **TINY, kv_memory="4MB") as llm:
        never = [told(ask(llm, [*prompt[:256], 5])) for prompt in OTHERS]
    with LLM(str(llama_path), **TINY, kv_memory="250KB", max_num_seqs=1, **where) as llm:
        for prompt in (PROMPT, *OTHERS):
            ask(llm, prompt)
        llm.engine.finish_in_flight()  # what is still being saved is not found
        outputs = llm.generate([[*prompt[:256], 5] for prompt in OTHERS], PARAMS)
        assert sum(stats.get("kv_fetched_pages", 0.0) for stats in llm.stats().values()) > 0
    assert [told(output) for output in outputs] == never
    assert sum(output.num_cached_tokens == 256 for output in outputs) == len(OTHERS)


def test_what_one_engine_has_saved_another_one_loads(llama_path: Path, tmp_path: Path, reference: Reference) -> None:
    """Saved by two workers by head, loaded by three by token, with blocks of another size."""
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("5a" * 32)
    where = {**TINY, "kv_store_dir": str(tmp_path / "kv"), "kv_key_file": str(key)}
    turn = [*PROMPT[:256], *PROMPT[:40]]
    with LLM(str(llama_path), memory_workers=2, block_size=16, **where) as llm:
        ask(llm, PROMPT)
        never = ask(llm, turn)
        assert never.num_cached_tokens == 256
        llm.engine.finish_in_flight()
    with LLM(str(llama_path), memory_workers=3, partition="token", block_size=64, **where) as llm:
        again = ask(llm, turn)
        assert again.num_cached_tokens == 256
        assert loaded(llm) > 0
    assert told(again) == told(never)
    assert again.outputs[0].token_ids == reference(turn, 8)
    assert not (tmp_path / "kv" / "secret").exists()


TTL_S, SOON_S = 3.0, 60.0


@pytest.mark.long(but=["directory"])
@pytest.mark.parametrize("memory", ["", "64MiB"], ids=["directory", "memory before it"])
def test_pages_go_when_their_time_is_up_though_nobody_asks(memory: str, llama_path: Path, tmp_path: Path) -> None:
    """In real seconds: not before they were unused for so long, and soon after. The engine knows, so no load fails."""
    tier = {"kv_store_dir": str(tmp_path / "kv"), "kv_store_ttl": f"{TTL_S:g}s", "kv_load_failure_policy": "fail"}
    tier |= {"kv_offloading_size": memory} if memory else {}
    with LLM(str(llama_path), memory_workers=2, kv_memory="260KB", **{**TINY, **tier}) as llm:
        begun, pause, index = time.monotonic(), threading.Event(), llm.engine.scheduler.features[OffloadIndex]
        never = ask(llm, PROMPT)
        llm.engine.finish_in_flight()
        assert index.stored_keys
        while index.stored_keys:
            assert time.monotonic() < begun + TTL_S + SOON_S, "its KV is there for ever"
            pause.wait(0.02)
            llm.engine.check_workers()
        assert time.monotonic() >= begun + TTL_S
        assert sum(number for _, number, _ in store_pages(tmp_path / "kv")) == 0
        for other in OTHERS:
            ask(llm, other)
        assert told(ask(llm, PROMPT)) == told(never)


def store_pages(directory: Path) -> list[tuple[bytes, int, int]]:
    """Tenant, pages and bytes of what a store has."""
    with closing(StoreDirectory(str(directory))) as folder, closing(PageIndex(folder)) as index:
        return [(tenant, pages, nbytes) for _, tenant, pages, nbytes in index.counts()]


@pytest.mark.long
@pytest.mark.parametrize("way", TIGHT, ids=str)
def test_a_preempted_one_goes_on_bit_for_bit(way: dict[str, Any], llama_path: Path) -> None:
    """It goes on as if it had never been away, in the middle of a page; computed anew it differs in the last bits."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=3)
    prompts, found, counted = [PROMPT[:200], OTHERS[0][:190]], list[Any](), list[Any]()
    runs = [{"kv_memory": "4MB"}, {"preemption_mode": "auto"}, {"preemption_mode": "recompute"}]
    for run in runs if way is TIGHT[0] else runs[:2]:
        options = {**TINY, **way, "max_model_len": 288, "deterministic": True, "kv_offloading_size": "64MiB", **run}
        with LLM(str(llama_path), **options) as llm:
            found.append([told(output) for output in llm.generate(prompts, params)])
            scheduler = llm.engine.scheduler
            assert scheduler.features.get(SwapPolicy) is not None
            counted.append(
                (scheduler.num_preemptions, scheduler.features.get(SwapPolicy).num_swapped_sequences, loaded(llm) > 0)
            )
    assert counted == [(0, 0, False), (1, 1, True), (1, 0, True)][: len(counted)], "its prompt's page is there anyway"
    never, swapped, *computed = found
    assert swapped == never
    assert all(other != never for other in computed), "the control"


@pytest.mark.long(but=["fail"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_load_that_fails_while_nothing_else_is_done(
    policy: str, llama_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    """The prompt is computed, or the request ends with an error; and the engine goes on."""

    def lose(self: HostStorage, key: bytes, into: Any) -> None:
        raise FragmentLostError("it is not there")

    options = {**TINY, "kv_offloading_size": "64MiB", "memory_workers": 2, "kv_load_failure_policy": policy}
    with LLM(str(llama_path), **options) as llm:
        ask(llm, PROMPT)
        llm.engine.finish_in_flight()
        llm.engine.scheduler.evict_retained()
        monkeypatch.setattr(HostStorage, "read", lose)
        failed = ask(llm, [*PROMPT, 9])
        assert failed.outputs[0].finish_reason == {"recompute": "length", "fail": "error"}[policy]
        assert failed.num_cached_tokens in (0, None)
        if policy == "recompute":
            assert failed.outputs[0].token_ids == reference([*PROMPT, 9], 8)
        assert ask(llm, [*PROMPT, 9]).outputs[0].token_ids == reference([*PROMPT, 9], 8)
        assert sum(stats["kv_failed_transfers"] for n, stats in llm.stats().items() if n.startswith("memory")) >= 1


def test_pages_that_expire_right_before_they_are_loaded_are_computed(
    llama_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    """Another worker deletes them after they were found. That is no failed load, so no request ends."""
    read = FileStorage.read

    def expire_first(self: FileStorage, key: bytes, into: Any) -> None:
        self.page_index.expire(-1.0)
        read(self, key, into)

    options = {**TINY, "kv_store_dir": str(tmp_path / "kv"), "kv_store_ttl": "1h", "kv_load_failure_policy": "fail"}
    with LLM(str(llama_path), memory_workers=2, **options) as llm:
        ask(llm, PROMPT)
        llm.engine.finish_in_flight()
        llm.engine.scheduler.evict_retained()
        monkeypatch.setattr(FileStorage, "read", expire_first)
        again = ask(llm, [*PROMPT, 9])
        assert again.outputs[0].token_ids == reference([*PROMPT, 9], 8)
        assert again.num_cached_tokens in (0, None)
        counts = [stats for name, stats in llm.stats().items() if name.startswith("memory")]
        assert not any(stats.get("kv_failed_transfers") or stats.get("kv_loaded_bytes") for stats in counts)


def test_a_request_that_is_cancelled_while_its_kv_is_loaded(
    llama_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    """Its blocks stay until the load has ended, and are all free then."""
    read, may_go = HostStorage.read, threading.Event()

    def wait(self: HostStorage, key: bytes, into: Any) -> None:
        assert may_go.wait(30.0)
        read(self, key, into)

    with LLM(str(llama_path), kv_offloading_size="64MiB", memory_workers=2, **TINY) as llm:
        engine = llm.engine
        ask(llm, PROMPT)
        engine.finish_in_flight()
        engine.scheduler.evict_retained()
        engine.release_idle_blocks()
        before = engine.free_blocks
        monkeypatch.setattr(HostStorage, "read", wait)
        number = engine.add([*PROMPT, 9], PARAMS)
        while not any(s.transfer.loading_tokens for b in engine.scheduler.batches for s in b.running):
            engine.step()
        engine.cancel(number)
        assert engine.scheduler.num_running == 1, "it is being loaded"
        may_go.set()
        engine.finish_in_flight()
        engine.release_idle_blocks()
        assert engine.scheduler.num_running == 0
        assert engine.free_blocks == before
        assert ask(llm, [*PROMPT, 9]).outputs[0].token_ids == reference([*PROMPT, 9], 8)


@pytest.mark.long
def test_pages_are_saved_as_they_fill(llama_path: Path, reference: Reference) -> None:
    """They are saved long before their request ends, and as they would be found after it, to the last token."""
    with LLM(str(llama_path), memory_workers=2, kv_offloading_size="64MiB", **TINY) as llm:
        engine, tier = llm.engine, llm.engine.scheduler.features.get(OffloadIndex)
        assert tier is not None
        engine.add(PROMPT, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
        drawn = 0
        while engine.has_work:
            outputs = engine.step()
            (running,) = engine.scheduler.batches[0].running or [None]
            if running is not None and len(running.tokens) >= 384:
                there = tier.num_loadable_pages(tier.keys_of(running, 384), FIRST_LOCATION)
                drawn = drawn or (running.num_output_tokens if there == 3 else 0)
        never = outputs[0].outputs[0].token_ids
        assert 84 <= drawn < 200, "the third page has 44 tokens of the prompt"
        engine.finish_in_flight()
        engine.release_idle_blocks()  # it is retained now
        engine.scheduler.evict_retained()
        again = ask(llm, [*PROMPT, *never[:100]])
        assert again.num_cached_tokens == 384
        assert again.outputs[0].token_ids == never[100:108]
        engine.finish_in_flight()
        engine.release_idle_blocks()
        engine.scheduler.evict_retained()
        behind = ask(llm, said := [*PROMPT, *never, 7])
        assert behind.num_cached_tokens == 499, "three pages, and 115 tokens"
        assert behind.outputs[0].token_ids == reference(said, 8)


def test_what_is_to_be_saved_is_saved_though_others_end_before(
    llama_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A memory worker hears that the driver ends once the compute worker has gone; after a loss it saves no more."""
    gone, where = threading.Event(), {**TINY, "kv_store_dir": str(tmp_path / "kv")}
    serve, abort, write = MemoryWorker.serve, MemoryWorker.abort, FileStorage.write

    def serve_until(self: MemoryWorker, *asked: Any) -> None:
        try:
            serve(self, *asked)
        finally:
            gone.set()

    def behind(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *asked: gone.wait(30.0) and call(*asked)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryWorker, "serve", serve_until)
        patch.setattr(MemoryWorker, "abort", behind(abort))
        patch.setattr(FileStorage, "write", behind(write))
        patch.setattr(page_transfers, "LAST_S", 30.0)
        with LLM(str(llama_path), **where) as llm:
            ask(llm, PROMPT)
    with LLM(str(llama_path), **where) as llm:
        assert ask(llm, [*PROMPT, 7]).num_cached_tokens == 256


@pytest.mark.long
def test_another_model_finds_nothing(llama_path: Path, tmp_path: Path) -> None:
    where = {**TINY, "kv_store_dir": str(tmp_path / "kv")}
    with LLM(str(llama_path), **where) as llm:
        ask(llm, PROMPT)
    with LLM(str(llama_path), **{**where, "dtype": "bfloat16"}) as llm:
        assert ask(llm, PROMPT).num_cached_tokens == 0


@pytest.mark.long
def test_where_bits_count_another_build_finds_nothing(
    llama_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, recipes = [], set[Provenance]()
    for build, fixed in itertools.product(("one", "two"), (True, False)):
        for room in ("compute.kv_identity", "memory.memory_worker"):
            monkeypatch.setattr(f"lamina.workers.{room}.build_id", lambda build=build: build)
        where = {**TINY, "kv_store_dir": str(tmp_path / "kv"), "deterministic": fixed}
        with LLM(str(llama_path), **where) as llm:
            found.append(ask(llm, [*PROMPT, *range(5, 12)]).num_cached_tokens)
            llm.engine.finish_in_flight()  # until all is saved, however slow this machine is
        with (
            closing(StoreDirectory(str(where["kv_store_dir"]), make=False)) as folder,
            closing(PageIndex(folder)) as index,
        ):
            recipes |= {entry.page.provenance for entry in index.entries() if entry.page.tokens == PAGE}
    assert found == [0, 0, 0, 256]
    assert recipes == {Provenance("prompt", 64, "one", 1), Provenance("prompt", 64, "two", 1)}


@pytest.mark.long
def test_nothing_is_found_behind_a_reset(llama_path: Path) -> None:
    with LLM(str(llama_path), kv_offloading_size="64MiB", kv_memory="500KB", **TINY) as llm:
        for prompt in (PROMPT, *OTHERS):
            ask(llm, prompt)
        llm.reset_prefix_cache()
        assert ask(llm, PROMPT).num_cached_tokens == 0


def test_a_reset_is_not_forgotten_by_the_next_engine(llama_path: Path, tmp_path: Path) -> None:
    """Pages from before the reset are found no more, and go; pages that come after it are found."""
    where = {**TINY, "kv_store_dir": str(tmp_path / "kv"), "memory_workers": 2}
    with LLM(str(llama_path), **where) as llm:
        ask(llm, PROMPT)
        llm.engine.finish_in_flight()  # what is on its way to the directory is there
        llm.reset_prefix_cache()
        ask(llm, OTHERS[0])
        llm.engine.finish_in_flight()
    with closing(StoreDirectory(where["kv_store_dir"], make=False)) as folder:
        assert sum(part.pages for part in store_summary(folder).parts) == 3, "of the one behind the reset"
    with LLM(str(llama_path), **where) as llm:
        assert ask(llm, [*PROMPT, 7]).num_cached_tokens == 0
        assert ask(llm, [*OTHERS[0], 7]).num_cached_tokens == 256


@pytest.mark.long
@pytest.mark.parametrize("wipes", [True, False])
def test_blocks_that_are_free_are_zeros_and_pages_are_saved_before(llama_path: Path, *, wipes: bool) -> None:
    """Seen in the pool's own memory; the other one is the control."""
    options = {**TINY, "kv_offloading_size": "64MiB", "memory_workers": 2, "kv_memory": "260KB"}
    earlier = [x for x in gc.get_objects() if isinstance(x, KvStore)]  # held, so that none is taken for a new one
    with LLM(str(llama_path), zero_on_free=wipes, **options) as llm:
        never = told(ask(llm, [*PROMPT[:256], 5]))
        for prompt in OTHERS:
            ask(llm, prompt)  # whose blocks were another one's, whose pages were still being saved
        again = ask(llm, [*PROMPT[:256], 5])
        assert (told(again), again.num_cached_tokens) == (never, 256)
        llm.engine.finish_in_flight()
        llm.reset_prefix_cache()
        llm.engine.release_idle_blocks()
        pools = [x for x in gc.get_objects() if isinstance(x, KvStore) and not any(x is old for old in earlier)]
        tensors = [x[:-1] for pool in pools for layer in pool.layers for piece in layer for x in piece.kv.tensors]
        assert len(tensors) == 2 * 2 * 3
        assert any(x.any() for x in tensors) != wipes


def test_a_size_without_room_for_a_sequence_is_refused_in_one_line(llama_path: Path, tmp_path: Path) -> None:
    """512 tokens of 3 layers, 4 KV heads, 2 x 8 numbers of 4 bytes; two workers that have half of its pages each."""
    whole = 512 * 3 * 4 * 2 * 8 * 4
    why = rf"no space for one sequence of 512 tokens, which takes {{}} on each of .*: give {whole} at least, or lower"
    with pytest.raises(ValueError, match=f"^kv_offloading_size: {whole - 1} bytes have {why.format(whole)}.*$"):
        LLM(str(llama_path), kv_offloading_size=str(whole - 1), memory_workers=1, **TINY)
    halves = {"kv_store_dir": str(tmp_path / "kv"), "memory_workers": 2, "partition": "token"}
    with pytest.raises(ValueError, match=f"^kv_store_size: {whole - 1} bytes have {why.format(whole // 2)}.*$"):
        LLM(str(llama_path), kv_store_size=str(whole - 1), **halves, **TINY)
    with LLM(str(llama_path), kv_store_size=str(whole), **halves, **TINY) as llm:
        assert ask(llm, PROMPT).outputs


def test_a_tier_needs_what_it_is_for(llama_path: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="^kv_offloading_size does not go with enable_prefix_caching=False, because .*$"
    ):
        LLM(str(llama_path), kv_offloading_size="1MiB", enable_prefix_caching=False)
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ValueError, match="^kv_store_dir.*: chmod 700 .*$"):
        LLM(str(llama_path), enable_prefix_caching=True, kv_store_dir=str(tmp_path / "open"))
    with pytest.raises(ValueError, match="^kv_store_ttl needs kv_store_dir"):
        LLM(str(llama_path), kv_store_ttl="7h")
    with pytest.raises(ValueError, match="^kv_store_ttl=7 is not a time"):
        LLM(str(llama_path), kv_store_ttl="7", kv_store_dir=str(tmp_path))
    with pytest.raises(ValueError, match="^kv_key_file needs kv_store_dir, because .*$"):
        LLM(str(llama_path), enable_prefix_caching=True, kv_key_file=str(tmp_path / "key"))
