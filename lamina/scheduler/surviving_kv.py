"""How much KV there is, and how much of a sequence's is left behind a loss, as memory workers have reported. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from lamina.protocol.step_plan import SurvivingKv

from .kv_manager.block_accounting import BlockAccounting
from .sequence import Sequence as RunningSequence


class SurvivingTokens:
    """Whoever holds a part of a sequence counts: what it has not in all layers is to be computed again."""

    def __init__(
        self, accounting: BlockAccounting, holders: Sequence[Sequence[int]], reports: Sequence[Mapping[int, int]]
    ) -> None:
        """``holders``: group -> memory workers; ``reports``: see EpochChanged, empty for those that were lost."""
        self._ledger, self._holders, self._reports = accounting, holders, reports

    def count(self, wanted: SurvivingKv) -> int:
        """How many of the tokens ``wanted`` can stay; 0 where a block that the next token needs was given back."""
        held = self._ledger.surviving_blocks(wanted)
        if held is None:
            return 0
        workers = {w for blocks, holders in zip(held, self._holders, strict=True) if blocks for w in holders}
        length = min([wanted.length, *(self._reports[w].get(wanted.sequence, 0) for w in workers)])
        return length if self._ledger.surviving_blocks(structs.replace(wanted, length=length)) is not None else 0


def num_stored_tokens(running: Iterable[RunningSequence]) -> int:
    """Tokens of running sequences whose KV is stored or on its way."""
    return sum(s.num_computed_tokens for s in running if not s.finished)
