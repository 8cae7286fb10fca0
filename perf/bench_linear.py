"""Linear layers of a decode step: native variants, torch, and oneDNN with weights packed beforehand, by rows.

The layers are those of the reference model of bench_decode.py, bf16 or another dtype; a turn is one pass over all of
them. Everybody has a turn in each round, so that noise of the machine hits them alike; who takes longer than TURN_S is
given fewer rounds. The floors are measured in the same rounds. One is a plain read of as many bytes by the same
threads; the other is as many products as cores do in registers (peak_products.cpp, compiled on the spot). Prints one
JSON line for each number of threads; --write appends them to perf/results/bench_linear.jsonl.

    python perf/bench_linear.py --threads 1,2 --write

What torch does on a CPU without bf16 instructions shows ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI, which the record keeps. On
such a CPU the products are those of floats, and torch has a turn with weights that were widened once, too.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from common import cpu_pressure, parser_of, peak_products, record, spread
from reference_model import SHAPE
from torch import Tensor

from lamina.ops.attention._attention import VARIANTS, Kernels
from lamina.ops.gemm._gemm import Engine, usable
from lamina.ops.gemm.native import TYPES
from lamina.ops.gemm.packed_memory import PrivateMemory

REST_S = 0.003  # before a turn, while idle threads of the one before go on spinning for work
TURN_S = 0.5
CHECK = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # norm-wise, between competitors
PEAK_S = 0.02  # 1 ms is too short: threads start, and cores speed up

Turn = Callable[[int], None]  # one pass over all layers with so many rows


class LayerWeights:
    """Weights of all layers, [out, in] each, and rows for them."""

    def __init__(self, dtype: torch.dtype, rows: int) -> None:
        hidden, wide, heads = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["num_attention_heads"]
        kv = hidden // heads * SHAPE["num_key_value_heads"]
        block = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
        block += [(wide, hidden), (wide, hidden), (hidden, wide)]
        shapes = block * SHAPE["num_hidden_layers"] + [(SHAPE["vocab_size"], hidden)]
        generator = torch.Generator().manual_seed(0)
        self.weights = [(torch.randn(s, generator=generator) * 0.02).to(dtype) for s in shapes]
        self.x = {k: torch.randn(rows, k, generator=generator).to(dtype) for k in (hidden, wide)}
        self.numel = sum(w.numel() for w in self.weights)
        self.bytes = self.numel * dtype.itemsize

    def passes(self, linear: Callable[[Tensor, int], Tensor]) -> Turn:
        """``linear``: rows [rows, in] and the number of a layer -> [rows, out]."""

        def turn(rows: int) -> None:
            for i, w in enumerate(self.weights):
                linear(self.x[w.shape[1]][:rows], i)

        return turn


def native(layers: LayerWeights, variant: str, threads: int) -> Callable[[Tensor, int], Tensor]:
    """Multiplies by a variant of csrc/gemm, whatever the limit of its rows."""
    engine = Engine(threads, variant)

    def linear(x: Tensor, i: int) -> Tensor:
        w = layers.weights[i]
        (cols, k), kind = w.shape, TYPES[w.dtype]
        y = torch.empty(len(x), cols, dtype=x.dtype)
        engine.linear(x.data_ptr(), w.data_ptr(), 0, y.data_ptr(), kind, len(x), cols, k, w.stride(0))
        return y

    return linear


def native_packed(layers: LayerWeights, variant: str, threads: int) -> Callable[[Tensor, int], Tensor]:
    """Multiplies by a variant that has an order of weights of its own."""
    engine = Engine(threads, variant)
    shapes = [(TYPES[w.dtype], *w.shape, w.stride(0)) for w in layers.weights]
    pages = PrivateMemory()
    room = [pages.allocate(w, engine.packed_bytes(*s[:3]))[0] for w, s in zip(layers.weights, shapes, strict=True)]
    for w, to, shape in zip(layers.weights, room, shapes, strict=True):
        engine.pack(w.data_ptr(), to.data_ptr(), *shape)

    def linear(x: Tensor, i: int) -> Tensor:
        kind, cols, k, _ = shapes[i]
        y = torch.empty(len(x), cols, dtype=x.dtype)
        engine.linear(x.data_ptr(), room[i].data_ptr(), 0, y.data_ptr(), kind, len(x), cols, k, 0)
        return y

    return linear


def packed(layers: LayerWeights) -> Callable[[Tensor, int], Tensor]:
    """Multiplies by oneDNN, as torch's compiler calls it, with a copy of the weights in an order of its own."""
    copies = [torch.ops.mkldnn._reorder_linear_weight(w, 16) for w in layers.weights]
    return lambda x, i: torch.ops.mkldnn._linear_pointwise(x, copies[i], None, "none", [], "")


