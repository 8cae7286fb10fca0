def usable() -> list[str]:
    """Instruction sets that this CPU can run, best first."""

class Engine:
    """Linear layers on ``threads`` threads, the caller's included. Calls from several threads take turns.

    ``variant``: one of ``usable()``, or "" for the best. Raises ValueError where the CPU lacks it.
    """

    def __new__(cls, threads: int, variant: str) -> Engine: ...
    def packed_bytes(self, type: int, cols: int, k_size: int, /) -> int:
        """Of w [cols, k_size] in the variant's own order, by which it is faster; 0 where it has none for ``type``."""

    def pack(self, w: int, to: int, type: int, cols: int, k_size: int, ldw: int, /) -> None:
        """Write w, as ``linear`` takes it, to ``to`` in that order; the GIL is released. ``to`` is a multiple of 64.

        Raises ValueError where the variant has none.
        """

    def linear(self, x: int, w: int, b: int, y: int, type: int, rows: int, cols: int, k_size: int, ldw: int, /) -> None:
        """y[rows, cols] = x[rows, k_size] w[cols, k_size]^T + b[cols]; the GIL is released.

        x, w, b, y are addresses of elements of one ``type`` (0 = fp32, 1 = bf16, 2 = fp16), x and y without gaps, rows
        of w ``ldw`` elements apart (0: w is what ``pack`` wrote; the result has the same bits, but a NaN may be
        another); b may be 0 for none.
        The memory is the caller's and is not checked.
        """

    def quantized_bytes(
        self,
        cols: int,
        k_size: int,
        bits: int,
        block: int,
        by_channel: int,
        type: int,
        has_offsets: int,
        int8_inputs: int,
        values: int,
        /,
    ) -> int:
        """Bytes of quantized w [cols, k_size] in panels (csrc/gemm/quantized.h), the same in every variant.

        The last seven arguments are the form of w: ``bits`` of a code (4 or 8), k of a ``block``, and whether the
        blocks of a column have one scale; ``type`` of scales and offsets, whether there are offsets, and whether rows
        of x become int8; and the address of 16 floats for which codes of 4 bits stand. Raises ValueError where there is
        no such form.
        """

    def pack_quantized(
        self,
        codes: int,
        scales: int,
        offsets: int,
        to: int,
        cols: int,
        k_size: int,
        bits: int,
        block: int,
        by_channel: int,
        type: int,
        has_offsets: int,
        int8_inputs: int,
        values: int,
        /,
    ) -> None:
        """Write w to ``to``, a multiple of 64, in this order; the GIL is released.

        ``codes``: bytes [cols, k_size]; ``scales``, ``offsets``: [cols, blocks], or [cols] by channel. No gaps.
        """

    def linear_quantized(
        self,
        x: int,
        w: int,
        b: int,
        y: int,
        type: int,
        rows: int,
        cols: int,
        k_size: int,
        bits: int,
        block: int,
        by_channel: int,
        scale_type: int,
        has_offsets: int,
        int8_inputs: int,
        values: int,
        /,
    ) -> None:
        """The same as ``linear`` for w that ``pack_quantized`` wrote."""

    def quantized_rows(
        self,
        ids: int,
        w: int,
        y: int,
        count: int,
        cols: int,
        k_size: int,
        bits: int,
        block: int,
        by_channel: int,
        scale_type: int,
        has_offsets: int,
        int8_inputs: int,
        values: int,
        /,
    ) -> None:
        """Write rows of w, which ``pack_quantized`` wrote, to ``y`` [count, k_size], in fp32; the GIL is released.

        ``ids``: int64 [count]. Raises IndexError if one is no row of w.
        """

    def quantized_products(self) -> tuple[int, int]:
        """The number of products by quantized w so far, and of those whose rows became int8. Safe from any thread."""

    def calls(self) -> object:
        """A capsule of csrc/gemm/calls.h, which does not keep the engine."""
