from torch import Tensor

from lamina.kv.paged_cache import Ints, LayerCache, RowTable
from lamina.kv.stored_format import StoredRows

from . import Operator
from .merge import Partial

VARIANTS: tuple[str, ...]
"""Instruction sets that this CPU runs, the fastest first."""

class Step:
    """The arrays of ``rows`` (int64), kept as they are, and the tasks that follow from them."""

    def __new__(cls, rows: RowTable, /) -> Step: ...

class Kernels:
    """The kernels of one variant, dtype of queries and of stored numbers ("" = the same), and their threads.

    Calls give the GIL back; one computes at a time.
    """

    def __new__(cls, variant: str, dtype: str, stored: str = "") -> Kernels: ...
    def attend(
        self,
        step: Step,
        op: Operator,
        stored: bool,
        q: Tensor,
        kv: LayerCache | StoredRows,
        part: Partial,
        out: Tensor | None,
        threads: int,
        /,
    ) -> None:
        """Attention of a step's rows over stored tokens, or over each other.

        ``kv``: a store's blocks if ``stored``, else the step's rows. Tensors are contiguous; their types and shapes are
        not checked. Without ``out`` the result goes to ``part``. With it, ``part`` holds the stored part, which is
        merged with the result and the sinks into out. Raises AttributeError and TypeError for other objects.
        """

    def merge(self, parts: Partial, left: Tensor, right: Tensor, pairs: int, q_heads: int, v_dim: int, /) -> None:
        """o [rows, q_heads, v_dim], lse [rows, q_heads]: rows left[i] become their merge with rows right[i]; int64."""

    def close(
        self,
        stored: Partial,
        new: Partial,
        sinks: Tensor | None,
        queries: int,
        q_heads: int,
        v_dim: int,
        out: Tensor,
        /,
    ) -> None:
        """Merge both and the sinks, [q_heads] or none, into out [queries, v_dim]; queries are q_heads by row."""

    def select(
        self,
        op: Operator,
        least: Tensor,
        most: Tensor,
        choices: Ints,
        blocks: Ints,
        q: Tensor,
        table: Tensor,
        width: int,
        threads: int,
        /,
    ) -> None:
        """Fill a table [choices, KV heads, width] with the blocks that rows attend; what follows them is left.

        ``choices``, ``blocks``: of lamina.ops.attention.block_selection. Raises ValueError where these make no sense.
        """

    def tally(
        self,
        op: Operator,
        k: Tensor,
        k_scale: Tensor | None,
        block_size: int,
        blocks: Ints,
        q: Tensor,
        seen: Ints,
        to: Tensor,
        threads: int,
        /,
    ) -> int:
        """Add what rows attend each block to ``to`` [KV heads, blocks] int64: lamina.ops.attention.block_scores.

        Returns the products of a query and a key that it took. Raises ValueError where these make no sense.
        """

    def read(self, address: int, nbytes: int, threads: int) -> int:
        """Read memory once, from end to end: what attention can be compared with. The result means nothing."""
