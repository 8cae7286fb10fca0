"""Memory workers come and go while sequences run: KV moves, weights stay, and no sequence's tokens change.

Covers: lamina/executor/termination_notice.py.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from running import eventually
from test_spares import memory as resident

from lamina import LLM, SamplingParams
from lamina.engine.scheduler_factory import check_kv_capacity
from lamina.executor import termination_notice
from lamina.executor.elastic import MemoryResizer, ResizeResult
from lamina.executor.memory_worker_slots import ResizeNeedsRestartError
from lamina.kv import arena, paged_cache
from lamina.protocol.executor import WorkerError
from lamina.protocol.step_plan import SurvivingKv
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.workers.memory.kv_transfer import transfer_link
from lamina.workers.memory.memory_worker import MemoryWorker

pytestmark = pytest.mark.usefixtures("no_child_left")
# Penalties depend on what workers were sent before; log-probabilities show a wrong bit where a token would not.
PARAMS = SamplingParams(temperature=0.0, max_tokens=44, logprobs=1, frequency_penalty=0.4, ignore_eos=True)
PROMPTS = [[7 + i % 200 for i in range(n)] for n in (3, 140, 290)]


def open_llm(path: Path, **options: Any) -> LLM:
    chosen = {"memory_workers": 2, "deterministic": True, "prefill_chunk": 64, "kv_memory": "20MiB", **options}
    return LLM(str(path), **chosen)


def change(llm: LLM, count: int, leaving: Sequence[int] = ()) -> None:
    wanted = llm.pools.resizer.plan(count)
    check_kv_capacity(llm.engine.scheduler, llm.engine.worker_info, wanted.capacity)
    llm.pools.resizer.begin(wanted, leaving)


def wait_for_room(llm: LLM) -> None:
    while llm.pools.resizer.is_preparing:
        llm.pools.registry.check()


def steps(llm: LLM, outputs: dict[int, Any]) -> Iterator[ResizeResult | None]:
    while llm.engine.has_work:
        outputs |= {o.request_id: o for o in llm.engine.step()}
        yield llm.pools.resizer.take_outcome()


def run(llm: LLM, sizes: Sequence[tuple[int, list[int]]] = ()) -> tuple[list[Any], list[ResizeResult]]:
    """Tokens and log-probabilities by prompt; in their midst there come to be so many memory workers."""
    ids, outputs, found = [llm.engine.add(p, PARAMS) for p in PROMPTS], dict[int, Any](), list[ResizeResult]()
    left, busy = list(sizes), False
    for outcome in steps(llm, outputs):
        if outcome is not None:
            found.append(outcome)
            busy = False
        if left and not busy and len(outputs) == len(ids):
            change(llm, *left.pop(0))
            busy = True
            wait_for_room(llm)
    llm.engine.release_idle_blocks()
    llm.engine.accounting.check_integrity()
    return [(outputs[i].outputs[0].token_ids, outputs[i].outputs[0].logprobs) for i in ids], found


def counts(llm: LLM, role: str, name: str) -> float:
    return sum(values[name] for worker, values in llm.stats().items() if worker.startswith(role))


@pytest.mark.no_retry
@pytest.mark.long(but=["token"])
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"partition": "head"}, [(3, []), (1, []), (2, [])]),
        ({"partition": "token", "kv_cache_dtype": "int8"}, [(4, []), (2, [0, 2])]),
        ({"partition": "request", "pipeline": 2, "prefill_workers": 1}, [(3, []), (2, [1])]),
        ({"partition": "token", "tensor_parallel_size": 2}, [(4, []), (2, [0, 3])]),
    ],
    ids=["head", "token", "request", "ranks"],
)
def test_kv_moves_to_the_workers_that_there_are_bit_by_bit(
    options: dict[str, Any], sizes: list[tuple[int, list[int]]], tiny_lm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, right_move, right = list[Any](), MemoryResizer.move_kv, arena.huge_page_zeros

    def move(self: MemoryResizer, keep: Sequence[SurvivingKv]) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(arena, "huge_page_zeros", lambda shape, dtype: (made.append(shape), right(shape, dtype))[1])
            return right_move(self, keep)

    monkeypatch.setattr(MemoryResizer, "move_kv", move)
    with open_llm(tiny_lm, transport="loopback", **options) as llm:
        wanted, _ = run(llm)
        rows = counts(llm, "compute", "rows") + counts(llm, "prefill", "rows")
        found, outcomes = run(llm, sizes)
        assert found == wanted
        assert [o.error for o in outcomes] == [""] * len(sizes)
        assert all(o.moved_bytes for o in outcomes)
        assert counts(llm, "compute", "loads") == len(llm.pools.registry.compute)
        again = counts(llm, "compute", "rows") + counts(llm, "prefill", "rows") - rows
        assert again < rows + len(sizes) * 2 * llm.engine.config.batching.max_num_seqs, "a prompt was computed again"
        assert len(llm.pools.registry.memory) == sizes[-1][0]
        uneven = options["partition"] == "head"  # two heads, three workers: some have a layer that they had no part of
        assert uneven or not made, "fresh memory was taken while streams paused"
        prefixes = llm.engine.scheduler.features[PrefixCache]
        hit, known = prefixes.num_hit_tokens, run(llm)[0]
        assert known == wanted
        assert prefixes.num_hit_tokens - hit == 128 + 256, "what is retained has moved, too"


BESIDE: dict[str, dict[str, Any]] = {
    "host": {"kv_offloading_size": "64MiB", "partition": "request"},
    "file": {"kv_store_dir": "kv", "kv_store_size": "64MiB", "partition": "head"},
    "layered": {"kv_store_dir": "kv", "kv_store_size": "64MiB", "kv_offloading_size": "64MiB", "partition": "token"},
}


@pytest.mark.no_retry
@pytest.mark.long
@pytest.mark.parametrize("medium", BESIDE)
def test_what_lies_beside_the_pool_is_found_by_those_that_there_are(
    medium: str, tiny_lm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV in the pool moves as ever. Of a directory all is found; of memory what is there whole for who needs it."""
    monkeypatch.chdir(tmp_path)

    def loaded(llm: LLM) -> float:
        return counts(llm, "memory", "kv_loaded_bytes")

    with open_llm(tiny_lm, transport="loopback", **BESIDE[medium]) as llm:
        wanted, _ = run(llm)
        rows = counts(llm, "compute", "rows")
        found, outcomes = run(llm, [(3, []), (2, [0])])
        assert found == wanted
        assert [bool(o.error) or not o.moved_bytes for o in outcomes] == [False, False]
        assert counts(llm, "compute", "rows") < 2 * rows, "what is retained was found in the pool"
        llm.engine.finish_in_flight()
        llm.engine.scheduler.evict_retained()
        llm.engine.release_idle_blocks()
        before = loaded(llm)
        assert run(llm)[0] == wanted
        assert loaded(llm) > before
        assert sum(stats["kv_failed_transfers"] for name, stats in llm.stats().items() if "memory" in name) == 0


