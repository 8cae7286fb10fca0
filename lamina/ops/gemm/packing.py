"""Second copies of linear layers' weights, in a faster order, if the host has memory for them."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.config.engine_config import DeviceOptions
from lamina.config.topology import TopologyOptions
from lamina.env import PACKED

from . import LinearBackend
from .packed_memory import PackedMemory, PrivateMemory, SharedMemory

if TYPE_CHECKING:
    from lamina.converter import SlicedProgram

log = logging.getLogger(__name__)


def packed_weights(program: SlicedProgram, backend: LinearBackend) -> list[tuple[Tensor, int]]:
    """Return the weights of the program's linear layers, and the bytes of each in the order of ``backend``. Each slice
    has its own copy, even of tied weights, and if it was derived from an equal slice.
    """
    weights: dict[tuple[int, int], tuple[Tensor, int]] = {}
    for number, part in enumerate(program.slices):
        for node in part.module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
            if node.args[1].op == "get_attr":
                w = operator.attrgetter(node.args[1].target)(part.module)
                weights[number, id(w)] = w, backend.packed_bytes(w.dtype, *w.shape)
    return list(weights.values())


def has_room(needed: int, shared: int, free: int, topology: TopologyOptions, devices: DeviceOptions) -> bool:
    """Return whether the workers of a host may have packed weights: ``needed`` bytes for each one, or group of stages.
    The workers share ``shared`` of these bytes. ``free``: bytes of the host. All packed weights of a host take at most
    half of these, so that KV whose size is chosen at the start gets as much. They also leave --kv-cache-memory-bytes.
    """
    taken = shared + (needed - shared) * (topology.num_compute + topology.prefill_groups)
    return taken <= free / 2 and taken + devices.kv_bytes() * topology.num_workers["memory"] <= free


def can_share(topology: TopologyOptions) -> bool:
    """Return whether workers share packed weights: there are several, and each has all weights."""
    whole = topology.tensor_parallel_size == topology.prefill_pipeline == 1
    return whole and topology.num_compute + topology.prefill_workers > 1


def choose_packing(
    program: SlicedProgram,
    backend: LinearBackend,
    free: Callable[[], int],
    topology: TopologyOptions,
    devices: DeviceOptions,
    timeout_s: float,
) -> PackedMemory | None:
    """Return memory in which ``backend`` packs the weights of ``program``; None if the host has none for that. It is a
    file that the launcher has given to the workers of this host, or the worker's own memory. The caller that binds the
    program calls ``seal`` afterwards. Waits up to ``timeout_s`` seconds for another worker that packs the same weights.
    """
    weights = packed_weights(program, backend)
    needed = sum(size for _, size in weights)
    pages = _shared_pages(timeout_s) if needed and can_share(topology) else None
    if pages is None:
        return PrivateMemory() if needed and has_room(needed, 0, free(), topology, devices) else None
    shared = sum({name: size for w, size in weights if (name := pages.name_of(w))}.values())
    own = sum(size for w, size in weights if not pages.name_of(w))
    to_share = 0 if pages.is_filled else shared
    if own + to_share and not has_room(own + to_share, to_share, free(), topology, devices):
        pages.seal()
        return None
    pages.reserve(shared)
    return pages


def _shared_pages(timeout_s: float) -> SharedMemory | None:
    path = os.environ.get(PACKED, "")
    try:
        return SharedMemory(path, timeout_s) if path else None
    except OSError as error:
        log.warning("packed weights are not shared: %s", error)
        return None
