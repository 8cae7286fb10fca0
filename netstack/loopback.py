"""Both ends in one process: the fake for tests, and the way to run a whole cluster in one debugger."""

from __future__ import annotations

from .contract.fabric import Fabric
from .host.loopback_host import LoopbackFabric


def open_fabric(key: bytes, *, gpu: int | None = None) -> Fabric:
    """Open the transport. ``gpu``: see loopback_gpu, which kernels need for their messages."""
    if gpu is None:
        return LoopbackFabric(key)
    from .cuda.loopback_gpu import open_on

    return open_on(key, gpu)
