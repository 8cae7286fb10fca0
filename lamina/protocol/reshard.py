"""KV that changes hands because memory workers come or go: which heads of which blocks go from which worker to which.

A pure function of two partitions and of where sequences lie under each. So all memory workers compute the same moves,
and only KV is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from lamina.config.engine_config import CHUNK_TOKENS
from lamina.config.partition import KvShards, Partition, Piece

from .blocks.extents import Extents
from .control import Address
from .kv_placement import KvLocation, KvPlacement
from .offload_messages import OffloadConfig
from .step_plan import BindRequest, SurvivingKv


class TerminationNotice(msgspec.Struct, frozen=True, tag="leaving"):
    """Memory worker -> driver, at any time: somebody wants this process to end soon, with SIGTERM. It serves until it
    is told to stop, or is killed.
    """


class PrepareStore(msgspec.Struct, frozen=True, tag="make-room"):
    """Driver -> memory worker, at any time: a Recut to ``bind`` may come; have memory ready. None: it does not come.
    Answered by StorePrepared, but for None, or where another one has come. ``storage``: where pages will lie beside the
    pool, which must do for one sequence. ``resize_number``: of the change; 0 = of none: a spare may take a place with
    such a Bind, and nobody waits for an answer.
    """

    bind: BindRequest | None
    storage: OffloadConfig | None = None
    resize_number: int = 0

    @property
    def is_first_store(self) -> bool:
        """Whether it is for the first store that there will be."""
        return self.bind is not None and not self.resize_number


class StorePrepared(msgspec.Struct, frozen=True, tag="room-made"):
    """Memory worker -> driver: it has, for the change of that number. ``error``: it cannot; why."""

    error: str = ""
    resize_number: int = 0


class Reshard(msgspec.Struct, frozen=True, kw_only=True, tag="recut"):
    """Driver -> memory worker at rest, behind Quiesced: have the store of ``bind`` in place of the one that is there,
    with the KV of ``surviving``, which the workers of ``before`` have. Answered by Recutted.
    """

    epoch: int  # of the Quiesce; of the channels between the peers, too
    bind: BindRequest | None  # None: this worker goes, and keeps nothing
    before: Partition
    after: Partition
    surviving: list[SurvivingKv]
    peers: list[Address]  # all workers that give or take
    own_index: int  # among them
    sources: list[int]  # worker of ``before`` -> who it is among the peers
    targets: list[int]  # the same of ``after``
    timeout_s: float  # without a word of a peer


class RebuildKv(msgspec.Struct, frozen=True, kw_only=True, tag="rebuild"):
    """Driver -> memory worker at rest, behind Quiesced: rebuild the KV of ``surviving`` of a lost worker, as the
    exclusive or of all other workers' KV, of which one is the parity. Answered by Recutted.
    """

    epoch: int  # of the Quiesce; of the channels between the peers, too
    bind: BindRequest | None  # of the one that takes the lost one's place; None: this worker gives
    surviving: list[SurvivingKv]
    peers: list[Address]  # all, the new one too
    own_index: int  # among them
    sources: list[int]  # the workers that give
    targets: list[int]  # the new one alone
    timeout_s: float  # without a word of a peer


class ReshardDone(msgspec.Struct, frozen=True, kw_only=True, tag="recutted"):
    """Memory worker -> driver: it has its store. ``error``: it has none, nor any KV; why."""

    epoch: int
    error: str = ""
    nbytes: int = 0  # that came from others


class HeadTransfer(NamedTuple):
    """KV heads ``head_start .. head_stop`` of a layer that go from one memory worker, of the partition before, to one
    of the next. ``blocks``: sequence -> KV blocks, counted from its token 0.
    """

    source: int
    target: int
    source_piece: int  # the source's piece of the layer
    target_piece: int  # the target's
    head_start: int
    head_stop: int
    blocks: dict[int, list[int]]


class HeadTransfers:
    """The strips of every layer. Layers with equal windows and an equal cut of heads have the same strips."""

    def __init__(
        self, before: Partition, after: Partition, windows: Sequence[int], keep: Sequence[SurvivingKv], block_size: int
    ) -> None:
        """``windows``: by layer, in tokens; ``block_size`` in tokens, as all that is counted here in blocks."""
        self._before, self._after, self._windows, self._keep = before, after, windows, keep
        self._block_size = block_size
        self._known: dict[tuple[int, int, int], list[HeadTransfer]] = {}

    def of_layer(self, layer: int) -> list[HeadTransfer]:
        """In an order that all workers have alike."""
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
        """Sequence -> the blocks that some KV shards have of it."""
        placement = KvPlacement(of.num_kv_shards, of.stripe * CHUNK_TOKENS // self._block_size, of.single_shard)
        extents, numbers = Extents([window], self._block_size, [kv_shards], placement), dict[int, dict[int, None]]()
        for each in self._keep:
            place: KvLocation = each.previous_location if was and each.previous_location is not None else each.location
            left = extents.extent_of_surviving(SurvivingKv(each.sequence, each.length, place))
            numbers[each.sequence] = dict.fromkeys(extents.block_numbers(0, left))
        return numbers


def _pieces(of: Partition, layer: int) -> list[tuple[int, int, Piece]]:
    """The pieces of all workers, each with its worker and its number among that worker's pieces."""
    return [(w, i, piece) for w in range(of.num_workers) for i, piece in enumerate(of.pieces(layer, w))]
