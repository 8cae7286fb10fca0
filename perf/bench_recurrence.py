"""Recurrent layers: decoding compared with a copy of their states, prompts with transformers, on the same cores.

A turn of decoding is one token of each sequence in several layers, whose states together exceed the caches. Its floor
copies as many bytes past the caches by the same threads: each state is read once and written once, elsewhere. A turn of
a prompt is one sequence's chunk in one layer; transformers computes it by its own function for chunks. Each competitor
has a turn in each round, so that noise of the machine hits them alike. Where other work has the cores, one thread's
CPU time still means something: --cpu-time. Prints one JSON line for each shape; --write appends them to
perf/results/bench_recurrence.jsonl.

    python perf/bench_recurrence.py --shapes qwen3-next,granite-4-h --write
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

from lamina.kv.arena import huge_page_zeros
from lamina.ops.recurrence.native import NativeRecurrence
from lamina.ops.recurrence.segments import ZEROS, Segment, Segments
from lamina.ops.recurrence.spec import RecurrenceSpec

REST_S = 0.003  # before a turn, while idle threads of the one before go on spinning for work
LEAST_BYTES = 300_000_000  # of the states that a turn of decoding reads
SHAPES = {
    "qwen3-next": RecurrenceSpec(
        kind="gated_delta", heads=32, groups=16, heads_per_group=2, key_dim=128, value_dim=128, width=4, scale=128**-0.5
    ),
    "kimi-linear": RecurrenceSpec(
        kind="kimi_delta", heads=32, groups=32, key_dim=128, value_dim=128, width=4, scale=128**-0.5
    ),
    "granite-4-h": RecurrenceSpec(
        kind="mamba2", heads=128, groups=1, heads_per_group=128, key_dim=128, value_dim=64, width=4, bias=True
    ),
    "nemotron-h": RecurrenceSpec(
        kind="mamba2", heads=128, groups=8, heads_per_group=16, key_dim=128, value_dim=64, width=4, bias=True
    ),
    "lfm2": RecurrenceSpec(kind="convolution", heads=2048, width=3, silu=False),
}


def operands(spec: RecurrenceSpec, rows: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Static operands, and inputs: messages have ``dtype``, decays fp32."""
    g = torch.Generator().manual_seed(0)
    static = {name: torch.randn(shape, generator=g) * 0.3 for name, shape in spec.static_shapes.items()}
    if "A" in static:
        static["A"] = -static["A"].exp()
    inputs = {name: torch.randn(rows, n, generator=g) for name, n in spec.input_columns.items()}
    if "g" in inputs:
        inputs |= {"g": -inputs["g"].exp() * 0.1, "beta": inputs["beta"].sigmoid()}
    return static, {name: t if name == "g" else t.to(dtype) for name, t in inputs.items()}


def timed(turn: Callable[[], Any], clock: Callable[[], float]) -> float:
    time.sleep(REST_S)
    start = clock()
    turn()
    return clock() - start


def in_turns(turns: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Return the seconds of each turn; the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in turns}
    for i in range(rounds + 1):
        for name, turn in turns.items():
            took = timed(turn, clock)
            if i:
                times[name].append(took)
    return times


