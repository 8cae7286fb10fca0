"""The KV blocks that sequences hold in all layer groups: ids and counts only, no tensors, no I/O."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

from lamina.config.partition import KvShards
from lamina.protocol.kv_placement import KvLocation, KvPlacement
from lamina.protocol.step_plan import Fork, SequenceOp, StepPlan, SurvivingKv

from .block_counts import num_kv_shards
from .extents import Extent, Extents, PlanError, check_exists

# Extents that a plan changes (None: freed), extents of sequences that continue in their last block, and its forks.
PlannedExtents = tuple[dict[int, Extent | None], dict[int, Extent], list[Fork]]
BlockCopy = tuple[int, int]  # from one block to another


class BlockPool:
    """The blocks ``0 .. num_blocks`` of one layer group. A block is free once no sequence holds it."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._free = array("q", range(num_blocks - 1, -1, -1))  # the last one is allocated next
        self._holders: dict[int, int] = {}  # block -> holders, for blocks that several sequences hold
        self.freed: list[int] | None = None  # blocks that have become free; None: not recorded

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def has_shared(self) -> bool:
        """Return whether some block has several holders."""
        return bool(self._holders)

    def allocate(self) -> int:
        """Return a block for one holder. Raises IndexError if none is free."""
        return self._free.pop()

    def allocate_many(self, count: int) -> array[int]:
        """Return ``count`` blocks, in the order of ``allocate``. Raises IndexError if too few are free."""
        left = len(self._free) - count
        if left < 0:
            raise IndexError(f"{count} blocks are needed, and {len(self._free)} are free")
        taken = self._free[: left - 1 if left else None : -1] if count else array("q")
        del self._free[left:]
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add one holder to each of ``blocks``."""
        for block in blocks:
            self._holders[block] = self.num_holders(block) + 1

    def restore(self, blocks: Iterable[int]) -> None:
        """Hold exactly ``blocks``, each as often as it is listed. They belong to this pool."""
        named = Counter(blocks)
        self._free = array("q", (b for b in range(self._num_blocks - 1, -1, -1) if b not in named))
        self._holders = {block: n for block, n in named.items() if n > 1}

    def free(self, blocks: Iterable[int]) -> None:
        """Remove one holder from each of ``blocks``. Of those that become free, the last one is allocated next."""
        if not self._holders and self.freed is None:  # the usual case, in an engine
            self._free.extend(blocks)
            return
        for block in blocks:
            left = self.num_holders(block) - 1
            if not left:
                self._free.append(block)
                if self.freed is not None:
                    self.freed.append(block)
            elif left == 1:
                del self._holders[block]
            else:
                self._holders[block] = left

    def num_holders(self, block: int) -> int:
        """Return how many sequences hold a block that is not free."""
        return self._holders.get(block, 1)

    def check(self, held: Iterable[int]) -> None:
        """Raise RuntimeError unless this pool agrees with the tables, which list the blocks ``held``."""
        named = Counter(held)
        if sorted([*self._free, *named]) != list(range(self._num_blocks)):
            raise RuntimeError("a KV block was lost, or is free and held")
        if any(self.num_holders(block) != n for block, n in named.items()) or not self._holders.keys() <= named.keys():
            raise RuntimeError("a KV block has other holders than the tables that name it")


class SequenceBlocks:
    """The blocks of all sequences after the plans applied so far.

    Group g keeps what lies in ``kv_shards[g]``, by the locations of sequences, rows and grants.
    """

    def __init__(
        self,
        windows: Sequence[int],
        num_blocks: Sequence[int],
        block_size: int,
        kv_shards: Sequence[KvShards] | None = None,
        stripe_blocks: int = 0,
        stays: bool = False,
        sparse: Sequence[bool] = (),
    ) -> None:
        """``windows[g]``: tokens, 0: all. ``num_blocks[g]``: KV blocks of group g. ``kv_shards``: None: all of them in
        every group. ``stays``: ``single_shard`` of KvPlacement; ``sparse``: see Extents.
        """
        kv_shards = [KvShards()] * len(windows) if kv_shards is None else kv_shards
        same = len(windows) == len(num_blocks) == len(kv_shards) > 0
        if not same or min(num_blocks) < 1 or min(windows) < 0 or block_size < 1:
            raise ValueError(f"block tables of windows {windows}, {num_blocks} blocks of {block_size} tokens")
        self.windows = tuple(windows)
        self.num_blocks = tuple(num_blocks)
        self.block_size = block_size
        self.kv_shards = tuple(kv_shards)
        self.stripe_blocks = stripe_blocks
        self.placement = KvPlacement(num_kv_shards(kv_shards), stripe_blocks, stays)
        self.sparse = tuple(sparse) or (False,) * len(windows)
        if any(each and (w or not x.has_all) for each, w, x in zip(self.sparse, windows, kv_shards, strict=True)):
            raise ValueError("block tables of sparse layers with a window, or of some KV shards")
        self._extents = Extents(self.windows, block_size, self.kv_shards, self.placement, self.sparse)
        self.sequence_extents: dict[int, Extent] = {}
        self._last: dict[int, StepPlan] = {}  # batch -> its last plan
        self._tables: list[dict[int, array[int]]] = [{} for _ in windows]
        self._pools = [BlockPool(n) for n in num_blocks]
        # Of a CommitMigration: group, sequence -> number -> block.
        self._num_taken: dict[tuple[int, int], dict[int, int]] = {}
        # The last outcome of ``can_apply``.
        self._checked: tuple[StepPlan, list[SequenceOp], PlannedExtents] | None = None
        self.pending_copies: list[list[BlockCopy]] = [[] for _ in windows]  # by group, of the plan applied last

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """The number of free blocks, by group."""
        return tuple(pool.num_free for pool in self._pools)

    def take_freed(self) -> list[list[int]]:
        """Return, by group, the blocks freed since the last call, even if they are held again; nothing at first."""
        blocks = [pool.freed or [] for pool in self._pools]
        for pool in self._pools:
            pool.freed = []
        return blocks

    @property
    def num_kv_shards(self) -> int:
        """The partition's number of KV shards, as far as it shows here."""
        return self.placement.num_kv_shards

    @property
    def sequences(self) -> list[int]:
        """The sequences that exist, oldest first."""
        return list(self.sequence_extents)

    def length(self, sequence: int) -> int:
        """Return the tokens of ``sequence`` up to the end of its last rows. Raises PlanError if it does not exist."""
        return self._extent(self.sequence_extents, sequence).length

    def location(self, sequence: int) -> KvLocation:
        """Return the location of ``sequence``. Raises PlanError if it does not exist."""
        return self._extent(self.sequence_extents, sequence).location

    def block_table(self, group: int, sequence: int) -> tuple[int, array[int]]:
        """Return (start, ids): the kept blocks of the sequence from the ``start``-th on, in order. Read only."""
        return self._extent(self.sequence_extents, sequence).starts[group], self._tables[group][sequence]

    def block_ids(self, group: int, sequence: int, low: int, high: int) -> array[int]:
        """Return the ids of blocks ``low .. high`` of the sequence, counted from token 0, without dropped ones. All
        other blocks in that range are kept.
        """
        extent = self._extent(self.sequence_extents, sequence)
        at, stop = (self._extents.table_index(group, extent, n) for n in (low, high))
        return self._tables[group][sequence][at:stop]

    def dropped_blocks(self, group: int, sequence: int) -> tuple[int, ...]:
        """Return the blocks of the sequence that the group no longer keeps, counted from token 0, ascending."""
        return self._extent(self.sequence_extents, sequence).dropped_blocks if self.sparse[group] else ()

    def max_blocks(self, location: KvLocation, length: int, max_rows: int) -> list[int]:
        """Return, by group, the most blocks that one sequence at ``location``, of up to ``length`` tokens, holds."""
        return self._extents.max_blocks(location, length, max_rows)

    def count_blocks(self, sequences: Iterable[int]) -> tuple[int, ...]:
        """Return, by group, the blocks that ``sequences`` hold together; those that do not exist hold none."""
        known = [s for s in sequences if s in self.sequence_extents]
        return tuple(len({b for s in known for b in tables[s]}) for tables in self._tables)

    def exclusive_blocks(self, sequence: int) -> tuple[int, ...]:
        """Return, by group, the blocks that only ``sequence`` holds: so many become free with it. Raises PlanError."""
        self._extent(self.sequence_extents, sequence)
        each = zip(self._pools, self._tables, strict=True)
        return tuple(sum(pool.num_holders(b) == 1 for b in tables[sequence]) for pool, tables in each)

    def num_surviving_blocks(self, keep: Iterable[SurvivingKv]) -> int:
        """Return the blocks of ``keep`` in all groups together; shared ones count once for each sequence."""
        return sum(sum(self._extents.num_held_blocks(self._extents.extent_of_surviving(each))) for each in keep)

    def surviving_block_ids(self, keep: Iterable[SurvivingKv]) -> array[int]:
        """Return the blocks of the KV of ``keep`` alone: sequence by sequence, group by group."""
        return array("q", (block for each in keep for tables in self._tables for block in tables[each.sequence]))

    def restore(self, keep: Sequence[SurvivingKv], ids: Sequence[int]) -> None:
        """Hold only the KV of ``keep``, in the blocks ``ids`` that ``surviving_block_ids`` of other tables returned. So
        sequences share the same blocks in both. Raises PlanError if that is impossible.
        """
        extents, at = {each.sequence: self._extents.extent_of_surviving(each) for each in keep}, 0
        tables: list[dict[int, array[int]]] = [{} for _ in self.windows]
        for sequence, extent in extents.items():
            for g, count in enumerate(self._extents.num_held_blocks(extent)):
                tables[g][sequence] = array("q", ids[at : at + count])
                at += count
                own = set(tables[g][sequence])
                if len(own) != count or not all(0 <= block < self.num_blocks[g] for block in own):
                    raise PlanError(f"sequence {sequence}: blocks that cannot be {count} of {self.num_blocks[g]}")
        if at != len(ids) or len(extents) != len(keep):
            raise PlanError(f"{len(ids)} blocks for {len(keep)} sequences, which hold {at}")
        self.sequence_extents, self._tables, self._checked = dict(extents), tables, None
        self._last.clear()
        for pool, of in zip(self._pools, tables, strict=True):
            pool.restore(block for table in of.values() for block in table)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block is free or in tables, and every table is as long as its sequence."""
        held = {sequence: self._extents.num_held_blocks(extent) for sequence, extent in self.sequence_extents.items()}
        for g, (pool, tables) in enumerate(zip(self._pools, self._tables, strict=True)):
            pool.check(b for table in tables.values() for b in table)
            for sequence, blocks in held.items():
                if len(tables[sequence]) != blocks[g]:
                    raise RuntimeError(f"layer group {g}: sequence {sequence} holds {len(tables[sequence])} blocks")
            if tables.keys() != self.sequence_extents.keys():
                raise RuntimeError(f"layer group {g}: a table without a sequence")

    def _extent(self, changes: dict[int, Extent | None] | dict[int, Extent], sequence: int) -> Extent:
        return check_exists(self._known(changes, sequence), sequence)

    def _known(self, changes: dict[int, Extent | None] | dict[int, Extent], sequence: int) -> Extent | None:
        return changes[sequence] if sequence in changes else self.sequence_extents.get(sequence)
