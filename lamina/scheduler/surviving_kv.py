"""Counts KV that is stored, and KV of a sequence that is left after a loss, by the memory workers' reports. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import structs

from lamina.config.partition import KvShards
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.step_plan import SurvivingKv

from .sequence import Sequence as RunningSequence


class StateReports(NamedTuple):
    """The versions of recurrent states that memory workers have, see EpochChanged. ``shards``: for each worker the KV
    shards whose sequences have states there.
    """

    shards: Sequence[KvShards | None]
    versions: Sequence[Mapping[int, Sequence[int]]]

    def newest_common(self, wanted: SurvivingKv) -> int:
        """Return the most tokens, up to ``wanted``, after which all its workers have its state; 0 if there are none."""
        holders = [w for w, own in enumerate(self.shards) if own is not None and wanted.location.kv_shard in own]
        each = [set(self.versions[w].get(wanted.sequence, ())) for w in holders]
        return max((n for n in set.intersection(*each) if n <= wanted.length), default=0) if each else 0


class SurvivingTokens:
    """Counts tokens that every holder of a part of their sequence has in all layers; others are computed again."""

    def __init__(
        self,
        accounting: BlockTables,
        holders: Sequence[Sequence[int]],
        reports: Sequence[Mapping[int, int]],
        states: StateReports | None = None,
    ) -> None:
        """``holders``: group -> memory workers; ``reports``: see EpochChanged, empty for those that were lost.
        ``states``: of a model with recurrent layers.
        """
        self._ledger, self._holders, self._reports, self._states = accounting, holders, reports, states

    def count(self, wanted: SurvivingKv) -> int:
        """Count the tokens ``wanted`` that can stay; 0 if a block that the next token needs was given back."""
        held = self._ledger.surviving_blocks(wanted)
        if held is None:
            return 0
        workers = {w for blocks, holders in zip(held, self._holders, strict=True) if blocks for w in holders}
        length = min([wanted.length, *(self._reports[w].get(wanted.sequence, 0) for w in workers)])
        if self._states is not None:
            length = self._states.newest_common(structs.replace(wanted, length=length))
        return length if self._ledger.surviving_blocks(structs.replace(wanted, length=length)) is not None else 0


def num_stored_tokens(running: Iterable[RunningSequence]) -> int:
    """Tokens of running sequences whose KV is stored or on its way."""
    return sum(s.num_computed_tokens for s in running if not s.finished)
