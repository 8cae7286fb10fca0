"""What a Bind sets up on a memory worker, its heads of every layer and the KV blocks, and what a plan does to it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lamina.attention import Operator, get
from lamina.attention.merge import CHUNK_TOKENS, Partial
from lamina.attention.spec import AttentionSpec
from lamina.kv.blocks import BlockTables, layer_groups, split_memory
from lamina.kv.partition import Share
from lamina.kv.pool import LayerStore, allocate, row_table, write_index

from .stepplan import Bind, Bound, LayerShape, ProtocolError, StepPlan

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Store:
    """Sequences, blocks and tensors of one Bind. Holds state, decides nothing.

    Raises ValueError where the Bind asks for something that cannot be, ProtocolError where it contradicts itself.
    """

    def __init__(self, bind: Bind, device: torch.device) -> None:
        _check(bind)
        self.bind = bind
        self.dtype = DTYPES[bind.dtype]
        self.device = device
        self.backend = get(bind.backend, device, self.dtype)
        self.operators = [_operator(x, _share(bind, i), device) for i, x in enumerate(bind.layers)]
        self.windows, self.group = layer_groups([op.spec.window for op in self.operators])
        self.view = 0
        num_blocks = self._num_blocks()
        self.tables = BlockTables(self.windows, num_blocks, bind.block_size)
        self.layers = [self._allocate(op, num_blocks[g]) for op, g in zip(self.operators, self.group, strict=True)]
        self.bound = Bound(windows=self.windows, num_blocks=num_blocks, backend=type(self.backend).__name__.lower())

    def begin(self, plan: StepPlan) -> Step:
        """Apply a plan, all or nothing. Raises ProtocolError, PlanError, NoBlocksError: then nothing has changed."""
        bind = self.bind
        if plan.view < self.view:
            raise ProtocolError(f"step {plan.step} is of view {plan.view}, this worker is in view {self.view}")
        if plan.partition != bind.partition.id:
            raise ProtocolError(f"step {plan.step} is of partition {plan.partition}, not {bind.partition.id}")
        for replicas in (plan.source, plan.reply_to):
            if len(replicas) not in (0, len(bind.layers)) or any(not 0 <= r < bind.replicas for r in replicas):
                raise ProtocolError(f"step {plan.step} names {replicas} as replicas of {len(bind.layers)} layers")
        if plan.source[1:] != plan.reply_to[:-1]:
            raise ProtocolError(f"step {plan.step}: an O does not go to the replica of the next slice")
        if plan.num_rows > bind.max_rows:
            raise ProtocolError(f"step {plan.step} has {plan.num_rows} rows, {bind.max_rows} were bound")
        for row in plan.rows:
            if row.first + row.count > bind.max_model_len:
                raise ProtocolError(
                    f"sequence {row.sequence}: rows up to position {row.first + row.count - 1}, "
                    f"a sequence has at most {bind.max_model_len} tokens"
                )
        self.tables.apply(plan)
        self.view = plan.view
        return Step(self, plan)

    def _num_blocks(self) -> list[int]:
        bind, block_bytes = self.bind, [0] * len(self.windows)
        for op, group in zip(self.operators, self.group, strict=True):
            block_bytes[group] += bind.block_size * op.kv_heads * (op.qk_dim + op.v_dim) * self.dtype.itemsize
        return split_memory(
            bind.kv_bytes,
            block_bytes,
            self.windows,
            block_size=bind.block_size,
            max_rows=bind.max_rows,
            max_len=bind.max_model_len,
        )

    def _allocate(self, op: Operator, num_blocks: int) -> LayerStore:
        return allocate(
            num_blocks, op.kv_heads, self.bind.block_size, op.qk_dim, op.v_dim, dtype=self.dtype, device=self.device
        )


class Step:
    """One applied plan: index tensors that all layers of a group share, and the work of a layer."""

    def __init__(self, store: Store, plan: StepPlan) -> None:
        self.plan = plan
        self.num_rows = plan.num_rows
        self._store = store
        groups = range(len(store.windows) if plan.rows else 0)
        tables, rows = store.tables, plan.rows
        self._write = [write_index(tables, g, rows, store.device) for g in groups]
        self._prepared = [store.backend.prepare(row_table(tables, g, rows, align=CHUNK_TOKENS)) for g in groups]

    def attend_stored(self, layer: int, q: Tensor) -> Partial:
        """See ``AttentionBackend.attend_stored``."""
        store, prepared = self._store, self._prepared[self._store.group[layer]]
        return store.backend.attend_stored(store.operators[layer], prepared, store.layers[layer], q)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the rows' K and V at their positions."""
        self._store.layers[layer].write(self._write[self._store.group[layer]], k, v)

    def finish(self, layer: int, stored: Partial, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """See ``AttentionBackend.finish``."""
        store, prepared = self._store, self._prepared[self._store.group[layer]]
        store.backend.finish(store.operators[layer], prepared, stored, q, k, v, out)


def _check(bind: Bind) -> None:
    if bind.dtype not in DTYPES:
        raise ValueError(f"--dtype {bind.dtype}: KV is stored in one of {', '.join(DTYPES)}")
    if bind.block_size < 1 or CHUNK_TOKENS % bind.block_size:
        fits = [str(n) for n in range(1, CHUNK_TOKENS + 1) if CHUNK_TOKENS % n == 0]
        raise ValueError(f"--block-size {bind.block_size} does not divide {CHUNK_TOKENS}: use one of {', '.join(fits)}")
    if bind.replicas < 1:
        raise ProtocolError(f"bind of {bind.replicas} replicas")
    if bind.max_rows < 1 or bind.max_model_len < 1:
        raise ProtocolError(f"bind of {bind.max_rows} rows a step, {bind.max_model_len} tokens a sequence")
    if not len(bind.layers) == len(bind.partition.layer_table) > 0:
        raise ProtocolError(f"bind of {len(bind.layers)} layers, partition of {len(bind.partition.layer_table)}")
    free = available_bytes()
    if bind.kv_bytes > free:
        raise ValueError(f"{bind.kv_bytes} bytes of KV memory asked for, {free} are free: lower --kv-memory")


def _share(bind: Bind, layer: int) -> Share:
    try:
        share = bind.partition.share(layer, bind.worker)
    except (KeyError, IndexError) as e:
        raise ProtocolError(f"layer {layer}: no share for memory worker {bind.worker}: {e}") from e
    if not 0 <= share.head_start < share.head_stop <= bind.layers[layer].kv_heads:
        raise ProtocolError(f"layer {layer}: heads {share.head_start}..{share.head_stop} of the share do not exist")
    if share.chunk_start or share.chunk_stop:
        raise ProtocolError(f"layer {layer}: this worker takes whole sequences, not a range of their chunks")
    return share


def _operator(shape: LayerShape, share: Share, device: torch.device) -> Operator:
    if min(shape.q_heads, shape.kv_heads, shape.qk_dim, shape.v_dim) < 1 or shape.q_heads % shape.kv_heads:
        raise ProtocolError(f"attention of {shape.q_heads} query heads, {shape.kv_heads} KV heads, {shape.qk_dim} dims")
    try:
        spec = AttentionSpec.decode(shape.spec)
    except ValueError as e:  # msgspec's errors are such
        raise ProtocolError(f"not an attention spec: {e}") from e
    group = shape.q_heads // shape.kv_heads

    def operand(wanted: bool, data: bytes) -> Tensor | None:
        if len(data) != (4 * shape.q_heads if wanted else 0):
            raise ProtocolError(f"static operand of {len(data)} bytes for {shape.q_heads} query heads")
        if not wanted:
            return None
        mine = np.frombuffer(data, "<f4")[share.head_start * group : share.head_stop * group]
        return torch.from_numpy(mine.astype(np.float32)).to(device)

    return Operator(
        spec=spec,
        q_heads=share.num_kv_heads * group,
        kv_heads=share.num_kv_heads,
        qk_dim=shape.qk_dim,
        v_dim=shape.v_dim,
        sinks=operand(spec.sinks, shape.sinks),
        slopes=operand(spec.alibi, shape.slopes),
    )


def available_bytes() -> int:
    """Memory that this host could give to a process now."""
    with open("/proc/meminfo") as f:
        fields = dict(line.split(":") for line in f)
    return int(fields["MemAvailable"].split()[0]) << 10
