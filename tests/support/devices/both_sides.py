"""Helpers of tests: the compute side and memory workers in one thread, over real messages and no channel."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lamina.config.partition import Partition
from lamina.ops.attention import AttentionBackend
from lamina.ops.attention.merge import Partial
from lamina.protocol.step_plan import BindRequest, MessageKey, MessageKind, StepPlan, decode, encode
from lamina.workers.compute.attention_client import AttentionClient, MemoryWorkerClient
from lamina.workers.memory.attention_step import AttentionStep
from lamina.workers.memory.kv_store import KvStore

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

    def __init__(self, bind: BindRequest) -> None:
        self.store = KvStore(bind, CPU)
        self.step: AttentionStep
        self.sent: dict[int, bytes] = {}  # by kind, of the layer
        self.o = deque[tuple[bytes, bytearray]]()
        self.largest = {MessageKind.Q: 0, MessageKind.KV: 0, MessageKind.O: 0}

    def begin(self, plan: StepPlan) -> None:
        self.store.apply_plan(plan)
        self.step = AttentionStep(self.store, plan)

    def serve(self, layer: int) -> None:
        """The layer's work, as a session does it."""
        x, step, sent = self.step.messages(layer), self.step, self.sent
        assert (len(sent.get(MessageKind.Q, b"")), len(sent.get(MessageKind.KV, b""))) == (x.q_bytes, x.kv_bytes)
        q, kv = (self.store.message_tensor(memoryview(sent.pop(kind, b""))) for kind in (MessageKind.Q, MessageKind.KV))
        stored, rows, out = step.attend_stored(layer, q), step.rows(layer, kv), bytearray(x.o_bytes)
        if out:
            room = memoryview(out)
            halves = (
                self.store.staging.device_buffer(half) for half in (room[: x.partial_bytes], room[x.partial_bytes :])
            )
            step.finish(layer, stored, q, rows, *halves)
            plan = step.plan
            self.o.append((MessageKey(MessageKind.O, plan.step, plan.batch, plan.epoch, layer).pack(), out))
        step.write(layer, rows)
        for kind, nbytes in ((MessageKind.Q, x.q_bytes), (MessageKind.KV, x.kv_bytes), (MessageKind.O, x.o_bytes)):
            self.largest[kind] = max(self.largest[kind], nbytes)

    # The channel:
    def reserve(self, nbytes: int, timeout_s: float = 0.0) -> Any:
        return SimpleNamespace(data=memoryview(bytearray(b"\xff" * nbytes)))  # NaN, where nothing is written

    def put_signal(self, slot: Any, tag: bytes) -> None:
        self.sent[MessageKey.unpack(tag).kind] = bytes(slot.data)

    def wait_signal(self, timeout_s: float) -> Any:
        tag, data = self.o.popleft()
        return SimpleNamespace(tag=tag, data=memoryview(data))

    def release(self, arrival: Any) -> None:
        """Nothing to do."""


class Both:
    """A pool over memory workers of ``binds``. ``backend``: of all, in place of the one that is bound."""

    def __init__(
        self, binds: Sequence[BindRequest], backend: AttentionBackend | None = None, partition: Partition | None = None
    ) -> None:
        self.sides, self.layers = [Side(b) for b in binds], binds[0].layers
        for side in self.sides if backend else []:
            side.store.backend = backend  # type: ignore[assignment]
        links = [MemoryWorkerClient(side, w, 1.0) for w, side in enumerate(self.sides)]  # type: ignore[arg-type]
        merging = backend or self.sides[0].store.backend
        self.pool = AttentionClient(links, partition or binds[0].partition, self.layers, merging)

    def begin(self, plan: StepPlan) -> StepPlan:
        """Every worker takes the plan, as it comes over the wire."""
        plan = decode(StepPlan, encode(plan))
        for side in self.sides:
            side.begin(plan)
        self.pool.begin_step(plan)
        return plan

    def layer(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [R, Hq, D], k [R, Hkv, D], v [R, Hkv, Dv] -> o [R, Hq, Dv]"""
        self.pool.q(layer, q.unsqueeze(2))
        self.pool.kv(layer, k.unsqueeze(2), v.unsqueeze(2))
        for side in self.sides:
            side.serve(layer)
        return self.pool.o(layer, len(q), q.dtype)[:, 0]
