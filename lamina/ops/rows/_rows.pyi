class Program:
    """A table (lamina/ops/rows/instructions.py) on the threads of an engine of lamina.ops.gemm, which it keeps."""

    def __new__(cls, engine: object, table: bytes, variant: str, /) -> Program:
        """``variant``: "avx512" or "avx2"; "": the best that this CPU has.

        Raises ValueError for a variant that the CPU lacks, and for a table that is none.
        """

    def run(self, rows: int, first: int, last: int, arena: int, /, *given: int) -> None:
        """Instructions ``first`` .. ``last`` - 1 on ``rows`` rows; ``arena`` and ``given`` are addresses. Callers of
        one engine take turns. Raises IndexError where a row looks up what a table has not.
        """

class Chain:
    """Programs one after another, and sends between them, in one call: csrc/rows/chain.cpp."""

    def __new__(cls, programs: tuple[Program, ...], table: bytes, /) -> Chain:
        """``table``: 64-bit numbers, as lamina/ops/rows/native_slices.py writes them. Raises ValueError for one that is
        none."""

    def run(self, send: object | None, rows: int, arena: int, /, *outside: int) -> None:
        """``send``: a capsule of csrc/rows/send.h, for chains that send; ``arena`` and ``outside`` are addresses, of
        values given and then of results. Raises IndexError as Program, and what sends raise.
        """
