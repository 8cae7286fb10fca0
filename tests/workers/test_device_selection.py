"""The GPU that each worker gets, and the message about one that is not there.

Covers: lamina/executor/transport_choice.py, lamina/workers/memory/main.py.
"""

from __future__ import annotations

import logging
import socket
import threading
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from memory_peer import bind, shape

from lamina import LLM, netstack
from lamina.api import frontend
from lamina.cli.common.preflight import workers_that_would_start
from lamina.cli.launch import main
from lamina.config.conflicts import conflict_text
from lamina.config.engine_config import DeviceOptions, EngineConfig
from lamina.config.flat_options import make_config, replace_options
from lamina.executor.transport_choice import choose_transport
from lamina.ops import attention
from lamina.protocol.control import ControlLink, Failed, MemoryReady, StartMemory
from lamina.server.engine_client import engine_process
from lamina.server.engine_client.messages import StartEngine
from lamina.workers import device_selection as devices
from lamina.workers.device_selection import (
    CPU,
    FREE_MEMORY_SHARE,
    check,
    gpu_index,
    limit_sms,
    linear_backend,
    memory_share,
    pick_device,
)
from lamina.workers.memory import kv_store as memory_store
from lamina.workers.memory.kv_store import num_kv_bytes
from lamina.workers.memory.main import serve_memory

TINY = "examples/tiny_lm/model"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> int:
    """A host with two of them, as torch would say."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return 2


def numbers(config: EngineConfig) -> list[list[str]]:
    counts, devices = config.topology.num_workers, config.devices
    roles = {role: counts[role] for role in ("compute", "prefill", "memory")}
    asked = {"compute": devices.compute_device, "prefill": devices.compute_device, "memory": devices.memory_device}
    return [
        [str(pick_device("--device", asked[role], config.gpu_index(role, i))) for i in range(count)]
        for role, count in roles.items()
    ]


def test_workers_take_gpus_in_turn(gpus: int) -> None:
    both: dict[str, Any] = {"compute_device": "cuda", "memory_device": "cuda"}
    assert numbers(make_config(both)) == [["cuda:0"], [], ["cuda:1", "cuda:0"]]
    assert numbers(make_config({"memory_device": "auto"})) == [["cpu"], [], ["cuda:0", "cuda:1"]]
    assert numbers(make_config({"compute_device": "auto", "pipeline": 3, "prefill_workers": 1})) == [
        ["cuda:0", "cuda:1"], ["cuda:0"], ["cpu", "cpu"]
    ]  # fmt: skip
    assert numbers(make_config({"compute_device": "cuda:1"})) == [["cuda:1"], [], ["cpu", "cpu"]]


def test_a_transport_is_told_which_gpu_it_is(gpus: int) -> None:
    assert [gpu_index("cuda", 3), gpu_index("auto", 2), gpu_index("cuda:1", 0), gpu_index("cpu", 1)] == [1, 0, 1, None]
    assert gpu_index("cuda:2", 0) is None, "who picks it says that it is not there"


@pytest.mark.long
def test_on_one_gpu_the_nearest_is_one_process_and_why_is_said(
    gpus: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one: dict[str, Any] = {"compute_device": "cuda:1", "memory_device": "cuda:1", "transport": "auto"}
    with caplog.at_level(logging.INFO):
        config, why = choose_transport(make_config(one))
    assert netstack.open(config.launch.transport, key=bytes(32)).in_process
    assert why == "all workers compute on GPU 1, which processes would have by turns"
    assert f"--transport: {config.launch.transport}, for {why}" in caplog.text
    assert choose_transport(config) == (config, "")
    assert choose_transport(make_config({**one, "transport": ""})) == (config, why), "as if nobody had chosen"
    elsewhere: list[dict[str, Any]] = [
        {"transport": "cuda"}, {"transport": "shm"}, {"memory_device": "cuda:0"}, {"memory_device": "cpu"},
        {"ray_address": "auto"}, {"cores": "0/0,0"}, {"memory_addresses": "127.0.0.1:0,127.0.0.1:0"},
    ]  # fmt: skip
    for other in (make_config({**one, **options}) for options in elsewhere):
        assert choose_transport(other) == (other, "")
    in_turn = make_config({"compute_device": "cuda", "memory_device": "auto", "memory_workers": 1, "transport": "auto"})
    assert choose_transport(in_turn) == (in_turn, ""), "each has a GPU of its own"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_transport(in_turn)[1]
    assert workers_that_would_start(TINY, in_turn).startswith(
        f"would start 1 compute worker and 1 memory worker over {config.launch.transport} for {TINY}: all workers "
        "compute on"
    )


@pytest.mark.parametrize("module", [frontend, engine_process])
def test_who_starts_workers_takes_the_nearest(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[EngineConfig]()

    def pools(model: str, config: EngineConfig, on_progress: Any, **_: Any) -> None:
        taken.append(config)
        raise ValueError("enough")

    monkeypatch.setattr(module, "WorkerExecutor", pools)
    monkeypatch.setattr(
        module, "choose_transport", lambda config: (replace_options(config, {"transport": "loopback"}), "of a test")
    )
    start = StartEngine(model=TINY, tokenizer="", config=make_config({}))
    with pytest.raises(ValueError, match="enough"):
        LLM(TINY) if module is frontend else engine_process.serve_link(ControlLink(socket.socket(), StartEngine), start)
    assert [config.launch.transport for config in taken] == ["loopback"]


class Green:
    """In place of torch's green contexts."""

    made: ClassVar[list[tuple[int, int]]] = []

    @staticmethod
    def create(*, num_sms: int, device_id: int) -> Green:
        if num_sms == 13:
            raise RuntimeError("CUDA driver error: invalid argument\nwith a trace")
        Green.made.append((num_sms, device_id))
        return Green()

    def Stream(self) -> str:  # noqa: N802
        return "of the part"


