"""Transfers of pages that memory workers have begun and not ended, as the driver follows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lamina.engine.sequence import Sequence
from lamina.protocol.placement import Place
from lamina.protocol.plan import Transfer

from .ahead import Load


class Moved(NamedTuple):
    """All transfers of a sequence have ended. ``loaded``: the sequence, where they were loads; else ``saved`` has its
    number. ``error``: why not all pages are where they were to be.
    """

    loaded: Sequence | None
    saved: int
    error: str


@dataclass
class MovingPages:
    op: Transfer
    left: int  # reports to come
    pages: int  # that are where they were to be
    error: str = ""


@dataclass
class LoadingSequence:
    sequence: Sequence
    wanted: Load
    left: int  # transfers under way
    shut: int  # gates that are to open before its first rows
    valid: int  # tokens that are there, as far as is known
    error: str = ""


@dataclass
class SavingSequence:
    place: Place
    keys: set[bytes]
    left: int
    error: str = ""
