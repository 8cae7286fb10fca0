"""Modelled: the share of its memory's bandwidth that a GPU's attention should get, before any GPU has run it.

Some inputs can be counted without one: the instructions that a warp runs for a tile of 16 tokens (gpu/sass.py), and the
warps that fit by registers and shared memory. Others are the bytes that warps have in flight, and how evenly a plan
deals out a step. Other inputs are ASSUMED and named as such in the row: cycles that a warp alone takes for an
instruction, and the latency of memory under load. So are the clock, and the part of the data sheet's bandwidth that a
plain read gets. A share is that of a plain read; gpu_suite.py will measure both.

    python perf/model_attention.py --write
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from common import parser_of, record
from gpu.sass import attend, of_tile

from lamina.ops.attention.cuda_geometry import CHUNK_TOKENS, TILE_TOKENS, GpuLimits, Variant, choose

CYCLES = 4.0  # of a warp that runs alone, for an instruction
LATENCY_S = 1e-6  # of memory, under load
READ = 0.92  # of the data sheet's bandwidth, that a plain read gets
CHUNK_INSTRUCTIONS = 480  # in addition to its tiles: sums are closed, merged and saved; read off sm_90's code
TASK_TILES = 4.0  # the time of a task in addition to its chunks, in tiles: its ring fills, its node meets the sibling
KV_HEADS, GROUP = 8, 4
PROMPTS, PROMPT_TILE = (512, 1024, 2048, 8192), 16  # rows; queries of a tile


@dataclass(frozen=True)
class Gpu:
    """``architecture``: as in sm_90; ``bytes_s``: of the data sheet."""

    architecture: int
    limits: GpuLimits
    bytes_s: float
    hertz: float


HOPPER = GpuLimits(processors=132, shared_bytes=228 << 10, block_shared_bytes=227 << 10)
GPUS = {  # clocks: ASSUMED
    "A100 80 GB": Gpu(80, replace(HOPPER, processors=108, shared_bytes=164 << 10), 2.04e12, 1.4e9),
    "H100 SXM": Gpu(90, HOPPER, 3.35e12, 1.7e9),
    "H200": Gpu(90, HOPPER, 4.8e12, 1.7e9),
    "B200": Gpu(100, replace(HOPPER, processors=148), 8.0e12, 1.8e9),
}
SHAPES = {
    "32 x 4096": [4096] * 32,
    "64 x 8192": [8192] * 64,
    "32, of 2000 to 4170 tokens": [2000 + 70 * i for i in range(32)],
}
AIM = {"share": 0.85, "H200 TB/s": 3.9}


def tile_bytes(variant: Variant) -> int:
    """Returns the bytes of K and V."""
    return TILE_TOKENS * (variant.qk_dim + variant.v_dim) * (1 if variant.stored else 2)


def bounds(variant: Variant, gpu: Gpu, instructions: float) -> dict[str, float]:
    """TB/s that a GPU's warps can take in: by the bytes in flight, and by each warp's own instructions. For
    a whole multiprocessor, the limit is the four instructions that it issues in a cycle.
    """
    warps, nbytes = variant.warps(gpu.limits), tile_bytes(variant)
    return {
        "in flight": warps * (variant.stages - 1) * nbytes / LATENCY_S / 1e12,
        "warps": warps * nbytes * gpu.hertz / (instructions * CYCLES) / 1e12,
        "issue": gpu.limits.processors * 4 * nbytes * gpu.hertz / instructions / 1e12,
    }


def chunks_of(tokens: int) -> int:
    return -(-tokens // CHUNK_TOKENS)


def level_of(lengths: Sequence[int], warps: int) -> int:
    """choose_level of csrc/attention/cuda/step.cuh."""
    longest = max(map(chunks_of, lengths))
    costs = {}
    for level in range(longest.bit_length() + 1):
        tasks = sum(-(-chunks_of(n) // (1 << level)) for n in lengths)
        costs[level] = -(-tasks * KV_HEADS // warps) * (min(1 << level, longest) + 1)
    return min(costs, key=lambda level: (costs[level], -level))


def tasks_of(lengths: Sequence[int], level: int) -> Iterator[float]:
    """Their tiles, in the order in which they are dealt out."""
    tokens = CHUNK_TOKENS << level
    for length in lengths:
        for first in range(0, length, tokens):
            for _ in range(KV_HEADS):
                yield min(tokens, length - first) / TILE_TOKENS + TASK_TILES


def prompt_tasks(rows: int) -> list[float]:
    """Returns the tasks of the rows of one prompt over each other; the last ones first."""
    tiles = reversed(range(0, rows * GROUP, PROMPT_TILE))
    return [(query + PROMPT_TILE) / GROUP / TILE_TOKENS + TASK_TILES for query in tiles for _ in range(KV_HEADS)]


def busy(each: Sequence[float], warps: int, spare: float) -> float:
    """Returns how much of the time is that of tiles, not of tasks, nor waited for. Warps share all there is evenly, and
    none takes more than ``spare`` times its part; a warp that is done takes the next task.
    """
    tasks = iter(each)
    active = list(islice(tasks, warps))
    heapq.heapify(active)
    done, clock = 0.0, 0.0
    while active:
        until = heapq.heappop(active)
        clock += (until - done) / min(spare / warps, 1.0 / (len(active) + 1))
        done = until
        for task in islice(tasks, 1):
            heapq.heappush(active, done + task)
    return (sum(each) - len(each) * TASK_TILES) / clock


def decode_share(lengths: Sequence[int], warps: int, spare: float) -> float:
    """Returns the share of a read's bandwidth that a decode step gets; ``spare``: what the warps could take of it."""
    return min(1.0, spare) * busy(list(tasks_of(lengths, level_of(lengths, warps))), warps, max(1.0, spare))


