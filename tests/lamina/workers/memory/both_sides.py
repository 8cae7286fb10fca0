"""For tests: the compute side and memory workers in one thread, over real messages and no channel."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lamina.attention import AttentionBackend
from lamina.attention.merge import Partial
from lamina.compute.links import MemoryLink
from lamina.compute.memory_pool import MemoryPool
from lamina.memory.step import Step
from lamina.memory.store import Store
from lamina.protocol.partition import Partition
from lamina.protocol.plan import Bind, Key, Kind, StepPlan, decode_plan, encode

CPU = torch.device("cpu")


class Echo(AttentionBackend):
    """Finds nothing among stored tokens; attention over new ones gives each row its q. Needs v_dim = qk_dim."""

    def prepare(self, rows: Any) -> Any:
        return rows

    def attend_stored(self, op: Any, prepared: Any, store: Any, q: Tensor) -> Partial:
        return Partial(torch.zeros(q.shape), torch.full(q.shape[:2], float("-inf")))

    def attend_new(self, op: Any, prepared: Any, q: Tensor, kv: Any) -> Partial:
        assert q.shape == (len(kv.k), op.q_heads, op.qk_dim)
        assert kv.v.shape == (len(kv.k), op.kv_heads, op.v_dim)
        return Partial(q.to(torch.float32), torch.zeros(q.shape[:2]))


class Side:
    """A memory worker, and the compute side's channel to it."""

    def __init__(self, bind: Bind) -> None:
        self.store = Store(bind, CPU)
        self.step: Step
        self.sent: dict[int, bytes] = {}  # by kind, of the layer
        self.o = deque[tuple[bytes, bytearray]]()
        self.largest = {Kind.Q: 0, Kind.KV: 0, Kind.O: 0}

    def begin(self, plan: StepPlan) -> None:
        self.store.begin(plan)
        self.step = Step(self.store, plan)

    def serve(self, layer: int) -> None:
        """The layer's work, as a session does it."""
        x, step, sent = self.step.messages(layer), self.step, self.sent
        assert (len(sent.get(Kind.Q, b"")), len(sent.get(Kind.KV, b""))) == (x.q_bytes, x.kv_bytes)
        q, kv = (self.store.message(memoryview(sent.pop(kind, b""))) for kind in (Kind.Q, Kind.KV))
        stored, rows, out = step.attend_stored(layer, q), step.rows(layer, kv), bytearray(x.o_bytes)
        if out:
            room = memoryview(out)
            halves = (self.store.staging.room(half) for half in (room[: x.partial_bytes], room[x.partial_bytes :]))
            step.finish(layer, stored, q, rows, *halves)
            plan = step.plan
            self.o.append((Key(Kind.O, plan.step, plan.batch, plan.view, layer).pack(), out))
        step.write(layer, rows)
        for kind, nbytes in ((Kind.Q, x.q_bytes), (Kind.KV, x.kv_bytes), (Kind.O, x.o_bytes)):
            self.largest[kind] = max(self.largest[kind], nbytes)

    # The channel:
    def reserve(self, nbytes: int, timeout_s: float = 0.0) -> Any:
        return SimpleNamespace(data=memoryview(bytearray(b"\xff" * nbytes)))  # NaN, where nothing is written

    def put_signal(self, slot: Any, tag: bytes) -> None:
        self.sent[Key.unpack(tag).kind] = bytes(slot.data)

    def wait_signal(self, timeout_s: float) -> Any:
        tag, data = self.o.popleft()
        return SimpleNamespace(tag=tag, data=memoryview(data))

    def release(self, arrival: Any) -> None:
        """Nothing to do."""


class Both:
    """A pool over memory workers of ``binds``. ``backend``: of all, in place of the one that is bound."""

    def __init__(
        self, binds: Sequence[Bind], backend: AttentionBackend | None = None, partition: Partition | None = None
    ) -> None:
        self.sides, self.layers = [Side(b) for b in binds], binds[0].layers
        for side in self.sides if backend else []:
            side.store.backend = backend  # type: ignore[assignment]
        links = [MemoryLink(side, w, 1.0) for w, side in enumerate(self.sides)]  # type: ignore[arg-type]
        merging = backend or self.sides[0].store.backend
        self.pool = MemoryPool(links, partition or binds[0].partition, self.layers, merging)

    def begin(self, plan: StepPlan) -> StepPlan:
        """Every worker takes the plan, as it comes over the wire."""
        plan = decode_plan(encode(plan))
        for side in self.sides:
            side.begin(plan)
        self.pool.select(plan)
        return plan

    def layer(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [R, Hq, D], k [R, Hkv, D], v [R, Hkv, Dv] -> o [R, Hq, Dv]"""
        self.pool.q(layer, q.unsqueeze(2))
        self.pool.kv(layer, k.unsqueeze(2), v.unsqueeze(2))
        for side in self.sides:
            side.serve(layer)
        return self.pool.o(layer, len(q), q.dtype)[:, 0]
