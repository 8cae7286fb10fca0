def usable() -> list[str]:
    """Instruction sets that this CPU can run, best first."""

def layer(*numbers: float) -> object:
    """A capsule with what all tokens share (csrc/recurrence/recurrence.h), copied.

    The numbers are, in this order: the kind, 0 to 3 as in ``spec.Kind``; heads, groups, heads_per_group, first_head,
    key_dim, value_dim, width; silu, normalised, softplus; scale, prompt_dt_least, prompt_dt_most; channels; the first
    channels of q, k and v; history_size, state_size. Then addresses of fp32 numbers without gaps, 0 for none: weight
    [width, channels], bias [channels], A, D and dt_bias [heads].
    """

class Engine:
    """Recurrences on ``threads`` threads, the caller's included. Calls from several threads take turns.

    ``variant``: one of ``usable()``, or "" for the best. Raises ValueError where the CPU lacks it.
    """

    def __new__(cls, threads: int, variant: str) -> Engine: ...
    def update(self, layer: object, /, *numbers: int) -> None:
        """Compute the segments of a step; the GIL is released.

        The numbers are, of each of x, g (or dt) and beta: address, type (0 = fp32, 1 = bf16, 2 = fp16), and elements
        from one row to the next. Then the address of the output [rows, heads * value_dim], which has x's type and no
        gaps; address and number of the segments, int64 [number, 5]; address of the states, and fp32 numbers from one
        slot to the next. The memory is the caller's and is not checked.
        """

    def copy(self, source: int, to: int, numbers: int, /) -> None:
        """Copy fp32 numbers past the caches by all threads: what reading and writing as much takes at least.

        Raises ValueError where addresses or numbers are no multiples of 64 bytes.
        """
