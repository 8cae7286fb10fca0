"""Ranks over gloo, torch's collectives between CPUs: TCP between all ranks, without a copy through slots.

gloo ends the process where sizes differ, and waits without looking at anything else: so ranks meet on the mesh before
each operation, with the size, and gloo has then only to bring the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from lamina.netstack import ChannelTimeout

from . import Facts, RankPlace
from .mesh import Mesh
from .process_group import OfGroup, Opened, failed, open_group


class Gloo(OfGroup):
    """One rank's end of a group that gloo carries."""

    def __init__(self, mesh: Mesh, opened: Opened, timeout_s: float) -> None:
        """``timeout_s``: of an operation, once all ranks are there."""
        super().__init__(mesh, opened)
        self._timeout_s = timeout_s
        self._wait_s = 0.0

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for other ranks, over the mesh and in gloo."""
        return self._mesh.wait_s + self._wait_s

    def launched(self) -> None:
        """Does nothing: no graph of a device holds calls of gloo."""

    def _do(self, start: Callable[[Any], Any], nbytes: int) -> None:
        self._mesh.meet(nbytes)
        began = time.perf_counter()
        try:
            start(self._group).wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            if time.perf_counter() - began >= self._timeout_s:
                raise ChannelTimeout(f"rank {self.rank}: gloo did not end within {self._timeout_s:g} s") from error
            raise failed(self._mesh, error) from error
        finally:
            self._wait_s += time.perf_counter() - began


def lacks(device: torch.device) -> str:
    """Why this torch cannot use gloo, whatever the device; "": it can."""
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        return ""
    return f": torch {torch.__version__} was built without it: use --collective mesh, or another torch"


def unfit(ranks: Sequence[Facts]) -> str:
    """Nothing: any ranks can use gloo."""
    return ""


def open_collective(mesh: Mesh, at: RankPlace) -> Gloo:
    """One rank's end; all ranks open theirs together. They find each other over the mesh."""

    def make(store: Any) -> Any:
        kind: Any = torch._C._distributed_c10d.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname=at.host)]
        options._threads = 1
        options._timeout = timedelta(seconds=at.start_timeout_s)
        return kind(store, mesh.rank, mesh.size, options)

    opened = open_group(mesh, at, make)
    opened.group._set_default_timeout(
        timedelta(seconds=at.step_timeout_s)
    )  # else its threads go on with given-up calls
    return Gloo(mesh, opened, at.step_timeout_s)
