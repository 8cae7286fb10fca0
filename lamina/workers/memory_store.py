"""What a Bind sets up on a memory worker, its pieces of every layer and the KV blocks, and what a plan does to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lamina.attention import Operator, get
from lamina.attention.merge import CHUNK_TOKENS, Partial
from lamina.attention.spec import AttentionSpec
from lamina.kv.blocks import BlockTables, split_memory
from lamina.kv.partition import Lanes, Piece
from lamina.kv.pool import LayerStore, allocate, row_table, write_index

from .stepplan import Bind, Bound, LayerShape, ProtocolError, Rows, StepPlan

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class StoredPiece:
    """A piece of a layer, with its operator and its KV blocks."""

    group: int
    operator: Operator
    kv: LayerStore


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
        self.view = 0
        pieces = [
            [(p.lanes, _operator(shape, p, device)) for p in bind.partition.pieces(i, bind.worker)]
            for i, shape in enumerate(bind.layers)
        ]
        groups = list(dict.fromkeys((op.spec.window, lanes) for layer in pieces for lanes, op in layer))
        if not groups:
            raise ProtocolError(f"the partition has nothing for memory worker {bind.worker}")
        windows, lanes = [g[0] for g in groups], [g[1] for g in groups]
        numbered = [[(groups.index((op.spec.window, lanes)), op) for lanes, op in layer] for layer in pieces]
        num_blocks = self._num_blocks(windows, lanes, numbered)
        self.tables = BlockTables(windows, num_blocks, bind.block_size, lanes)
        self.layers = [[StoredPiece(g, op, self._allocate(op, num_blocks[g])) for g, op in x] for x in numbered]
        backend = type(self.backend).__name__.lower()
        self.bound = Bound(windows=windows, lanes=lanes, num_blocks=num_blocks, backend=backend)

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

    def _num_blocks(
        self, windows: list[int], lanes: list[Lanes], layers: Sequence[Sequence[tuple[int, Operator]]]
    ) -> list[int]:
        bind, block_bytes = self.bind, [0] * len(windows)
        for group, op in (piece for layer in layers for piece in layer):
            block_bytes[group] += bind.block_size * op.kv_heads * (op.qk_dim + op.v_dim) * self.dtype.itemsize
        return split_memory(
            bind.kv_bytes,
            block_bytes,
            windows,
            lanes,
            block_size=bind.block_size,
            max_rows=bind.max_rows,
            max_len=bind.max_model_len,
        )

    def _allocate(self, op: Operator, num_blocks: int) -> LayerStore:
        return allocate(
            num_blocks, op.kv_heads, self.bind.block_size, op.qk_dim, op.v_dim, dtype=self.dtype, device=self.device
        )


class _GroupRows:
    """A step's rows of the sequences that one group keeps."""

    def __init__(self, store: Store, group: int, rows: list[Rows]) -> None:
        self.num_rows = sum(r.count for r in rows)
        if rows:
            table = row_table(store.tables, group, rows, align=CHUNK_TOKENS)
            self.write_index = write_index(store.tables, group, rows, store.device)
            self.prepared = store.backend.prepare(table)
            self.stored_tokens = int((table.first - table.seen).sum())


