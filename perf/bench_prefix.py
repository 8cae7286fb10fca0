"""What --enable-prefix-caching brings and costs: seconds to the first token of a prompt whose beginning is known, and
of one whose beginning is not, with the option and without, in turns; with --peer-python also vLLM's.

Prompts are --shared tokens and then --own tokens. Each turn has new ones: a cold one shares nothing with any before it,
a warm one begins as the first prompt of all. CPU seconds are those of all of Lamina's processes. Prints one JSON line;
--write appends it to perf/results/bench_prefix.jsonl.

    python perf/bench_prefix.py --model PATH --peer-python ENVIRONMENT/bin/python --write
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

from child import Child
from common import cpu_pressure, record, spread
from decode_peer import ENVIRONMENT
from reference_model import make

from lamina import LLM, SamplingParams

WORDS = 30_000
FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class Player(Protocol):
    """An engine."""

    def first_s(self, prompt: list[int]) -> float:
        """Seconds until a prompt's first token."""
        ...

    def close(self) -> None: ...


class Lamina:
    """An LLM that nobody else uses."""

    def __init__(self, path: Path, length: int, *, caches: bool) -> None:
        self._llm = LLM(
            str(path), dtype="bfloat16", memory_workers=1, max_model_len=length + 8, enable_prefix_caching=caches
        )
        self.cpu_s = 0.0  # of the last prompt

    def first_s(self, prompt: list[int]) -> float:
        """Seconds until a prompt's first token."""
        before, start = self._cpu(), time.perf_counter()
        self._llm.generate([prompt], FIRST)
        seconds = time.perf_counter() - start
        self.cpu_s = self._cpu() - before
        return seconds

    def close(self) -> None:
        """End its workers."""
        self._llm.close()

    def _cpu(self) -> float:
        """Seconds of CPU of its processes, of which this is one."""
        total = 0.0
        for pid in {os.getpid(), *self._llm.pools.pids.values()}:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return total


class Peer:
    """vLLM, in an environment and a process of its own."""

    def __init__(self, python: str, path: Path, length: int) -> None:
        script = str(Path(__file__).with_name("prefix_peer.py"))
        self._child = Child(python, script, [str(path), str(length)], None, **ENVIRONMENT["vllm"])

    def first_s(self, prompt: list[int]) -> float:
        """Seconds until a prompt's first token."""
        return float(self._child.ask(prompt=prompt)["seconds"])

    def close(self) -> None:
        """End the process."""
        self._child.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="", help="a directory; none: the reference model, made anew")
    parser.add_argument("--shared", type=int, default=900)
    parser.add_argument("--own", type=int, default=100)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--peer-python", default="", help="of an environment with vLLM (peers.sh)")
    parser.add_argument("--write", action="store_true", help="append to perf/results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(args.model) if args.model else make(Path(folder), "bfloat16")
        results = measure(path, args)
    settings = {name: value for name, value in vars(args).items() if name in ("shared", "own", "turns")}
    print(record("bench_prefix", settings, results, write=args.write))


def measure(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Medians and ratios."""
    draw, length = random.Random(0), args.shared + args.own
    known = words(draw, args.shared)
    players: dict[str, Player] = {
        "without": Lamina(path, length, caches=False),
        "with": Lamina(path, length, caches=True),
    }
    if args.peer_python:
        players["vllm"] = Peer(args.peer_python, path, length)
    seconds: dict[str, list[float]] = {f"{name} {kind}": [] for name in players for kind in ("cold", "warm")}
    cpu: dict[str, list[float]] = {"without": [], "with": []}
    pressure = []
    try:
        for player in players.values():
            player.first_s([*known, *words(draw, args.own)])
        for _ in range(args.turns):
            cold, warm = words(draw, length), [*known, *words(draw, args.own)]
            for name in draw.sample(sorted(players), len(players)):
                player = players[name]
                seconds[f"{name} cold"].append(player.first_s(cold))
                if isinstance(player, Lamina):
                    cpu[name].append(player.cpu_s)
                seconds[f"{name} warm"].append(player.first_s(warm))
            pressure.append(cpu_pressure())
    finally:
        for player in players.values():
            player.close()
    middle = {name: statistics.median(found) for name, found in seconds.items()}
    found = {
        "first_s": {name: spread(each) for name, each in seconds.items()},
        "cpu_s_cold": {name: spread(each) for name, each in cpu.items()},
        "gain": middle["without warm"] / middle["with warm"],
        "cost_without_hits": middle["with cold"] / middle["without cold"] - 1,
        "cpu_cost_without_hits": statistics.median(cpu["with"]) / statistics.median(cpu["without"]) - 1,
        "cpu_pressure_avg10": pressure,
    }
    if "vllm" in players:
        found["warm_beside_vllm"] = middle["vllm warm"] / middle["with warm"]
    return found


def words(draw: random.Random, count: int) -> list[int]:
    """Token ids that nobody has had before."""
    return [draw.randrange(5, WORDS) for _ in range(count)]


if __name__ == "__main__":
    main()
