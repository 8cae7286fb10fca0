"""How much KV there is, and how much of a sequence's is left behind a loss, as memory workers have reported. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from lamina.protocol.plan import Keep

from .blocks.ledger import Ledger
from .sequence import Sequence as RunningSequence


class KeptKV:
    """Whoever holds a part of a sequence counts: what it has not in all layers is to be computed again."""

    def __init__(self, ledger: Ledger, holders: Sequence[Sequence[int]], reports: Sequence[Mapping[int, int]]) -> None:
        """``holders``: group -> memory workers; ``reports``: see ViewChanged, empty for those that were lost."""
        self._ledger, self._holders, self._reports = ledger, holders, reports

    def tokens(self, wanted: Keep) -> int:
        """How many of the tokens ``wanted`` can stay; 0 where a block that the next token needs was given back."""
        held = self._ledger.held_of(wanted)
        if held is None:
            return 0
        workers = {w for blocks, holders in zip(held, self._holders, strict=True) if blocks for w in holders}
        length = min([wanted.length, *(self._reports[w].get(wanted.sequence, 0) for w in workers)])
        return length if self._ledger.held_of(structs.replace(wanted, length=length)) is not None else 0


def num_stored(running: Iterable[RunningSequence]) -> int:
    """Tokens of running sequences whose KV is stored or on its way."""
    return sum(s.num_scheduled for s in running if not s.finished)
