"""Which kernel takes which step on a GPU, with how many warps and how much memory. Numbers only: no torch, no GPU."""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = 14  # of the merge tree within a sequence, as kLevels of csrc/attention/cuda/step.cuh
CHUNK_TOKENS = 128  # merge.CHUNK_TOKENS
MOST_TOKENS = CHUNK_TOKENS << LEVELS
LANES = 32
TILE_TOKENS = 16
HEAD_DIMS = range(64, 257, 8)  # that tensor cores take
LOAD_BYTES = 32  # of a token, that one instruction brings from shared memory for tensor cores
SCALE_BYTES = 8  # of a token's K and V, beside numbers of 8 bits
PLAIN_DIM_MOST = 256
SPLITS = 4  # tasks of stored tokens for each warp, at most; where tiles alone are more, none is cut
REGISTER_WARPS = 8  # of a multiprocessor, with 255 registers a lane
NARROW_WARPS, NARROW_DIM = 12, 128  # with 168, which one column of queries takes for heads up to that size
SHARED_MOST = 228 << 10  # bytes of a multiprocessor of sm_90 and sm_100, of all the most
PLAIN_WARPS = 16
RESERVED_BYTES = 1024  # of shared memory, for each block


@dataclass(frozen=True, kw_only=True)
class GpuLimits:
    """The limits of a GPU, which a launch is fitted to."""

    processors: int
    shared_bytes: int  # of a multiprocessor
    block_shared_bytes: int  # that one block can have


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One compilation of csrc/attention/cuda/kernels.cu."""

    element: str  # float, BFloat16, Half
    stored: str = ""  # Int8, Fp8; "" = element
    qk_dim: int = 0
    v_dim: int = 0
    columns: int = 0  # of 8 queries; 0 = the plain core, which takes one query and any head size
    stages: int = 3
    near_levels: int = 0

    @property
    def tile(self) -> int:
        """Queries of a task."""
        return 8 * self.columns or 1

    @property
    def register_warps(self) -> int:
        """Warps of a multiprocessor for which the compiled kernel leaves enough registers: more than REGISTER_WARPS
        only where some GPU has shared memory for them, since a lane with fewer registers may spill some; it does where
        a token is copied by 8 bytes, of twice as many addresses.
        """
        if not self.columns:
            return PLAIN_WARPS
        by_sixteen = not any(dim * self._itemsize % 16 for dim in (self.qk_dim, self.v_dim))
        narrow = self.columns == 1 and max(self.qk_dim, self.v_dim) <= NARROW_DIM and by_sixteen
        return min(NARROW_WARPS, max(REGISTER_WARPS, self._room(SHARED_MOST))) if narrow else REGISTER_WARPS

    @property
    def node_numbers(self) -> int:
        """fp32 numbers of a saved node: Fragment::kSize."""
        if not self.columns:
            return (PLAIN_DIM_MOST // LANES + 1) * LANES
        padded = self._loads(self.v_dim) * LOAD_BYTES // self._itemsize
        return 2 * self.columns * (padded // 8 + 1) * LANES

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the ring of K and V, then nodes that wait."""
        if not self.columns:
            return 0
        row = sum((2 * self._loads(dim) | 1) * 16 for dim in (self.qk_dim, self.v_dim))
        row += SCALE_BYTES if self.stored else 0
        return self.stages * TILE_TOKENS * row + self.near_levels * self.node_numbers * 4

    @property
    def _itemsize(self) -> int:
        """Bytes of a stored number, where there are tensor cores."""
        return 1 if self.stored else 2

    def _loads(self, dim: int) -> int:
        """The loads of LOAD_BYTES that a token's ``dim`` numbers take."""
        return -(-dim * self._itemsize // LOAD_BYTES)

    def warps(self, device: GpuLimits) -> int:
        """Warps that the GPU runs at a time, each a block by itself; 0 = there is no room for one."""
        if not self.columns:
            return self.register_warps * device.processors
        if self.shared_bytes > device.block_shared_bytes:
            return 0
        return min(self.register_warps, self._room(device.shared_bytes)) * device.processors

    def _room(self, shared_bytes: int) -> int:
        """Warps that a multiprocessor of that much shared memory has room for."""
        return shared_bytes // (self.shared_bytes + RESERVED_BYTES)

    def defines(self) -> tuple[str, ...]:
        """The macros of this variant, as options of the compiler."""
        defined = {"ELEMENT": self.element, **({"STORED": self.stored} if self.stored else {})}
        if self.columns:
            numbers = (self.qk_dim, self.v_dim, self.columns, self.stages, self.near_levels, self.register_warps)
            names = ("KEY_DIM", "VALUE_DIM", "COLUMNS", "STAGES", "NEAR_LEVELS", "WARPS")
            defined |= dict(zip(names, map(str, numbers), strict=True))
        return tuple(f"-DLAMINA_{name}={value}" for name, value in defined.items())


def choose(element: str, qk_dim: int, v_dim: int, queries: int, stored: str = "") -> Variant:
    """The variant for tiles of ``queries`` queries at most, of one sequence and KV head.

    Registers decide: a second column of queries fits for head sizes up to 128. Raises ValueError for head sizes that no
    variant takes.
    """
    widest = max(qk_dim, v_dim)
    if widest > PLAIN_DIM_MOST:
        raise ValueError(f"attention backend 'cuda' takes head sizes up to {PLAIN_DIM_MOST}, not {widest}")
    if element == "float" or qk_dim not in HEAD_DIMS or v_dim not in HEAD_DIMS:
        return Variant(element=element, stored=stored)
    columns = 2 if queries > 8 and widest <= 128 else 1
    near_most = 96 if stored else 128  # of 8 bits, widening takes more warps, and these take the room
    near_levels = 2 if columns == 1 and widest <= near_most else 1
    return Variant(element=element, stored=stored, qk_dim=qk_dim, v_dim=v_dim, columns=columns, near_levels=near_levels)


@dataclass(frozen=True, kw_only=True)
class LaunchShape:
    """The sizes of one launch. They follow from what a captured graph fixes, never from lengths."""

    blocks: int
    capacity: int  # tasks of a KV head

    @staticmethod
    def of(variant: Variant, device: GpuLimits, *, sequences: int, rows: int, group: int, kv_heads: int) -> LaunchShape:
        """For steps of at most that many sequences and rows. Raises ValueError where not even one warp fits."""
        warps = variant.warps(device)
        if not warps:
            raise ValueError(
                f"attention over heads of {variant.qk_dim} and {variant.v_dim} needs {variant.shared_bytes} bytes of "
                f"shared memory, this GPU has {device.block_shared_bytes}"
            )
        tiles = rows * group // variant.tile + sequences
        capacity = tiles + SPLITS * warps // kv_heads
        return LaunchShape(blocks=min(warps, capacity * kv_heads), capacity=capacity)