def model(variant: Variant, gpu: Gpu) -> dict[str, object]:
    """Returns what is counted, what follows from it, and the share for each shape."""
    copies = tile_bytes(variant) // 512 + (1 if variant.stored else 0)
    count = of_tile(attend(variant, gpu.architecture), copies)
    instructions, warps = sum(count.values()), variant.warps(gpu.limits)
    with_chunk = instructions + CHUNK_INSTRUCTIONS * TILE_TOKENS / CHUNK_TOKENS
    limits = bounds(variant, gpu, with_chunk)
    spare = min(limits.values()) * 1e12 / (gpu.bytes_s * READ)
    ahead = warps // gpu.limits.processors * (variant.stages - 1) * tile_bytes(variant)
    needed = gpu.bytes_s * READ * LATENCY_S / gpu.limits.processors
    prompt = replace(variant, columns=PROMPT_TILE // 8, near_levels=1).warps(gpu.limits)
    shares = {name: decode_share(lengths, warps, spare) for name, lengths in SHAPES.items()}
    return {
        "instructions a tile": instructions,
        "by name": dict(count.most_common(8)),
        "warps of a multiprocessor": warps // gpu.limits.processors,
        "KiB of a multiprocessor": {"on their way": round(ahead / 1024), "needed": round(needed / 1024)},
        "TB/s at most": {name: round(limit, 2) for name, limit in limits.items()},
        "share of a plain read": {name: round(share, 3) for name, share in shares.items()},
        "warps at work on a prompt's own rows": {n: round(busy(prompt_tasks(n), prompt, 1.0), 2) for n in PROMPTS},
        "and if its first rows were first": {n: round(busy(prompt_tasks(n)[::-1], prompt, 1.0), 2) for n in PROMPTS},
        "TB/s": {name: round(share * READ * gpu.bytes_s / 1e12, 2) for name, share in shares.items()},
    }


def main() -> int:
    parser = parser_of(__doc__)
    args = parser.parse_args()
    variants = {"bf16": choose("BFloat16", 128, 128, GROUP), "fp8": choose("BFloat16", 128, 128, GROUP, "Fp8")}
    try:
        rows = {
            f"{name}, {kind}": model(variant, gpu) for name, gpu in GPUS.items() for kind, variant in variants.items()
        }
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    assumed = {
        "cycles": CYCLES,
        "latency_s": LATENCY_S,
        "read": READ,
        "hertz": {n: gpu.hertz for n, gpu in GPUS.items()},
    }
    record("model_attention", {"assumed": assumed, "aim": AIM}, {"modelled": rows}, write=args.write)
    for name, row in rows.items():
        print(name, *(f"  {key}: {value}" for key, value in row.items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
