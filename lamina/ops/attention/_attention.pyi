from lamina.kv.paged_cache import Ints

VARIANTS: tuple[str, ...]
"""Instruction sets that this CPU runs, the fastest first."""

class Step:
    """The arrays of a ``lamina.kv.paged_cache.RowTable`` (int64), kept as they are, and the tasks that follow from
    them."""

    def __new__(
        cls,
        row: Ints,
        first: Ints,
        count: Ints,
        seen: Ints,
        stop: Ints,
        origin: Ints,
        table: Ints,
        block_size: int,
    ) -> Step: ...

class Kernels:
    """The kernels of one variant, dtype of queries and of stored numbers ("" = the same), and their threads.

    Calls give the GIL back; one computes at a time.
    """

    def __new__(cls, variant: str, dtype: str, stored: str = "") -> Kernels: ...
    def attend(
        self,
        step: Step,
        operator: tuple[int, int, int, int, int, float, float, int, int],
        stored: bool,
        q: int,
        k: int,
        v: int,
        k_scale: int,
        v_scale: int,
        o: int,
        lse: int,
        out: int,
        threads: int,
    ) -> None:
        """Attention of a step's rows over stored tokens, or over each other.

        ``operator``: query heads, KV heads, qk_dim, v_dim, window, scale, softcap, addresses of sinks and slopes (0 =
        none). k and v: a store's blocks if ``stored``, else the step's rows; k_scale and v_scale: theirs, 0 where they
        are not of 8 bits. All tensors by address, contiguous. Without ``out`` the result goes to o and lse. With it, o
        and lse hold the stored part, which is merged with the result and the sinks into out.
        """

    def merge(self, o: int, lse: int, left: int, right: int, pairs: int, q_heads: int, v_dim: int) -> None:
        """o [rows, q_heads, v_dim], lse [rows, q_heads]: rows left[i] become their merge with rows right[i]; int64."""

    def close(
        self,
        stored_o: int,
        stored_lse: int,
        new_o: int,
        new_lse: int,
        sinks: int,
        queries: int,
        q_heads: int,
        v_dim: int,
        out: int,
    ) -> None:
        """Merge both and the sinks, [q_heads] or none (0), into out [queries, v_dim]; queries are q_heads by row."""

    def select(
        self,
        operator: tuple[int, int, int, float],
        q: int,
        least: int,
        most: int,
        choices: Ints,
        blocks: Ints,
        table: int,
        width: int,
        threads: int,
    ) -> None:
        """Fill a table [choices, KV heads, width] with the blocks that rows attend; what is behind them is left.

        ``operator``: query heads, KV heads, qk_dim, scale. ``choices``, ``blocks``: of
        lamina.ops.attention.block_selection. Tensors by address. Raises ValueError where these make no sense.
        """

    def tally(
        self,
        operator: tuple[int, int, int, float, float, int],
        q: int,
        k: int,
        k_scale: int,
        blocks: Ints,
        seen: Ints,
        block_size: int,
        to: int,
        threads: int,
    ) -> int:
        """Add what rows attend each block to ``to`` [KV heads, blocks] int64: lamina.ops.attention.block_scores.

        ``operator``: query heads, KV heads, qk_dim, scale, softcap, address of sinks (0 = none). q, k and its scales (0
        where it has none) by address. Returns the products of a query and a key that it took. Raises ValueError where
        these make no sense.
        """

    def read(self, address: int, nbytes: int, threads: int) -> int:
        """Read memory once, from end to end: what attention can be compared with. The result means nothing."""
