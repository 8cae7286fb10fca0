"""The store that a Bind sets up on a memory worker: its pieces of every layer, and the KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from lamina.config.conflicts import conflict_text
from lamina.config.partition import KvShards
from lamina.config.resolve import check_whole_heads
from lamina.facts.host_memory import free_bytes, not_enough_memory_message
from lamina.kv.arena import HugePageArena, Shape
from lamina.kv.paged_cache import LayerCache, allocate_layer, cache_shapes
from lamina.kv.rope_shift import rotate_blocks
from lamina.kv.stored_format import bounds_bytes, head_bytes, is_scaled, stored_dtype
from lamina.ops.attention import Operator, get, name_of
from lamina.ops.attention.merge import CHUNK_TOKENS
from lamina.ops.attention.spec import AttentionSpec
from lamina.protocol.blocks.block_counts import split_memory
from lamina.protocol.blocks.block_tables import BlockTables, PlanError
from lamina.protocol.codec import LayerGroup, WorkerPiece, max_nodes, owned_nodes, worker_pieces
from lamina.protocol.kv_placement import KvPlacement
from lamina.protocol.sparse_layers import max_kept_tokens, selecting_layers, sparse_layers
from lamina.protocol.step_plan import (
    BindReply,
    BindRequest,
    ContextShift,
    FetchPrefix,
    LayerShape,
    LoadKv,
    PrefillGrant,
    ProtocolError,
    Rotary,
    RowRange,
    StepPlan,
    SurvivingKv,
)
from lamina.utils.tensor_buffers import tensor_over
from lamina.workers.device_selection import CPU, FREE_MEMORY_SHARE
from lamina.workers.staging import EMPTY_BYTES, open_staging

from .committed_tokens import CommittedTokens
from .kv_checksums import BlockChecksums
from .lease_limits import check_lease
from .state_store import StateStore, bytes_of_version, num_slots, state_shards

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class StoredPiece:
    """A piece of a layer: the heads that one worker holds, with their operator and KV blocks."""

    group: int
    operator: Operator
    kv: LayerCache


class KvStore:
    """The sequences, blocks and tensors of a Bind; later Binds of the same shape find them again. It makes no
    decisions. Raises ValueError if the Bind requests something impossible, ProtocolError if it contradicts itself.
    """

    def __init__(
        self,
        bind: BindRequest,
        device: torch.device,
        share: float = FREE_MEMORY_SHARE,
        *,
        slabs: HugePageArena | None = None,
        given: int = 0,
    ) -> None:
        """``share``: of the device's free memory, used if the Bind names no size. ``slabs``: if given,
        ``allocate_next_layer`` allocates the layers from these later, while an older store frees ``given`` bytes.
        """
        check_bind(bind)
        self.selects_blocks = selecting_layers_of(bind)  # by layer
        if bind.kv.kv_checks and device.type != "cpu":
            raise ValueError(conflict_text("--kv-checks", "--memory-device cuda"))
        if any(self.selects_blocks) and device.type != "cpu":
            raise ValueError(conflict_text("--kv-sparsity select", "--memory-device cuda"))
        self._slabs = slabs
        self.bind_request = bind
        self.dtype = DTYPES[bind.dtype]
        self.staging = open_staging(device)
        self.device = device
        kv_bytes = num_kv_bytes(bind, device, share, given)
        self.kv_dtype = stored_dtype(bind.kv.kv_cache_dtype, self.dtype)
        self.is_scaled = is_scaled(self.kv_dtype)
        self.backend = get(bind.kv.attention, device, self.dtype, self.kv_dtype)
        partition = bind.partition
        self.placement = KvPlacement(
            partition.num_kv_shards, partition.stripe_chunks * CHUNK_TOKENS, partition.single_shard
        )  # in tokens
        self.states = StateStore(bind, device, kv_bytes) if bind.mixers else None
        form = store_shape(bind, kv_bytes)
        self.pieces = form.pieces
        self.equal_pieces = [self.pieces.index(x) for x in self.pieces]  # layer -> the first layer with the same pieces
        size, stays = bind.kv.block_size, partition.single_shard
        self.tables = BlockTables(
            form.windows, form.num_blocks, size, form.kv_shards, form.stripe_blocks, stays, form.sparse
        )
        if bind.kv.zero_on_free:
            self.tables.take_freed()
        self.layers: list[list[StoredPiece]] = []
        if slabs is None:
            for _ in bind.layers:
                self.allocate_next_layer()
        self.committed = CommittedTokens()
        self.checksums = BlockChecksums(self, bind.kv.kv_checks) if bind.kv.kv_checks else None
        self.bind_reply = BindReply(
            windows=form.windows,
            kv_shards=form.kv_shards,
            stripe_blocks=form.stripe_blocks,
            single_shard=stays,
            sparse=form.sparse,
            num_blocks=form.num_blocks,
            backend=name_of(self.backend),
            kv_bytes=kv_bytes,
            state_shards=state_shards(bind),
            state_slots=num_slots(bind, kv_bytes),
        )

    def allocate_next_layer(self) -> list[StoredPiece]:
        """Allocate the tensors of the next layer. Raises MemoryError."""
        number = len(self.layers)
        shape, held = self.bind_request.layers[number], self.pieces[number]
        operators = [(p.group, _operator(shape, _spec(shape), p, self.device)) for p in held]
        counts = self.tables.num_blocks
        selects = self.selects_blocks[number]
        self.layers.append([StoredPiece(g, op, self._allocate(op, counts[g], selects)) for g, op in operators])
        return self.layers[-1]

    @property
    def nbytes(self) -> int:
        """The bytes of all allocated KV blocks."""
        pieces = (piece.kv for layer in self.layers for piece in layer)
        return sum(kv.k.shape[0] * kv.k.shape[2] * kv.token_bytes for kv in pieces)

    def fits(self, bind: BindRequest) -> bool:
        """Return whether ``bind`` has the shape of this store. Its number of connections and its memory size do not
        count.
        """
        return _shape(bind) == _shape(self.bind_request)

    def set_peers(self, bind: BindRequest) -> None:
        """Serve the replicas and prefill workers of ``bind`` from now on, which must fit; all sequences stay."""
        self.bind_request = bind
        self.tables.forget_plans()

    def reconcile(self, keep: Sequence[SurvivingKv]) -> None:
        """Keep the tokens of ``keep`` and discard all others. Raises PlanError, changing nothing, if some are not
        here.
        """
        had = self.committed.report()
        for each in keep:
            if any(self.tables.surviving_blocks(each) or ()) and had.get(each.sequence, 0) < each.length:
                raise PlanError(f"sequence {each.sequence}: {each.length} tokens are to survive, but were not written")
        if self.states:
            self.states.versions.reconcile(keep)
        self.tables.reconcile(keep)
        self.committed.reconcile(keep)
        self.apply_block_copies()

    def message_tensor(self, data: memoryview) -> Tensor:
        """Return the message's bytes as a flat tensor on the device. On the CPU it shares them without a copy."""
        return self.staging.to_device(tensor_over(data, torch.uint8)) if len(data) else EMPTY_BYTES

    def apply_plan(self, plan: StepPlan) -> None:
        """Apply a plan completely. If it raises ProtocolError, PlanError or NoBlocksError, nothing has changed."""
        bind = self.bind_request
        for replicas in (plan.send_from, plan.reply_to):
            if len(replicas) not in (0, len(bind.layers)) or any(not 0 <= r < bind.replicas for r in replicas):
                raise ProtocolError(f"step {plan.step} names {replicas} as replicas of {len(bind.layers)} layers")
        if plan.send_from[1:] != plan.reply_to[:-1]:
            raise ProtocolError(f"step {plan.step}: an O does not go to the replica of the next slice")
        if plan.num_rows > bind.max_rows:
            raise ProtocolError(f"step {plan.step} has {plan.num_rows} rows, {bind.max_rows} were bound")
        grants = [op.rows for op in plan.ops if isinstance(op, PrefillGrant)]
        if any(g.count > bind.max_rows for g in grants):
            raise ProtocolError(f"step {plan.step} grants more than {bind.max_rows} rows at once")
        for row in [*plan.rows, *grants, *(op.rows for op in plan.ops if isinstance(op, FetchPrefix))]:
            if row.first + row.count > bind.max_model_len:
                raise ProtocolError(
                    f"sequence {row.sequence}: rows up to position {row.first + row.count - 1}, "
                    f"a sequence has at most {bind.max_model_len} tokens"
                )
            if row.location.moved_runs and self.placement.num_kv_shards > 1:  # with one KV shard all lies here
                self._check_moved(row)
        shifts = [op for op in plan.ops if isinstance(op, ContextShift)]
        moves = shifts or any(isinstance(op, LoadKv) and op.page_shift for op in plan.ops)
        if moves and any(layer.rotary is None for layer in bind.layers):
            raise ProtocolError(f"step {plan.step} shifts a sequence of a model whose keys cannot be rotated")
        again = self.tables.is_replay(plan)
        if not again:
            self.committed.check(plan, self.tables.block_size)
        if self.states:
            self.states.versions.check(plan, is_replay=again)
        self.tables.apply(plan)
        if self.states:
            self.states.begin(plan, is_replay=again)
        if self.checksums:
            self.checksums.before_other_writes(plan, is_replay=again)
        self.committed.begin(plan, is_replay=again)
        for op in () if again else shifts:
            self._rotate(op)

    def apply_block_copies(self) -> None:
        """Copy the blocks that forks have begun, after a plan and before its rows arrive. Zero freed blocks if the Bind
        says so.
        """
        copies, self.tables.pending_copies = self.tables.pending_copies, [[]] * len(self.tables.windows)
        freed = self.tables.take_freed() if self.bind_request.kv.zero_on_free else [[] for _ in copies]
        if self.checksums:
            for group, pairs in enumerate(copies):
                self.checksums.before_copies(group, pairs, freed[group])
        if any(copies) or any(freed):
            for piece in (piece for layer in self.layers for piece in layer):
                piece.kv.copy_and_wipe(copies[piece.group], freed[piece.group])

    def _rotate(self, op: ContextShift) -> None:
        """Rotate K of the tokens after those that ``op`` has discarded, if the sequence is still here."""
        if op.sequence not in self.tables.sequences:
            return
        blocks = [self.tables.blocks_after(g, op.sequence, op.first) for g in range(len(self.tables.windows))]
        self.rotate(blocks, -op.count, range(len(self.layers)))

    def rotate(self, blocks: Sequence[Sequence[int] | None], delta: int, layers: range) -> None:
        """Rotate K of whole ``blocks``, given by group, to positions that are ``delta`` higher; None for a group
        without any.
        """
        for layer in layers:
            for piece in self.layers[layer]:
                if (rotary := self.bind_request.layers[layer].rotary) is not None:
                    rotate_blocks(piece.kv, list(blocks[piece.group] or ()), rotary, delta)

    def update_bounds(self, blocks: Sequence[Sequence[int] | None], layers: range) -> None:
        """Compute the bounds of ``blocks``, given by group, whose K was loaded; None for a group without any."""
        for piece in (x for layer in layers if self.selects_blocks[layer] for x in self.layers[layer]):
            piece.kv.update_bounds(torch.tensor(blocks[piece.group] or (), dtype=torch.int64))

    def _check_moved(self, row: RowRange) -> None:
        """Raise PlanError if a sequence's location is invalid, or has more pieces here than the slots of O have space
        for.
        """
        try:
            self.placement.check(row.location)
        except ValueError as e:
            raise PlanError(f"sequence {row.sequence}: {e}") from None
        size = self.placement.stripe
        for lanes in set(self.tables.kv_shards):
            most = max_nodes(lanes, self.placement, -(-self.bind_request.max_model_len // size))
            stripes = range(-(-(row.first + row.count) // size))
            nodes, _ = owned_nodes(lanes, self.placement, row.location, stripes)
            if len(nodes) > most:
                raise PlanError(
                    f"sequence {row.sequence} lies here in {len(nodes)} pieces, at most {most} are possible"
                )

    def _allocate(self, op: Operator, num_blocks: int, selects: bool) -> LayerCache:
        return allocate_layer(
            num_blocks,
            op.kv_heads,
            self.bind_request.kv.block_size,
            op.qk_dim,
            op.v_dim,
            dtype=self.kv_dtype,
            device=self.device,
            slabs=self._slabs,
            selects=selects,
        )


class StoreShape(NamedTuple):
    """The layout of a store, by layer group, without tensors."""

    windows: list[int]
    kv_shards: list[KvShards]
    sparse: list[bool]  # by group; empty if none is sparse
    stripe_blocks: int
    pieces: list[tuple[WorkerPiece, ...]]  # by layer
    num_blocks: list[int]  # by group


def store_shape(bind: BindRequest, kv_bytes: int) -> StoreShape:
    """Return the shape of the store that ``bind`` requests, in ``kv_bytes`` of memory. Raises as KvStore."""
    groups, size = list[LayerGroup](), bind.kv.block_size
    seen = [layer_window(x) for x in bind.layers]
    layers = sparse_layers(bind.layers, seen, bind.kv)
    pieces = worker_pieces(bind.layers, seen, bind.partition, bind.worker, groups, layers)
    if not groups:
        raise ProtocolError(f"the partition has nothing for memory worker {bind.worker}")
    block_bytes, kv_dtype = [0] * len(groups), stored_dtype(bind.kv.kv_cache_dtype, DTYPES[bind.dtype])
    for held, selects in zip(pieces, selecting_layers_of(bind), strict=True):
        for piece in held:
            nbytes = size * head_bytes(piece.qk_dim, piece.v_dim, kv_dtype)
            block_bytes[piece.group] += piece.kv_heads * (nbytes + selects * bounds_bytes(piece.qk_dim, kv_dtype))
    windows, lanes, sparse = [g.window for g in groups], [g.kv_shards for g in groups], [g.sparse for g in groups]
    if bind.kv.is_sparse:
        check_whole_heads(bind.partition, [layer.kv_heads for layer in bind.layers], bind.kv.kv_sparsity)
    stripe_blocks = bind.partition.stripe_chunks * CHUNK_TOKENS // size
    num_blocks = split_memory(
        kv_bytes - num_slots(bind, kv_bytes) * bytes_of_version(bind),
        block_bytes,
        windows,
        lanes,
        stripe_blocks=stripe_blocks,
        single_shard=bind.partition.single_shard,
        block_size=size,
        max_rows=bind.max_rows,
        max_len=bind.max_model_len,
        max_kept_tokens=[max_kept_tokens(bind.kv) * g.sparse for g in groups],
    )
    return StoreShape(windows, lanes, sparse if any(sparse) else [], stripe_blocks, pieces, num_blocks)


def shapes_by_layer(bind: BindRequest) -> list[list[Shape]]:
    """Return the shapes of the tensors of the store that ``bind`` requests, by layer. Raises as KvStore."""
    check_bind(bind)
    form, size, dtype = store_shape(bind, bind.kv_bytes), bind.kv.block_size, DTYPES[bind.dtype]
    dtype = stored_dtype(bind.kv.kv_cache_dtype, dtype)
    return [
        [x for p in layer for x in cache_shapes(form.num_blocks[p.group], p.kv_heads, size, p.qk_dim, p.v_dim, dtype)]
        for layer in form.pieces
    ]


def selecting_layers_of(bind: BindRequest) -> list[bool]:
    """Return, for each layer, whether queries attend selected blocks only. Raises ValueError if no layer would."""
    return selecting_layers(bind.layers, [layer_window(x) for x in bind.layers], bind.kv)


def layer_window(shape: LayerShape) -> int:
    """Return the attention window of a layer in tokens; 0 for all tokens. Raises ProtocolError."""
    return _spec(shape).window


def _shape(bind: BindRequest) -> BindRequest:
    """Return the part of a Bind that determines the tensors and tables of a store."""
    return structs.replace(bind.unconnected, kv_bytes=0, max_kv_bytes=0)


def check_bind(bind: BindRequest) -> None:
    """Raise ValueError if the Bind requests something impossible, ProtocolError if it contradicts itself."""
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


def num_kv_bytes(bind: BindRequest, device: torch.device, share: float, given: int) -> int:
    """Return the bytes for KV blocks. A device other than the CPU has what is free, up to ``max_kv_bytes`` if that is
    set. Raises ValueError if there is not enough memory.
    """
    free = available_bytes(device) + given
    if device.type != "cpu" and bind.max_kv_bytes:
        return min(bind.max_kv_bytes, int(free * share))
    if bind.kv_bytes > free:
        where = "here" if device.type == "cpu" else f"on {device}"
        raise ValueError(not_enough_memory_message(bind.kv_bytes, free, where=where))
    return bind.kv_bytes


def _spec(shape: LayerShape) -> AttentionSpec:
    if min(shape.q_heads, shape.kv_heads, shape.qk_dim, shape.v_dim) < 1 or shape.q_heads % shape.kv_heads:
        raise ProtocolError(f"attention of {shape.q_heads} query heads, {shape.kv_heads} KV heads, {shape.qk_dim} dims")
    try:
        return AttentionSpec.decode(shape.spec)
    except ValueError as e:  # msgspec's decoding errors are ValueErrors
        raise ProtocolError(f"not an attention spec: {e}") from e


def _operator(shape: LayerShape, spec: AttentionSpec, piece: WorkerPiece, device: torch.device) -> Operator:
    def operand(wanted: bool, data: bytes) -> Tensor | None:
        if len(data) != (4 * shape.q_heads if wanted else 0):
            raise ProtocolError(f"static operand of {len(data)} bytes for {shape.q_heads} query heads")
        if not wanted:
            return None
        heads = np.frombuffer(data, "<f4")[
            piece.head_start * piece.q_heads_per_kv_head : piece.head_stop * piece.q_heads_per_kv_head
        ]
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
    """Return the bytes of free memory of ``device``; for the CPU: of this host."""
    if device.type != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    return free_bytes()
