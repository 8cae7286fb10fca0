"""The whole product on small models: tokens of transformers, over every transport, whatever the batch does.

Covers: lamina/api/llm.py.
"""

from __future__ import annotations

import os
import re
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamina import LLM, SamplingParams, netstack
from lamina.engine.tuning.tuner import Tuner
from lamina.netstack import SCHEMES
from lamina.request import RequestOutput

pytestmark = pytest.mark.usefixtures("no_child_left")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
Reference = Callable[[list[int], int], list[int]]


def tokens(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


@pytest.mark.long(but=["shm", "tcp"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tokens_are_those_of_transformers(
    scheme: str, llama_path: Path, prompts: list[list[int]], reference: Reference
) -> None:
    with LLM(str(llama_path), transport=scheme, memory_workers=2, prefill_chunk=32) as llm:
        assert tokens(llm, prompts) == [reference(p, 24) for p in prompts]
        pids, stats = llm.pools.pids, llm.stats()
        in_process = netstack.open(scheme, key=b"k" * 32).in_process
        assert len({*pids.values(), os.getpid()}) == (1 if in_process else 4), "each worker is its own process"
        summary = llm.engine.worker_info.summary
        rows = stats["compute-0"]["rows"]
        layers = len(summary["q_bytes"])
        for worker in ("memory-0", "memory-1"):
            wire = stats[worker]["bytes_received"]
            least = rows * (sum(summary["q_bytes"]) + sum(summary["kv_bytes"])) / 2
            assert least <= wire <= 1.2 * least + 4096 * stats[worker]["steps"], "Q and KV crossed the wire"
            assert stats[worker]["attend_s"] > 0
        assert layers == 3


@pytest.mark.no_retry
@pytest.mark.long
def test_four_memory_workers_give_the_same_bits_as_one(llama_path: Path, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=3, ignore_eos=True)
    found = []
    for workers, overlap in ((1, True), (4, True), (2, False)):
        with LLM(str(llama_path), transport="loopback", memory_workers=workers, overlap=overlap) as llm:
            found.append([o.outputs[0].logprobs for o in llm.generate(prompts, params)])
    assert found[0] == found[1] == found[2]


@pytest.mark.long
@pytest.mark.timeout(400)  # six replicas are loaded and cut
def test_batches_that_take_turns_give_the_same_bits(
    llama_path: Path, prompts: list[list[int]], reference: Reference
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True)
    found, steps = [], []
    for pipeline, scheme in ((1, "loopback"), (3, "loopback"), (2, "shm"), (3, "shm")):
        options = {"pipeline": pipeline, "deterministic": True, "prefill_chunk": 32, "max_num_seqs": 4}
        with LLM(str(llama_path), transport=scheme, **options) as llm:
            outputs = [o.outputs[0] for o in llm.generate(prompts, params)]
            found.append([o.logprobs for o in outputs])
            stats = llm.stats()
            assert all(stats[f"compute-{r}"]["steps"] for r in range(max(1, pipeline - 1)))
            assert f"compute-{max(1, pipeline - 1)}" not in stats
            steps.append(stats["memory-0"]["steps"])
    assert [o.token_ids for o in outputs] == [reference(p, 12) for p in prompts]
    assert found[0] == found[1] == found[2] == found[3]
    assert steps[0] < steps[2] < steps[1], "each batch takes steps of its own"


@pytest.mark.no_retry
@pytest.mark.long
def test_batches_are_dealt_anew_and_the_bits_stay(llama_path: Path, prompts: list[list[int]]) -> None:
    params, found = SamplingParams(temperature=0.0, max_tokens=60, logprobs=2, ignore_eos=True), []
    for options in ({"pipeline": 1}, {"plan": "auto:3"}):
        with LLM(str(llama_path), transport="loopback", deterministic=True, prefill_chunk=32, **options) as llm:
            tuner, begun, outputs = llm.engine.feature(Tuner), llm.stats(), dict[int, RequestOutput]()
            planned = tuner.reason if tuner else ""
            for number, output in enumerate(llm.stream(prompts, params)):
                outputs[output.request_id] = output
                if tuner:
                    llm.engine.scheduler.set_num_batches(1 + number // 7 % 3)
            found.append([outputs[i].outputs[0].logprobs for i in sorted(outputs)])
            ended = llm.stats()
    assert found[0] == found[1]
    assert re.match(r"1 batch until requests come; measured at the start: slices [0-9.]+ ms", planned)
    assert ended["compute-1"]["steps"] > begun["compute-1"]["steps"]


@pytest.mark.long
def test_replicas_whose_reports_pile_up_keep_the_order_of_tokens(
    llama_path: Path, prompts: list[list[int]], reference: Reference
) -> None:
    """One batch, three layers: its steps end on either replica in turn, and each has a link of its own."""
    with LLM(str(llama_path), transport="loopback", plan="auto:3") as llm:
        pools, piled = llm.pools, 0
        replicas, wait = [m for m in pools.registry if m.handle.role == "compute"], pools.wait

        def wait_late() -> Any:
            nonlocal piled
            deadline = time.monotonic() + 0.5  # the first and the last step are alone in flight
            while not all(pools.registry.has_message(m) for m in replicas) and time.monotonic() < deadline:
                select.select([], [], [], 0.0005)  # workers are threads, which want this process's turn
            piled += all(pools.registry.has_message(m) for m in replicas)
            return wait()

        pools.wait = wait_late  # type: ignore[method-assign]
        assert tokens(llm, prompts[:1]) == [reference(prompts[0], 24)]
    assert piled > 3, "steps never waited for the driver in pairs"


@pytest.mark.no_retry
@pytest.mark.long
@pytest.mark.parametrize(("model", "dtype"), [("llama_path", "float32"), ("tiny_lm", "bfloat16")])
def test_deterministic_results_do_not_depend_on_batch_mates(
    model: str, dtype: str, prompts: list[list[int]], request: pytest.FixtureRequest
) -> None:
    """In bf16 by matrix instructions, too, where a CPU has them: they take rows of prompts, and not those of tokens."""
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=12, logprobs=3, ignore_eos=True)
    path, options = str(request.getfixturevalue(model)), {"prefill_chunk": 32, "deterministic": True, "dtype": dtype}
    with LLM(path, transport="loopback", **options) as llm:
        together = [o.outputs[0].logprobs for o in llm.generate(prompts, params)]
        alone = [llm.generate([p], params)[0].outputs[0].logprobs for p in prompts]
    with LLM(path, transport="loopback", prefill_workers=1, **options) as llm:
        apart = [o.outputs[0].logprobs for o in llm.generate(prompts, params)]
    assert together == alone == apart


@pytest.mark.long
def test_preemption_loses_nothing(llama_path: Path, prompts: list[list[int]], reference: Reference) -> None:
    # one sequence of 130 tokens fits with another one, not five
    with LLM(str(llama_path), transport="loopback", max_model_len=160, kv_memory="96KiB", block_size=16) as llm:
        assert tokens(llm, prompts) == [reference(p, 24) for p in prompts]
        assert llm.engine.scheduler.num_preemptions > 0


def test_kv_is_freed_and_requests_come_and_go(llama_path: Path, prompts: list[list[int]], reference: Reference) -> None:
    with LLM(str(llama_path), transport="loopback") as llm:
        full = llm.engine.free_blocks
        stream = llm.stream(prompts, GREEDY)
        for _ in range(7):
            next(stream)
        stream.close()
        assert llm.engine.free_blocks == full, "cancelled requests give their blocks back"
        assert tokens(llm, prompts[:2]) == [reference(p, 24) for p in prompts[:2]]
        assert llm.engine.free_blocks == full


@pytest.mark.no_retry
@pytest.mark.long(but=["options1"])
@pytest.mark.parametrize(
    "options",
    [
        {"memory_workers": 3},
        {"memory_workers": 2, "memory_weights": "0.7,0.3"},
        {"memory_workers": 5, "partition": "request", "pipeline": 3},
        {"memory_workers": 3, "partition": "token", "pipeline": 2},
    ],
)
def test_partitions_give_the_same_bits(
    options: dict[str, Any],
    llama_path: Path,
    prompts: list[list[int]],
    undivided: Callable[[list[list[int]]], list[Any]],
) -> None:
    assert divided(llama_path, prompts, options) == undivided(prompts)


@pytest.fixture(scope="module")
def undivided(llama_path: Path) -> Callable[[list[list[int]]], list[Any]]:
    """Returns the tokens of one memory worker, run once."""
    known = list[list[Any]]()

    def give(prompts: list[list[int]]) -> list[Any]:
        if not known:
            known.append(divided(llama_path, prompts, {"memory_workers": 1}))
        return known[0]

    return give


def divided(path: Path, prompts: list[list[int]], options: dict[str, Any]) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3)
    with LLM(str(path), transport="loopback", deterministic=True, **options) as llm:
        outputs = [o.outputs[0] for o in llm.generate([*prompts, prompts[1] * 9], params)]
        read = [v["stored_bytes"] for k, v in llm.stats().items() if k.startswith("memory")]
        assert len(read) == options["memory_workers"]
        assert min(read) > 0
    return [(o.token_ids, o.logprobs) for o in outputs]


@pytest.mark.long
def test_weights_are_measured_at_the_start(
    llama_path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One worker says that it reads at 0.3 of the other's rate: it gets that part of the stored tokens."""
    rates = iter((30e9, 100e9))
    monkeypatch.setattr("lamina.workers.memory.memory_worker.measure_read_bandwidth", lambda device: next(rates))
    options: dict[str, Any] = {"memory_weights": "measured", "partition": "token", "memory_workers": 2}
    with caplog.at_level("INFO", "lamina"), LLM(str(llama_path), transport="loopback", **options) as llm:
        llm.generate([[first, *prompts[3] * 5] for first in (3, 4, 5, 6)], GREEDY)  # with nothing in common
        read = sorted(v["stored_bytes"] for k, v in llm.stats().items() if k.startswith("memory"))
    assert 0.2 < read[0] / read[1] < 0.4
    assert "0.3 (30.0 GB/s)" in caplog.text


def test_stream_grows_and_ends(llama_path: Path, prompts: list[list[int]]) -> None:
    with LLM(str(llama_path), transport="loopback") as llm:
        lengths: dict[int, int] = {}
        last = {}
        for output in llm.stream(prompts, GREEDY):
            assert len(output.outputs[0].token_ids) == lengths.get(output.request_id, 0) + 1
            lengths[output.request_id] = len(output.outputs[0].token_ids)
            last[output.request_id] = output
        assert all(o.finished and o.outputs[0].finish_reason == "length" for o in last.values())


def test_iterators_do_not_take_each_others_outputs(
    llama_path: Path, prompts: list[list[int]], reference: Reference
) -> None:
    with LLM(llama_path, transport="loopback") as llm:
        first = llm.stream(prompts[1], GREEDY)
        next(first)
        assert tokens(llm, [prompts[0]]) == [reference(prompts[0], 24)]
        second = llm.stream(prompts[2], GREEDY)
        ends = [list(first)[-1], list(second)[-1]]
        assert [e.outputs[0].token_ids for e in ends] == [reference(prompts[i], 24) for i in (1, 2)]


def test_iterators_may_be_made_first_and_read_later_or_never(
    shared_llm: LLM, prompts: list[list[int]], reference: Reference
) -> None:
    full = shared_llm.engine.free_blocks
    first, second, never = (shared_llm.stream(p, GREEDY) for p in prompts[:3])
    ends = [list(first)[-1], list(second)[-1]]
    assert [e.outputs[0].token_ids for e in ends] == [reference(p, 24) for p in prompts[:2]]
    del never
    assert not shared_llm.engine.has_work
    assert shared_llm.engine.free_blocks == full


def test_numbers_may_come_from_numpy(shared_llm: LLM) -> None:
    params = SamplingParams(
        temperature=np.float32(0.7), seed=np.int64(3), top_k=np.int32(5), max_tokens=np.int64(4), stop=None,
        stop_token_ids=[np.int64(319)], min_tokens=np.int64(2), ignore_eos=True,
    )  # fmt: skip
    assert len(shared_llm.generate([[3, 4]], params)[0].outputs[0].token_ids) <= 4


def test_eos_stop_tokens_and_min_tokens(llama_path: Path, reference: Reference) -> None:
    prompt = [5, 9, 200]
    free = reference(prompt, 24)
    stop = free[6]
    first = free.index(stop)
    with LLM(str(llama_path), transport="loopback") as llm:
        got = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=[stop]))[0].outputs[
            0
        ]
        assert got.token_ids == free[: first + 1]
        assert (got.finish_reason, got.stop_reason) == ("stop", stop)
        late = SamplingParams(
            temperature=0.0, max_tokens=24, stop_token_ids=[stop], min_tokens=first + 2, ignore_eos=True
        )
        got = llm.generate([prompt], late)[0].outputs[0]
        assert stop not in got.token_ids[: first + 2]
        assert len(got.token_ids) > first + 2


@pytest.mark.no_retry
def test_n_completions_with_seeds(llama_path: Path) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=42, max_tokens=8, ignore_eos=True)
    with LLM(str(llama_path), transport="loopback") as llm:
        (first,) = llm.generate([[4, 5, 6]], params)
        (again,) = llm.generate([[4, 5, 6]], params)
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in again.outputs]
    assert len({tuple(o.token_ids) for o in first.outputs}) == 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.generate([[]]), "empty"),
        (lambda llm: llm.generate([[3] * 512]), "--max-model-len"),
        (lambda llm: llm.generate([[320]]), "vocabulary"),
        (lambda llm: llm.generate([[-1]]), "vocabulary"),
        (lambda llm: llm.generate("text"), "tokenizer"),
        (lambda llm: llm.generate([[3], [4]], [GREEDY]), "2 prompts"),
    ],
)
def test_bad_requests_are_refused_and_the_engine_lives(call: Any, words: str, shared_llm: LLM) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        call(shared_llm)
    assert "\n" not in str(caught.value)
    assert len(tokens(shared_llm, [[3, 4]])[0]) == 24


