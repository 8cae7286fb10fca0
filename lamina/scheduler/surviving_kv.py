"""Counts KV that is stored, and KV of a sequence that is left after a loss, by the memory workers' reports. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.step_plan import SurvivingKv

from .sequence import Sequence as RunningSequence


class SurvivingTokens:
    """Counts tokens that every holder of a part of their sequence has in all layers; others are computed again."""

    def __init__(
        self, accounting: BlockTables, holders: Sequence[Sequence[int]], reports: Sequence[Mapping[int, int]]
    ) -> None:
        """``holders``: group -> memory workers; ``reports``: see EpochChanged, empty for those that were lost."""
        self._ledger, self._holders, self._reports = accounting, holders, reports

    def count(self, wanted: SurvivingKv) -> int:
        """Count the tokens ``wanted`` that can stay; 0 if a block that the next token needs was given back."""
        held = self._ledger.surviving_blocks(wanted)
        if held is None:
            return 0
        workers = {w for blocks, holders in zip(held, self._holders, strict=True) if blocks for w in holders}
        length = min([wanted.length, *(self._reports[w].get(wanted.sequence, 0) for w in workers)])
        return length if self._ledger.surviving_blocks(structs.replace(wanted, length=length)) is not None else 0


def num_stored_tokens(running: Iterable[RunningSequence]) -> int:
    """Tokens of running sequences whose KV is stored or on its way."""
    return sum(s.num_computed_tokens for s in running if not s.finished)
