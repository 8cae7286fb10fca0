"""Transfers of pages that memory workers have begun and not ended, as the driver follows them."""

from __future__ import annotations

from dataclasses import dataclass

from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.step_plan import Transfer
from lamina.scheduler.sequence import Sequence

from .prefetch import LoadableKv


@dataclass
class PageTransfer:
    op: Transfer
    num_waiting: int  # reports to come
    pages: int  # that are where they were to be
    error: str = ""


@dataclass
class SequenceLoad:
    sequence: Sequence
    loadable: LoadableKv
    num_waiting: int  # transfers under way
    num_not_ready: int  # gates that are to open before its first rows
    num_valid_tokens: int  # tokens that are there, as far as is known
    error: str = ""


@dataclass
class SequenceSave:
    location: KvLocation
    keys: set[bytes]
    num_waiting: int
    error: str = ""
