def usable() -> list[str]:
    """Instruction sets that this CPU can run, best first."""

class Engine:
    """Linear layers on ``threads`` threads, the caller's included. Calls from several threads take turns.

    ``variant``: one of ``usable()``, or "" for the best. Raises ValueError where the CPU lacks it.
    """

    def __new__(cls, threads: int, variant: str) -> Engine: ...
    def linear(self, x: int, w: int, b: int, y: int, type: int, rows: int, cols: int, k_size: int, ldw: int, /) -> None:
        """y[rows, cols] = x[rows, k_size] w[cols, k_size]^T + b[cols]; the GIL is released.

        x, w, b, y are addresses of elements of one ``type`` (0 = fp32, 1 = bf16, 2 = fp16), x and y without gaps, rows
        of w ``ldw`` elements apart; b may be 0 for none. The memory is the caller's and is not checked.
        """

    def calls(self) -> object:
        """A capsule of csrc/gemm/calls.h, which does not keep the engine."""
