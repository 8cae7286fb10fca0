"""The cuda backend: kernels of csrc/attention/cuda, for decode and prompts, on NVIDIA GPUs from sm_80 on.

HARDWARE-UNVERIFIED: its kernels were compiled for sm_80, sm_90 and sm_100, and run warp by warp on a CPU.

Everything is launched on torch's current stream, and nothing waits for the GPU. Lengths and block tables are in a
``DeviceTable`` on the device, so a captured CUDA graph can be replayed over growing lengths:

    step = backend.step(sequences=64, rows=64, tokens=32768, block_size=16)
    backend.refill(step, table)                        # once, then warm up what is to be captured
    with torch.cuda.graph(graph): ... backend.attend_stored(op, step, store, q) ...
    backend.refill(step, next_table); graph.replay()   # every step
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lamina.kv.paged_cache import LayerCache, RowTable, SlotMapping
from lamina.kv.stored_format import StoredRows

from . import AttentionBackend, Operator
from .cuda_geometry import HEAD_DIMS, LEVELS, MOST_TOKENS, LaunchShape, Variant, choose
from .cuda_kernels import Argument, CupyKernels, Kernels
from .merge import CHUNK_TOKENS, Partial

log = logging.getLogger(__name__)
ELEMENTS = {torch.float32: "float", torch.bfloat16: "BFloat16", torch.float16: "Half"}
STORED: dict[torch.dtype | None, str] = {torch.int8: "Int8", torch.float8_e4m3fn: "Fp8"}
HEADER = 8  # int32 before a step's sequences
SEQUENCE = ("row", "first", "count", "seen", "stop", "origin")  # struct Sequence of csrc/attention/cuda/step.cuh
SEQUENCE_INTS = 8
SEQUENCES_PER_WARP = 32
ALIGNMENT = 16


def open_backend(device: torch.device, dtype: torch.dtype, store_dtype: torch.dtype) -> CudaAttention:
    """Open the backend for queries of ``dtype`` on a CUDA device."""
    if device.type != "cuda":
        raise ValueError(f"attention backend 'cuda' computes on CUDA devices, not on {device}")
    try:
        return CudaAttention(CupyKernels(device), device, dtype, store_dtype)
    except ImportError as error:
        raise ImportError(f"attention backend 'cuda' cannot be used here: {error}") from error


class PlanKey(NamedTuple):
    """The properties, in addition to the step, that a plan depends on."""

    variant: Variant
    group: int
    kv_heads: int
    stored: bool


class DeviceTable:
    """A row table on the device, and its plans. Its addresses stay the same when it is filled again."""

    def __init__(self, device: torch.device, sequences: int, rows: int, width: int, block_size: int) -> None:
        self.sequences, self.rows, self.width, self.block_size = sequences, rows, width, block_size
        self.most_rows = rows - sequences + 1 if sequences else 0  # rows of one sequence, at most
        self.data = torch.zeros(HEADER + sequences * (SEQUENCE_INTS + width), dtype=torch.int32, device=device)
        self.plans: dict[PlanKey, Tensor] = {}

    def pack(self, table: RowTable) -> Tensor:
        """Return the table in its device layout, in host memory. Raises ValueError if it does not fit."""
        count, width = table.table.shape
        if count > self.sequences or table.num_rows > self.rows or width > self.width:
            raise ValueError(
                f"the step takes {self.sequences} sequences, {self.rows} rows and {self.width} blocks of each, not "
                f"{count}, {table.num_rows} and {width}"
            )
        if table.count.max(initial=0) > self.most_rows:
            raise ValueError(f"the step takes {self.most_rows} rows of a sequence, not {table.count.max()}")
        if table.block_size != self.block_size:
            raise ValueError(f"the step has blocks of {self.block_size} tokens, not {table.block_size}")
        host = torch.zeros(self.data.shape, dtype=torch.int32, pin_memory=self.data.is_cuda)
        data = host.numpy()
        data[0] = count
        sequences = data[HEADER : HEADER + self.sequences * SEQUENCE_INTS].reshape(-1, SEQUENCE_INTS)
        for i, name in enumerate(SEQUENCE):
            sequences[:count, i] = getattr(table, name)
        data[HEADER + sequences.size :].reshape(self.sequences, self.width)[:count, :width] = table.table
        return host

    def arguments(self) -> tuple[Argument, ...]:
        """Return counts and sequences, as arguments of the kernels."""
        base = self.data.data_ptr()
        return np.uint64(base), np.uint64(base + HEADER * 4)

    @property
    def table_address(self) -> int:
        return self.data.data_ptr() + (HEADER + self.sequences * SEQUENCE_INTS) * 4


class CudaAttention(AttentionBackend):
    """The ``AttentionBackend`` of our CUDA kernels. One stream at a time may use it, as scratch memory is shared."""

    def __init__(
        self, kernels: Kernels, device: torch.device, dtype: torch.dtype, store_dtype: torch.dtype | None = None
    ) -> None:
        self.kernels = kernels
        self._device = device
        self._element = ELEMENTS[dtype]
        self._stored = STORED.get(store_dtype, "")
        # For kernels that are the same in all variants.
        self._common = Variant(element=self._element, stored=self._stored)
        self._scratch: dict[str, Tensor] = {}
        self.outgrown: list[Tensor] = []  # captured graphs may still use it
        self._plain = set[tuple[int, int]]()  # head sizes for which it was logged that they do not use tensor cores

    def new_step(self, *, sequences: int, rows: int, tokens: int, block_size: int) -> DeviceTable:
        """Allocate a table for steps of up to ``sequences``, ``rows`` and, in each sequence, ``tokens`` visible tokens.
        Raises ValueError for more tokens than the kernels can count.
        """
        if tokens > MOST_TOKENS:
            raise ValueError(f"attention backend 'cuda' takes {MOST_TOKENS} tokens of a sequence, not {tokens}")
        # The visible tokens may begin within a chunk.
        width = (-(-tokens // CHUNK_TOKENS) + 1) * (CHUNK_TOKENS // block_size)
        return DeviceTable(self._device, sequences, rows, width, block_size)

    def refill(self, step: DeviceTable, table: RowTable) -> None:
        """Copy another row table into ``step``, and compute its plans again."""
        step.data.copy_(step.pack(table), non_blocking=True)
        for key in step.plans:
            self._plan(step, key)

    def prepare(self, rows: RowTable) -> DeviceTable:
        count, width = rows.table.shape
        if width * rows.block_size > MOST_TOKENS + CHUNK_TOKENS:
            raise ValueError(f"attention backend 'cuda' takes {MOST_TOKENS} tokens of a sequence")
        width = 1 << max(0, width - 1).bit_length()  # many steps have the same width, so they can be refilled
        step = DeviceTable(self._device, count, rows.num_rows, width, rows.block_size)
        step.most_rows = int(rows.count.max(initial=0))
        self.refill(step, rows)
        return step

    def graph_key(self, prepared: DeviceTable) -> tuple[int, ...]:
        return prepared.sequences, prepared.rows, prepared.width, prepared.block_size, prepared.most_rows

    def update_prepared(self, prepared: DeviceTable, other: DeviceTable) -> None:
        """Copy the table; the graph also launches the computation of its plans."""
        prepared.data.copy_(other.data)

    def attend_stored(self, op: Operator, prepared: DeviceTable, store: LayerCache, q: Tensor) -> Partial:
        if store.k.shape[0] * op.kv_heads * prepared.block_size >= 1 << 31:
            raise ValueError(f"a store of {store.k.shape[0]} blocks is more than attention backend 'cuda' numbers")
        out = self._empty(op, q)
        self._attend(op, prepared, True, q, StoredRows(store.k, store.v, store.scales), out)
        return out

    def attend_new(self, op: Operator, prepared: DeviceTable, q: Tensor, kv: StoredRows) -> Partial:
        out = self._empty(op, q)
        self._attend(op, prepared, False, q, kv, out)
        return out

    def finish(
        self, op: Operator, prepared: DeviceTable, stored: Partial, q: Tensor, kv: StoredRows, out: Tensor
    ) -> None:
        self._attend(op, prepared, False, q, kv, stored, out)

    def merge(self, parts: Partial, left: Tensor, right: Tensor) -> None:
        heads, dim = parts.o.shape[1:]
        tensors = parts.o, parts.lse, left, right
        self._launch(
            self._common, "lamina_merge", len(left) * heads, *map(_address, tensors), *map(np.int32, (heads, dim))
        )

    def merge_output(self, stored: Partial, new: Partial, sinks: Tensor | None, out: Tensor) -> None:
        heads, dim = new.o.shape[-2:]
        tensors = stored.o, stored.lse, new.o, new.lse, sinks
        shape = np.int32(heads), np.int32(dim)
        self._launch(self._common, "lamina_close", new.lse.numel(), *map(_address, tensors), *shape, _address(out))

    def write_rows(self, store: LayerCache, slot_mapping: SlotMapping, rows: StoredRows) -> None:
        """Write rows as ``LayerCache.write`` does, in one launch."""
        _, heads, size, v_dim = store.v.shape
        shape = (np.int32(heads), np.int32(size), np.int32(rows.k.shape[-1]), np.int32(v_dim))
        none = (None, None)
        tensors = tuple(
            map(_address, (rows.k, rows.v, *(rows.scales or none), slot_mapping.blocks, slot_mapping.offsets))
        )
        to = tuple(map(_address, (store.k, store.v, *(store.scales or none))))
        self._launch(self._common, "lamina_append", len(rows.k) * heads, *tensors, *shape, *to)

    def _attend(
        self,
        op: Operator,
        step: DeviceTable,
        stored: bool,
        q: Tensor,
        kv: StoredRows,
        part: Partial,
        out: Tensor | None = None,
    ) -> None:
        spec, group = op.spec, op.q_heads // op.kv_heads
        variant = choose(self._element, op.qk_dim, op.v_dim, step.most_rows * group, self._stored)
        key = PlanKey(variant, group, op.kv_heads, stored)
        geometry = self.geometry(step, key)
        if not variant.columns:
            self._warn(op.qk_dim, op.v_dim)
        q, k, v = map(_aligned, (q, kv.k, kv.v))
        if key not in step.plans:
            step.plans[key] = torch.empty(4 + 4 * geometry.capacity, dtype=torch.int32, device=self._device)
            self._plan(step, key)
        tasks = geometry.capacity * op.kv_heads
        scratch = (
            self._reserve("nodes", tasks * variant.node_numbers, torch.float32),
            self._reserve("counters", tasks, torch.int32),
            self._reserve("taken", 1, torch.int32),
            self._reserve("slots", geometry.blocks * LEVELS * variant.node_numbers, torch.float32),
        )
        shape = (op.q_heads, op.kv_heads, op.qk_dim, op.v_dim, spec.window)
        self._launch(
            variant,
            "lamina_attend",
            geometry.blocks,
            *step.arguments(),
            np.uint64(step.table_address),
            np.int32(step.width),
            np.int32(step.block_size.bit_length() - 1),
            _address(step.plans[key]),
            *map(np.int32, shape),
            np.float32(spec.scale),
            np.float32(spec.softcap),
            _address(op.sinks),
            _address(op.slopes),
            np.int32(stored),
            *map(_address, (q, k, v, *(kv.scales or (None, None)), part.o, part.lse)),
            _address(out),
            *map(_address, scratch),
        )

    def _warn(self, qk_dim: int, v_dim: int) -> None:
        """Log once for each kind of head that it does not use tensor cores."""
        if (qk_dim, v_dim) in self._plain:
            return
        self._plain.add((qk_dim, v_dim))
        log.warning(
            "attention over %s heads of %d and %d uses no tensor cores, and reads K and V once for each query. This is "
            "far slower; use bfloat16 or float16 and heads of %d to %d, a multiple of %d",
            self._element, qk_dim, v_dim, HEAD_DIMS[0], HEAD_DIMS[-1], HEAD_DIMS.step,
        )  # fmt: skip

    def _plan(self, step: DeviceTable, key: PlanKey) -> None:
        geometry = self.geometry(step, key)
        shape = (geometry.capacity, key.variant.tile, key.group, key.kv_heads, geometry.blocks, key.stored)
        blocks = max(1, -(-step.sequences // SEQUENCES_PER_WARP))  # an empty plan must be written, too
        arguments = (*step.arguments(), _address(step.plans[key]), *map(np.int32, shape))
        self._launch(self._common, "lamina_plan", blocks, *arguments)

    def geometry(self, step: DeviceTable, key: PlanKey) -> LaunchShape:
        sizes = {"sequences": step.sequences, "rows": step.rows, "group": key.group, "kv_heads": key.kv_heads}
        return LaunchShape.of(key.variant, self.kernels.device, **sizes)

    def _launch(self, variant: Variant, name: str, blocks: int, *arguments: Argument) -> None:
        if blocks:
            self.kernels.launch(variant, name, blocks, arguments)

    def _reserve(self, name: str, numbers: int, dtype: torch.dtype) -> Tensor:
        """Return scratch memory that is kept for later calls; zeros if it is new."""
        scratch = self._scratch.get(name)
        if scratch is None or scratch.numel() < numbers:
            if scratch is not None:
                self.outgrown.append(scratch)
            scratch = self._scratch[name] = torch.zeros(numbers, dtype=dtype, device=self._device)
        return scratch

    def _empty(self, op: Operator, q: Tensor) -> Partial:
        shape = q.shape[0], op.q_heads
        return Partial(torch.empty(*shape, op.v_dim, device=self._device), torch.empty(*shape, device=self._device))


def _address(tensor: Tensor | None) -> np.uint64:
    """Return the address of a tensor, which must be contiguous: kernels compute places from sizes alone."""
    assert tensor is None or tensor.is_contiguous()
    return np.uint64(0 if tensor is None else tensor.data_ptr())


def _aligned(rows: Tensor) -> Tensor:
    """Return rows aligned to ALIGNMENT bytes, by which kernels load K and V; for q, 4 would suffice. Rows of a message
    begin wherever the ones before them end.
    """
    dense = rows.contiguous()
    return dense if dense.data_ptr() % ALIGNMENT == 0 else dense.clone()
