def usable() -> list[str]:
    """Instruction sets that this CPU can run, best first."""

class Engine:
    """Linear layers on ``threads`` threads, the caller's included. Calls from several threads take turns.

    ``variant``: one of ``usable()``, or "" for the best. Raises ValueError where the CPU lacks it.
    """

    def __new__(cls, threads: int, variant: str) -> Engine: ...
    def linear(self, x: int, type: int, rows: int, k_size: int, /, *weights: int) -> None:
        """y[rows, cols] = x[rows, k_size] w[cols, k_size]^T + b[cols] for each of 1 to 8 ``weights``, which are given
        as w, b, y, cols, ldw; the GIL is released.

        x, w, b, y are addresses of elements of one ``type`` (0 = fp32, 1 = bf16, 2 = fp16), x and y without gaps, rows
        of w ``ldw`` elements apart; b may be 0 for none. The memory is the caller's and is not checked.
        """

    def packed_bytes(self, type: int, cols: int, k_size: int, /) -> int:
        """Of a copy of weights [cols, k_size] in the order of the variant; 0: it takes them as they lie alone."""

    def pack(self, w: int, copy: int, type: int, cols: int, k_size: int, ldw: int, /) -> None:
        """Write that copy of w to ``copy``, an address that is a multiple of 64. Raises ValueError where none is."""

    def use(self, w: int, copy: int, type: int, cols: int, k_size: int, ldw: int, /) -> None:
        """Calls of ``linear`` with these weights take ``copy`` from now on; y has the same bits. Both must stay as they
        are as long as calls come. Raises ValueError as ``pack``.
        """

    def addresses(self) -> tuple[int, int]:
        """The engine's own and that of its function, for compiled code (csrc/gemm/linear_on.h); as long as it lives."""
