"""Between a worker's device and its messages, which lie in host memory.

On the CPU the two are one and nothing is copied. A device with memory of its own gets copies through pinned host
memory, in the order of its stream; the host waits for the device only before it reads results: once for each Q, for
each K and V, for each O, and for tensors that compute workers carry or share. Where devices send and receive the
messages of layers themselves (workers.device_transport), one wait for each step takes the place of the first three.
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
    """The queue of a CUDA device's work; others may put theirs between."""

    gpu: int
    stream: int  # CUDA's handle


class Staging(Protocol):
    """A device, and the ways to it and back."""

    device: torch.device

    @property
    def is_separate(self) -> bool:
        """Whether the device has memory of its own."""
        ...

    def to_device(self, x: Tensor) -> Tensor:
        """``x`` of the host, on the device: on the CPU x itself, else a copy, and x may be overwritten at once."""
        ...

    def to_host(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Tensors of the device on the host, there to be read now."""
        ...

    def device_buffer(self, data: memoryview) -> Tensor:
        """Flat bytes on the device that are to become ``data``: on the CPU they are."""
        ...

    def copy_out(self, data: memoryview, room: Tensor) -> None:
        """Bring the bytes that the device has put into ``room`` into ``data``."""
        ...

    def empty_host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """HostStaging memory that is to go ``to_device``, and not to change after."""
        ...

    def record_event(self) -> Callable[[], None]:
        """A wait, for any thread, until the device has done all work that this one has given it so far."""
        ...

    def move_program(self, program: Any) -> Any:
        """A sliced program with its weights on the device; the one given is used up."""
        ...

    def graph_capture(self) -> GraphCapture | None:
        """Records graphs, where the device has them."""
        ...


class HostStaging:
    """The CPU."""

    is_separate = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to_device(self, x: Tensor) -> Tensor:
        """``x`` itself."""
        return x

    def to_host(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """The tensors themselves."""
        return xs

    def device_buffer(self, data: memoryview) -> Tensor:
        """``data`` as a flat tensor, without a copy."""
        return tensor_over(data, torch.uint8) if len(data) else EMPTY_BYTES

    def copy_out(self, data: memoryview, room: Tensor) -> None:
        """Nothing to do: ``room`` is ``data``."""

    def empty_host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Host memory of this shape, not set."""
        return torch.empty(shape, dtype=dtype)

    def record_event(self) -> Callable[[], None]:
        """No wait: a CPU has done what was called."""
        return _nothing

    def move_program(self, program: Any) -> Any:
        """The program itself."""
        return program

    def graph_capture(self) -> GraphCapture | None:
        """None: a CPU has no graphs."""
        return None


class DeviceStaging:
    """A device with memory of its own, whose copies are done at once. Subclasses have them done in their order."""

    is_separate = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_waits = 0  # of the host for the device

    def to_device(self, x: Tensor) -> Tensor:
        """A copy of ``x`` on the device; ``x`` may be overwritten at once."""
        held = x if self.is_pinned(x) else self.empty_host(*x.shape, dtype=x.dtype).copy_(x)
        there = torch.empty(x.shape, dtype=x.dtype, device=self.device)
        self.copy(there, held)
        return there

    def to_host(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Copies of the tensors on the host. The host waits once for all."""
        copies = tuple(self.empty_host(*x.shape, dtype=x.dtype) for x in xs)
        for here, x in zip(copies, xs, strict=True):
            self.copy(here, x)
        self.num_waits += 1
        self.wait()
        return copies

    def device_buffer(self, data: memoryview) -> Tensor:
        """Flat bytes on the device, as many as ``data`` has."""
        return torch.empty(len(data), dtype=torch.uint8, device=self.device)

    def copy_out(self, data: memoryview, room: Tensor) -> None:
        """Copy ``room`` of the device into ``data``."""
        if len(data):
            (here,) = self.to_host(room)
            tensor_over(data, torch.uint8).copy_(here)

    def empty_host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Host memory that is to go ``to_device``, and not to change after."""
        return torch.empty(shape, dtype=dtype)

    def record_event(self) -> Callable[[], None]:
        """A wait for all that the device was given. Subclasses wait for no more than what was given so far."""
        return self.wait

    def move_program(self, program: Any) -> Any:
        """The program with its weights on the device; the one given is used up. Raises ValueError where they do not
        fit.
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
        """None: this device has no graphs."""
        return None

    def current_queue(self) -> Queue | None:
        """Of this thread; None where the device has none."""
        return None

    def is_pinned(self, x: Tensor) -> bool:
        """Whether the device copies from ``x`` while the host goes on."""
        return False

    def copy(self, to: Tensor, x: Tensor) -> None:
        """Copy from the host to the device or back, behind the work that the device was given before."""
        to.copy_(x)

    def wait(self) -> None:
        """Wait until the device has done all work that it was given."""


class CudaStaging(DeviceStaging):
    """A CUDA device, on a stream of this thread's own: workers may be threads of one process.

    torch keeps pinned memory until the copies out of it are done, whatever becomes of its tensors.
    HARDWARE-UNVERIFIED: all but what is below has been run with a stand-in.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        torch.cuda.set_device(device)  # else a context, of hundreds of MB, is made on the first device too
        if torch.cuda.current_stream(device) == torch.cuda.default_stream(device):
            torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def empty_host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Pinned host memory, which the device copies from while the host goes on."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def current_queue(self) -> Queue | None:
        """This thread's stream."""
        stream = torch.cuda.current_stream(self.device)
        return Queue(stream.device_index, stream.cuda_stream)

    def record_event(self) -> Callable[[], None]:
        """A wait for an event behind what is on the current stream now."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        wait: Callable[[], None] = event.synchronize
        return wait

    def is_pinned(self, x: Tensor) -> bool:
        """Whether ``x`` is in pinned memory."""
        return x.is_pinned()

    def copy(self, to: Tensor, x: Tensor) -> None:
        """Copy in the order of the current stream."""
        to.copy_(x, non_blocking=True)

    def wait(self) -> None:
        """Wait until the current stream is done."""
        torch.cuda.current_stream(self.device).synchronize()

    def graph_capture(self) -> GraphCapture | None:
        """Records CUDA graphs of this thread's stream."""
        return CudaCapture(self.device)


def _nothing() -> None: ...


# type of device -> its staging
KINDS: dict[str, Callable[[torch.device], Staging]] = {"cpu": HostStaging, "cuda": CudaStaging}


def open_staging(device: torch.device) -> Staging:
    """For the thread that calls, which is to be the only one that uses it."""
    return KINDS[device.type](device)
