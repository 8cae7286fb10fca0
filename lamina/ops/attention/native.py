"""The native backend: kernels of csrc/attention, for decode and prompts, on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.kv.paged_cache import LayerCache, RowTable
from lamina.kv.stored_format import DTYPES, Scales, StoredRows

from . import AttentionBackend, Operator
from .block_selection import BlockChoices
from .merge import Partial

try:
    from ._attention import VARIANTS, Kernels, Step
except ImportError as error:
    raise ImportError(
        f"it needs the native module lamina.ops.attention._attention, which did not load ({error}). Install a C++17 "
        "compiler, "
        "then run `python setup.py build_ext --inplace` or install again; or use another backend"
    ) from error

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
STORED: dict[torch.dtype | None, str] = {dtype: name for name, dtype in DTYPES.items()}


def open_backend(device: torch.device, dtype: torch.dtype, store_dtype: torch.dtype) -> NativeAttention:
    """Open the backend for queries of ``dtype``, with the best instructions of this CPU."""
    if device.type != "cpu":
        raise ValueError(f"attention backend 'native' computes on CPUs, not on {device}")
    return NativeAttention(dtype, store_dtype=store_dtype)


class NativeAttention(AttentionBackend):
    """The ``AttentionBackend`` of ``csrc/attention``. It has its own threads, as many as torch's setting."""

    def __init__(self, dtype: torch.dtype, variant: str = VARIANTS[0], store_dtype: torch.dtype | None = None) -> None:
        """``variant``: one of VARIANTS. Raises ValueError for one that this CPU cannot run."""
        self.kernels = Kernels(variant, NAMES[dtype], STORED.get(store_dtype, ""))

    @property
    def engine(self) -> Kernels:
        return self.kernels

    def prepare(self, rows: RowTable) -> Step:
        return Step(rows.row, rows.first, rows.count, rows.seen, rows.stop, rows.origin, rows.table, rows.block_size)

    def attend_stored(self, op: Operator, prepared: Step, store: LayerCache, q: Tensor) -> Partial:
        out = _empty(op, q)
        self._attend(op, prepared, True, q, store.k, store.v, store.scales, out, 0)
        return out

    def attend_new(self, op: Operator, prepared: Step, q: Tensor, kv: StoredRows) -> Partial:
        out = _empty(op, q)
        self._attend(op, prepared, False, q, kv.k, kv.v, kv.scales, out, 0)
        return out

    def finish(self, op: Operator, prepared: Step, stored: Partial, q: Tensor, kv: StoredRows, out: Tensor) -> None:
        self._attend(op, prepared, False, q, kv.k, kv.v, kv.scales, stored, out.data_ptr())

    def select_blocks(self, op: Operator, store: LayerCache, choices: BlockChoices, q: Tensor, table: Tensor) -> None:
        assert store.bounds is not None
        shape, (least, most) = (op.q_heads, op.kv_heads, op.qk_dim, op.spec.scale), store.bounds
        addresses, into = (q.data_ptr(), least.data_ptr(), most.data_ptr()), (table.data_ptr(), table.shape[-1])
        self.kernels.select(shape, *addresses, choices.numbers, choices.blocks, *into, torch.get_num_threads())

    def block_scores(self, op: Operator, store: LayerCache, blocks: Tensor, q: Tensor, seen: Tensor) -> Tensor:
        to = torch.zeros(op.kv_heads, len(blocks), dtype=torch.int64)
        sinks, scales = (0 if x is None else x.data_ptr() for x in (op.sinks, store.scales and store.scales.k))
        shape = op.q_heads, op.kv_heads, op.qk_dim, op.spec.scale, op.spec.softcap, sinks
        of, rows = (blocks.numpy(), seen.numpy(), store.k.shape[2]), q.contiguous()
        threads = torch.get_num_threads()
        self.kernels.tally(shape, rows.data_ptr(), store.k.data_ptr(), scales, *of, to.data_ptr(), threads)
        return to.sum(0)

    def merge(self, parts: Partial, left: Tensor, right: Tensor) -> None:
        addresses = parts.o.data_ptr(), parts.lse.data_ptr(), left.data_ptr(), right.data_ptr()
        self.kernels.merge(*addresses, len(left), *parts.o.shape[1:])

    def merge_output(self, stored: Partial, new: Partial, sinks: Tensor | None, out: Tensor) -> None:
        addresses = stored.o.data_ptr(), stored.lse.data_ptr(), new.o.data_ptr(), new.lse.data_ptr()
        shape = new.lse.numel(), new.lse.shape[-1], new.o.shape[-1]
        self.kernels.close(*addresses, 0 if sinks is None else sinks.data_ptr(), *shape, out.data_ptr())

    def _attend(
        self,
        op: Operator,
        step: Step,
        stored: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scales: Scales | None,
        part: Partial,
        out: int,
    ) -> None:
        spec = op.spec
        sinks = 0 if op.sinks is None else op.sinks.data_ptr()
        slopes = 0 if op.slopes is None else op.slopes.data_ptr()
        shape = op.q_heads, op.kv_heads, op.qk_dim, op.v_dim, spec.window, spec.scale, spec.softcap, sinks, slopes
        of_scales = (scales.k.data_ptr(), scales.v.data_ptr()) if scales else (0, 0)
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), *of_scales, part.o.data_ptr(), part.lse.data_ptr()
        self.kernels.attend(step, shape, stored, *addresses, out, torch.get_num_threads())


def _empty(op: Operator, q: Tensor) -> Partial:
    return Partial(torch.empty(q.shape[0], op.q_heads, op.v_dim), torch.empty(q.shape[0], op.q_heads))
