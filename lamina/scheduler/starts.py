"""The beginning of a waiting sequence: the stored tokens that it may have, and what becomes of it. Pure policy."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, Protocol

from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.step_plan import Fork, New

from .batch import Batch, ChunkPolicy
from .kv_manager.block_accounting import Blocks
from .sequence import Sequence


class KvStart(Protocol):
    """Stored tokens with which a sequence may begin: those of another sequence in the pool, or loaded ones."""

    @property
    def length(self) -> int:
        """Tokens."""
        ...

    @property
    def source(self) -> int | None:
        """The number of the sequence that has them and is forked; None: they are loaded."""
        ...

    @property
    def locations(self) -> tuple[KvLocation, ...]:
        """Places where the sequence may begin. That of a fork is its source's."""
        ...

    @property
    def blocks(self) -> Blocks:
        """KV blocks that the sequence need not take, by layer group; empty: none."""
        ...

    @property
    def is_swapped(self) -> bool:
        """True of the sequence's own KV, from before it was preempted."""
        ...


def start_op(sequence: Sequence, start: KvStart | None) -> New | Fork:
    """The op that starts an admitted sequence, which has its id."""
    if start is None or start.source is None:
        return New(sequence.id)
    return Fork(sequence.id, start.source, start.length)


class Verdict(Enum):
    """The fate of a sequence that waits first in line."""

    BEGINS = auto()
    STEPS_ASIDE = auto()  # it waits on, and those after it need not wait for it
    HOLDS_UP = auto()  # it waits on, and so do those after it


class DecodePlacement(NamedTuple):
    """The place where a sequence decodes, as it is chosen. ``loads``: tokens that the attention of each batch reads, of
    which the least is taken. ``reason``: there, of all places. ``free_blocks``: KV blocks that are promised
    to no sequence, by layer group.
    """

    batch: int
    loads: Several[int]
    location: KvLocation
    reason: str
    free_blocks: Several[int]


def _never(known: int) -> bool:
    return False


def _unknown(tokens: int) -> float:
    return 0.0


@dataclass
class Candidates:
    """The ways in which a waiting sequence may begin, which features fill in.

    ``alone``: nothing runs. ``starts``: the best first. ``may_begin_anew``: it begins without any, where there is no
    room for these. ``is_settled``: no feature adds starts any more. ``loads_kv``: the best start is loaded, so its
    chunk has no rows of it yet. ``on_prefill_worker``: its rows are computed elsewhere.
    ``is_for_prefill_worker``: whether they would be, if so many tokens are stored. ``prefill_s``: seconds for so many
    tokens of a prompt; 0: nothing is known. ``placement``: is there once it begins.
    """

    sequence: Sequence
    batches: Several[Batch]
    chunk_policy: ChunkPolicy
    alone: bool
    verdict: Verdict = Verdict.BEGINS
    starts: list[KvStart] = field(default_factory=list)
    may_begin_anew: bool = True
    is_settled: bool = False
    loads_kv: bool = False
    on_prefill_worker: bool = False
    is_for_prefill_worker: Callable[[int], bool] = _never
    prefill_s: Callable[[int], float] = _unknown
    placement: DecodePlacement | None = None

    @property
    def num_stored_tokens(self) -> int:
        """Tokens that lie in the pool for it."""
        return next((start.length for start in self.starts if start.source is not None), 0)
