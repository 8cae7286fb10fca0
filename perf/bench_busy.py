"""The share of decode speed that Lamina and its peers keep while another program uses one of the cores.

All are prefilled first and take turns of a few steps. One turn has the cores free, and one runs while a loop, bound to
the last core, never rests. Shares of one's own speed are compared, so a machine with other work will do. Prints one
JSON line; --write appends it to perf/results/bench_busy.jsonl.

    python perf/bench_busy.py --batch 8 --prompt 512 --peers vllm --write
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_decode import REST_S, DecodeLamina, Generate
from common import GREEDY, cpu_pressure, parser_of, record, spread
from peers.decode import PEERS, DecodePeer
from reference_model import made

TURN_STEPS = 8
SUBJECT = "lamina"


class BusyLoop:
    """A process that uses one core without rest while it is let run."""

    def __init__(self, core: int) -> None:
        self._process = multiprocessing.get_context("spawn").Process(target=_use, args=(core,), daemon=True)
        self._process.start()
        self.rest()

    def run(self) -> None:
        self._signal(signal.SIGCONT)

    def rest(self) -> None:
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()

    def _signal(self, which: signal.Signals) -> None:
        if self._process.pid is None or not self._process.is_alive():
            raise RuntimeError("the busy loop has ended")
        os.kill(self._process.pid, which)


def _use(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=96, help="tokens decoded by each competitor, half of them busy")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--peers", default="", help="other engines, by comma, or all: " + ", ".join(PEERS))
    parser.add_argument(
        "--peer-folder", type=Path, default=Path("build/peers"), help="their environments (peers/install.sh)"
    )
    args = parser.parse_args()
    if args.tokens < 2 * TURN_STEPS:
        raise SystemExit(f"--tokens {args.tokens}: a turn of either kind takes {TURN_STEPS} steps; give more")
    cores = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(len(cores))
    settings = {k: v for k, v in vars(args).items() if k not in ("peer_folder", "write")} | {"threads": len(cores)}
    with made(args.dtype, {}) as path:
        print(record("bench_busy", settings, _measure(path, args, cores), write=args.write))


def _measure(path: Path, args: argparse.Namespace, cores: list[int]) -> dict[str, Any]:
    players: dict[str, Any] = {}
    missing: dict[str, str] = {}
    loop = BusyLoop(cores[-1])
    try:
        for name, start in _makers(path, args, len(cores)).items():
            try:
                players[name] = start()
            except (OSError, RuntimeError) as e:
                if name not in PEERS:
                    raise
                missing[name] = str(e)
        return {**_turns(players, loop, args.tokens // (2 * TURN_STEPS)), "missing_peers": missing}
    finally:
        loop.close()
        for player in players.values():
            player.close()


def _makers(path: Path, args: argparse.Namespace, threads: int) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=args.dtype).eval()
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, 32000, (args.batch, args.prompt), generator=generator).tolist()
    total = args.tokens + 4 * TURN_STEPS + args.tokens // TURN_STEPS
    config = model.config
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    settings = {
        "model": str(path),
        "dtype": args.dtype,
        "prompts": prompts,
        "tokens": total,
        "threads": threads,
        "sampling": GREEDY,
        "kv_bytes": token * args.batch * (args.prompt + total),
    }
    makers: dict[str, Any] = {
        SUBJECT: lambda: DecodeLamina(path, prompts, total, transport="shm", dtype=args.dtype),
        "transformers static": lambda: Generate(model, prompts, total, "static"),
    }
    for name in PEERS if args.peers == "all" else filter(None, args.peers.split(",")):
        makers[name] = partial(DecodePeer, args.peer_folder, name, settings)
    return makers


def _turns(players: dict[str, Any], loop: BusyLoop, rounds: int) -> dict[str, Any]:
    times: dict[str, dict[str, list[float]]] = {name: {"free": [], "busy": []} for name in players}
    pressure = []
    for player in players.values():
        player.turn(2)  # warm
    for _ in range(rounds):
        for name, player in players.items():
            time.sleep(REST_S)
            times[name]["free"] += player.turn(TURN_STEPS)
        pressure.append(cpu_pressure())  # before the loop, which counts too
        for name, player in players.items():
            time.sleep(REST_S)
            loop.run()
            times[name]["busy"] += player.turn(TURN_STEPS)
            loop.rest()
    means = {name: {kind: sum(t) / len(t) for kind, t in both.items()} for name, both in times.items()}
    kept = {name: mean["free"] / mean["busy"] for name, mean in means.items()}
    return {
        "step_s": {name: {kind: spread(t) for kind, t in both.items()} for name, both in times.items()},
        "mean_s": means,
        "kept": kept,
        "kept_of_lamina_against": {name: kept[SUBJECT] / share for name, share in kept.items() if name != SUBJECT},
        "cpu_pressure_avg10": pressure,
    }


if __name__ == "__main__":
    main()
