"""Loads and saves of pages whose end not all memory workers have reported. Pure policy: no torch, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lamina.protocol.step_plan import Transfer
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.starts import KvStart

MAX_PAGES_PER_SAVE = 8  # pages of one save, so that a worker with a slow disk reports progress


@dataclass
class PageTransfer:
    """One load or save."""

    op: Transfer
    num_waiting: int  # pending reports
    pages: int  # pages saved by all workers that have reported
    error: str = ""
    has_failed: bool = False  # else the next page is a miss


@dataclass
class SequenceLoad:
    """All loads of a sequence."""

    sequence: Sequence
    loadable: KvStart
    num_waiting: int  # transfers in flight
    num_not_ready: int  # pending reports before its first rows
    num_valid_tokens: int  # loaded tokens, by the reports so far
    error: str = ""
    has_failed: bool = False  # else the next page is a miss


@dataclass
class SequenceSave:
    """All saves of a sequence."""

    keys: set[bytes]
    num_waiting: int
    error: str = ""


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Divide ``numbers`` into runs of consecutive ones, at most MAX_PAGES_PER_SAVE each."""
    runs = list[list[int]]()
    for number in numbers:
        if not runs or number != runs[-1][-1] + 1 or len(runs[-1]) == MAX_PAGES_PER_SAVE:
            runs.append([])
        runs[-1].append(number)
    return runs
