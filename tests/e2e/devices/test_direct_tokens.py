"""Workers on GPUs that CPUs stand in for, processes or threads of one, whose Q, K, V and O go from device to device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cuda_stand_in import STAND_IN, scheme_of
from stand_in_gpu import stand_in_gpus

from lamina import LLM, SamplingParams
from lamina.executor.launchers import local
from lamina.netstack import loopback

pytestmark = [pytest.mark.usefixtures("no_child_left"), pytest.mark.timeout(300)]
SCORED = SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=12, logprobs=2, ignore_eos=True)


@contextmanager
def on_gpus() -> Iterator[str]:
    """All workers that are processes; the transport that fits."""
    with scheme_of(STAND_IN) as scheme, pytest.MonkeyPatch.context() as patch:
        for role in ("compute", "memory"):
            patch.setitem(local.ROLES, role, ("on_gpus", f"serve_{role}"))
        yield scheme


@contextmanager
def by_nccl() -> Iterator[str]:
    """The same, whose kernels put by NCCL's device API."""
    with on_gpus():
        yield "gin"


@contextmanager
def beside_nics() -> Iterator[str]:
    """The same, where each GPU has a ConnectX of its own that its kernels drive; of tests/netstack/nic/test_mlx5.py."""
    with on_gpus():
        yield "mlx5"


@contextmanager
def on_one_gpu() -> Iterator[str]:
    """All workers that are threads of this process."""
    with stand_in_gpus(graphs=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(loopback, "open_fabric", partial(loopback.open_fabric, gpu=0))
        yield "loopback"


Where = Callable[[], AbstractContextManager[str]]


@pytest.fixture(params=[on_gpus, by_nccl, on_one_gpu, *([beside_nics] if "FAKE_MLX5_SERVES" in os.environ else [])])
def where(request: pytest.FixtureRequest) -> Where:
    found: Where = request.param
    return found


def outputs(path: Path, prompts: list[list[int]], **options: Any) -> tuple[list[Any], dict[str, dict[str, float]]]:
    options = {"prefill_chunk": 32, "gemm": "torch", "deterministic": True, **options}
    with LLM(str(path), **options) as llm:
        found = [o.outputs[0] for o in llm.generate(prompts, SCORED)]
        return [(o.token_ids, o.logprobs) for o in found], llm.stats()


Hosts = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def of_hosts(llama_path: Path) -> Hosts:
    """Runs hosts with these options once, and returns their tokens: each is compared with both kinds of GPUs."""
    known: dict[str, list[Any]] = {}

    def give(prompts: list[list[int]], **options: Any) -> list[Any]:
        key = repr((prompts, sorted(options.items())))
        if key not in known:
            known[key], _ = outputs(llama_path, prompts, transport="loopback", **options)
        return known[key]

    return give


@pytest.mark.long(but=["on_one_gpu-partition=token memory_workers=2-"])
@pytest.mark.parametrize(
    ("options", "direct"),
    [
        ({}, True),
        ({"memory_workers": 2}, True),
        ({"pipeline": 2}, True),
        ({"tensor_parallel_size": 2, "memory_workers": 2}, True),
        ({"pipeline": 3}, False),
        ({"partition": "token", "memory_workers": 2}, False),
        ({"prefill_workers": 1}, False),
    ],
    ids=lambda o: " ".join(f"{k}={v}" for k, v in o.items()) or "plain" if isinstance(o, dict) else "",
)
def test_the_bits_are_those_of_hosts(
    options: dict[str, Any], direct: bool, where: Where, llama_path: Path, prompts: list[list[int]], of_hosts: Hosts
) -> None:
    if where is by_nccl and "prefill_workers" in options:
        pytest.skip("gin makes all channels at the start: no prefill workers")
    wanted = of_hosts(prompts, **options)
    with where() as scheme:
        found, stats = outputs(llama_path, prompts, transport=scheme, **options)
    assert found == wanted
    waits = [x["wait_s"] for name, x in stats.items() if name.startswith("compute")]
    assert all((wait == 0) is direct for wait in waits), "a host waits for messages where devices cannot"


@pytest.mark.long(but=["on_one_gpu-memory_workers=2"])
@pytest.mark.parametrize(
    "options",
    [{"memory_workers": 2}, {"pipeline": 2}, {"tensor_parallel_size": 2, "memory_workers": 2}],
    ids=lambda o: " ".join(f"{k}={v}" for k, v in o.items()),
)
def test_tokens_are_those_of_hosts_where_slices_are_graphs(
    options: dict[str, Any], where: Where, llama_path: Path, prompts: list[list[int]], of_hosts: Hosts
) -> None:
    """The rows are as many as there are, in graphs of more, with messages as parts of them or between them. Ranks'
    graphs end where they meet, and there are two batches.
    """
    options = {**options, "deterministic": False}
    wanted = of_hosts(prompts, **options)
    with where() as scheme:
        found, stats = outputs(llama_path, prompts, transport=scheme, **options)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    assert stats["compute-0"]["wait_s"] == 0


@pytest.mark.long(but=["on_one_gpu"])
def test_tokens_are_those_of_transformers(
    where: Where, llama_path: Path, prompts: list[list[int]], reference: Callable[[list[int], int], list[int]]
) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with where() as scheme, LLM(str(llama_path), transport=scheme, memory_workers=2, gemm="torch") as llm:
        found = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy)]
        assert llm.stats()["compute-0"]["wait_s"] == 0, "a host waits for messages"
    assert found == [reference(p, 16) for p in prompts]


@pytest.mark.long
def test_blocks_are_scored_and_dropped_where_devices_send(llama_path: Path, of_hosts: Hosts) -> None:
    """The same blocks go, as the bits tell."""
    prompts = [[(7 * i + k) % 90 + 5 for i in range(n)] for k, n in ((1, 300), (5, 200))]
    evict = {"kv_sparsity": "evict", "kv_budget": 128, "kv_recent": 16, "memory_workers": 2}
    wanted = of_hosts(prompts, **evict)
    assert wanted != of_hosts(prompts, memory_workers=2), "nothing is left out"
    with on_one_gpu() as scheme:
        found, stats = outputs(llama_path, prompts, transport=scheme, **evict)
    assert found == wanted
    assert stats["compute-0"]["wait_s"] == 0, "a host waits for messages"
