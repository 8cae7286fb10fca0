"""Decode speed of two checkouts of Lamina on the same model and cores, in turns: what the changes between them bring.

Each runs in a process of its own, with its own native modules, over shm with 1 + 1 workers. Prints one JSON line;
--write appends it to perf/results/bench_versions.jsonl.

    python perf/bench_versions.py --before ../lamina-before --batch 8 --prompt 512 --write

With --temperature both sample, by the same parameters and seeds. --model takes a model in place of the Llama shape.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from common import add_sampling, commit_of, cpu_pressure, parser_of, record, sampling_of, spread
from peers.child import Child, Fields, serve

HERE = Path(__file__).resolve().parents[1]
TURN_STEPS = 8
REST_S = 0.01


class Version:
    """A checkout whose engine has taken all prompts."""

    def __init__(self, checkout: Path, settings: Path) -> None:
        folder = str(checkout.resolve())
        script = str(Path(__file__).resolve())
        self._child = Child(sys.executable, script, ["--child", str(settings)], checkout, PYTHONPATH=folder)
        self.facts = self._child.ask(steps=0)
        if strange := [path for path in self.facts["lamina"] if not path.startswith(f"{folder}/")]:
            raise SystemExit(f"--before {checkout}: {strange[0]} is not of there; give the root of a checkout")

    def turn(self, steps: int) -> list[float]:
        """Seconds of each of ``steps`` decode steps."""
        seconds: list[float] = self._child.ask(steps=steps)["seconds"]
        return seconds

    def close(self) -> None:
        """End the process."""
        self._child.close()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="root of another checkout, its modules built")
    parser.add_argument("--model", type=Path, help="a directory or a GGUF file, in place of random weights")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens decoded by each version")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "int8", "fp8"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add_sampling(parser)
    args = parser.parse_args()
    sampling = sampling_of(args)
    settings = {k: v for k, v in vars(args).items() if k not in ("before", "write", "model")}
    settings |= {"model": args.model.name} if args.model else {}
    with tempfile.TemporaryDirectory() as folder:
        from reference_model import make

        model = args.model.resolve() if args.model else make(Path(folder) / "model", args.dtype)
        file = Path(folder) / "settings.json"
        file.write_text(json.dumps(settings | {"model": str(model), "sampling": sampling}))
        print(record("bench_versions", settings, measure(args, file), write=args.write))


def measure(args: argparse.Namespace, settings: Path) -> dict[str, Any]:
    """Steps of both, in turns."""
    players: dict[str, Version] = {}
    try:
        for name, checkout in (("before", args.before), ("after", HERE)):
            players[name] = Version(checkout, settings)
        times: dict[str, list[float]] = {name: [] for name in players}
        pressure = []
        for player in players.values():
            player.turn(2)  # warm
        for _ in range(args.tokens // TURN_STEPS):
            for name, player in players.items():
                time.sleep(REST_S)
                times[name] += player.turn(TURN_STEPS)
            pressure.append(cpu_pressure())
        medians = {name: spread(t)["median"] for name, t in times.items()}
        return {
            "before_commit": commit_of(args.before),
            "gemm_variants": {name: player.facts["gemm"] for name, player in players.items()},
            "step_s": {name: spread(t) for name, t in times.items()},
            "tokens_per_s": {name: args.batch / m for name, m in medians.items()},
            "speedup": medians["before"] / medians["after"],
            "cpu_pressure_avg10": pressure,
        }
    finally:
        for player in players.values():
            player.close()


NATIVE = {f"_{name}" for name in ("attention", "compute", "gemm", "memory", "netstack", "rows", "sampling", "native")}


def _modules(pids: Iterable[int]) -> set[str]:
    """Native modules of Lamina that these processes, its workers, have mapped."""
    maps = [line.split(maxsplit=5) for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {fields[5] for fields in maps if len(fields) == 6 and Path(fields[5]).name.split(".")[0] in NATIVE}


def _begin(file: str) -> Callable[[Fields], Fields]:
    import torch
    from bench_decode import DecodeLamina

    import lamina
    from lamina.ops.gemm._gemm import usable

    settings = json.loads(Path(file).read_text())
    batch, threads = settings["batch"], settings["threads"]
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, 32000, (batch, settings["prompt"]), generator=generator).tolist()
    total = settings["tokens"] + 2 * TURN_STEPS + settings["tokens"] // TURN_STEPS
    options = {"dtype": settings["dtype"], "transport": "shm", "memory_workers": 1}
    options["kv_cache_dtype"] = settings["kv_cache_dtype"]
    threads = {"compute_threads": threads, "memory_threads": threads}
    player = DecodeLamina(Path(settings["model"]), prompts, total, settings["sampling"], **options, **threads)
    paths = [str(Path(lamina.__file__).resolve()), *_modules(player.llm.pools.pids.values())]
    facts = {"lamina": paths, "gemm": usable()[0]}

    def reply(question: Fields) -> Fields:
        return {"seconds": player.turn(question["steps"]) if question["steps"] else [], **facts}

    return reply


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        serve(partial(_begin, sys.argv[2]))
    else:
        main()
