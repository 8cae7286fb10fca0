"""The beginning of a waiting sequence: the stored tokens that it may have, and what becomes of it. Pure policy."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.step_plan import Fork, New

from .batch import Batch, ChunkPolicy
from .sequence import Sequence


class KvStart(NamedTuple):
    """Stored tokens with which a sequence may begin: the first ``length`` of its own.

    ``locations``: places where it may begin; that of a fork is its source's. ``source``: the number of the sequence in
    the pool that has them and is forked; None: pages of ``keys`` are loaded. ``blocks``: those that a fork need not
    take, by layer group. ``is_swapped``: it is its own KV, of before it was preempted. ``page_shifts``: of each page,
    from how many positions further on it comes; empty: none is moved. ``state_keys``: of recurrent states after
    ``length`` tokens, which are loaded, too.
    """

    length: int
    locations: tuple[KvLocation, ...]
    keys: tuple[bytes, ...] = ()
    source: int | None = None
    blocks: tuple[int, ...] = ()
    is_swapped: bool = False
    page_shifts: tuple[int, ...] = ()
    state_keys: tuple[bytes, ...] = ()


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


@dataclass
class PromptRows:
    """The place where a sequence's prompt is computed. ``on_prefill_worker``: a prefill worker, not decoding steps.
    ``prefers_prefill_worker``: one will, once KV that other sequences are computing of this prompt is cached.
    ``first_chunk_s``: seconds of its first chunk on a prefill worker. ``token_s``: of a row on compute workers; 0:
    unknown.
    """

    on_prefill_worker: bool = False
    prefers_prefill_worker: bool = False
    first_chunk_s: float = 0.0
    token_s: float = 0.0


@dataclass
class Candidates:
    """The ways in which a waiting sequence may begin, which features fill in.

    ``starts``: KV that it may begin with, the best first. ``may_begin_anew``: it may begin without KV if none of them
    has room. ``is_settled``: no feature adds starts any more. ``near``: where it begins if there is room; None:
    anywhere. ``placement``: its place, set when it begins.
    """

    sequence: Sequence
    batches: Several[Batch]
    chunk_policy: ChunkPolicy
    verdict: Verdict = Verdict.BEGINS
    starts: list[KvStart] = field(default_factory=list)
    may_begin_anew: bool = True
    is_settled: bool = False
    near: KvLocation | None = None
    rows: PromptRows = field(default_factory=PromptRows)
    placement: DecodePlacement | None = None

    @property
    def alone(self) -> bool:
        """True if nothing runs."""
        return not any(batch.running for batch in self.batches)

    def next_chunk_after(self, known: int) -> int:
        """The number of tokens in the sequence's first chunk, if its first ``known`` tokens have KV."""
        missing, policy = self.sequence.num_tokens_with_placeholders - known, self.chunk_policy
        return policy.next_chunk(missing, policy.chunk, known)

    @property
    def num_stored_tokens(self) -> int:
        """The number of the sequence's first tokens whose KV is in the pool."""
        return next((start.length for start in self.starts if start.source is not None), 0)
