"""Paged attention of the memory workers against the limit of the memory that it reads, and against its peers.

The storage and the calls are those of a memory worker's step: blocks that sequences filled side by side, and a row
table. ``attend_stored`` runs over the stored tokens, ``write`` stores the new ones, and ``finish`` attends those. The
limit is a plain read of the same bytes by the same threads. Everybody has one turn in each round, so that noise of the
machine hits them alike; every round is on another layer, so that nothing is in a cache. A turn does not count when some
task of the machine waited for a core for more than QUIET of the time. There are rounds until enough turns count, or
patience ends. All results are checked against dense attention in fp64 first. Rates by CPU time ("on_core") are bytes
over the seconds that a competitor's threads ran, by thread. They show what a kernel does while it has its cores, also
on a machine that never rests.

``--rows`` above 1 is a piece of a prompt over the stored tokens that all its rows see. Its limit is products, which are
measured in the same rounds, by CPU time (peak_products.cpp, compiled on the spot); torch's attention is the peer.

    python perf/bench_attention.py --threads 2 --batch 16 --context 4096 --write
    python perf/bench_attention.py --batch 1 --rows 512 --context 2048 --write
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from common import cpu_pressure, parser_of, peak_products, record, spread
from peers.attention import AttentionPeer, seconds
from torch import Tensor

from lamina.config.engine_config import KV_CACHE_DTYPES
from lamina.kv.paged_cache import LayerCache, allocate_layer, row_table, slot_mapping
from lamina.kv.stored_format import dequantise, head_bytes, stored_dtype, to_stored_format
from lamina.ops.attention import BACKENDS, AttentionBackend, Operator, get
from lamina.ops.attention.merge import CHUNK_TOKENS
from lamina.ops.attention.spec import AttentionSpec
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.step_plan import New, RowRange, StepPlan

CPU = torch.device("cpu")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOLERANCE = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 1e-4}  # norm-wise, between competitors
COLD_BYTES = 128 << 20  # of K and V, all layers: more than caches hold
TURN_S = 0.25  # who takes longer than this for one call sits out rounds
REST_S = 0.01  # before a turn, while idle threads of the one before go on spinning for work
PEAK_S = 0.02  # for which products are measured
LIMITS = ("read", "products")
QUIET = 0.02  # share of a turn in which tasks waited for a core
ENOUGH = 3  # quiet turns of a peer

Turn = Callable[[int], dict[str, float]]  # one call on a layer -> seconds by part


class Problem:
    """The problem to compute: settings, the stores of some layers, and the new rows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.dtype = DTYPES[args.dtype]
        self.op = Operator(
            spec=AttentionSpec(scale=args.head_dim**-0.5),
            q_heads=args.heads,
            kv_heads=args.kv_heads,
            qk_dim=args.head_dim,
            v_dim=args.head_dim,
        )
        self.kv_dtype = stored_dtype(args.kv_cache_dtype, self.dtype)
        self.stored_heads = args.batch * args.context * args.kv_heads  # of tokens
        self.stored_bytes = self.stored_heads * head_bytes(args.head_dim, args.head_dim, self.kv_dtype)
        generator = torch.Generator().manual_seed(0)
        count = args.batch * args.rows
        shape = count, args.kv_heads, args.head_dim
        self.q = torch.randn(count, args.heads, args.head_dim, generator=generator).to(self.dtype)
        self.k, self.v = (torch.randn(shape, generator=generator).to(self.dtype) for _ in range(2))
        self.tables, self.rows = self._fill_tables()
        self.layers = [self._store(generator) for _ in range(max(1, -(-COLD_BYTES // self.stored_bytes)))]
        self.table = row_table(self.tables, 0, self.rows, align=CHUNK_TOKENS)
        self.at = slot_mapping(self.tables, 0, self.rows, CPU)

    @property
    def _blocks_each(self) -> int:
        args = self.args
        return int(-(-(args.context + args.rows) // args.block_size))

    def _fill_tables(self) -> tuple[BlockTables, list[RowRange]]:
        """Sequences that grew side by side, ``--grow`` tokens at a time, and the rows of the next step."""
        args, size = self.args, self.args.block_size
        tables = BlockTables([0], [args.batch * self._blocks_each], size)
        order, plans = range(args.batch), range(0, args.context, args.grow)
        tables.apply(StepPlan(step=0, ops=[New(i) for i in order], rows=[]))
        for at in plans:
            tables.apply(
                StepPlan(step=1, ops=[], rows=[RowRange(i, at, min(args.grow, args.context - at)) for i in order])
            )
        rows = [RowRange(i, args.context, args.rows) for i in order]
        tables.apply(StepPlan(step=2, ops=[], rows=rows))
        return tables, rows

    def _store(self, generator: torch.Generator) -> LayerCache:
        args = self.args
        blocks = args.batch * self._blocks_each
        dims = args.head_dim, args.head_dim
        store = allocate_layer(blocks, args.kv_heads, args.block_size, *dims, dtype=self.kv_dtype, device=CPU)
        for x in store.k, store.v, *(store.scales or ()):
            flat = x[:-1].view(-1)
            some = torch.randn(min(flat.numel(), 1 << 20), generator=generator)
            if store.scales is not None:  # of the same size as without scales
                some = (some * 40).round() if x.dtype == torch.int8 else some.abs() / 40 if x.dim() == 3 else some * 40
            some = some.clamp(-127, 127).to(x.dtype)
            for start in range(0, flat.numel(), some.numel()):
                part = flat[start : start + some.numel()]
                part.copy_(some[: part.numel()])
        return store

    def contiguous(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V as peers without pages have them: [batch, KV heads, context, head_dim]."""
        store, args = self.layers[layer], self.args
        ids = torch.from_numpy(self.table.table[:, : -(-args.context // args.block_size)].copy())

        def gather(x: Tensor, scale: Tensor | None) -> Tensor:
            dense = dequantise(x[ids], None if scale is None else scale[ids]).to(self.dtype)
            return dense.transpose(1, 2).flatten(2, 3)[:, :, : args.context].contiguous()

        scales = store.scales or (None, None)
        return gather(store.k, scales[0]), gather(store.v, scales[1])


class AttentionCompetitor(NamedTuple):
    """Its turns, its result for layer 0 [batch, heads, head_dim], and what is to be done at the end."""

    turn: Turn
    result: Callable[[], Tensor]
    close: Callable[[], None] = lambda: None


def lamina(problem: Problem, backend: AttentionBackend) -> AttentionCompetitor:
    """A memory worker's work for one layer of a step."""
    op, rows, at = problem.op, problem.table, problem.at
    q, out = problem.q, torch.empty_like(problem.q)
    clock = time.perf_counter

    def turn(layer: int) -> dict[str, float]:
        store, start = problem.layers[layer], clock()
        prepared = backend.prepare(rows)
        prepare = clock() - start
        times, stored = seconds(lambda: backend.attend_stored(op, prepared, store, q))
        start = clock()
        kv = to_stored_format(problem.k, problem.v, problem.kv_dtype)
        store.write(at, kv)
        append, start = clock() - start, clock()
        backend.finish(op, prepared, stored, q, kv, out)
        return {**times, "prepare": prepare, "append": append, "finish": clock() - start}

    def result() -> Tensor:
        return backend.attend_stored(op, backend.prepare(rows), problem.layers[0], q).o.clone()

    return AttentionCompetitor(turn, result)


def read_limit(problem: Problem) -> AttentionCompetitor:
    """Reads as many bytes of K and V as attention reads, from end to end."""
    threads, heads = problem.args.threads, problem.stored_heads
    try:
        from lamina.ops.attention.native import NativeAttention

        kernels = NativeAttention(problem.dtype).kernels

        def read(x: Tensor, nbytes: int) -> None:
            kernels.read(x.data_ptr(), nbytes, threads)
    except ImportError:

        def read(x: Tensor, nbytes: int) -> None:
            x.view(-1).view(torch.int64)[: nbytes // 8].max()

    def both(store: LayerCache) -> None:
        for x in store.k, store.v:
            read(x, heads * x.shape[3] * x.itemsize)
        for scale in store.scales or ():
            read(scale, heads * scale.itemsize)

    return AttentionCompetitor(lambda layer: seconds(lambda: both(problem.layers[layer]))[0], lambda: torch.empty(0))


def torch_sdpa(problem: Problem, *, folded: bool) -> AttentionCompetitor:
    """torch's, over contiguous K and V. ``folded``: the query heads of a KV head as rows of one query."""
    both, args = [problem.contiguous(i) for i in range(len(problem.layers))], problem.args
    by_row = problem.q.view(args.batch, args.rows, args.kv_heads if folded else args.heads, -1, args.head_dim)
    q = by_row.transpose(1, 2).flatten(2, 3)  # a copy, where there are several rows

    def attend(layer: int) -> Tensor:
        return F.scaled_dot_product_attention(q, *both[layer], enable_gqa=not folded)

    def result() -> Tensor:
        by_head = attend(0).view(args.batch, q.shape[1], args.rows, -1, args.head_dim)
        return by_head.transpose(1, 2).reshape(problem.q.shape)

    return AttentionCompetitor(lambda layer: seconds(lambda: attend(layer))[0], result)


def products_limit(problem: Problem, folder: Path) -> AttentionCompetitor:
    """The products that attention does, in registers. Its turn takes the seconds that all threads would need."""
    args = problem.args
    peak, pool = peak_products(folder, bf16=args.dtype == "bf16"), ThreadPoolExecutor(args.threads)
    flops = 4 * len(problem.q) * args.context * args.heads * args.head_dim

    def rate(_: int) -> float:
        """FLOP/s of a thread by its CPU time."""
        start, cpu = time.perf_counter(), time.thread_time()
        return peak(PEAK_S) * (time.perf_counter() - start) / (time.thread_time() - cpu)

    def turn(layer: int) -> dict[str, float]:
        due = flops / sum(pool.map(rate, range(args.threads)))
        return {"attention": due, "cpu": due * args.threads}

    return AttentionCompetitor(turn, lambda: torch.empty(0), pool.shutdown)


def in_child(problem: Problem, peer: str) -> AttentionCompetitor:
    """A peer of another environment, in a process of its own that only works in its turns."""
    args = problem.args
    settings = {**vars(args), "layers": len(problem.layers)}
    child = AttentionPeer(args.peer_python, peer, settings, problem.q, *problem.contiguous(0))
    return AttentionCompetitor(child.turn, child.result, child.close)


def competitors(problem: Problem, folder: Path) -> tuple[dict[str, AttentionCompetitor], dict[str, str]]:
    """Returns the competitors that take part, by name, and those that do not, with the cause."""
    args = problem.args
    players = {"read": read_limit(problem)}
    missing: dict[str, str] = {}
    for name in args.backend.split(","):
        players[name] = lamina(problem, get(name, CPU, problem.dtype, problem.kv_dtype))
    if args.peers:
        players["sdpa_folded"] = torch_sdpa(problem, folded=True)
        players["sdpa"] = torch_sdpa(problem, folded=False)
    if args.rows > 1:
        players["products"] = products_limit(problem, folder)
    elif args.peers:
        try:
            players["vllm"] = in_child(problem, "vllm")
        except (OSError, RuntimeError) as e:
            missing["vllm"] = str(e)
    return players, missing


def check(problem: Problem, players: dict[str, AttentionCompetitor]) -> dict[str, float]:
    """Norm-wise difference of each from dense attention in fp64. Raises ValueError where one is wrong."""
    args = problem.args
    k, v = (x.double() for x in problem.contiguous(0))
    by_head = problem.q.double().view(args.batch, args.rows, args.kv_heads, -1, args.head_dim).transpose(1, 2)
    q = by_head.flatten(2, 3)
    want = torch.stack([((a @ b.mT) * args.head_dim**-0.5).softmax(-1) @ c for a, b, c in zip(q, k, v, strict=True)])
    want = want.view(by_head.shape).transpose(1, 2).reshape(problem.q.shape)
    errors = {}
    for name, competitor in players.items():
        if name not in LIMITS:
            got = competitor.result().double()
            errors[name] = float((got - want).norm(dim=-1).max() / want.norm(dim=-1).max())
            if not errors[name] < TOLERANCE[args.dtype]:
                raise ValueError(f"{name} computes something else: norm-wise error {errors[name]:.2g}")
    return errors


def stalled() -> float:
    """Seconds so far in which some task waited for a core; 0 where the kernel does not say."""
    try:
        with open("/proc/pressure/cpu") as f:
            return int(f.readline().split("total=")[1]) / 1e6
    except OSError:
        return 0.0


def timed(turn: Turn, layer: int) -> dict[str, float]:
    """A turn, with the share of it in which tasks waited."""
    time.sleep(REST_S)
    start, before = time.perf_counter(), stalled()
    times = turn(layer)
    waited = stalled() - before
    return {**times, "stalled": waited / (time.perf_counter() - start)}


def rounds(problem: Problem, players: dict[str, AttentionCompetitor]) -> dict[str, list[dict[str, float]]]:
    """Turns of all, until there are enough quiet ones."""
    args, layers = problem.args, len(problem.layers)
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in players}
    every = {}
    for name, competitor in players.items():
        competitor.turn(0)  # warm
        every[name] = 1 + int(competitor.turn(layers - 1)["attention"] / TURN_S)
    lamina_too = ("read", *args.backend.split(","))
    wanted = {name: args.rounds if name in lamina_too and every[name] == 1 else ENOUGH for name in players}
    end, number = time.monotonic() + args.patience, 0
    while True:
        for name, competitor in players.items():
            if number % every[name] == 0:
                turns[name].append(timed(competitor.turn, number % layers))
        number += 1
        enough = all(sum(t["stalled"] <= QUIET for t in turns[name]) >= n for name, n in wanted.items())
        if number >= args.rounds and (enough or time.monotonic() > end):
            return turns


def quiet(turns: list[dict[str, float]]) -> list[dict[str, float]]:
    """Returns the rounds that count; all where too few were quiet."""
    kept = [t for t in turns if t["stalled"] <= QUIET]
    return kept if len(kept) >= ENOUGH else turns


def summary(problem: Problem, name: str, turns: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """A backend's line: its rate, the read limit's, and where a step's time goes."""

    gb, threads = problem.stored_bytes / 1e9, problem.args.threads
    rates = {who: spread([gb / t["attention"] for t in quiet(x)]) for who, x in turns.items()}
    on_core = {who: spread([gb * threads / t["cpu"] for t in x]) for who, x in turns.items()}
    parts = {part: median(t[part] for t in quiet(turns[name])) for part in ("prepare", "attention", "append", "finish")}
    products = 4 * len(problem.q) * problem.args.context * problem.args.heads * problem.args.head_dim
    by_products = {}
    if "products" in turns:
        due = median(t["attention"] for t in turns["products"])
        by_products = {
            "products_gflop_s": products / due / 1e9,
            "ratio_to_products": due / parts["attention"],
            "ratio_to_products_on_core": {who: due * threads / median(t["cpu"] for t in x) for who, x in turns.items()},
        }
    return {
        "backend": name,
        **by_products,
        "gflop_s": products / parts["attention"] / 1e9,
        "gb_s": rates[name]["median"],
        "read_limit_gb_s": rates["read"]["median"],
        "ratio": rates[name]["median"] / rates["read"]["median"],
        "ratio_on_core": on_core[name]["median"] / on_core["read"]["median"],
        "gb_s_on_core": on_core,
        "gb_s_spread": rates[name],
        "read_limit_gb_s_spread": rates["read"],
        "seconds": parts,
        "append_share": parts["append"] / (parts["attention"] + parts["append"] + parts["finish"]),
        "peers": {who: x for who, x in rates.items() if who not in (*LIMITS, *BACKENDS)},
        "quiet_turns": {who: f"{sum(t['stalled'] <= QUIET for t in x)} of {len(x)}" for who, x in turns.items()},
        "stalled_share": {who: median(t["stalled"] for t in x) for who, x in turns.items()},
    }


def huge_pages() -> int:
    """Bytes of this process in huge pages; -1 where the kernel does not say."""
    try:
        with open("/proc/self/smaps_rollup") as f:
            return next(int(line.split()[1]) << 10 for line in f if line.startswith("AnonHugePages"))
    except (OSError, StopIteration):
        return -1


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--backend", default="native", help="of the attention table, several by comma")
    parser.add_argument("--threads", type=int, default=0, help="of each competitor; 0 = all cores")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=4096, help="stored tokens of each sequence")
    parser.add_argument("--rows", type=int, default=1, help="of each sequence: 1 decodes, more are a piece of a prompt")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="of stored K and V")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--grow", type=int, default=512, help="tokens by which sequences grew in turns")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--patience", type=float, default=60.0, help="seconds of rounds at most, until enough are quiet"
    )
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="only Lamina and the read limit")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter of the environment with vLLM")
    parser.add_argument("--json", action="store_true", help="print the JSON lines instead of a table")
    args = parser.parse_args(arguments)
    args.threads = args.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(args.threads)
    problem = Problem(args)
    folder = tempfile.TemporaryDirectory()
    players, missing = competitors(problem, Path(folder.name))
    try:
        errors = check(problem, players)
        pressure = [cpu_pressure()]
        turns = rounds(problem, players)
        pressure.append(cpu_pressure())
    finally:
        for competitor in players.values():
            competitor.close()
        folder.cleanup()
    settings = {k: v for k, v in vars(args).items() if k not in ("backend", "peer_python", "json", "write")}
    context = {
        "errors": errors,
        "missing_peers": missing,
        "cpu_pressure_avg10": pressure,
        "huge_page_bytes": huge_pages(),
        "numpy": np.__version__,
        "numba": importlib.metadata.version("numba"),
    }
    for name in args.backend.split(","):
        line = {**summary(problem, name, turns), **context}
        text = record("bench_attention", {**settings, "layers": len(problem.layers)}, line, write=args.write)
        print(text if args.json else table(line), flush=True)


def table(line: dict[str, Any]) -> str:
    """Returns a table for people."""
    rows = [(line["backend"], line["gb_s_spread"]), ("read limit", line["read_limit_gb_s_spread"])]
    rows += line["peers"].items()
    out = [f"{name:<14}{x['median']:8.2f} GB/s  ({x['p10']:.2f} to {x['p90']:.2f})" for name, x in rows]
    out += [f"{name:<14}missing: {cause}" for name, cause in line["missing_peers"].items()]
    out.append("quiet turns: " + ", ".join(f"{name} {n}" for name, n in line["quiet_turns"].items()))
    ratios = f"ratio to the limit {line['ratio']:.3f}, by CPU time {line['ratio_on_core']:.3f}"
    out.append(f"{ratios}; append {line['append_share']:.1%} of a layer's step")
    out.append(f"{line['gflop_s']:.0f} GFLOP/s over stored tokens")
    if "products_gflop_s" in line:
        shares = ", ".join(
            f"{who} {x:.2f}" for who, x in line["ratio_to_products_on_core"].items() if who not in LIMITS
        )
        out.append(f"products {line['products_gflop_s']:.0f} GFLOP/s; shares of it, by CPU time: {shares}")
    return "\n".join(out)


if __name__ == "__main__":
    main()