def test_a_memory_worker_takes_a_part_of_the_multiprocessors(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    streams, gpu = list[str](), torch.device("cuda:1")
    with monkeypatch.context() as patch:
        patch.setattr(devices, "green_contexts", None)
        with pytest.raises(ValueError, match="--memory-sms 8: torch .* makes no streams of green contexts: leave it"):
            limit_sms(gpu, 8)
    monkeypatch.setattr(devices, "green_contexts", SimpleNamespace(SUPPORTED=True, GreenContext=Green))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    assert isinstance(limit_sms(gpu, 8), Green)
    assert (Green.made, streams) == ([(8, 1)], ["of the part"])
    with pytest.raises(ValueError, match="--memory-sms 133: cuda:1 has 132 multiprocessors"):
        limit_sms(gpu, 133)
    with pytest.raises(ValueError, match="--memory-sms 13 on cuda:1: CUDA driver error: invalid argument$"):
        limit_sms(gpu, 13)


def test_the_thread_that_serves_is_the_one_that_is_limited(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[tuple[str, int, str]]()
    monkeypatch.setattr(devices, "limit_sms", lambda d, n: taken.append((str(d), n, threading.current_thread().name)))
    for sms in (8, 0):
        here, there = socket.socketpair()
        part = DeviceOptions(memory_device="cuda", memory_sms=sms)
        start = StartMemory(scheme="tcp", address="", key=bytes(32), threads=1, devices=part, device_number=1)
        with here, there:
            ControlLink(here, MemoryReady).send(start)
            serving = threading.Thread(target=serve_memory, args=(there,), name="serves", daemon=True)
            serving.start()
            assert isinstance(ControlLink(here, MemoryReady).recv(), MemoryReady)
        serving.join(60)
    assert taken == [("cuda:1", 8, "serves")]


def test_a_memory_worker_opens_the_rdma_device_that_was_named() -> None:
    here, there = socket.socketpair()
    named = DeviceOptions(rdma_device="mlx5_7")
    with here, there:
        ControlLink(here, Failed).send(StartMemory(scheme="tcp", address="", key=bytes(32), threads=1, devices=named))
        serving = threading.Thread(target=serve_memory, args=(there,), daemon=True)
        serving.start()
        answer = ControlLink(here, Failed).recv(60)
        assert "--rdma-device mlx5_7 is for --transport verbs, mlx5, auto" in answer.text
        assert answer.user_error
    serving.join(60)


def test_without_a_gpu_auto_is_the_cpu() -> None:
    assert numbers(make_config({"compute_device": "auto", "memory_device": "auto"}))[::2] == [["cpu"], ["cpu", "cpu"]]
    assert check(make_config({})) == (CPU, CPU)


def test_a_gpu_that_is_not_there(gpus: int) -> None:
    with pytest.raises(ValueError, match="--memory-device cuda:2: torch finds 2 GPUs here, the last one is cuda:1"):
        pick_device("--memory-device", "cuda:2")
    config = make_config({"compute_device": "cuda", "tensor_parallel_size": 4, "memory_workers": 4})
    with pytest.raises(ValueError, match="--tensor-parallel-size 4 with --compute-device cuda: each rank needs a GPU"):
        check(config)
    assert str(pick_device("--compute-device", "cuda", 0, 4)) == "cuda:0", "another host's worker, whose GPU is its own"


def test_backends_of_another_device_are_refused(gpus: int) -> None:
    for name in ("native", "numba"):
        with pytest.raises(ValueError) as refused:
            check(make_config({"memory_device": "auto", "attention": name}))
        assert str(refused.value) == conflict_text("--attention-backend native or numba", "--memory-device cuda")
    with pytest.raises(
        ValueError, match="^--gemm native does not go with --compute-device cuda, because it computes on CPUs"
    ):
        linear_backend("native", torch.device("cuda:0"))
    assert linear_backend("auto", torch.device("cuda:0")) == "torch"
    assert linear_backend("auto", CPU) == "auto"
    for name in attention.KINDS:
        other = attention.get_equivalent(name, CPU, torch.bfloat16, "reference")
        assert attention.name_of(other) == (name if attention.KINDS[name] == "cpu" else "reference")


def test_workers_of_a_device_share_what_it_has_free(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_share("cpu", 5) == pytest.approx(FREE_MEMORY_SHARE / 5)
    assert memory_share("cuda", 2) == FREE_MEMORY_SHARE
    assert memory_share("cuda", 3) == pytest.approx(FREE_MEMORY_SHARE / 2)
    assert memory_share("cuda:1", 3) == pytest.approx(FREE_MEMORY_SHARE / 3)
    monkeypatch.setattr(memory_store, "available_bytes", lambda device: 1000)
    wanted = bind([shape()], kv_bytes=600, max_kv_bytes=5000)
    assert num_kv_bytes(wanted, torch.device("cuda:0"), 0.5, 0) == 500
    assert num_kv_bytes(wanted, torch.device("cuda:0"), 0.5, 200) == 600, "others give so much back"
    assert num_kv_bytes(bind([shape()], kv_bytes=600, max_kv_bytes=50), torch.device("cuda:0"), 0.5, 0) == 50
    assert num_kv_bytes(wanted, CPU, 0.5, 0) == 600, "the host is shared with everything else"
    with pytest.raises(
        ValueError, match="take 2.0 kB, 1.0 kB are free on cuda:0: lower --kv-cache-memory-bytes below 1000B"
    ):
        num_kv_bytes(bind([shape()], kv_bytes=2000), torch.device("cuda:0"), 0.5, 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--compute-device", "gpu"], "--compute-device must be cpu, cuda, cuda:N or auto, not 'gpu'"),
        (["--memory-device", "cuda:x"], "--memory-device must be cpu, cuda, cuda:N or auto, not 'cuda:x'"),
        (["--compute-device", "cuda:0", "--tensor-parallel-size", "2"], "each rank takes a GPU of its own"),
        (["--compute-device", "cuda"], "--compute-device cuda: torch"),
        (["--memory-device", "cuda:0"], "--memory-device cuda:0: torch"),
        (["--memory-sms", "8"], "--memory-sms needs --memory-device cuda or --memory-device auto"),
        (["--memory-sms", "-1"], "--memory-sms must be at least 0, not -1"),
    ],
)
def test_one_line_before_anything_starts(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available() and "torch" in words:
        pytest.skip("there is a GPU")
    assert main(["generate", TINY, "--prompt", "x", "--dry-run", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
