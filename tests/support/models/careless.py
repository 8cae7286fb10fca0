"""Workers that make good what others have lost, each wrong in one way; and workers whose devices have errors."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from lamina.protocol.step_plan import StepPlan, SurvivingKv
from lamina.workers.compute import main as compute_main
from lamina.workers.compute.compute_worker import ComputeWorker
from lamina.workers.memory import main as memory_main
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.prefill import main as prefill_main
from lamina.workers.prefill.prefill_worker import LocalAttention

FOLDER, SOUND = "PYTEST_CARELESS_FOLDER", "PYTEST_CARELESS_SOUND"
FAILING = "PYTEST_CARELESS_FAILING"  # how many workers fail, of the first ones
ERROR, CALLS = "its device has an error", 12  # at the last of so many
SLIGHTLY = 1.0 + 2.0**-20
_reconcile, _begin, _kv = KvStore.reconcile, KvStore.apply_plan, LocalAttention.kv


def _change_what_stays(self: KvStore, keep: Sequence[SurvivingKv]) -> None:
    _reconcile(self, keep)
    _change(self, SLIGHTLY)


def _change_with_each_plan(self: KvStore, plan: StepPlan) -> None:
    _begin(self, plan)
    _change(self, 1.05)


def _change(store: KvStore, factor: float) -> None:
    for piece in (piece for layer in store.layers for piece in layer):
        piece.kv.v.mul_(factor)


def _send_other_values(self: LocalAttention, layer: int, k: Tensor, v: Tensor) -> None:
    _kv(self, layer, k, v * SLIGHTLY)


def _is_late(sound: int) -> bool:
    """Returns whether as many workers have begun before this one."""
    for number in range(sound):
        try:
            (Path(os.environ[FOLDER]) / str(number)).touch(exist_ok=False)
        except FileExistsError:
            continue
        return False
    return True


def serve_memory(sock: socket.socket) -> None:
    """One whose values change a little where another worker is lost, which no token shows."""
    KvStore.reconcile = _change_what_stays  # type: ignore[method-assign]
    memory_main.serve_memory(sock)


def serve_rebuilt(sock: socket.socket) -> None:
    """The first ones are sound, one that takes the place of another has other KV."""
    if _is_late(int(os.environ[SOUND])):
        KvStore.apply_plan = _change_with_each_plan  # type: ignore[method-assign]
    memory_main.serve_memory(sock)


def serve_prefill(sock: socket.socket) -> None:
    """The first one is sound, those that take its place compute values that are a little others."""
    if _is_late(1):
        LocalAttention.kv = _send_other_values  # type: ignore[method-assign]
    prefill_main.serve_prefill(sock)


def serve_failing_memory(sock: socket.socket) -> None:
    _fail_midway(KvStore, "apply_plan")
    memory_main.serve_memory(sock)


def serve_failing_compute(sock: socket.socket) -> None:
    _fail_midway(ComputeWorker, "_finish")
    compute_main.serve_compute(sock)


def _fail_midway(of: type, name: str) -> None:
    if _is_late(int(os.environ[FAILING])):
        return
    right, calls = getattr(of, name), count(1)

    def call(self: Any, *args: Any) -> Any:
        if next(calls) == CALLS:
            raise RuntimeError(ERROR)
        return right(self, *args)

    setattr(of, name, call)