class Step:
    """One applied plan: what all layers of a group share, and the work of a layer.

    The messages of a layer are flat tensors, one piece behind the other: q [R, Hq, D]; k [R, Hkv, D], v [R, Hkv, Dv];
    o [R, Hq, Dv], where R counts the rows of the piece's own sequences.
    """

    def __init__(self, store: Store, plan: StepPlan) -> None:
        self.plan = plan
        self._store = store
        self._groups = [
            _GroupRows(store, g, [r for r in plan.rows if r.sequence in lanes])
            for g, lanes in enumerate(store.tables.lanes)
        ]

    def sizes(self, layer: int) -> tuple[int, int, int]:
        """Numbers in the layer's Q, KV and O; 0 where this worker has nothing to do."""
        pieces = list(self._pieces(layer))

        def total(shapes: Shapes) -> int:
            return sum(group.num_rows * heads * dim for p, group in pieces for heads, dim in shapes(p.operator))

        return total(_q_shapes), total(_kv_shapes), total(_o_shapes)

    def stored_bytes(self, layer: int) -> int:
        """Bytes of stored K and V that the layer's attention reads."""
        return sum(
            group.stored_tokens * heads * dim * self._store.dtype.itemsize
            for p, group in self._pieces(layer)
            for heads, dim in _kv_shapes(p.operator)
        )

    def attend_stored(self, layer: int, q: Tensor) -> list[Partial]:
        """See ``AttentionBackend.attend_stored``; by piece."""
        attend = self._store.backend.attend_stored
        return [attend(p.operator, rows.prepared, p.kv, x) for p, rows, (x,) in self._split(layer, q, _q_shapes)]

    def write(self, layer: int, kv: Tensor) -> None:
        """Store the rows' K and V at their positions."""
        for piece, rows, (k, v) in self._split(layer, kv, _kv_shapes):
            piece.kv.write(rows.write_index, k, v)

    def finish(self, layer: int, stored: list[Partial], q: Tensor, kv: Tensor, out: Tensor) -> None:
        """See ``AttentionBackend.finish``."""
        finish, parts = self._store.backend.finish, iter(stored)
        for (piece, rows, (x,)), (_, _, (k, v)), (_, _, (o,)) in zip(
            self._split(layer, q, _q_shapes),
            self._split(layer, kv, _kv_shapes),
            self._split(layer, out, _o_shapes),
            strict=True,
        ):
            finish(piece.operator, rows.prepared, next(parts), x, k, v, o)

    def _pieces(self, layer: int) -> Iterator[tuple[StoredPiece, _GroupRows]]:
        """Those with rows."""
        for piece in self._store.layers[layer]:
            group = self._groups[piece.group]
            if group.num_rows:
                yield piece, group

    def _split(
        self, layer: int, flat: Tensor, shapes: Shapes
    ) -> Iterator[tuple[StoredPiece, _GroupRows, list[Tensor]]]:
        """A message's tensors, by piece."""
        at = 0
        for piece, group in self._pieces(layer):
            views = []
            for heads, dim in shapes(piece.operator):
                upto = at + group.num_rows * heads * dim
                views.append(flat[at:upto].view(group.num_rows, heads, dim))
                at = upto
            yield piece, group, views


Shapes = Callable[[Operator], tuple[tuple[int, int], ...]]  # of a message's tensors, by row: (heads, dims)


def _q_shapes(op: Operator) -> tuple[tuple[int, int], ...]:
    return ((op.q_heads, op.qk_dim),)


def _kv_shapes(op: Operator) -> tuple[tuple[int, int], ...]:
    return ((op.kv_heads, op.qk_dim), (op.kv_heads, op.v_dim))


def _o_shapes(op: Operator) -> tuple[tuple[int, int], ...]:
    return ((op.q_heads, op.v_dim),)


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
    if not bind.layers:
        raise ProtocolError("bind of no layers")
    try:
        bind.partition.check([x.kv_heads for x in bind.layers])
    except ValueError as e:
        raise ProtocolError(str(e)) from e
    free = available_bytes()
    if bind.kv_bytes > free:
        raise ValueError(f"{bind.kv_bytes} bytes of KV memory asked for, {free} are free: lower --kv-memory")


def _operator(shape: LayerShape, piece: Piece, device: torch.device) -> Operator:
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
        mine = np.frombuffer(data, "<f4")[piece.head_start * group : piece.head_stop * group]
        return torch.from_numpy(mine.astype(np.float32)).to(device)

    return Operator(
        spec=spec,
        q_heads=piece.num_kv_heads * group,
        kv_heads=piece.num_kv_heads,
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