@pytest.mark.long
def test_a_part_without_room_for_a_sequence_leaves_all_as_it_is(tiny_lm: Path) -> None:
    """Two workers have a half of a sequence each, and three would have a third."""
    size = {"kv_offloading_size": "8MiB", "partition": "request"}
    with open_llm(tiny_lm, transport="loopback", **size) as llm:
        _, (outcome,) = run(llm, [(3, [])])
        assert "--kv-offloading-size" in outcome.error
        assert len(llm.pools.registry.memory) == 2


@pytest.mark.no_retry
@pytest.mark.long
@pytest.mark.parametrize(
    "victim", ["stays", "gone", *(pytest.param(v, marks=pytest.mark.slow) for v in ("comes", "goes"))]
)
def test_a_death_in_the_midst_of_a_move_costs_the_kv_and_nothing_else(
    victim: str, tiny_lm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, killed = MemoryResizer.move_kv, list[int]()

    def move(self: MemoryResizer, keep: Sequence[SurvivingKv]) -> bool:
        if self.moves and not killed:
            there = {m.handle.index: m for m, order in self.moves if order.bind}
            going = [m for m, order in self.moves if not order.bind]
            last = {"comes": there[max(there)], "goes": (going or [there[0]])[0]}
            member = last.get(victim, there[0])
            killed.append(member.handle.pid)
            os.kill(member.handle.pid, signal.SIGKILL)
            while victim == "gone" and member.handle.exit_reason() is None:  # so that it takes no message any more
                pass
        return right(self, keep)

    partition = "request" if victim == "gone" else "head"  # by request the others have KV that is whole
    with open_llm(tiny_lm, transport="shm", dtype="float32", partition=partition) as llm:
        wanted, _ = run(llm)
        monkeypatch.setattr(MemoryResizer, "move_kv", move)
        found, outcomes = run(llm, [(1, []) if victim == "goes" else (3, [])])
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
        assert killed
        assert [o.error for o in outcomes] == [""]
        assert counts(llm, "compute", "loads") == 1.0


@pytest.mark.long
@pytest.mark.parametrize("caches", [False, True], ids=["no KV", "KV is retained"])
def test_workers_that_come_to_an_idle_engine_take_their_memory_once(
    caches: bool, tiny_lm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do so whether or not there is KV to move: a host may have no room for two stores at once."""
    workers, taken, made, right = list[MemoryWorker](), list[Any](), MemoryWorker.__init__, arena.huge_page_zeros
    monkeypatch.setattr(MemoryWorker, "__init__", lambda self, *args: (workers.append(self), made(self, *args))[1])
    options = {"partition": "request", "transport": "loopback", "enable_prefix_caching": caches}
    with open_llm(tiny_lm, **options) as llm:
        wanted, _ = run(llm)
        for count in (3, 1, 2):
            taken.clear()
            with monkeypatch.context() as patch:
                for module in (arena, paged_cache):
                    patch.setattr(module, "huge_page_zeros", lambda *asked: (taken.append(asked[0]), right(*asked))[1])
                change(llm, count)
                wait_for_room(llm)
                ahead, outcome = len(taken), None
                while outcome is None:
                    llm.engine.check_workers()
                    outcome = llm.pools.resizer.take_outcome()
            assert outcome.error == ""
            assert len(taken) == ahead, "a store was taken beside the one that was made ready"
            assert not any(w.preallocation.arena.nbytes for w in workers), "what was made ready is nobody's"
        assert run(llm)[0] == wanted


@pytest.mark.long
@pytest.mark.parametrize("partition", ["head", "token"])
def test_who_stays_has_no_second_store_while_kv_moves(partition: str, tiny_lm: Path) -> None:
    """The peak of its process's resident memory shows its own store, and one layer."""
    size = 256 << 20
    with open_llm(tiny_lm, transport="shm", partition=partition, kv_memory=f"{size >> 20}MiB") as llm:
        for number, count in enumerate((4, 2, 4)):
            there = [llm.pools.pids[f"memory-{n}"] for n in range(2)]
            before = [resident(pid, "VmRSS") for pid in there]
            for pid in there:
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # the highest is what there is now; proc(5)
            _, outcomes = run(llm, [(count, [])])
            assert [(o.error, o.moved_bytes > 0) for o in outcomes] == [("", True)]
            assert [llm.pools.pids[f"memory-{n}"] for n in range(2)] == there
            if number:  # at first most of it had never been written
                more = [resident(pid, "VmHWM") - had for pid, had in zip(there, before, strict=True)]
                assert max(more) < size // 2, [nbytes >> 20 for nbytes in more]
            assert eventually(partial(all_have, there, 0.9 * size), 60.0)


def all_have(pids: Sequence[int], nbytes: float) -> bool:
    return all(resident(pid, "RssAnon") > nbytes for pid in pids)


@pytest.mark.long
def test_one_that_is_to_go_may_die_before(tiny_lm: Path) -> None:
    """Another one takes its place, and goes."""
    killed = False
    with open_llm(tiny_lm, transport="shm", dtype="float32") as llm:
        wanted, _ = run(llm)
        ids = [llm.engine.add(p, PARAMS) for p in PROMPTS]
        outputs, outcomes = dict[int, Any](), list[ResizeResult]()
        for outcome in steps(llm, outputs):
            outcomes += [outcome] if outcome else []
            if len(outputs) == len(ids) and not killed:
                change(llm, 1)
                os.kill(llm.pools.pids["memory-1"], signal.SIGKILL)
                killed = True
        assert [outputs[i].outputs[0].token_ids for i in ids] == [tokens for tokens, _ in wanted]
        assert killed
        assert [o.error for o in outcomes] == [""]
        assert len(llm.pools.registry.memory) == 1


@pytest.mark.long
def test_a_spare_takes_any_of_the_places_that_there_are_by_then(tiny_lm: Path) -> None:
    """It comes after workers that came, and that went; it stays a spare meanwhile."""
    with open_llm(tiny_lm, transport="shm", dtype="float32", partition="request", spare_memory=1) as llm:
        wanted, _ = run(llm)
        (first,) = [m.handle.pid for m in llm.pools.workers.spare_workers]
        for sizes, place in (([(3, [])], 2), ([(1, [0, 2])], 0)):
            (spare,) = [m.handle.pid for m in llm.pools.workers.spare_workers]
            found, outcomes = run(llm, sizes)
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
            assert [o.error for o in outcomes] == [""]
            assert [m.handle.pid for m in llm.pools.workers.spare_workers] == [spare]
            os.kill(llm.pools.pids[f"memory-{place}"], signal.SIGKILL)
            found, _ = run(llm)
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
            assert llm.pools.pids[f"memory-{place}"] == spare
        assert first != spare, "it had a successor"


@pytest.mark.no_retry
@pytest.mark.long
def test_what_is_damaged_on_its_way_is_computed_again(tiny_lm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = transfer_link.checksum
    with open_llm(tiny_lm, transport="loopback", dtype="float32") as llm:
        wanted, _ = run(llm)
        sums = iter([bytes(16)])
        monkeypatch.setattr(transfer_link, "checksum", lambda data: next(sums, None) or right(data))
        found, (outcome,) = run(llm, [(1, [])])
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
        assert (outcome.error, outcome.moved_bytes) == ("", 0)


@pytest.mark.no_retry
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_is_damaged_before_it_goes_is_seen_before_anybody_attends_it(
    tiny_lm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With checksums of all blocks: where it comes to it would have one that is right."""
    right, done = MemoryResizer.move_kv, list[int]()

    def move(self: MemoryResizer, keep: Sequence[SurvivingKv]) -> bool:
        if self.moves and not done:
            stores = (w.store for w in workers if w.store is not None)
            store = next(
                store for store in stores if store.bind_request.worker == 0
            )  # who stays: who goes ends, and no more
            (block, *_) = store.tables.block_table(0, keep[0].sequence)[1]
            store.layers[0][0].kv.k.numpy()[block] += 1.0
            done.append(int(block))
        return right(self, keep)

    workers, made = list[MemoryWorker](), MemoryWorker.__init__
    monkeypatch.setattr(MemoryWorker, "__init__", lambda self, *args: (workers.append(self), made(self, *args))[1])
    with open_llm(tiny_lm, transport="loopback", dtype="float32", kv_checks=1.0) as llm:
        run(llm)
        monkeypatch.setattr(MemoryResizer, "move_kv", move)
        with pytest.raises(WorkerError, match="is not what was written there"):
            run(llm, [(1, [])])
    assert done


@pytest.mark.long
def test_what_cannot_be_is_refused_and_nothing_changes(tiny_lm: Path) -> None:
    with open_llm(tiny_lm, transport="loopback", max_num_seqs=8) as llm:
        with pytest.raises(ValueError, match="--memory-workers 0"):
            llm.pools.resizer.plan(0)
        with pytest.raises(ValueError, match="memory"):
            llm.pools.resizer.plan(900)
        with pytest.raises(ValueError, match="are to go"):
            llm.pools.resizer.begin(llm.pools.resizer.plan(2), [5])
        room = llm.pools.resizer.plan(1).capacity
        short = room._replace(num_blocks=[[2] for _ in room.num_blocks])
        llm.engine.add(PROMPTS[2], PARAMS)
        for _ in range(8):
            llm.engine.step()
        with pytest.raises(ValueError, match="1 running sequences would have no room"):
            check_kv_capacity(llm.engine.scheduler, llm.engine.worker_info, short)
        while llm.engine.has_work:
            llm.engine.step()
    ways: dict[str, dict[str, Any]] = {
        "weights were measured": {"memory_workers": 2, "memory_weights": "measured"},
        "--pipeline auto, because auto has measured": {"plan": "auto", "memory_workers": 1},
    }
    for words, options in ways.items():
        with (
            LLM(str(tiny_lm), transport="loopback", **options) as llm,
            pytest.raises(ResizeNeedsRestartError, match=words),
        ):
            llm.pools.resizer.plan(3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "partition", "ends"), [(1, "head", [0]), (2, "request", [0]), (3, "token", [0, 2])]
)
def test_who_is_told_to_end_gives_its_kv_to_another_first(
    workers: int, partition: str, ends: list[int], tiny_lm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that are signalled together, such as all of a host, leave in one change of the epoch."""
    monkeypatch.setattr(termination_notice, "GATHER_S", 2.0 if len(ends) > 1 else 0.25)  # a busy host brings word late
    options = {"partition": partition, "transport": "shm", "max_recoveries": 0}
    with open_llm(tiny_lm, memory_workers=workers, **options) as llm:
        wanted, _ = run(llm)
        rows, before = counts(llm, "compute", "rows"), llm.pools.pids
        told, members = [before[f"memory-{n}"] for n in ends], llm.pools.registry.memory
        view = llm.pools.ready.epoch
        ids, outputs = [llm.engine.add(p, PARAMS) for p in PROMPTS], dict[int, Any]()
        for _ in steps(llm, outputs):
            if len(outputs) == len(ids) and llm.pools.pids == before:
                for pid in told:
                    os.kill(pid, signal.SIGTERM)  # again and again, as some do
                while not llm.pools.resizer.in_progress and llm.pools.pids == before:
                    llm.engine.check_workers()
            wait_for_room(llm)
        found = [(outputs[i].outputs[0].token_ids, outputs[i].outputs[0].logprobs) for i in ids]
        assert found == wanted
        assert [name for name, pid in llm.pools.pids.items() if pid != before[name]] == [f"memory-{n}" for n in ends]
        assert llm.pools.ready.epoch == view + 2, "one Halt, one meeting"
        for n, pid in zip(ends, told, strict=True):
            members[n].handle.join(30.0)
            assert not Path(f"/proc/{pid}").exists()
        assert counts(llm, "memory", "moved_bytes")
        assert counts(llm, "compute", "rows") - rows < rows + llm.engine.config.batching.max_num_seqs * 2


@pytest.mark.long
def test_where_there_is_memory_for_one_they_go_one_by_one(
    tiny_lm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(termination_notice, "GATHER_S", 2.0)
    with open_llm(tiny_lm, memory_workers=3, partition="token", transport="shm", max_recoveries=0) as llm:
        wanted, _ = run(llm)
        elastic, there = llm.pools.resizer, sum(llm.pools.workers.kv_bytes[0])
        monkeypatch.setattr(elastic, "free", lambda: there // 2 + there // 6)  # of a worker, and of a layer of all
        elastic.plan(3, [0])
        with pytest.raises(ValueError, match="free"):
            elastic.plan(3, [0, 2])
        before, view, seen = llm.pools.pids, llm.pools.ready.epoch, dict[int, dict[str, int]]()
        ids, outputs = [llm.engine.add(p, PARAMS) for p in PROMPTS], dict[int, Any]()
        for _ in steps(llm, outputs):
            if len(outputs) == len(ids) and llm.pools.pids == before:
                for n in (0, 2):
                    os.kill(before[f"memory-{n}"], signal.SIGTERM)
                while not elastic.in_progress and llm.pools.pids == before:
                    llm.engine.check_workers()
            wait_for_room(llm)
            seen[llm.pools.ready.epoch] = llm.pools.pids
        found = [(outputs[i].outputs[0].token_ids, outputs[i].outputs[0].logprobs) for i in ids]
        assert found == wanted
        assert list(seen)[-2:] == [view + 2, view + 4], "two changes of the epoch"
        first, both = ({n for n, pid in pids.items() if pid != before[n]} for pids in list(seen.values())[-2:])
        assert len(first) == 1, "whichever was heard first"
        assert first < both == {"memory-0", "memory-2"}
        assert "keeps its KV until it ends" not in caplog.text


@pytest.mark.long
def test_one_that_cannot_be_replaced_stays_until_it_ends(tiny_lm: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_llm(tiny_lm, transport="shm", memory_weights="measured") as llm:
        told = llm.pools.pids["memory-1"]
        os.kill(told, signal.SIGTERM)
        while "keeps its KV until it ends" not in caplog.text:
            llm.engine.check_workers()
        assert llm.generate([PROMPTS[0]], PARAMS)[0].outputs[0].finish_reason == "length"
        assert llm.pools.pids["memory-1"] == told


def test_sigterm_stays_that_of_a_process_whose_memory_worker_is_a_thread(tiny_lm: Path) -> None:
    with open_llm(tiny_lm, transport="loopback"):
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        assert "lamina-notice" not in {thread.name for thread in threading.enumerate()}
