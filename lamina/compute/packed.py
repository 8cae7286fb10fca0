"""Weights of linear layers packed: a copy in the order that their backend takes them in.

Replicas of one host share one copy (one_copy.py); one that is alone has its own, in huge pages. A host without room for
it keeps weights as they lie, and computes the same bits.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lamina.converter import SlicedProgram
from lamina.facts.report import size
from lamina.facts.room import free_bytes, has_room_to_pack
from lamina.gemm import LinearBackend, copies_in
from lamina.models.checkpoint import weight_files
from lamina.protocol.control import StartCompute

from .one_copy import OneCopy, own_memory, share


class Packed(NamedTuple):
    """What has become of a program's weights. ``why``: for people; ``copy``: where it is shared, to be closed."""

    nbytes: int
    why: str
    copy: OneCopy | None = None


def pack_for(start: StartCompute, program: SlicedProgram, backend: LinearBackend, path: Path, key: bytes) -> Packed:
    """Pack the weights that a compute worker has from ``path``, if this host has room. ``key``: of the engine."""
    ranks, nbytes = start.topology.tensor_parallel_size, packed_bytes(program, backend)
    kv_bytes = start.devices.kv_bytes() * start.topology.memory_workers

    def check() -> None:
        if not has_room_to_pack(nbytes * ranks, program.weight_bytes * ranks, kv_bytes, free_bytes()):
            raise OSError(errno.ENOMEM, f"there is no room for {size(nbytes)} more")

    place = ""
    if start.topology.replicas > 1 and start.copies != 1:
        order = backend.packing.name if backend.packing else ""
        place = place_of(key, weight_files(path), start.rank, ranks, start.model.dtype, nbytes, order)
    return pack(program, backend, check, place, start.deadlines.start_timeout_s)


def pack(
    program: SlicedProgram, backend: LinearBackend, check: Callable[[], None], place: str = "", timeout_s: float = 0.0
) -> Packed:
    """Pack what ``backend`` is faster with, and have it take that.

    ``check``: raises OSError where this host has no room for one more copy. ``place``: of the copy that processes
    share, which are to be given it within ``timeout_s``; "": this one is alone. Without memory all stays as it was.
    """
    packing, nbytes = backend.packing, packed_bytes(program, backend)
    if packing is None or not nbytes:
        return Packed(0, "as they lie: this CPU has no better order for them")
    weights = [w for w in linear_weights(program) if packing.nbytes(w)]

    def fill(memory: Tensor) -> None:
        for w, part in copies_in(memory, packing, weights):
            packing.write(w, part)

    copy = None
    try:
        if place:
            copy = share(place, nbytes, check, fill, timeout_s)
            memory = copy.memory
        else:
            memory = own_memory(nbytes, check, fill)
    except OSError as error:
        return Packed(0, f"as they lie: {error.strerror or error}")
    for w, part in copies_in(memory, packing, weights):
        packing.use(w, part)
    how = "shared by the replicas of this host" if place else "in huge pages"
    return Packed(nbytes, f"packed: {size(nbytes)} more, {how}", copy)


def place_of(key: bytes, files: Sequence[Path], *facts: object) -> str:
    """Of the copy that all share who know ``key`` and have the same of ``files`` and ``facts``."""
    stats = [(str(file.resolve()), file.stat()) for file in files]
    found = [(name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats]
    return "lamina-packed-" + hashlib.blake2b(repr((found, facts)).encode(), key=key[:64], digest_size=20).hexdigest()


def packed_bytes(program: SlicedProgram, backend: LinearBackend) -> int:
    """Of the copy; 0: the backend wants none. The program may be a plan, without weights."""
    packing = backend.packing
    return sum(packing.nbytes(w) for w in linear_weights(program)) if packing else 0


def linear_weights(program: SlicedProgram) -> list[Tensor]:
    """Of each linear layer, in the order of their first use; one that several share comes once."""
    found: dict[Any, Tensor] = {}
    for part in program.slices:
        labels = dict.fromkeys(n.meta["weight"] for n in part.module.graph.nodes if "weight" in n.meta)
        weights = dict(zip(labels, part.weights.values(), strict=True))
        for node in part.module.graph.nodes:
            if node.target is torch.ops.aten.linear.default and "weight" in node.args[1].meta:
                w = weights[node.args[1].meta["weight"]]
                found.setdefault((w.untyped_storage()._cdata, w.storage_offset(), w.shape, w.stride()), w)
    return list(found.values())
