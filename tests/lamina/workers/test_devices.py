"""Which worker gets which GPU, and what is said of one that is not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memory_peer import bind, shape

from lamina.cluster.launch import main
from lamina.config import EngineConfig
from lamina.workers import memory_store
from lamina.workers.devices import CPU, FREE_PART, backend_on, check, gpu_of, linear, pick, share
from lamina.workers.memory_store import _kv_bytes

TINY = "examples/tiny_lm/model"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> int:
    """A host with two of them, as torch would say."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return 2


def numbers(config: EngineConfig) -> list[list[str]]:
    roles = {"compute": config.num_compute, "prefill": config.prefill_workers, "memory": config.memory_workers}
    asked = {"compute": config.compute_device, "prefill": config.compute_device, "memory": config.memory_device}
    return [
        [str(pick("--device", asked[role], config.gpu_number(role, i))) for i in range(count)]
        for role, count in roles.items()
    ]


def test_workers_take_gpus_in_turn(gpus: int) -> None:
    both: dict[str, Any] = {"compute_device": "cuda", "memory_device": "cuda"}
    assert numbers(EngineConfig(**both)) == [["cuda:0"], [], ["cuda:1", "cuda:0"]]
    assert numbers(EngineConfig(memory_device="auto")) == [["cpu"], [], ["cuda:0", "cuda:1"]]
    assert numbers(EngineConfig(compute_device="auto", pipeline=3, prefill_workers=1)) == [
        ["cuda:0", "cuda:1"], ["cuda:0"], ["cpu", "cpu"]
    ]  # fmt: skip
    assert numbers(EngineConfig(compute_device="cuda:1")) == [["cuda:1"], [], ["cpu", "cpu"]]


def test_a_transport_is_told_which_gpu_it_is(gpus: int) -> None:
    assert [gpu_of("cuda", 3), gpu_of("auto", 2), gpu_of("cuda:1", 0), gpu_of("cpu", 1)] == [1, 0, 1, None]
    assert gpu_of("cuda:2", 0) is None, "who picks it says that it is not there"


def test_without_a_gpu_auto_is_the_cpu() -> None:
    assert numbers(EngineConfig(compute_device="auto", memory_device="auto"))[::2] == [["cpu"], ["cpu", "cpu"]]
    assert check(EngineConfig()) == (CPU, CPU)


def test_a_gpu_that_is_not_there(gpus: int) -> None:
    with pytest.raises(ValueError, match="--memory-device cuda:2: torch finds 2 GPUs here, the last one is cuda:1"):
        pick("--memory-device", "cuda:2")
    config = EngineConfig(compute_device="cuda", tensor_parallel_size=4, memory_workers=4)
    with pytest.raises(ValueError, match="--tensor-parallel-size 4 with --compute-device cuda: each rank needs a GPU"):
        check(config)
    assert str(pick("--compute-device", "cuda", 0, 4)) == "cuda:0", "another host's worker, whose GPU is its own"


def test_backends_of_another_device_are_refused(gpus: int) -> None:
    with pytest.raises(ValueError, match="--attention native with --memory-device cuda: .* computes on CPUs"):
        check(EngineConfig(memory_device="cuda", attention="native"))
    with pytest.raises(ValueError, match="--gemm native computes on CPUs: use auto or torch with --compute-device"):
        check(EngineConfig(compute_device="cuda", gemm="native"))
    assert linear("auto", torch.device("cuda:0")) == "torch"
    assert linear("auto", CPU) == "auto"
    assert type(backend_on(CPU, "cuda", "reference", torch.bfloat16)).__name__ == "Reference"


def test_workers_of_a_device_share_what_it_has_free(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert share("cpu", 5) == pytest.approx(FREE_PART / 5)
    assert share("cuda", 2) == FREE_PART
    assert share("cuda", 3) == pytest.approx(FREE_PART / 2)
    assert share("cuda:1", 3) == pytest.approx(FREE_PART / 3)
    monkeypatch.setattr(memory_store, "available_bytes", lambda device: 1000)
    wanted = bind([shape()], kv_bytes=600, kv_most=5000)
    assert _kv_bytes(wanted, torch.device("cuda:0"), 0.5) == 500
    assert _kv_bytes(bind([shape()], kv_bytes=600, kv_most=50), torch.device("cuda:0"), 0.5) == 50
    assert _kv_bytes(wanted, CPU, 0.5) == 600, "the host is shared with everything else"
    with pytest.raises(ValueError, match="2000 bytes of KV memory asked for, 1000 are free on cuda:0"):
        _kv_bytes(bind([shape()], kv_bytes=2000), torch.device("cuda:0"), 0.5)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--compute-device", "gpu"], "--compute-device must be cpu, cuda, cuda:N or auto, not 'gpu'"),
        (["--memory-device", "cuda:x"], "--memory-device must be cpu, cuda, cuda:N or auto, not 'cuda:x'"),
        (["--compute-device", "cuda:0", "--tensor-parallel-size", "2"], "is one GPU"),
        (["--compute-device", "cuda"], "--compute-device cuda: torch"),
        (["--memory-device", "cuda:0"], "--memory-device cuda:0: torch"),
    ],
)
def test_one_line_before_anything_starts(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available() and "torch" in words:
        pytest.skip("there is a GPU")
    assert main(["generate", TINY, "--prompt", "x", "--dry-run", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
