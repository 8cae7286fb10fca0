"""What a Bind sets up on a memory worker, its pieces of every layer and the KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from lamina.attention import Operator, get, name_of
from lamina.attention.merge import CHUNK_TOKENS
from lamina.attention.spec import AttentionSpec
from lamina.buffers import tensor_over
from lamina.facts.room import free_bytes, too_little
from lamina.kv.pool import LayerStore, allocate, shapes_of
from lamina.kv.rotate import rotate_blocks
from lamina.kv.slabs import Shape, Slabs
from lamina.kv.stored import bounds_bytes, head_bytes, stored_dtype
from lamina.protocol.blocks.counts import split_memory
from lamina.protocol.blocks.tables import BlockTables, PlanError
from lamina.protocol.codec import Group, HeldPiece, held_pieces
from lamina.protocol.layout import held_nodes, most_nodes
from lamina.protocol.partition import Lanes
from lamina.protocol.placement import Placement
from lamina.protocol.plan import (
    Bind,
    Bound,
    Fetch,
    Grant,
    Import,
    Keep,
    LayerShape,
    ProtocolError,
    Rotary,
    Rows,
    Shift,
    StepPlan,
)
from lamina.protocol.sparse import most_kept, selecting_layers, sparse_layers
from lamina.workers.devices import CPU, FREE_PART
from lamina.workers.staging import NOTHING, open_staging

from .lease import check_lease
from .sums import BlockSums
from .written import WrittenTokens

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class StoredPiece:
    """A piece of a layer, with its operator and its KV blocks."""

    group: int
    operator: Operator
    kv: LayerStore


class Store:
    """Sequences, blocks and tensors of a Bind; later Binds of the same shape find them again. Holds state, decides
    nothing.

    Raises ValueError where the Bind asks for something that cannot be, ProtocolError where it contradicts itself.
    """

    def __init__(
        self,
        bind: Bind,
        device: torch.device,
        share: float = FREE_PART,
        *,
        slabs: Slabs | None = None,
        given: int = 0,
    ) -> None:
        """``share``: of the device's free memory, where the Bind names no size. ``slabs``: ``grow`` makes the layers
        later, from these, while ``given`` bytes of an older store become free.
        """
        check_bind(bind)
        self.selects = selecting(bind)  # by layer
        if bind.kv.kv_checks and device.type != "cpu":
            raise ValueError(f"--kv-checks is for memory workers on CPUs, not on {device}: leave it out")
        if any(self.selects) and device.type != "cpu":
            raise ValueError(f"--kv-sparsity select is for memory workers on CPUs, not on {device}: use another form")
        self._slabs = slabs
        self.bind = bind
        self.dtype = DTYPES[bind.dtype]
        self.staging = open_staging(device)
        self.device = device
        kv_bytes = _kv_bytes(bind, device, share, given)
        self.kv_dtype = stored_dtype(bind.kv.kv_cache_dtype, self.dtype)
        self.backend = get(bind.kv.attention, device, self.dtype, self.kv_dtype)
        partition = bind.partition
        self.placement = Placement(partition.num_lanes, partition.stripe * CHUNK_TOKENS, partition.stays)  # in tokens
        form = form_of(bind, kv_bytes)
        self.pieces = form.pieces
        self.alike = [self.pieces.index(x) for x in self.pieces]  # layer -> the first one that has the same
        size, stays = bind.kv.block_size, partition.stays
        self.tables = BlockTables(form.windows, form.num_blocks, size, form.lanes, form.stripe, stays, form.sparse)
        if bind.kv.zero_on_free:
            self.tables.freed()
        self.layers: list[list[StoredPiece]] = []
        if slabs is None:
            for _ in bind.layers:
                self.grow()
        self.written = WrittenTokens()
        self.sums = BlockSums(self, bind.kv.kv_checks) if bind.kv.kv_checks else None
        self.bound = Bound(
            windows=form.windows,
            lanes=form.lanes,
            stripe=form.stripe,
            stays=stays,
            sparse=form.sparse,
            num_blocks=form.num_blocks,
            backend=name_of(self.backend),
            kv_bytes=kv_bytes,
        )

    def grow(self) -> list[StoredPiece]:
        """Make the next layer. Raises MemoryError."""
        number = len(self.layers)
        shape, held = self.bind.layers[number], self.pieces[number]
        operators = [(p.group, _operator(shape, _spec(shape), p, self.device)) for p in held]
        counts = self.tables.num_blocks
        selects = self.selects[number]
        self.layers.append([StoredPiece(g, op, self._allocate(op, counts[g], selects)) for g, op in operators])
        return self.layers[-1]

    @property
    def nbytes(self) -> int:
        """Of all KV blocks that there are."""
        pieces = (piece.kv for layer in self.layers for piece in layer)
        return sum(kv.k.shape[0] * kv.k.shape[2] * kv.token_bytes for kv in pieces)

    def fits(self, bind: Bind) -> bool:
        """Whether the store has the shape that ``bind`` asks for. Its number of connections does not count, nor its
        memory, which was settled before.
        """
        return _shape(bind) == _shape(self.bind)

    def renew(self, bind: Bind) -> None:
        """Serve the replicas and prefill workers of ``bind`` from now on; all sequences stay. ``bind`` must fit."""
        self.bind = bind
        self.tables.forget_plans()

    def reconcile(self, keep: Sequence[Keep]) -> None:
        """Hold the tokens of ``keep`` and nothing else. Raises PlanError where they are not here: nothing changes."""
        had = self.written.report()
        for each in keep:
            if any(self.tables.held_of(each) or ()) and had.get(each.sequence, 0) < each.length:
                raise PlanError(f"sequence {each.sequence}: {each.length} tokens are to be kept, and were not written")
        self.tables.reconcile(keep)
        self.written.reconcile(keep)
        self.make_ready()

    def message(self, data: memoryview) -> Tensor:
        """Its bytes, flat, on the device. On the CPU they are shared, not copied."""
        return self.staging.up(tensor_over(data, torch.uint8)) if len(data) else NOTHING

    def begin(self, plan: StepPlan) -> None:
        """Apply a plan, all or nothing. Raises ProtocolError, PlanError, NoBlocksError: then nothing has changed."""
        bind = self.bind
        for replicas in (plan.source, plan.reply_to):
            if len(replicas) not in (0, len(bind.layers)) or any(not 0 <= r < bind.replicas for r in replicas):
                raise ProtocolError(f"step {plan.step} names {replicas} as replicas of {len(bind.layers)} layers")
        if plan.source[1:] != plan.reply_to[:-1]:
            raise ProtocolError(f"step {plan.step}: an O does not go to the replica of the next slice")
        if plan.num_rows > bind.max_rows:
            raise ProtocolError(f"step {plan.step} has {plan.num_rows} rows, {bind.max_rows} were bound")
        grants = [op.rows for op in plan.ops if isinstance(op, Grant)]
        if any(g.count > bind.max_rows for g in grants):
            raise ProtocolError(f"step {plan.step} grants more than {bind.max_rows} rows at once")
        for row in [*plan.rows, *grants, *(op.rows for op in plan.ops if isinstance(op, Fetch))]:
            if row.first + row.count > bind.max_model_len:
                raise ProtocolError(
                    f"sequence {row.sequence}: rows up to position {row.first + row.count - 1}, "
                    f"a sequence has at most {bind.max_model_len} tokens"
                )
            if row.place.moved and self.placement.num_lanes > 1:  # else all lies here
                self._check_moved(row)
        shifts = [op for op in plan.ops if isinstance(op, Shift)]
        moves = shifts or any(isinstance(op, Import) and op.moved for op in plan.ops)
        if moves and any(layer.rotary is None for layer in bind.layers):
            raise ProtocolError(f"step {plan.step} shifts a sequence of a model whose keys stay where they are")
        again = self.tables.comes_again(plan)
        if not again:
            self.written.check(plan, self.tables.block_size)
        self.tables.apply(plan)
        if self.sums:
            self.sums.forget(plan)
        self.written.begin(plan, again=again)
        for op in () if again else shifts:
            self._rotate(op)

    def make_ready(self) -> None:
        """Behind a plan, before its rows come: copy the blocks that forks have begun, and write zeros over those that
        have become free, where that is wanted.
        """
        copies, self.tables.copies = self.tables.copies, [[]] * len(self.tables.windows)
        freed = self.tables.freed() if self.bind.kv.zero_on_free else [[] for _ in copies]
        if self.sums:
            for group, pairs in enumerate(copies):
                self.sums.rewrite(group, pairs, freed[group])
        if any(copies) or any(freed):
            for piece in (piece for layer in self.layers for piece in layer):
                piece.kv.make_ready(copies[piece.group], freed[piece.group])

    def _rotate(self, op: Shift) -> None:
        """Move K of all that was behind the tokens that ``op`` has discarded, if it is still there."""
        if op.sequence not in self.tables.sequences:
            return
        blocks = [self.tables.blocks_behind(g, op.sequence, op.first) for g in range(len(self.tables.windows))]
        self.rotate(blocks, -op.count, range(len(self.layers)))

    def rotate(self, blocks: Sequence[Sequence[int] | None], delta: int, layers: range) -> None:
        """Rotate K of whole ``blocks``, by group, to positions ``delta`` further on; None: none of a group."""
        for layer in layers:
            for piece in self.layers[layer]:
                if (rotary := self.bind.layers[layer].rotary) is not None:
                    rotate_blocks(piece.kv, list(blocks[piece.group] or ()), rotary, delta)

    def _check_moved(self, row: Rows) -> None:
        """Raises PlanError where a sequence cannot lie so, or is in more pieces than the slots of O have room for."""
        try:
            self.placement.check(row.place)
        except ValueError as e:
            raise PlanError(f"sequence {row.sequence}: {e}") from None
        size = self.placement.stripe
        for lanes in set(self.tables.lanes):
            most = most_nodes(lanes, self.placement, -(-self.bind.max_model_len // size))
            stripes = range(-(-(row.first + row.count) // size))
            nodes, _ = held_nodes(lanes, self.placement, row.place, stripes)
            if len(nodes) > most:
                raise PlanError(f"sequence {row.sequence} lies here in {len(nodes)} pieces, at most {most} can be")

    def _allocate(self, op: Operator, num_blocks: int, selects: bool) -> LayerStore:
        return allocate(
            num_blocks,
            op.kv_heads,
            self.bind.kv.block_size,
            op.qk_dim,
            op.v_dim,
            dtype=self.kv_dtype,
            device=self.device,
            slabs=self._slabs,
            selects=selects,
        )


class StoreForm(NamedTuple):
    """What a store has of groups of layers, without a tensor."""

    windows: list[int]
    lanes: list[Lanes]
    sparse: list[bool]  # by group; empty: none is
    stripe: int  # in blocks
    pieces: list[tuple[HeldPiece, ...]]  # by layer
    num_blocks: list[int]  # by group


def form_of(bind: Bind, kv_bytes: int) -> StoreForm:
    """Of the store that ``bind`` asks for, in ``kv_bytes`` of memory. Raises as Store."""
    groups, size = list[Group](), bind.kv.block_size
    seen = [layer_window(x) for x in bind.layers]
    layers = sparse_layers(bind.layers, seen, bind.kv)
    pieces = held_pieces(bind.layers, seen, bind.partition, bind.worker, groups, layers)
    if not groups:
        raise ProtocolError(f"the partition has nothing for memory worker {bind.worker}")
    block_bytes, kv_dtype = [0] * len(groups), stored_dtype(bind.kv.kv_cache_dtype, DTYPES[bind.dtype])
    for held, selects in zip(pieces, selecting(bind), strict=True):
        for piece in held:
            nbytes = size * head_bytes(piece.qk_dim, piece.v_dim, kv_dtype)
            block_bytes[piece.group] += piece.kv_heads * (nbytes + selects * bounds_bytes(piece.qk_dim, kv_dtype))
    windows, lanes, sparse = [g.window for g in groups], [g.lanes for g in groups], [g.sparse for g in groups]
    if bind.kv.approximates and any(not g.lanes.all for g in groups):
        raise ValueError(
            f"--kv-sparsity {bind.kv.kv_sparsity}: memory worker {bind.worker} has not all tokens of its heads: use "
            f"--memory-workers, or --memory-weights, by which KV heads can be dealt out whole"
        )
    stripe = bind.partition.stripe * CHUNK_TOKENS // size
    num_blocks = split_memory(
        kv_bytes,
        block_bytes,
        windows,
        lanes,
        stripe=stripe,
        stays=bind.partition.stays,
        block_size=size,
        max_rows=bind.max_rows,
        max_len=bind.max_model_len,
        most_kept=[most_kept(bind.kv) * g.sparse for g in groups],
    )
    return StoreForm(windows, lanes, sparse if any(sparse) else [], stripe, pieces, num_blocks)


def shapes_by_layer(bind: Bind) -> list[list[Shape]]:
    """Of the tensors of the store that ``bind`` asks for. Raises as Store."""
    check_bind(bind)
    form, size, dtype = form_of(bind, bind.kv_bytes), bind.kv.block_size, DTYPES[bind.dtype]
    dtype = stored_dtype(bind.kv.kv_cache_dtype, dtype)
    return [
        [x for p in layer for x in shapes_of(form.num_blocks[p.group], p.kv_heads, size, p.qk_dim, p.v_dim, dtype)]
        for layer in form.pieces
    ]


def selecting(bind: Bind) -> list[bool]:
    """By layer, whether queries attend some blocks only. Raises ValueError where none is left."""
    return selecting_layers(bind.layers, [layer_window(x) for x in bind.layers], bind.kv)


def layer_window(shape: LayerShape) -> int:
    """Of a layer's attention, in tokens; 0 = all. Raises ProtocolError."""
    return _spec(shape).window


