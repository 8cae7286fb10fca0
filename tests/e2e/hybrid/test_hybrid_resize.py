"""Memory workers of hybrid models come and go while requests run: states move with KV, and tokens are transformers'.

Covers: lamina/workers/memory/kv_transfer/state_parts.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.models.hybrids import HYBRIDS, build_hybrid, greedy, prompts, reused

from lamina import LLM, SamplingParams
from lamina.engine.scheduler_factory import check_kv_capacity
from lamina.executor.elastic import MemoryResizer, ResizeResult
from lamina.protocol.step_plan import SurvivingKv
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.workers.memory.kv_transfer import reshard, state_parts

pytestmark = [pytest.mark.usefixtures("no_child_left"), pytest.mark.no_retry, pytest.mark.timeout(400)]
COUNT = 40
*TEXTS, FIRST, SECOND = prompts(5, 60, 33, 1, 70, 50, 42)
SIZES: list[tuple[int, list[int]]] = [(3, []), (1, []), (2, []), (1, [0])]
OPTIONS: dict[str, Any] = {
    "enable_prefix_caching": True,
    "memory_workers": 2,
    "dtype": "float32",
    "max_model_len": 256,
    "prefill_chunk": 16,
}


def run(
    llm: LLM, sizes: Sequence[tuple[int, list[int]]] = (), texts: Sequence[list[int]] = TEXTS
) -> tuple[list[list[int]], list[ResizeResult]]:
    """Return the tokens of all prompts, and the changes. In their midst there come to be so many memory workers."""
    params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    ids, outputs, found = [llm.engine.add(p, params) for p in texts], dict[int, Any](), list[ResizeResult]()
    left, is_busy, resizer = list(sizes), False, llm.pools.resizer
    while llm.engine.has_work:
        outputs |= {o.request_id: o for o in llm.engine.step()}
        if (outcome := resizer.take_outcome()) is not None:
            found.append(outcome)
            is_busy = False
        if left and not is_busy and len(outputs) == len(ids):
            count, leaving = left.pop(0)
            wanted = resizer.plan(count)
            check_kv_capacity(llm.engine.scheduler, llm.engine.worker_info, wanted.capacity)
            resizer.begin(wanted, leaving)
            is_busy = True
            while resizer.is_preparing:
                llm.pools.registry.check()
    assert not left, "requests ended before the last change"
    llm.engine.release_idle_blocks()
    llm.engine.accounting.check_integrity()
    return [list(outputs[i].outputs[0].token_ids) for i in ids], found


def rows(llm: LLM) -> float:
    return sum(values["rows"] for worker, values in llm.stats().items() if worker.startswith("compute"))


def check_moves(name: str, **options: Any) -> None:
    model = build_hybrid(name)
    expected = [greedy(model, text, COUNT) for text in TEXTS]
    with LLM(model, **{**OPTIONS, **options}) as llm:
        answers = run(llm, (), [FIRST, SECOND])[0]
        before = rows(llm)
        found, outcomes = run(llm, SIZES)
        assert found == expected
        assert [(o.error, o.moved_bytes > 0) for o in outcomes] == [("", True)] * len(SIZES)
        again = rows(llm) - before - sum(len(text) + COUNT - 1 for text in TEXTS)
        assert again <= 3 * len(SIZES) * len(TEXTS), "states moved, and no prompt was computed again"
        hits = llm.engine.scheduler.features[PrefixCache].num_hit_tokens
        turns = [[*text, *answer, 7, 8, 9] for text, answer in zip((FIRST, SECOND), answers, strict=True)]
        assert run(llm, (), turns)[0] == [greedy(model, text, COUNT) for text in turns]
        more = llm.engine.scheduler.features[PrefixCache].num_hit_tokens - hits
        due = sum(reused(name, len(text), COUNT) for text in (FIRST, SECOND))
        assert more == due, "snapshots where turns ended have moved, too"


@pytest.mark.long(but=["request"])
@pytest.mark.parametrize("partition", ["head", "request"])
def test_states_move_to_the_workers_that_there_are(partition: str) -> None:
    check_moves("falcon_h1", partition=partition, transport="loopback")


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["head", "request"])
@pytest.mark.parametrize("name", sorted(HYBRIDS))
def test_states_move_in_all_families(name: str, partition: str) -> None:
    check_moves(name, partition=partition, transport="tcp", pipeline=2 if partition == "request" else 1)


@pytest.mark.long(but=["zeros"])
@pytest.mark.parametrize("wrong", ["zeros", "another sequence"])
def test_tokens_depend_on_the_states_that_move(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, first = state_parts.read_state, dict[int, Any]()

    def read(part: Any, state: Any, message: Any) -> None:
        right(part, state, message)
        if wrong == "zeros":
            message.zero_()
        elif (kept := first.setdefault(message.numel(), message.clone())) is not None:
            message.copy_(kept)  # of whichever sequence came first

    monkeypatch.setattr(reshard, "read_state", read)
    model = build_hybrid("bamba")
    with LLM(model, **OPTIONS, transport="loopback") as llm:
        assert run(llm, [(3, [])])[0] != [greedy(model, text, COUNT) for text in TEXTS]


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["head", "request"])
@pytest.mark.parametrize("victim", ["stays", "goes"])
def test_a_death_in_the_midst_of_a_move_costs_states_and_no_token(
    victim: str, partition: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, killed, model = MemoryResizer.move_kv, list[int](), build_hybrid("qwen3_next")

    def move(self: MemoryResizer, keep: Sequence[SurvivingKv]) -> bool:
        if self.moves and not killed:
            stays = {"stays": True, "goes": False}[victim]
            member = next(m for m, order in self.moves if bool(order.bind) == stays)
            killed.append(member.handle.pid)
            os.kill(member.handle.pid, signal.SIGKILL)
        return right(self, keep)

    monkeypatch.setattr(MemoryResizer, "move_kv", move)
    model.save_pretrained(tmp_path)
    with LLM(str(tmp_path), **OPTIONS, transport="shm", partition=partition) as llm:
        found, outcomes = run(llm, [(1, [])])
        assert found == [greedy(model, text, COUNT) for text in TEXTS]
        assert killed
        assert [o.error for o in outcomes] == [""]
