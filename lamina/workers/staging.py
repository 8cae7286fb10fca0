"""Copies between a worker's device and its messages, which lie in host memory.

On the CPU nothing is copied. For a device with its own memory, copies go through pinned host memory in the order of its
stream. The host waits for the device only before it reads results. These are each Q, each K and V, each O, and tensors
that compute workers carry or share. If devices send and receive the layers' messages
(workers.device_transport), one wait in each step replaces the first three.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lamina.utils.tensor_buffers import tensor_over

from .cuda_graphs import CudaCapture, GraphCapture

EMPTY_BYTES = torch.empty(0, dtype=torch.uint8)


class Queue(NamedTuple):
    """The work queue of a CUDA device; other code may insert its own work."""

    gpu: int
    stream: int  # a CUDA handle


class Staging(Protocol):
    """A device, and copies to it and back."""

    device: torch.device

    @property
    def is_separate(self) -> bool:
        """True if the device has its own memory."""
        ...

    def to_device(self, x: Tensor) -> Tensor:
        """Return a host tensor on the device: ``x`` itself on the CPU, else a copy; ``x`` may then be overwritten at
        once.
        """
        ...

    def to_host(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Return tensors of the device on the host, ready to be read."""
        ...

    def device_buffer(self, data: memoryview) -> Tensor:
        """Return flat bytes on the device for the content of ``data``; on the CPU they share its memory."""
        ...

    def copy_out(self, data: memoryview, room: Tensor) -> None:
        """Copy the bytes that the device has written to ``room`` into ``data``."""
        ...

    def empty_host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return host memory for ``to_device``, which must not change after that."""
        ...

    def record_event(self) -> Callable[[], None]:
        """Return a function that waits, in any thread, until the device has done the work given to it so far."""
        ...

    def move_program(self, program: Any) -> Any:
        """Return a sliced program with its weights on the device; ``program`` must not be used again."""
        ...

    def graph_capture(self) -> GraphCapture | None:
        """Return a recorder of graphs; None if the device has none."""
        ...


class HostStaging:
    """The staging of the CPU, which copies nothing."""

    is_separate = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to_device(self, x: Tensor) -> Tensor:
        """Return ``x`` itself."""
        return x

    def to_host(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors themselves."""
        return xs

    def device_buffer(self, data: memoryview) -> Tensor:
        """Return ``data`` as a flat tensor, without a copy."""
        return tensor_over(data, torch.uint8) if len(data) else EMPTY_BYTES

    def copy_out(self, data: memoryview, room: Tensor) -> None:
        """Do nothing: ``room`` shares the memory of ``data``."""

    def empty_host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialized host memory of this shape."""
        return torch.empty(shape, dtype=dtype)

    def record_event(self) -> Callable[[], None]:
        """Return a function that does not wait: a CPU has done all work when a call returns."""
        return _nothing

    def move_program(self, program: Any) -> Any:
        """Return the program itself."""
        return program

    def graph_capture(self) -> GraphCapture | None:
        """Return None: a CPU has no graphs."""
        return None


class DeviceStaging:
    """A device with its own memory, whose copies are done at once. Subclasses copy in the order of a queue."""

    is_separate = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_waits = 0  # waits of the host for the device

    def to_device(self, x: Tensor) -> Tensor:
        """Return a copy of ``x`` on the device; ``x`` may be overwritten at once."""
        held = x if self.is_pinned(x) else self.empty_host(*x.shape, dtype=x.dtype).copy_(x)
        there = torch.empty(x.shape, dtype=x.dtype, device=self.device)
        self.copy(there, held)
        return there

    def to_host(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Return copies of the tensors on the host, which waits once for all."""
        copies = tuple(self.empty_host(*x.shape, dtype=x.dtype) for x in xs)
        for here, x in zip(copies, xs, strict=True):
            self.copy(here, x)
        self.num_waits += 1
        self.wait()
        return copies

    def device_buffer(self, data: memoryview) -> Tensor:
        """Return flat bytes on the device, as many as ``data`` has."""
        return torch.empty(len(data), dtype=torch.uint8, device=self.device)

    def copy_out(self, data: memoryview, room: Tensor) -> None:
        """Copy ``room`` of the device into ``data``."""
        if len(data):
            (here,) = self.to_host(room)
            tensor_over(data, torch.uint8).copy_(here)

    def empty_host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return host memory for ``to_device``, which must not change after that."""
        return torch.empty(shape, dtype=dtype)

    def record_event(self) -> Callable[[], None]:
        """Return a function that waits for all work of the device. Subclasses wait only for what was given so far."""
        return self.wait

    def move_program(self, program: Any) -> Any:
        """Return the program with its weights on the device; ``program`` must not be used again. Raises ValueError if
        they do not fit.
        """
        from lamina.converter import move

        try:
            moved = move(program, self.device)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"{program.weight_bytes} bytes of weights do not fit on {self.device}: use --tensor-parallel-size, or "
                f"another --compute-device"
            ) from error
        self.wait()
        return moved

    def graph_capture(self) -> GraphCapture | None:
        """Return None: this device has no graphs."""
        return None

    def current_queue(self) -> Queue | None:
        """Return this thread's queue; None if the device has none."""
        return None

    def is_pinned(self, x: Tensor) -> bool:
        """Return whether the device can copy from ``x`` while the host continues."""
        return False

    def copy(self, to: Tensor, x: Tensor) -> None:
        """Copy from the host to the device or back, after the work that the device was given before."""
        to.copy_(x)

    def wait(self) -> None:
        """Wait until the device has done all work that it was given."""


class CudaStaging(DeviceStaging):
    """A CUDA device, used on a stream of this thread's own, as workers may be threads of one process. torch keeps
    pinned memory until the copies from it are done, even if its tensors are freed. HARDWARE-UNVERIFIED: all except the
    methods below was run with a stand-in.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        torch.cuda.set_device(device)  # else a context of hundreds of MB is made on the first device too
        if torch.cuda.current_stream(device) == torch.cuda.default_stream(device):
            torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def empty_host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return pinned host memory, from which the device copies while the host continues."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def current_queue(self) -> Queue | None:
        """Return this thread's stream."""
        stream = torch.cuda.current_stream(self.device)
        return Queue(stream.device_index, stream.cuda_stream)

    def record_event(self) -> Callable[[], None]:
        """Return a wait for an event after the work that is on the current stream now."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        wait: Callable[[], None] = event.synchronize
        return wait

    def is_pinned(self, x: Tensor) -> bool:
        """Return whether ``x`` is in pinned memory."""
        return x.is_pinned()

    def copy(self, to: Tensor, x: Tensor) -> None:
        """Copy in the order of the current stream."""
        to.copy_(x, non_blocking=True)

    def wait(self) -> None:
        """Wait until the current stream is done."""
        torch.cuda.current_stream(self.device).synchronize()

    def graph_capture(self) -> GraphCapture | None:
        """Return a recorder of CUDA graphs of this thread's stream."""
        return CudaCapture(self.device)


def _nothing() -> None: ...


# type of device -> its staging
KINDS: dict[str, Callable[[torch.device], Staging]] = {"cpu": HostStaging, "cuda": CudaStaging}


def open_staging(device: torch.device) -> Staging:
    """Return the staging of a device for the calling thread, which alone may use it."""
    return KINDS[device.type](device)
