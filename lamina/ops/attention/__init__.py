"""Attention backends, each a module of this package with ``open_backend``. A ``KvStore`` opens one by ``get``."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from lamina.config.conflicts import conflict_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lamina.kv.paged_cache import LayerCache, RowTable, SlotMapping
    from lamina.kv.stored_format import StoredRows

    from .block_selection import BlockChoices
    from .merge import Partial
    from .spec import AttentionSpec

# name -> module of this package with a function open_backend(device, dtype, store_dtype); imported when first used. The
# best one comes first.
BACKENDS: dict[str, str] = {
    "native": "native",
    "numba": "numba",
    "cuda": "cuda",  # on GPUs only, like the next one: both raise ValueError for other devices
    "flashinfer": "flashinfer",
    "reference": "reference",
    "emulate": "emulate",
}
# The kind of device of backends that run on one kind only.
KINDS = {"native": "cpu", "numba": "cpu", "cuda": "cuda", "flashinfer": "cuda"}
WRAPPERS = ("emulate",)  # backends that compute with another one
UNSCALED = ("flashinfer",)  # backends whose stored K and V must have the dtype of messages


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One layer's attention on one worker: only the heads that lie there."""

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

    1. Meaning. ``AttentionSpec``, for any number of rows in a sequence: one (decode), some, a whole prompt. Query head
       h reads KV head h // (q_heads / kv_heads).
    2. Precision. Scores, softmax and sums are fp32 or better, whatever the dtype of the store. Weights may be rounded
       to bf16 where they are multiplied with V of bf16. ``native`` does so on AVX512-BF16, and on AMX for prompts. lse
       may then be that of the rounded weights, so within 2^-8. In a store of 8 bits (``kv.stored_format``), K and V are
       what number and scale give in fp32. A step's own rows are attended as they will be stored, not as they came. So a
       result does not depend more than without scales on which tokens were stored before the step. Chunks of a prompt,
       replayed steps and workers that split a sequence all read the same numbers.
    3. Exactness. The result of a (sequence, query head) depends, bit for bit, on that sequence's rows and stored tokens
       alone. Other sequences of the step, other heads of the worker, block ids and threads have no influence. Stored
       tokens are cut into chunks and merged as ``merge`` describes.
    4. Isolation. Stored bytes outside a sequence's visible positions, scales included, have no influence, even if they
       are NaN. A NaN stays in the (sequence, head) that it came from.
    5. Lifetime. Results may share memory with the arguments of the call and with the backend. They hold until the next
       ``prepare``, or the next call of the same method for the same operator, whichever is first. Nothing of q, k, v is
       kept after that.
    """

    @property
    def engine(self) -> object | None:
        """The object by which other native modules use its kernels and results of ``prepare``; None if there is
        none.
        """
        return None

    def prepare(self, rows: RowTable) -> Any:
        """Return what all layers of one group share in one step, for the methods that attend."""
        ...

    def graph_key(self, prepared: Any) -> tuple[int, ...] | None:
        """Return sizes that a recorded graph depends on: it serves every step with equal ones. None: it serves no other
        step.
        """
        return None

    def update_prepared(self, prepared: Any, other: Any) -> None:
        """Copy the content of ``other``, which has the same ``graph_key``, to the addresses of ``prepared``."""
        raise ValueError("graphs of this backend are for no other step")

    def attend_stored(self, op: Operator, prepared: Any, store: LayerCache, q: Tensor) -> Partial:
        """Attend the stored tokens of the rows' sequences, positions ``seen .. stop`` of the table. q [R, Hq, D] in the
        dtype of messages -> o [R, Hq, Dv], lse [R, Hq] fp32: the root over these tokens' chunks, empty if nothing is
        stored or seen.
        """
        ...

    def attend_new(self, op: Operator, prepared: Any, q: Tensor, kv: StoredRows) -> Partial:
        """Attend, causally, the step's rows over the rows of their own sequence. q [R, Hq, D] in the dtype of messages,
        ``kv`` in the store's -> o [R, Hq, Dv], lse [R, Hq] fp32.
        """
        ...

    def finish(self, op: Operator, prepared: Any, stored: Partial, q: Tensor, kv: StoredRows, out: Tensor) -> None:
        """Call ``attend_new``, then ``merge_output``."""
        self.merge_output(stored, self.attend_new(op, prepared, q, kv), op.sinks, out)

    def select_blocks(self, op: Operator, store: LayerCache, choices: BlockChoices, q: Tensor, table: Tensor) -> None:
        """Select the blocks that rows attend, as ``block_selection.select_blocks`` does. Backends may round bounds
        differently.
        """
        from .block_selection import select_blocks

        select_blocks(op, store, choices, q, table)

    def block_scores(self, op: Operator, store: LayerCache, blocks: Tensor, q: Tensor, seen: Tensor) -> Tensor:
        """Return how much rows attend each block of their sequence; see ``block_scores.block_scores``. All workers
        whose scores are added up have the same backend, since another one may round sums differently.
        """
        from .block_scores import block_scores

        return block_scores(op, store, blocks, q, seen)

    def write_rows(self, store: LayerCache, slot_mapping: SlotMapping, rows: StoredRows) -> None:
        """Write rows as ``LayerCache.write`` does, on the device that computes."""
        store.write(slot_mapping, rows)

    def merge(self, parts: Partial, left: Tensor, right: Tensor) -> None:
        """Replace rows ``left`` of ``parts`` by their merge with rows ``right``, bit for bit as inside
        ``attend_stored``. parts o [N, Hq, Dv], lse [N, Hq], contiguous; left, right int64, no row twice. See
        ``merge.merge``.
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
    """Open the backend ``name`` on ``device``; "auto" is the first one of the table that works.

    ``dtype``: of messages. ``store_dtype``: of the store; None for the same. Raises ValueError for an unknown name (it
    lists the known ones) and for a device or a store that it cannot use. Raises ImportError, with its cause, if
    something that it needs is missing.
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
    """Open a backend that equals ``name``, which other workers use, or ``other`` if ``name`` runs on other devices
    only. With ``other`` the bits differ. Raises ValueError if ``name`` is for this kind of device, and cannot be used
    here.
    """
    if KINDS.get(name, device.type) != device.type:
        return get(other, device, dtype)
    try:
        return get(name, device, dtype)
    except ImportError as e:
        raise ValueError(
            f"{e}; the memory workers compute with it: --attention-backend takes one that all hosts have"
        ) from e


def _open(name: str, device: torch.device, dtype: torch.dtype, store_dtype: torch.dtype) -> AttentionBackend:
    from lamina.kv.stored_format import kv_cache_dtype_name

    if name in UNSCALED and kv_cache_dtype_name(store_dtype) != "auto":
        raise ValueError(conflict_text(f"--attention-backend {name}", "--kv-cache-dtype int8 or fp8"))
    try:
        module = import_module(f"{__name__}.{BACKENDS[name]}")
    except ImportError as e:
        raise ImportError(f"attention backend {name!r} cannot be used here: {e}") from e
    backend: AttentionBackend = module.open_backend(device, dtype, store_dtype)
    return backend


def name_of(backend: AttentionBackend) -> str:
    """Return a backend's name in the table, which is its module's."""
    return type(backend).__module__.rpartition(".")[2]
