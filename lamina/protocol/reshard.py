"""Moves of KV when memory workers come or go: which heads of which blocks go from which worker to which.

This is a pure function of two partitions and of sequences' locations under each. So all memory workers compute the same
moves, and only KV is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from lamina.config.engine_config import CHUNK_TOKENS
from lamina.config.partition import HeadShare, KvShards, Partition, Piece

from .blocks.extents import Extents
from .control import Address
from .kv_placement import KvLocation, KvPlacement
from .offload_messages import OffloadConfig
from .step_plan import BindRequest, SurvivingKv


class TerminationNotice(msgspec.Struct, frozen=True, tag="leaving"):
    """Memory worker -> driver: its process got SIGTERM, to end soon. It serves until it gets Stop or is killed."""


class PrepareStore(msgspec.Struct, frozen=True, tag="make-room"):
    """Driver -> memory worker, at any time: have memory ready, since a Reshard to ``bind`` may come. None: it does not
    come.

    The reply is StorePrepared, except for None, or if another PrepareStore has come. ``storage``: where offloaded pages
    will lie; it must suffice for one sequence. ``resize_number``: of the change; 0: of none. A spare worker may take a
    place with such a ``bind``, and the driver waits for no reply.
    """

    bind: BindRequest | None
    storage: OffloadConfig | None = None
    resize_number: int = 0

    @property
    def is_first_store(self) -> bool:
        """Return whether it is for the worker's first store."""
        return self.bind is not None and not self.resize_number


class StorePrepared(msgspec.Struct, frozen=True, tag="room-made"):
    """Memory worker -> driver: its memory for change ``resize_number`` is ready. ``error``: why it cannot have it."""

    error: str = ""
    resize_number: int = 0


class Reshard(msgspec.Struct, frozen=True, kw_only=True, tag="recut"):
    """Driver -> quiesced memory worker: replace the store by that of ``bind``, with the KV of ``surviving``, which the
    workers of ``before`` have. The reply is ReshardDone.
    """

    epoch: int  # of the Quiesce, and of the channels between the peers
    bind: BindRequest | None  # None: this worker leaves, and keeps nothing
    before: Partition
    after: Partition
    surviving: list[SurvivingKv]
    peers: list[Address]  # all workers that send or receive KV
    own_index: int  # the receiver's index in ``peers``
    sources: list[int]  # worker of ``before`` -> its index in ``peers``
    targets: list[int]  # worker of ``after`` -> its index in ``peers``
    timeout_s: float  # limit of silence of a peer
    # Of each recurrent layer: who had which heads' states, and who is to have them.
    states_before: list[list[HeadShare]] = []
    states_after: list[list[HeadShare]] = []


class RebuildKv(msgspec.Struct, frozen=True, kw_only=True, tag="rebuild"):
    """Driver -> quiesced memory worker: rebuild a lost worker's KV of ``surviving`` as the XOR of all other workers'
    KV, of which one is the parity. The reply is ReshardDone.
    """

    epoch: int  # of the Quiesce, and of the channels between the peers
    bind: BindRequest | None  # of the worker in the lost one's place; None: the receiver sends KV
    surviving: list[SurvivingKv]
    peers: list[Address]  # all memory workers, the new one too
    own_index: int  # the receiver's index in ``peers``
    sources: list[int]  # indices of the workers that send
    targets: list[int]  # index of the new worker alone
    timeout_s: float  # limit of silence of a peer


class ReshardDone(msgspec.Struct, frozen=True, kw_only=True, tag="recutted"):
    """Memory worker -> driver: its new store is complete. ``error``: why it has none, nor any KV."""

    epoch: int
    error: str = ""
    nbytes: int = 0  # received from other workers


class HeadTransfer(NamedTuple):
    """KV heads ``head_start .. head_stop`` of a layer that move between memory workers: from ``source``, numbered by
    the partition before, to ``target`` of the next one. ``blocks``: sequence -> KV blocks, counted from token 0.
    """

    source: int
    target: int
    source_piece: int  # number of the source's piece of the layer
    target_piece: int  # number of the target's piece
    head_start: int
    head_stop: int
    blocks: dict[int, list[int]]


