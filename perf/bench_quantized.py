"""Linear layers by weights of 4 and 8 bits, compared with bf16, by rows, on the same cores.

A turn is one pass over all layers of a shape. Each competitor has a turn in each round, so that noise of the machine
hits them alike, and a ratio compares turns of one round. bf16 is what a compute worker does: packed weights, or torch
for more rows than native takes. The floor is a plain read by the same threads. Where other work has the cores, one
thread's CPU time still means something: --cpu-time. Prints one JSON line for each shape; --write appends them to
perf/results/bench_quantized.jsonl.

    python perf/bench_quantized.py --shapes llama-246m,llama-1b --write
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import cpu_pressure, parser_of, record, spread
from torch import Tensor

from lamina.ops.attention._attention import VARIANTS, Kernels
from lamina.ops.gemm.native import NativeLinear
from lamina.ops.gemm.packed_memory import PrivateMemory
from lamina.ops.gemm.quantized import QuantizedWeight

REST_S = 0.003  # before a turn, while idle threads of the one before go on spinning for work
READ_BYTES = 400_000_000
# [out, in] of all layers: of a Llama of 246 M, and of four of the 16 blocks of one of 1 B
SHAPES = {
    "llama-246m": [(1536, 1024), (1024, 1024), (5632, 1024), (1024, 2816)] * 16 + [(32000, 1024)],
    "llama-1b": [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)] * 4,
}
FORMS = {
    "int4 by 128": (4, 128),
    "int4 by 32": (4, 32),
    "int8 by 128": (8, 128),
    "int8 by channel": (8, 0),
    "int4 by 32, int8 rows": (4, 32),
    "int8 by 128, int8 rows": (8, 128),
    "int8 by channel, int8 rows": (8, 0),
}  # bits, group
INT8_ROWS = ", int8 rows"  # of x

Linear = Callable[[Tensor], Tensor]


class Player:
    """A competitor: a linear layer for each shape, the bytes of their weights."""

    def __init__(self, layers: list[Linear], nbytes: int) -> None:
        self.layers, self.nbytes = layers, nbytes

    def run(self, inputs: list[Tensor]) -> None:
        """Multiplies rows for each layer."""
        for linear, x in zip(self.layers, inputs, strict=True):
            linear(x)


def bf16(backend: NativeLinear, weights: list[Tensor]) -> Player:
    """Packed weights."""
    memory = PrivateMemory()

    def layer(w: Tensor) -> Linear:
        packed, (cols, k) = backend.pack(w, memory), w.shape

        def linear(x: Tensor) -> Tensor:
            y = torch.empty(len(x), cols, dtype=x.dtype)
            backend.engine.linear(x.data_ptr(), packed.data_ptr(), 0, y.data_ptr(), 1, len(x), cols, k, 0)
            return y

        return linear

    return Player([layer(w) for w in weights], sum(w.nbytes for w in weights))


def quantized(backend: NativeLinear, shapes: list[tuple[int, int]], name: str) -> Player:
    """Any codes and scales of bf16; the first layer is compared with torch."""
    layers, nbytes, g = list[Linear](), 0, torch.Generator().manual_seed(0)
    (bits, group), int8_rows = FORMS[name], name.endswith(INT8_ROWS)
    for cols, k in shapes:
        codes = torch.randint(-128, 128, (cols, k), generator=g, dtype=torch.int8)
        scales = torch.rand(cols, k // group if group else 1, generator=g).bfloat16()
        w = QuantizedWeight(codes if bits == 8 else (codes & 15).to(torch.uint8), scales, int8_inputs=int8_rows)
        packed = backend.pack_quantized(w)
        layers.append(partial(backend.linear_quantized, data=packed.data, b=None, form=packed.form))
        nbytes += packed.data.nbytes
        if len(layers) == 1:
            x = torch.randn(3, k, generator=g).bfloat16()
            due = x.float() @ w.dequantized(torch.float32).T
            if float((layers[0](x).float() - due).norm() / due.norm()) > (0.03 if int8_rows else 0.01):
                raise SystemExit(f"{name}: the result is wrong")
    return Player(layers, nbytes)


def timed(turn: Callable[[], Any], clock: Callable[[], float]) -> float:
    time.sleep(REST_S)
    start = clock()
    turn()
    return clock() - start


def measure(
    shapes: list[tuple[int, int]], rows: list[int], rounds: int, threads: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Return, by rows and competitor: seconds of a pass, GB/s of weights, their share of the read rate, and bf16's time
    divided by this one's.
    """
    torch.set_num_threads(threads)
    backend = NativeLinear(threads)
    weights = [(torch.randn(s) * 0.02).bfloat16() for s in shapes]
    players = {"bf16": bf16(backend, weights)}
    players |= {name: quantized(backend, shapes, name) for name in FORMS}
    reader, memory = Kernels(VARIANTS[0], "float32"), torch.ones(READ_BYTES, dtype=torch.uint8)
    passes: dict[str, Any] = {}
    for count in rows:
        x = {k: torch.randn(count, k).bfloat16() for k in {k for _, k in shapes}}
        inputs = [x[k] for _, k in shapes]
        turns: dict[str, Callable[[], Any]] = {name: partial(player.run, inputs) for name, player in players.items()}
        turns["read"] = partial(reader.read, memory.data_ptr(), READ_BYTES, threads)
        for turn in turns.values():
            turn()
        times: dict[str, list[float]] = {name: [] for name in turns}
        for _ in range(max(3, rounds // (1 if count < 256 else 5))):
            for name, turn in turns.items():
                times[name].append(timed(turn, clock))
        rate = READ_BYTES / statistics.median(times["read"])
        passes[str(count)] = {
            name: spread(times[name])
            | {
                "gb_s": p.nbytes / statistics.median(times[name]) / 1e9,
                "of_read": p.nbytes / statistics.median(times[name]) / rate,
                "faster_than_bf16": statistics.median(b / t for b, t in zip(times["bf16"], times[name], strict=True)),
            }
            for name, p in players.items()
        } | {"read_gb_s": rate / 1e9}
    return {"pass_s": passes, "weight_bytes": {n: p.nbytes for n, p in players.items()}, "cpu_pressure": cpu_pressure()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default="1,8,32,512")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time, by one thread")
    parser.add_argument("--rounds", type=int, default=15, help="a fifth of them for 256 rows and more")
    parser.add_argument("--note", default="", help="such as what else ran on the machine")
    args = parser.parse_args()
    threads, clock = (1, time.thread_time) if args.cpu_time else (args.threads, time.perf_counter)
    rows = [int(r) for r in args.rows.split(",")]
    with torch.inference_mode():
        for shape in args.shapes.split(","):
            settings = {"shape": shape, "rows": rows, "threads": threads, "cpu_time": args.cpu_time, "note": args.note}
            figures = measure(SHAPES[shape], rows, args.rounds, threads, clock)
            print(record("bench_quantized", settings | {"rounds": args.rounds}, figures, write=args.write))


if __name__ == "__main__":
    main()