def decoding(
    backend: NativeRecurrence, spec: RecurrenceSpec, sequences: int, rounds: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Return seconds of a layer, GB/s of states, and the floor's share of the time."""
    layers = max(1, min(64, -(-LEAST_BYTES // (spec.state_bytes * sequences))))
    states = huge_page_zeros((layers, 2 * sequences, spec.state_size), torch.float32)  # as memory workers have it
    states.copy_(torch.randn(spec.state_size))
    static, inputs = operands(spec, sequences, torch.bfloat16)
    steps = [
        Segments.of([Segment(i, 1, 0, i + a * sequences, i + (1 - a) * sequences) for i in range(sequences)])
        for a in (0, 1)
    ]
    number = 0

    def step() -> None:
        nonlocal number
        for layer in states:
            backend.update(spec, static, inputs, steps[number % 2], layer)
        number += 1

    half = sequences * spec.state_size

    def copy() -> None:
        for layer in states:
            at = layer.data_ptr()
            backend.engine.copy(at, at + 4 * half, half)

    times = in_turns({"update": step, "copy": copy}, rounds, clock)
    moved = 2 * layers * sequences * spec.state_bytes
    return {
        "layer_s": spread([t / layers for t in times["update"]]),
        "gb_s": moved / statistics.median(times["update"]) / 1e9,
        "copy_gb_s": moved / statistics.median(times["copy"]) / 1e9,
        "of_copy": statistics.median(c / u for c, u in zip(times["copy"], times["update"], strict=True)),
        "layers": layers,
    }


def prompts(
    backend: NativeRecurrence, spec: RecurrenceSpec, rows: int, rounds: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Return us of a token and head (``convolution``: of a token), and how much longer transformers' function takes."""
    static, inputs = operands(spec, rows, torch.bfloat16)
    states = torch.zeros(1, spec.state_size)
    segments = Segments.of([Segment(0, rows, rows, ZEROS, 0)])
    turns: dict[str, Callable[[], Any]] = {
        "update": partial(backend.update, spec, static, inputs, segments, states),
    }
    if peer := PEERS.get(spec.kind):
        turns["transformers"] = partial(peer, spec, static, inputs)
    times = in_turns(turns, max(3, rounds // 3), clock)
    heads = spec.heads if spec.key_dim else 1
    made: dict[str, Any] = {"us_of_token_and_head": spread([1e6 * t / rows / heads for t in times["update"]])}
    if peer:
        pairs = zip(times["transformers"], times["update"], strict=True)
        made["transformers_takes"] = statistics.median(other / own for other, own in pairs)
    return made


def convolved(spec: RecurrenceSpec, static: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """q, k and v [1, rows, heads, dim] by torch."""
    weight, bias = static["weight"].to(x.dtype), static.get("bias")
    bias = None if bias is None else bias.to(x.dtype)
    y = torch.nn.functional.conv1d(x.T[None], weight[:, None], bias, padding=spec.width - 1, groups=spec.channels)
    y = torch.nn.functional.silu(y[0, :, : len(x)]).T
    sizes = {"q": spec.key_dim, "k": spec.key_dim, "v": spec.value_dim}
    return {
        name: y[:, first : first + size].reshape(1, len(x), -1, sizes[name])
        for name, (first, size) in spec.channel_ranges.items()
    }


def delta_peer(spec: RecurrenceSpec, static: dict[str, Tensor], inputs: dict[str, Tensor]) -> None:
    """The function for chunks of Qwen3-Next."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    named = convolved(spec, static, inputs["x"])
    torch_chunk_gated_delta_rule(
        *(named[n] for n in "qkv"), inputs["g"][None], inputs["beta"][None], use_qk_l2norm_in_kernel=True
    )


def mamba2_peer(spec: RecurrenceSpec, static: dict[str, Tensor], inputs: dict[str, Tensor]) -> None:
    """The function for chunks of Granite-4-H."""
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan

    named, dt = convolved(spec, static, inputs["x"]), inputs["dt"][None].float()
    mamba2_chunk_scan(
        named["v"], dt, static["A"], named["k"], named["q"], 256, D=static["D"], dt_bias=static["dt_bias"],
        dt_softplus=True,
    )  # fmt: skip


PEERS: dict[str, Callable[..., None]] = {"gated_delta": delta_peer, "mamba2": mamba2_peer}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--sequences", default="1,8,32", help="of decoding")
    parser.add_argument("--prompt", type=int, default=512, help="rows of a chunk")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time, by one thread")
    parser.add_argument("--variant", default="", help="instructions; empty = the best")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--note", default="", help="such as what else ran on the machine")
    args = parser.parse_args()
    if args.cpu_time:
        args.threads = 1
    clock = time.thread_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(args.threads)
    backend = NativeRecurrence(args.threads, args.variant)
    with torch.inference_mode():
        for shape in args.shapes.split(","):
            spec = SHAPES[shape]
            settings = {name: value for name, value in vars(args).items() if name not in ("shapes", "write")}
            figures = {
                "state_bytes": spec.state_bytes,
                "decode": {n: decoding(backend, spec, int(n), args.rounds, clock) for n in args.sequences.split(",")},
                "prompt": prompts(backend, spec, args.prompt, args.rounds, clock),
                "cpu_pressure": cpu_pressure(),
            }
            print(record("bench_recurrence", settings | {"shape": shape}, figures, write=args.write))


if __name__ == "__main__":
    main()
