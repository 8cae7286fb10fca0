"""The memory workers' KV blocks, as the scheduler sees them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, Self

from lamina.config.partition import KvShards
from lamina.protocol.kv_placement import KvLocation, KvPlacement
from lamina.protocol.step_plan import ContextShift, RowRange, StepPlan, SurvivingKv

Blocks = tuple[int, ...]  # by layer group


class BlockAccounting(Protocol):
    """The memory workers' KV blocks as the engine knows them; protocol.blocks.block_tables.BlockTables is one. Counts
    are by layer group.
    """

    kv_shards: tuple[KvShards, ...]  # group -> the KV shards that it keeps
    num_blocks: tuple[int, ...]  # group -> KV blocks
    sparse: tuple[bool, ...]  # group -> whether sequences may lose blocks there
    windows: tuple[int, ...]  # group -> tokens that its layers see; 0 = all
    block_size: int  # tokens
    placement: KvPlacement  # its stripes in blocks

    @property
    def num_kv_shards(self) -> int:
        """The KV shards of the partition: a sequence may begin in each."""
        ...

    @property
    def free_blocks(self) -> Blocks:
        """Blocks that no sequence holds."""
        ...

    def max_blocks(self, location: KvLocation, length: int, max_rows: int) -> list[int]:
        """Blocks that a sequence at ``location``, of up to ``length`` tokens, takes at most, ``max_rows`` rows a "
        "step."""
        ...

    def blocks_needed(self, rows: Iterable[RowRange]) -> Blocks:
        """Blocks that ``rows`` take more than they give back."""
        ...

    def count_blocks(self, sequences: Iterable[int]) -> Blocks:
        """Blocks that some of ``sequences`` hold."""
        ...

    def exclusive_blocks(self, sequence: int) -> Blocks:
        """Blocks that ``sequence`` holds alone."""
        ...

    def can_shift(self, op: ContextShift) -> bool:
        """Return whether every memory worker can do it, if nothing else is done before."""
        ...

    def can_apply(self, plan: StepPlan) -> bool:
        """Return whether every memory worker can take the plan."""
        ...

    def apply(self, plan: StepPlan) -> None:
        """Book the plan, exactly as the memory workers will."""
        ...

    def holds_exclusively(self, sequence: int, position: int) -> bool:
        """Return whether no other sequence holds the blocks of this one from that of a position on."""
        ...

    def surviving_blocks(self, keep: SurvivingKv) -> Blocks | None:
        """Blocks of what ``keep`` leaves of its sequence; None where some of them were given back."""
        ...

    def forkable_blocks(self, keep: SurvivingKv) -> Blocks | None:
        """Blocks that a fork of what ``keep`` leaves shares with its sequence; None where some were given back."""
        ...

    def reconcile(self, keep: Sequence[SurvivingKv], *, moved: bool = False) -> None:
        """Book that memory workers hold what ``keep`` says, and nothing else; ``moved``: it has come from elsewhere."""
        ...

    def replace_with(self, other: Self) -> None:
        """Have the groups of another one, and what it holds; that is used no more."""
        ...