def _shape(bind: Bind) -> Bind:
    """The part of a Bind that the tensors and tables of a store follow from."""
    return structs.replace(bind.unconnected, kv_bytes=0, kv_most=0)


def check_bind(bind: Bind) -> None:
    """Raises ValueError where it asks for something that cannot be, ProtocolError where it contradicts itself."""
    if bind.dtype not in DTYPES:
        raise ValueError(f"--dtype {bind.dtype}: it must be one of {', '.join(DTYPES)}")
    if bind.replicas < 1 or bind.prefill_workers < 0:
        raise ProtocolError(f"bind of {bind.replicas} replicas and {bind.prefill_workers} prefill workers")
    if not 1 <= bind.prefill_pipeline <= max(1, len(bind.layers)) or bind.prefill_workers % bind.prefill_pipeline:
        raise ProtocolError(f"bind of {bind.prefill_workers} prefill workers in groups of {bind.prefill_pipeline}")
    if bind.max_rows < 1 or bind.max_model_len < 1:
        raise ProtocolError(f"bind of {bind.max_rows} rows a step, {bind.max_model_len} tokens a sequence")
    if not bind.layers:
        raise ProtocolError("bind of no layers")
    check_lease(bind.kv_bytes)
    for layer in bind.layers:
        if (rotary := layer.rotary) is not None and rotary.frequencies:
            _check_rotary(rotary, layer.qk_dim)
    try:
        bind.partition.check([x.kv_heads for x in bind.layers])
    except ValueError as e:
        raise ProtocolError(str(e)) from e


