"""Memory that a GPU and a NIC share: the GPU's memory for the NIC, and the host memory of a queue pair for kernels.
HARDWARE-UNVERIFIED: run against a stand-in of the CUDA driver.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from ctypes import byref, c_int, c_uint64

from lamina.netstack.cuda.driver import (
    DMA_BUF,
    HOST_IO_MEMORY,
    HOST_MAPPED,
    HOST_PORTABLE,
    NIC_WRITE_ORDER,
    CudaError,
    Driver,
    Pinned,
    Shared,
)
from lamina.netstack.host.native_module import LINE, Ringer

DMA_BUF_FILE = 1  # CUmemRangeHandleType
OWNER = 100  # CUGPUDirectRDMAWritesOrdering: kernels of this GPU see a NIC's writes in their order
PAGE = mmap.PAGESIZE  # of the host: 64 KiB on some of those whose CPU is NVIDIA's
NO_PIECE = 0, 0, -1  # as in NicMemory
NO_DOORBELL = b"\xff" * 8  # kNoDoorbell of csrc/netstack/proxy/proxy.h


def why_unusable(driver: Driver) -> str:
    """Return why kernels of this GPU cannot poll for a NIC's writes, in a few words; "" if they can."""
    if not driver.shares_memory:
        return "its memory cannot be mapped as a NIC needs it"
    if driver.attribute(NIC_WRITE_ORDER) < OWNER:
        return "its kernels may see a NIC's writes in another order"
    return ""


class NicMemory:
    """Memory of the GPU, of which a NIC can access ``nbytes``. ``piece``: the address, the bytes and the file of its
    dma-buf, or -1 if the driver makes none: then nvidia-peermem has to know the address.
    """

    def __init__(self, driver: Driver, nbytes: int) -> None:
        with ExitStack() as parts:
            memory = parts.enter_context(closing(Shared(driver, nbytes)))
            self.address = memory.address
            file = c_int(-1)
            if driver.attribute(DMA_BUF):
                whole = -(-nbytes // PAGE) * PAGE
                driver.call("cuMemGetHandleForAddressRange", byref(file), memory.address, whole, DMA_BUF_FILE, 0)
                parts.callback(os.close, file.value)
            self.piece = memory.address, nbytes, file.value
            self.close = parts.pop_all().close


class HostPages:
    """Pages of the host that hold ``ranges`` of (address, bytes), mapped for kernels. ``registers``: they are a
    device's, not memory.
    """

    def __init__(self, driver: Driver, ranges: Iterable[tuple[int, int]], *, registers: bool = False) -> None:
        flags = HOST_PORTABLE | HOST_MAPPED | (HOST_IO_MEMORY if registers else 0)
        self._shifts: list[tuple[int, int, int]] = []
        with ExitStack() as parts:
            for first, end in joined(ranges):
                driver.call("cuMemHostRegister_v2", first, end - first, flags)
                parts.callback(driver.call, "cuMemHostUnregister", first)
                there = c_uint64()
                driver.call("cuMemHostGetDevicePointer_v2", byref(there), first, 0)
                self._shifts.append((first, end, there.value - first))
            self.close = parts.pop_all().close

    def of(self, address: int) -> int:
        """Return the address for kernels of the host's ``address``."""
        return next(address + shift for first, end, shift in self._shifts if first <= address < end)


def joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of the pages that hold ``ranges`` of (address, bytes); each page once, as CUDA accepts none
    twice.
    """
    first = end = -1
    for start, nbytes in sorted(ranges):
        below, above = start // PAGE * PAGE, -(-(start + nbytes) // PAGE) * PAGE
        if below > end and end >= 0:
            yield first, end
        if below > end:
            first = below
        end = max(end, above)
    if end >= 0:
        yield first, end


class Mailbox:
    """A word in host memory that kernels write in place of the doorbell; ``ringer`` writes it to ``doorbell``.
    ``alternate``: as in a KernelPair's queue.
    """

    def __init__(self, driver: Driver, ringer: Ringer, doorbell: int, alternate: int) -> None:
        with ExitStack() as parts:
            word = parts.enter_context(closing(Pinned(driver, LINE)))
            word.view[:8] = NO_DOORBELL
            self.address = word.address
            ringer.add(self.address, doorbell, alternate)
            parts.callback(ringer.remove, self.address)
            self.close = parts.pop_all().close


def doorbell_fault(error: CudaError) -> str:
    """Return the warning for a driver that does not map a NIC's registers."""
    return (
        f"the GPU may not ring the NIC ({error}), so a thread of this host does. To change this, run as root, or load "
        'nvidia with NVreg_RegistryDwords="PeerMappingOverride=1;"'
    )
