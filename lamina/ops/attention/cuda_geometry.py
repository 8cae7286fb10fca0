"""The choice of a CUDA kernel for a step, with its number of warps and its memory. Numbers only: no torch, no GPU."""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = 14  # levels of the merge tree within a sequence, as kLevels of csrc/attention/cuda/step.cuh
CHUNK_TOKENS = 128  # merge.CHUNK_TOKENS
MOST_TOKENS = CHUNK_TOKENS << LEVELS
LANES = 32
TILE_TOKENS = 16
HEAD_DIMS = range(64, 257, 8)  # supported by tensor cores
LOAD_BYTES = 32  # bytes of a token that one instruction loads from shared memory for tensor cores
SCALE_BYTES = 8  # bytes of the scales of a token's K and V, with numbers of 8 bits
PLAIN_DIM_MOST = 256
SPLITS = 4  # tasks of stored tokens for each warp, at most; with more tiles than that, none is cut
REGISTER_WARPS = 8  # warps of a multiprocessor with 255 registers a lane
NARROW_WARPS, NARROW_DIM = 12, 128  # with 168 registers, enough for one column of queries and heads up to that size
SHARED_MOST = 228 << 10  # bytes of a multiprocessor of sm_90 and sm_100, the most of all GPUs
PLAIN_WARPS = 16
RESERVED_BYTES = 1024  # bytes of shared memory for each block


@dataclass(frozen=True, kw_only=True)
class GpuLimits:
    """The limits of a GPU, to which a launch is fitted."""

    processors: int
    shared_bytes: int  # shared memory of a multiprocessor
    block_shared_bytes: int  # the most that one block can have


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One compilation of csrc/attention/cuda/kernels.cu."""

    element: str  # float, BFloat16, Half
    stored: str = ""  # Int8, Fp8; "" = element
    qk_dim: int = 0
    v_dim: int = 0
    columns: int = 0  # columns of 8 queries; 0: the plain core, which takes one query and any head size
    stages: int = 3
    near_levels: int = 0

    @property
    def tile(self) -> int:
        """The queries of a task."""
        return 8 * self.columns or 1

    @property
    def register_warps(self) -> int:
        """The warps of a multiprocessor for which the compiled kernel leaves enough registers. More than REGISTER_WARPS
        only if some GPU has shared memory for them, since a lane with fewer registers may spill some. It does so if a
        token is copied by 8 bytes, with twice as many addresses.
        """
        if not self.columns:
            return PLAIN_WARPS
        by_sixteen = not any(dim * self._itemsize % 16 for dim in (self.qk_dim, self.v_dim))
        narrow = self.columns == 1 and max(self.qk_dim, self.v_dim) <= NARROW_DIM and by_sixteen
        return min(NARROW_WARPS, max(REGISTER_WARPS, self._room(SHARED_MOST))) if narrow else REGISTER_WARPS

    @property
    def node_numbers(self) -> int:
        """The fp32 numbers of a saved node: Fragment::kSize."""
        if not self.columns:
            return (PLAIN_DIM_MOST // LANES + 1) * LANES
        padded = self._loads(self.v_dim) * LOAD_BYTES // self._itemsize
        return 2 * self.columns * (padded // 8 + 1) * LANES

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block: the ring of K and V, then nodes that wait."""
        if not self.columns:
            return 0
        row = sum((2 * self._loads(dim) | 1) * 16 for dim in (self.qk_dim, self.v_dim))
        row += SCALE_BYTES if self.stored else 0
        return self.stages * TILE_TOKENS * row + self.near_levels * self.node_numbers * 4

    @property
    def _itemsize(self) -> int:
        """The bytes of a stored number, for tensor cores."""
        return 1 if self.stored else 2

    def _loads(self, dim: int) -> int:
        """Return the loads of LOAD_BYTES for a token's ``dim`` numbers."""
        return -(-dim * self._itemsize // LOAD_BYTES)

    def warps(self, device: GpuLimits) -> int:
        """Return the warps that the GPU runs at a time, each as a block by itself; 0 if not even one fits."""
        if not self.columns:
            return self.register_warps * device.processors
        if self.shared_bytes > device.block_shared_bytes:
            return 0
        return min(self.register_warps, self._room(device.shared_bytes)) * device.processors

    def _room(self, shared_bytes: int) -> int:
        """Return the warps that fit in a multiprocessor with that much shared memory."""
        return shared_bytes // (self.shared_bytes + RESERVED_BYTES)

    def defines(self) -> tuple[str, ...]:
        """Return the macros of this variant, as options of the compiler."""
        defined = {"ELEMENT": self.element, **({"STORED": self.stored} if self.stored else {})}
        if self.columns:
            numbers = (self.qk_dim, self.v_dim, self.columns, self.stages, self.near_levels, self.register_warps)
            names = ("KEY_DIM", "VALUE_DIM", "COLUMNS", "STAGES", "NEAR_LEVELS", "WARPS")
            defined |= dict(zip(names, map(str, numbers), strict=True))
        return tuple(f"-DLAMINA_{name}={value}" for name, value in defined.items())


def choose(element: str, qk_dim: int, v_dim: int, queries: int, stored: str = "") -> Variant:
    """Return the variant for tiles of up to ``queries`` queries of one sequence and KV head. Registers decide: a second
    column of queries fits for head sizes up to 128. Raises ValueError for head sizes that no variant supports.
    """
    widest = max(qk_dim, v_dim)
    if widest > PLAIN_DIM_MOST:
        raise ValueError(f"attention backend 'cuda' takes head sizes up to {PLAIN_DIM_MOST}, not {widest}")
    if element == "float" or qk_dim not in HEAD_DIMS or v_dim not in HEAD_DIMS:
        return Variant(element=element, stored=stored)
    columns = 2 if queries > 8 and widest <= 128 else 1
    near_most = 96 if stored else 128  # widening 8 bits takes more warps, which need this memory
    near_levels = 2 if columns == 1 and widest <= near_most else 1
    return Variant(element=element, stored=stored, qk_dim=qk_dim, v_dim=v_dim, columns=columns, near_levels=near_levels)


@dataclass(frozen=True, kw_only=True)
class LaunchShape:
    """The sizes of one launch. They follow from what a captured graph fixes, never from lengths."""

    blocks: int
    capacity: int  # tasks of a KV head

    @staticmethod
    def of(variant: Variant, device: GpuLimits, *, sequences: int, rows: int, group: int, kv_heads: int) -> LaunchShape:
        """Return the sizes for steps of up to ``sequences`` and ``rows``. Raises ValueError if not even one warp
        fits.
        """
        warps = variant.warps(device)
        if not warps:
            raise ValueError(
                f"attention over heads of {variant.qk_dim} and {variant.v_dim} needs {variant.shared_bytes} bytes of "
                f"shared memory, this GPU has {device.block_shared_bytes}"
            )
        tiles = rows * group // variant.tile + sequences
        capacity = tiles + SPLITS * warps // kv_heads
        return LaunchShape(blocks=min(warps, capacity * kv_heads), capacity=capacity)