class StateTransfer(NamedTuple):
    """States of heads ``head_start .. head_stop`` of a recurrent layer that move. ``versions``: sequence -> numbers of
    tokens in them.
    """

    source: int
    target: int
    head_start: int
    head_stop: int
    versions: dict[int, list[int]]


def state_transfers(
    before: Sequence[HeadShare], after: Sequence[HeadShare], keep: Sequence[SurvivingKv]
) -> Iterator[StateTransfer]:
    """Yield the moves of a recurrent layer's states, in the same order on all workers."""
    for a in before:
        for b in after:
            start, stop = max(a.head_start, b.head_start), min(a.head_stop, b.head_stop)
            moves = dict[tuple[int, int], dict[int, list[int]]]()
            for each in keep if start < stop else ():
                was = each.location if each.previous_location is None else each.previous_location
                ends = _owner(a, was), _owner(b, each.location)
                moves.setdefault(ends, {})[each.sequence] = sorted({each.length, *each.snapshots})
            for (source, target), versions in sorted(moves.items()):
                yield StateTransfer(source, target, start, stop, versions)


def _owner(share: HeadShare, location: KvLocation) -> int:
    return share.owners[location.kv_shard if len(share.owners) > 1 else 0]


class HeadTransfers:
    """The transfers of every layer. Layers with equal windows and an equal cut of heads have the same transfers."""

    def __init__(
        self, before: Partition, after: Partition, windows: Sequence[int], keep: Sequence[SurvivingKv], block_size: int
    ) -> None:
        """``windows``: by layer, in tokens. ``block_size``: in tokens; all blocks here have this size."""
        self._before, self._after, self._windows, self._keep = before, after, windows, keep
        self._block_size = block_size
        self._known: dict[tuple[int, int, int], list[HeadTransfer]] = {}

    def of_layer(self, layer: int) -> list[HeadTransfer]:
        """Return the transfers of a layer, in the same order on all workers."""
        key = self._before.layer_table[layer], self._after.layer_table[layer], self._windows[layer]
        if key not in self._known:
            self._known[key] = list(self._make(layer))
        return self._known[key]

    def _make(self, layer: int) -> Iterator[HeadTransfer]:
        window = self._windows[layer]
        old = [self._numbers(self._before, lanes, window, was=True) for lanes in self._lanes(self._before, layer)]
        new = [self._numbers(self._after, lanes, window, was=False) for lanes in self._lanes(self._after, layer)]
        for (source, given, a), had in zip(_pieces(self._before, layer), old, strict=True):
            for (target, taken, b), wanted in zip(_pieces(self._after, layer), new, strict=True):
                start, stop = max(a.head_start, b.head_start), min(a.head_stop, b.head_stop)
                if start < stop:
                    both = {s: [n for n in numbers if n in had[s]] for s, numbers in wanted.items()}
                    blocks = {s: numbers for s, numbers in both.items() if numbers}
                    if blocks:
                        yield HeadTransfer(source, target, given, taken, start, stop, blocks)

    @staticmethod
    def _lanes(partition: Partition, layer: int) -> list[KvShards]:
        return [piece.kv_shards for _, _, piece in _pieces(partition, layer)]

    def _numbers(self, of: Partition, kv_shards: KvShards, window: int, *, was: bool) -> dict[int, dict[int, None]]:
        """Return sequence -> the numbers of its blocks that lie in ``kv_shards``."""
        placement = KvPlacement(of.num_kv_shards, of.stripe_chunks * CHUNK_TOKENS // self._block_size, of.single_shard)
        extents, numbers = Extents([window], self._block_size, [kv_shards], placement), dict[int, dict[int, None]]()
        for each in self._keep:
            place: KvLocation = each.previous_location if was and each.previous_location is not None else each.location
            left = extents.extent_of_surviving(SurvivingKv(each.sequence, each.length, place))
            numbers[each.sequence] = dict.fromkeys(extents.block_numbers(0, left))
        return numbers


def _pieces(of: Partition, layer: int) -> list[tuple[int, int, Piece]]:
    """Return the pieces of all workers, each with its worker and its number among that worker's pieces."""
    return [(w, i, piece) for w in range(of.num_workers) for i, piece in enumerate(of.pieces(layer, w))]