def widened(layers: LayerWeights) -> Callable[[Tensor, int], Tensor]:
    """Multiplies by torch in fp32, with a copy of the weights that is twice as large."""
    copies = [w.float() for w in layers.weights]
    return lambda x, i: torch.nn.functional.linear(x.float(), copies[i]).to(x.dtype)


def competitors(layers: LayerWeights, threads: int, names: list[str]) -> dict[str, Turn]:
    """Returns the competitors by name; each is compared with torch first."""
    products: dict[str, Callable[[Tensor, int], Tensor]] = {
        f"native/{v}": native(layers, v, threads) for v in usable() if not names or v in names
    }
    products |= {
        f"native/{v} packed": native_packed(layers, v, threads)
        for v in usable()
        if (not names or v in names) and Engine(1, v).packed_bytes(TYPES[layers.weights[0].dtype], 1, 1)
    }
    products["torch"] = lambda x, i: torch.nn.functional.linear(x, layers.weights[i])
    if layers.weights[0].dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        products["oneDNN packed"] = packed(layers)
    elif layers.weights[0].dtype != torch.float32:
        products["torch, fp32"] = widened(layers)
    for name, linear in products.items():
        for i in range(7):  # one of each shape in a block
            x = layers.x[layers.weights[i].shape[1]]
            due = x.float() @ layers.weights[i].float().T
            if float((linear(x, i) - due).norm() / due.norm()) > CHECK[x.dtype]:
                raise SystemExit(f"{name}: layer {i} is wrong")
    return {name: layers.passes(linear) for name, linear in products.items()}


def floors(layers: LayerWeights, threads: int, folder: Path) -> tuple[Turn, Callable[[], float]]:
    """A read of as many bytes as the weights have, and FLOP/s of products in registers, on all threads."""
    peak = peak_products(folder, bf16=layers.bytes < 4 * layers.numel)
    reader, memory = Kernels(VARIANTS[0], "float32"), torch.ones(layers.bytes, dtype=torch.uint8)
    pool = ThreadPoolExecutor(threads)

    def rate() -> float:
        time.sleep(REST_S)
        return sum(pool.map(peak, [PEAK_S] * threads))

    def read(rows: int) -> None:
        reader.read(memory.data_ptr(), layers.bytes, threads)

    return read, rate


def timed(turn: Turn, rows: int) -> float:
    time.sleep(REST_S)
    start = time.perf_counter()
    turn(rows)
    return time.perf_counter() - start


def measure(layers: LayerWeights, args: argparse.Namespace, threads: int, folder: Path) -> dict[str, Any]:
    """Seconds of a pass by rows and competitor, and what the floors allow."""
    torch.set_num_threads(threads)
    players = competitors(layers, threads, [v for v in args.variants.split(",") if v])
    read, rate = floors(layers, threads, folder)
    players["read"] = read
    rates: list[float] = []
    passes: dict[str, Any] = {}
    pressure = []
    for rows in args.rows:
        slow = {name for name, turn in players.items() if timed(turn, rows) > TURN_S}  # which warms all up, too
        times: dict[str, list[float]] = {name: [] for name in players}
        for round_ in range(args.rounds):
            for name, turn in players.items():
                if name not in slow or round_ < args.rounds // 4:
                    times[name].append(timed(turn, rows))
            rates.append(rate())
        pressure.append(cpu_pressure())
        passes[str(rows)] = {name: spread(t) for name, t in times.items() if t}
    flops = spread(rates)["median"]
    for rows in args.rows:
        of_rows = passes[str(rows)]
        of_rows["products"] = {"median": 2.0 * rows * layers.numel / flops} if flops else {}
    return {"pass_s": passes, "weight_bytes": layers.bytes, "peak_flops": spread(rates), "cpu_pressure_avg10": pressure}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--threads", default="1,2", help="each in a record of its own")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--variants", default="", help="of native, by comma; all that this CPU has")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    args.rows = [int(rows) for rows in args.rows.split(",")]
    environment = {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "ONEDNN_"))}
    settings = {**{k: v for k, v in vars(args).items() if k != "write"}, "environment": environment}
    layers = LayerWeights(getattr(torch, args.dtype), max(args.rows))
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for threads in map(int, args.threads.split(",")):
            figures = measure(layers, args, threads, Path(folder))
            print(record("bench_linear", settings | {"threads": threads}, figures, write=args.write))


if __name__ == "__main__":
    main()
