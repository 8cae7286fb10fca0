"""Weights of linear layers a second time, in an order by which they are faster: where the host has room for them."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch

from lamina.protocol.options.engine import DeviceOptions
from lamina.protocol.options.topology import TopologyOptions

from . import LinearBackend

if TYPE_CHECKING:
    from lamina.converter import SlicedProgram


def packed_weight_bytes(program: SlicedProgram, backend: LinearBackend) -> int:
    """Of all weights of the program's linear layers in the order of ``backend``: of each slice, which has its own, also
    where they are tied or the slice was derived from an equal one.
    """
    weights: dict[tuple[int, int], int] = {}
    for number, part in enumerate(program.slices):
        for node in part.module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
            if node.args[1].op == "get_attr":
                w = operator.attrgetter(node.args[1].target)(part.module)
                weights[number, id(w)] = backend.packed_bytes(w.dtype, *w.shape)
    return sum(weights.values())


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
