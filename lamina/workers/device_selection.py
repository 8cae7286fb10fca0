"""The device that a worker computes on, of those that its host has."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from lamina.config.conflicts import conflict_text
from lamina.config.engine_config import EngineConfig
from lamina.ops import attention, collective

green_contexts: Any = None
with suppress(ImportError):  # an older torch lacks it
    from torch.cuda import green_contexts

CPU = torch.device("cpu")
FREE_MEMORY_SHARE = 0.9  # largest share of a device's free memory for KV blocks: backends need some for themselves


def pick_device(flag: str, asked: str, number: int = 0, ranks: int = 1) -> torch.device:
    """Return the device that ``flag`` requests: cpu, cuda, cuda:N, or auto, which is cuda if torch has it. ``number``:
    of the worker among those on this host; its GPUs are assigned in rotation. ``ranks``: share weights, and need a GPU
    each. Raises ValueError, naming the flag, for a device that does not exist.
    """
    count = torch.cuda.device_count() if asked != "cpu" and torch.cuda.is_available() else 0
    if asked == "cpu" or (asked == "auto" and not count):
        return CPU
    if not count:
        raise ValueError(
            f"{flag} {asked}: torch {torch.__version__} finds no NVIDIA GPU here. Use cpu, or a torch built for CUDA "
            f"on a host with a GPU; with Ray, request a type of GPU, as compute_on: H100 in the file of --cluster"
        )
    _, given, index = asked.partition(":")
    if given and int(index) >= count:
        raise ValueError(f"{flag} {asked}: torch finds {count} GPUs here, the last one is cuda:{count - 1}")
    if not given and count < ranks and number >= count:
        raise ValueError(
            f"--tensor-parallel-size {ranks} with {flag} {asked}: each rank needs a GPU, and torch finds {count} here: "
            f"lower it, or use {flag} cpu"
        )
    return torch.device("cuda", int(index) if given else number % count)


def gpu_index(asked: str, number: int) -> int | None:
    """Return the number of the GPU that ``pick_device`` returns; None if it returns the CPU or raises."""
    with suppress(ValueError):
        return pick_device("", asked, number).index
    return None


def memory_share(asked: str, workers: int) -> float:
    """Return the share of its device's free memory that a worker may take, if ``workers`` use the host's GPUs in
    rotation.
    """
    count = torch.cuda.device_count() if asked == "auto" or asked == "cuda" else 1
    return FREE_MEMORY_SHARE / max(1, -(-workers // max(1, count)))


def limit_sms(device: torch.device, sms: int) -> object:
    """Run this thread's work for ``device`` on ``sms`` of its multiprocessors, while the returned object is held. Uses
    a stream of a green context, which shares memory, modules and events with all others of the device. CUDA rounds
    ``sms`` up to a size that it supports. Raises ValueError that names the flag. HARDWARE-UNVERIFIED.
    """
    check_sms(device, sms)
    torch.cuda.set_device(device)
    try:
        green: Any = green_contexts.GreenContext.create(num_sms=sms, device_id=device.index)
        torch.cuda.set_stream(green.Stream())
    except RuntimeError as error:
        first_line, _, _ = str(error).partition("\n")
        raise ValueError(f"--memory-sms {sms} on {device}: {first_line}") from error
    return green


def check_sms(device: torch.device, sms: int) -> None:
    """Raise ValueError if ``limit_sms`` is impossible."""
    if green_contexts is None or not green_contexts.SUPPORTED or not hasattr(green_contexts.GreenContext, "Stream"):
        raise ValueError(
            f"--memory-sms {sms}: torch {torch.__version__} makes no streams of green contexts: leave it out, or use "
            f"torch 2.12 or newer, built for CUDA 12.8 or newer"
        )
    if sms > (count := torch.cuda.get_device_properties(device).multi_processor_count):
        raise ValueError(f"--memory-sms {sms}: {device} has {count} multiprocessors")


def linear_backend(asked: str, device: torch.device) -> str:
    """Return the backend of linear layers on ``device`` for --gemm ``asked``. Raises ValueError if it has none."""
    if device.type == "cpu":
        return asked
    if asked not in ("auto", "torch"):
        raise ValueError(conflict_text(f"--gemm {asked}", "--compute-device cuda"))
    return "torch"


def check(config: EngineConfig) -> tuple[torch.device, torch.device]:
    """Return the devices of the first compute worker and the first memory worker on this host. Raises the errors of
    their start: ValueError, ImportError, naming the flag.
    """
    ranks, prefill = config.topology.tensor_parallel_size, range(config.topology.prefill_workers)
    numbers = [
        *(config.gpu_index("compute", i) for i in range(config.topology.num_compute)),
        *(config.gpu_index("prefill", i) for i in prefill),
    ]
    compute, *_ = [pick_device("--compute-device", config.devices.compute_device, n, ranks) for n in numbers]
    linear_backend(config.model.gemm, compute)
    if ranks > 1 and (lacks := collective.why_unavailable(config.topology.collective, compute)):
        raise ValueError(lacks)
    memory = pick_device("--memory-device", config.devices.memory_device, config.gpu_index("memory", 0))
    if memory.type != "cpu":
        if attention.KINDS.get(config.kv.attention) == "cpu":
            raise ValueError(conflict_text("--attention-backend native or numba", "--memory-device cuda"))
        dtype = torch.float32 if config.model.dtype == "float32" else torch.bfloat16
        try:
            attention.get(config.kv.attention, memory, dtype)
        except ValueError as error:
            raise ValueError(
                f"--attention-backend {config.kv.attention} with --memory-device {config.devices.memory_device}: "
                f"{error}"
            ) from None
        if config.devices.memory_sms:
            check_sms(memory, config.devices.memory_sms)
    return compute, memory
