def usable() -> list[str]:
    """Instruction sets that this CPU can run, best first."""

def random_bits(seed: int, index: int, /) -> int:
    """The 53 bits that a draw of (seed, index) uses."""

class Engine:
    """Draws on ``threads`` threads, the caller's included. Calls from several threads take turns.

    ``variant``: one of ``usable()``, or "" for the best. Raises ValueError where the CPU lacks it.

    Logits are ``rows`` rows of ``size`` numbers of one ``type`` (0 = fp32, 1 = bf16, 2 = fp16), ``stride`` of them from
    one row to the next. Addresses are the caller's and are not checked; the GIL is released.
    """

    def __new__(cls, threads: int, variant: str) -> Engine: ...
    def draw(self, x: int, type: int, rows: int, size: int, stride: int, asks: bytes, /) -> list[int]:
        """A token for each Ask of csrc/sampling/draw.h in ``asks``. Raises ValueError for a field out of range."""

    def best(self, x: int, type: int, rows: int, size: int, stride: int, count: int, ids: int, /) -> None:
        """The tokens of the first ``count`` ranks of each row, to int64 ``ids`` [rows, count]."""

    def masses(self, x: int, type: int, size: int, best: float, factor: float, cut: int, /) -> list[int]:
        """Masses of one row, whose ``size`` is a multiple of 1024; for tests."""
