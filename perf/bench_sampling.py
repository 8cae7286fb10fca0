"""The cost of drawing a step's tokens, by filter: lamina.ops.sampling native and in torch, torch.topk, a sort of all.

All take turns on the same logits, so that noise of the machine hits them alike. Prints one JSON line; --write appends
it to perf/results/bench_sampling.jsonl.

    python perf/bench_sampling.py --rows 64 --vocabulary 128256 --write

The floor is one reading of the logits for the largest one. Where there is no top_k, an exponential of each is added: a
second reading, of a row that is in the cache by then. They are drawn from a normal distribution: with top_p 0.95 a
fifth of 128k tokens are left, far more than of a trained model's.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from common import cpu_pressure, parser_of, record, spread
from torch import Tensor

from lamina.ops.sampling import Backend, SampleSpec
from lamina.ops.sampling.native import NativeSampling
from lamina.ops.sampling.sampling_settings import sampler_settings
from lamina.ops.sampling.torch_sampling import TorchSampling
from lamina.request import FILTERS

REST_S = 0.01  # before a turn, while idle threads of the one before go on spinning for work
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_k 50, top_p 0.95": {"top_k": 50, "top_p": 0.95},
    "top_k 50, top_p 0.95, min_p 0.02": {"top_k": 50, "top_p": 0.95, "min_p": 0.02},
    "top_p 0.95": {"top_p": 0.95},
    "min_p 0.02": {"min_p": 0.02},
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--deviation", type=float, default=2.5, help="standard deviation of the logits")
    parser.add_argument("--threads", type=int, default=0, help="0 = all cores")
    parser.add_argument("--variant", default="", help="instruction set of native; empty = the best")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--without-torch", action="store_true", help="leave out lamina's arithmetic in torch")
    args = parser.parse_args()
    args.threads = args.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(args.threads)
    settings = {k: v for k, v in vars(args).items() if k != "write"}
    print(record("bench_sampling", settings, measure(args), write=args.write))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each competitor, and the floor."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(args.rows, args.vocabulary, generator=generator) * args.deviation
    logits = logits.to(getattr(torch, args.dtype))
    bits, out = logits.view(torch.int32 if logits.element_size() == 4 else torch.int16), torch.empty_like(logits[0])
    backends: dict[str, Backend] = {"native": NativeSampling(args.threads, args.variant)}
    if not args.without_torch:
        backends["torch"] = TorchSampling()
    players: dict[str, Callable[[], Any]] = {
        "read": bits.max,
        "read and torch.exp": lambda: _exponentials(bits, logits, out),
        "torch.topk 50": lambda: logits.topk(50, dim=-1),
        "torch.sort": lambda: _by_sort(logits),
    }
    for choice, options in CHOICES.items():
        fields = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "order": FILTERS, **options}
        asks = [SampleSpec(i, sampler_settings(**fields), i, 1) for i in range(args.rows)]
        for name, backend in backends.items():
            players[f"{name}: {choice}"] = lambda b=backend, a=asks: b.draw(logits, a)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in players}
    pressure = []
    for at in range(args.rounds + 1):  # the first one warms
        for name, player in players.items():
            time.sleep(REST_S)
            start = time.perf_counter()
            player()
            if at:
                times[name].append(time.perf_counter() - start)
        pressure.append(cpu_pressure())
    return {"seconds": {name: spread(t) for name, t in times.items()}, "cpu_pressure_avg10": pressure}


def _exponentials(bits: Tensor, logits: Tensor, out: Tensor) -> None:
    """The floor of a draw without filters, row by row, so that the second reading is one of the cache."""
    for its_bits, row in zip(bits, logits, strict=True):
        its_bits.max()
        torch.exp(row, out=out)


def _by_sort(logits: Tensor) -> Tensor:
    """top_p as it is done with a sort."""
    values, ids = logits.float().sort(dim=-1)
    return ids[values.softmax(-1).cumsum(-1) > 0.05]


if __name__ == "__main__":
    main()
