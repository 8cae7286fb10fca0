"""The native backend: kernels of csrc/attention, for decode and prompts, on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.kv.paged_cache import LayerCache, RowTable
from lamina.kv.stored_format import DTYPES, StoredRows

from . import AttentionBackend, Operator
from .block_selection import BlockChoices
from .merge import Partial

try:
    from ._attention import VARIANTS, Kernels, Step
except ImportError as error:
    raise ImportError(
        f"it needs the native module lamina.ops.attention._attention, which did not load ({error}): install Lamina "
        "again (a checkout: `python setup.py build_ext --inplace`), or use another backend"
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
        return Step(rows)

    def attend_stored(self, op: Operator, prepared: Step, store: LayerCache, q: Tensor) -> Partial:
        out = _empty(op, q)
        self.kernels.attend(prepared, op, True, q, store, out, None, torch.get_num_threads())
        return out

    def attend_new(self, op: Operator, prepared: Step, q: Tensor, kv: StoredRows) -> Partial:
        out = _empty(op, q)
        self.kernels.attend(prepared, op, False, q, kv, out, None, torch.get_num_threads())
        return out

    def finish(self, op: Operator, prepared: Step, stored: Partial, q: Tensor, kv: StoredRows, out: Tensor) -> None:
        self.kernels.attend(prepared, op, False, q, kv, stored, out, torch.get_num_threads())

    def select_blocks(self, op: Operator, store: LayerCache, choices: BlockChoices, q: Tensor, table: Tensor) -> None:
        assert store.bounds is not None
        least, most = store.bounds
        into = table, table.shape[-1], torch.get_num_threads()
        self.kernels.select(op, least, most, choices.numbers, choices.blocks, q, *into)

    def block_scores(self, op: Operator, store: LayerCache, blocks: Tensor, q: Tensor, seen: Tensor) -> Tensor:
        to = torch.zeros(op.kv_heads, len(blocks), dtype=torch.int64)
        keys, threads = (store.k, store.scales and store.scales.k, store.k.shape[2]), torch.get_num_threads()
        self.kernels.tally(op, *keys, blocks.numpy(), q.contiguous(), seen.numpy(), to, threads)
        return to.sum(0)

    def merge(self, parts: Partial, left: Tensor, right: Tensor) -> None:
        self.kernels.merge(parts, left, right, len(left), *parts.o.shape[1:])

    def merge_output(self, stored: Partial, new: Partial, sinks: Tensor | None, out: Tensor) -> None:
        self.kernels.close(stored, new, sinks, new.lse.numel(), new.lse.shape[-1], new.o.shape[-1], out)


def _empty(op: Operator, q: Tensor) -> Partial:
    return Partial(torch.empty(q.shape[0], op.q_heads, op.v_dim), torch.empty(q.shape[0], op.q_heads))
