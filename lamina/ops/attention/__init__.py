"""Attention backends of the memory workers. Each is a module of this package with ``open_backend``; see ``get``."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lamina.kv.paged_cache import LayerCache, RowTable, SlotMapping
    from lamina.kv.stored_format import StoredRows

    from .block_selection import BlockChoices
    from .merge import Partial
    from .spec import AttentionSpec

# name -> module of this package with a function open_backend(device, dtype, store_dtype); imported when first used. The
# best first.
BACKENDS: dict[str, str] = {
    "native": "native",
    "numba": "numba",
    "cuda": "cuda",  # on GPUs only, as the next one: both raise ValueError for other devices
    "flashinfer": "flashinfer",
    "reference": "reference",
    "emulate": "emulate",
}
KINDS = {"native": "cpu", "numba": "cpu", "cuda": "cuda", "flashinfer": "cuda"}  # of device, of backends for one
WRAPPERS = ("emulate",)  # backends that compute with another one
UNSCALED = ("flashinfer",)  # backends that take stored K and V in the wire's dtype alone


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One layer's attention as one memory worker does it: its own heads only."""

    spec: AttentionSpec
    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    sinks: Tensor | None = None  # [Hq] fp32
    slopes: Tensor | None = None  # [Hq] fp32


class AttentionBackend(Protocol):
    """Computes partial attention (``merge.Partial``) for the rows of a step, one layer at a time.

    Contract, the same for every backend (tests/contract/test_attention.py runs it over the whole table):

    1. Meaning. ``AttentionSpec``, for any numbers of rows in a sequence: one (decode), some, a whole prompt. Query head
       h reads KV head h // (q_heads / kv_heads).
    2. Precision. Scores, softmax and sums in fp32 or better, whatever the dtype of the store; weights may be
       rounded to bf16 where they meet V of bf16, as native does on AVX512-BF16, and for prompts on AMX; lse may be of
       the sum of weights as they are rounded, so within 2^-8. Where the store is of 8 bits (``kv.stored_format``), a K
       or V is what its number and scale give in fp32; a step's own rows are attended as they will be stored, never as
       they came. So a result does not tell which tokens were stored before the step and which came with it, more than
       it does without scales: chunks of a prompt, replayed steps and workers that split a sequence all read the same
       numbers.
    3. Exactness. What a (sequence, query head) gets depends, bit for bit, on that sequence's rows and stored tokens
       alone: not on the other sequences of the step, the other heads of the worker, block ids or threads. Stored tokens
       are cut into chunks and merged as ``merge`` describes.
    4. Isolation. Stored bytes outside a sequence's visible positions, scales too, have no influence, even if they are
       NaN; a NaN stays in the (sequence, head) that it came from.
    5. Lifetime. Results may share memory with the arguments of the call and with the backend; they hold until the next
       ``prepare``, or the next call of the same method for the same operator, whichever is first. Nothing is kept of q,
       k, v after that.
    """

    @property
    def engine(self) -> object | None:
        """For other native modules, which use its kernels, and what ``prepare`` gives; None where there is none."""
        return None

    def prepare(self, rows: RowTable) -> Any:
        """What all layers of one group share in one step; passed to the other two."""
        ...

    def graph_key(self, prepared: Any) -> tuple[int, ...] | None:
        """Sizes by which a graph of the device that was recorded with ``prepared`` is for others too, which have the
        same; None: it is for no other.
        """
        return None

    def update_prepared(self, prepared: Any, other: Any) -> None:
        """Have ``prepared`` say what ``other``, of the same ``graph_key``, says, at the addresses that it has."""
        raise ValueError("graphs of this backend are for no other step")

    def attend_stored(self, op: Operator, prepared: Any, store: LayerCache, q: Tensor) -> Partial:
        """Attention of the step's rows over their sequences' stored tokens, positions ``seen .. stop`` of the table.

        q [R, Hq, D] in the wire dtype -> o [R, Hq, Dv], lse [R, Hq] fp32: the root over these tokens' chunks, empty
        where nothing is stored or seen.
        """
        ...

    def attend_new(self, op: Operator, prepared: Any, q: Tensor, kv: StoredRows) -> Partial:
        """Causal attention of the step's rows over the rows of their own sequence.

        q [R, Hq, D] in the wire dtype, ``kv`` in the store's -> o [R, Hq, Dv], lse [R, Hq] fp32.
        """
        ...

    def finish(self, op: Operator, prepared: Any, stored: Partial, q: Tensor, kv: StoredRows, out: Tensor) -> None:
        """``attend_new``, then ``merge_output``."""
        self.merge_output(stored, self.attend_new(op, prepared, q, kv), op.sinks, out)

    def select_blocks(self, op: Operator, store: LayerCache, choices: BlockChoices, q: Tensor, table: Tensor) -> None:
        """``select.fill``: which blocks rows attend. Bounds may be rounded otherwise, so each backend has its own."""
        from .block_selection import select_blocks

        select_blocks(op, store, choices, q, table)

    def block_scores(self, op: Operator, store: LayerCache, blocks: Tensor, q: Tensor, seen: Tensor) -> Tensor:
        """``scores.block_scores``: how much rows attend each block of their sequence. All workers that add theirs up
        have one backend, since sums may be rounded otherwise by another.
        """
        from .block_scores import block_scores

        return block_scores(op, store, blocks, q, seen)

    def write_rows(self, store: LayerCache, slot_mapping: SlotMapping, rows: StoredRows) -> None:
        """``LayerCache.write``, on the device that computes."""
        store.write(slot_mapping, rows)

    def merge(self, parts: Partial, left: Tensor, right: Tensor) -> None:
        """Rows ``left`` of ``parts`` become their merge with rows ``right``, bit for bit as inside ``attend_stored``.

        parts o [N, Hq, Dv], lse [N, Hq], contiguous; left, right int64, no row twice. See ``merge.merge``.
        """
        from .merge import Partial, merge

        merged = merge(*(Partial(parts.o[at], parts.lse[at]) for at in (left, right)))
        parts.o[left], parts.lse[left] = merged

    def merge_output(self, stored: Partial, new: Partial, sinks: Tensor | None, out: Tensor) -> None:
        """Merge stored and new tokens and ``sinks`` into ``out``, as ``merge.finish`` does. All are contiguous."""
        from .merge import finish

        finish(stored, new, sinks, out)


