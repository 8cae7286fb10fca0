"""Whether a host has room for weights in a second order, by which linear layers are faster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lamina.gemm import LinearBackend, packed_weight_bytes
from lamina.protocol.options.engine import DeviceOptions
from lamina.protocol.options.topology import TopologyOptions

if TYPE_CHECKING:
    from lamina.converter import SlicedProgram


def bytes_to_pack(
    program: SlicedProgram, backend: LinearBackend, free: int, topology: TopologyOptions, devices: DeviceOptions
) -> int:
    """Bytes of weights of ``program`` that a worker is to have a second time, packed; 0 where ``backend`` packs none or
    the host has no room. ``free``: bytes of the host.

    All workers of a host together take at most half of them, so that KV whose size is chosen at the start has as much,
    and leave what --kv-memory asks for.
    """
    needed = packed_weight_bytes(program, backend)
    taken = needed * (topology.num_compute + topology.prefill_workers)
    fits = taken <= free / 2 and taken + devices.kv_bytes() * topology.memory_workers <= free
    return needed if fits else 0