def _check_rotary(rotary: Rotary, width: int) -> None:
    size = len(rotary.frequencies)
    if size % 8 or not 0 <= rotary.start <= width - size // 4:
        raise ProtocolError(f"rotary of {size} bytes from element {rotary.start} on in heads of {width}")
    if not np.isfinite(np.frombuffer(rotary.frequencies, "<f8")).all():
        raise ProtocolError("rotary of frequencies that are no finite numbers")


def _kv_bytes(bind: Bind, device: torch.device, share: float, given: int) -> int:
    """For KV blocks; on a device of its own memory, where nobody says how much, what it has. Raises ValueError."""
    free = available_bytes(device) + given
    if device.type != "cpu" and bind.kv_most:
        return min(bind.kv_most, int(free * share))
    if bind.kv_bytes > free:
        where = "here" if device.type == "cpu" else f"on {device}"
        raise ValueError(too_little(bind.kv_bytes, free, where=where))
    return bind.kv_bytes


def _spec(shape: LayerShape) -> AttentionSpec:
    if min(shape.q_heads, shape.kv_heads, shape.qk_dim, shape.v_dim) < 1 or shape.q_heads % shape.kv_heads:
        raise ProtocolError(f"attention of {shape.q_heads} query heads, {shape.kv_heads} KV heads, {shape.qk_dim} dims")
    try:
        return AttentionSpec.decode(shape.spec)
    except ValueError as e:  # msgspec's errors are such
        raise ProtocolError(f"not an attention spec: {e}") from e


def _operator(shape: LayerShape, spec: AttentionSpec, piece: HeldPiece, device: torch.device) -> Operator:
    def operand(wanted: bool, data: bytes) -> Tensor | None:
        if len(data) != (4 * shape.q_heads if wanted else 0):
            raise ProtocolError(f"static operand of {len(data)} bytes for {shape.q_heads} query heads")
        if not wanted:
            return None
        heads = np.frombuffer(data, "<f4")[piece.head_start * piece.each : piece.head_stop * piece.each]
        return torch.from_numpy(heads.astype(np.float32)).to(device)

    return Operator(
        spec=spec,
        q_heads=piece.q_heads,
        kv_heads=piece.kv_heads,
        qk_dim=shape.qk_dim,
        v_dim=shape.v_dim,
        sinks=operand(spec.sinks, shape.sinks),
        slopes=operand(spec.alibi, shape.slopes),
    )


def available_bytes(device: torch.device = CPU) -> int:
    """Memory that ``device`` could give to a process now; the CPU: this host."""
    if device.type != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    return free_bytes()