def get(
    name: str, device: torch.device, dtype: torch.dtype, store_dtype: torch.dtype | None = None
) -> AttentionBackend:
    """Open the backend ``name`` on ``device``, for the wire's ``dtype`` and the store's (None = the same); "auto" is
    the first of the table that works.

    Raises ValueError for an unknown name (it lists the known ones), a device or a store that it cannot use, and
    ImportError, with its cause, when something that it needs is missing.
    """
    store_dtype = store_dtype or dtype
    if name == "auto":
        for candidate in BACKENDS:
            with suppress(ImportError, ValueError):
                return _open(candidate, device, dtype, store_dtype)
        raise ImportError(f"no attention backend can be used on {device}")
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; choose one of auto, {', '.join(BACKENDS)}")
    return _open(name, device, dtype, store_dtype)


def get_equivalent(name: str, device: torch.device, dtype: torch.dtype, other: str) -> AttentionBackend:
    """``get``, for a worker beside those that compute with ``name``: ``other`` where ``name`` is for another kind of
    device, and then the bits are others. Raises ValueError where it is for this kind, and cannot be used here.
    """
    if KINDS.get(name, device.type) != device.type:
        return get(other, device, dtype)
    try:
        return get(name, device, dtype)
    except ImportError as e:
        raise ValueError(
            f"{e}; the memory workers compute with it: --attention-backend takes one that all hosts have"
        ) from e


def check_store(name: str, kv_cache_dtype: str) -> None:
    """Raises ValueError where backend ``name`` has no kernels for that --kv-cache-dtype."""
    if name in UNSCALED and kv_cache_dtype != "auto":
        others = ", ".join(b for b in BACKENDS if b not in (*UNSCALED, *WRAPPERS))
        raise ValueError(
            f"--kv-cache-dtype {kv_cache_dtype}: attention backend {name!r} stores K and V as --dtype alone; "
            f"use --attention-backend {others} or auto"
        )


def _open(name: str, device: torch.device, dtype: torch.dtype, store_dtype: torch.dtype) -> AttentionBackend:
    from lamina.kv.stored_format import kv_cache_dtype_name

    check_store(name, kv_cache_dtype_name(store_dtype))
    try:
        module = import_module(f"{__name__}.{BACKENDS[name]}")
    except ImportError as e:
        raise ImportError(f"attention backend {name!r} cannot be used here: {e}") from e
    backend: AttentionBackend = module.open_backend(device, dtype, store_dtype)
    return backend


def name_of(backend: AttentionBackend) -> str:
    """A backend's name in the table, which is its module's."""
    return type(backend).__module__.rpartition(".")[2]