@pytest.fixture(scope="module")
def shared_llm(llama_path: Path) -> Any:
    with LLM(str(llama_path), transport="loopback") as llm:
        yield llm


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory_workers": 2, "memory_weights": "1,1000"}, "memory worker 0 of 2 would get nothing of 4 KV heads"),
        ({"memory_weights": "0,0"}, "memory_weights must be positive"),
        ({"memory_weights": "measure"}, "memory_weights must be positive numbers .* or measured"),
        ({"pipeline": "fast"}, "pipeline must be a number of batches, not fast"),
        ({"pipeline": 0}, "pipeline must be at least 1, not 0"),
        ({"memory_weights": "1,1,1"}, "memory_weights names 3 weights for memory_workers=2"),
        ({"partition": "tea"}, "partition must be one of head, token, request"),
        ({"memory_workers": 0}, "memory_workers"),
        ({"transport": "carrier-pigeon"}, "unknown transport"),
        ({"max_model_len": 4096}, "max_model_len=4096"),
        ({"kv_memory": "1KiB"}, "kv_cache_memory_bytes"),
        ({"kv_memory": "lots"}, "kv_cache_memory_bytes"),
        ({"dtype": "int3"}, "dtype"),
        ({"memory_workers": "2"}, "memory_workers"),
        ({"block_size": 256}, "block_size"),
        ({"memory_addresses": "127.0.0.1:0"}, "memory_addresses"),
        ({"transport": "tcp", "memory_addresses": "h:7,h:7"}, "memory_addresses names h:7 twice"),
        ({"memroy_workers": 2}, "memroy_workers"),
        ({"attention": "magic"}, "attention"),
    ],
)
def test_bad_options_are_refused_in_one_line(options: dict[str, Any], words: str, llama_path: Path) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        LLM(str(llama_path), **{"transport": "loopback", **options})
    assert "\n" not in str(caught.value)


@pytest.mark.long
def test_a_busy_port_is_named(llama_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"memory_addresses.*{address}"):
            LLM(str(llama_path), transport="tcp", memory_workers=1, memory_addresses=address)


def test_a_closed_llm_says_so(llama_path: Path) -> None:
    llm = LLM(str(llama_path), transport="loopback")
    llm.close()
    llm.close()
    for call in (lambda: llm.generate([[3]]), llm.stats, lambda: llm.stream([[3]])):
        with pytest.raises(ValueError, match="closed"):
            call()


@pytest.mark.parametrize("model", [None, "", 7])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="model"):
        LLM(model)
