"""The gain and the cost of --enable-prefix-caching: seconds to the first token of a prompt whose beginning is known,
and of one whose beginning is not. Engines with the option and without take turns; with --peers also other engines.

Prompts are --shared tokens and then --own tokens. Each turn has new ones: a cold one shares nothing with any before it,
a warm one begins as the first prompt of all. CPU seconds are those of all of Lamina's processes. Prints one JSON line;
--write appends it to perf/results/bench_prefix.jsonl.

With --tiers the known prefix lies in the pool, in host memory or in a directory, and the pool of --kv-memory holds one
prompt and not two. "none" has that pool and no storage. Two cold prompts follow one another in each turn, so that the
first one is saved while the second one is computed; CPU seconds are those until SAVED_S after them.

With --steps N it prints CPU seconds alone, with the option and without, where nothing is found. One number is of a
prompt of --own tokens, BATCH of which are asked for together; the other is of a step of as many sequences, N of which
follow.

Most of a run with peers is their start. A --model that was used before has what they make of it: OpenVINO's form of it
lies there, llama.cpp's too, and vLLM knows what it has compiled. --warm leaves out cold prompts and Lamina without the
option: a minute with one peer.

    python perf/bench_prefix.py --model PATH --peers vllm,openvino,llama.cpp-server,llama.cpp-slots --write
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

from common import BrokenError, cpu_pressure, parser_of, record, spread
from peers.child import Child
from peers.decode import ENVIRONMENT
from peers.prefix import HOMES, PEERS
from reference_model import make

from lamina import LLM, SamplingParams

WORDS = 30_000
SAVED_S = 0.3  # until the last prompt is saved, too
REST_S = 0.25  # until threads of the one before have ceased to look for work
OTHERS = ("steps", "tiers", "kv_memory")
BATCH = 8  # sequences that decode together


def some(tokens: int) -> SamplingParams:
    """So many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


FIRST = some(1)


class PrefixPlayer(Protocol):
    """An engine."""

    def first_s(self, prompt: list[int]) -> float:
        """Seconds until a prompt's first token."""
        ...

    def close(self) -> None: ...


class PrefixLamina:
    """An LLM without other users."""

    def __init__(self, path: Path, length: int, *, caches: bool, **more: Any) -> None:
        self._llm = LLM(
            str(path),
            dtype="bfloat16",
            memory_workers=1,
            max_model_len=length + 8,
            enable_prefix_caching=caches,
            **more,
        )
        self.cpu_s = 0.0  # of the last prompt
        self.cached = 0  # tokens of the last prompt

    def first_s(self, prompt: list[int]) -> float:
        """Seconds until a prompt's first token."""
        before, start = self.used_s(), time.perf_counter()
        self.cached = self._llm.generate([prompt], FIRST)[0].num_cached_tokens or 0
        seconds = time.perf_counter() - start
        self.cpu_s = self.used_s() - before
        return seconds

    def cpu_of(self, prompts: list[list[int]], tokens: int) -> float:
        """Seconds of CPU that so many tokens of each take. Raises BrokenError where KV of a prompt was there."""
        before = self.used_s()
        outputs = self._llm.generate(prompts, some(tokens))
        used = self.used_s() - before
        if any(output.num_cached_tokens for output in outputs):
            raise BrokenError("a new prompt found KV")
        return used

    def close(self) -> None:
        """End its workers."""
        self._llm.close()

    def used_s(self) -> float:
        """Seconds of CPU of its processes, of which this is one."""
        total = 0.0
        for pid in {os.getpid(), *self._llm.pools.pids.values()}:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return total


class PrefixPeer:
    """Another engine, in an environment and a process of its own."""

    def __init__(self, folder: Path, peer: str, path: Path, length: int) -> None:
        script, home = str(Path(__file__).parent / "peers" / "prefix.py"), folder / HOMES.get(peer, peer)
        python, environment = str((home / "bin" / "python").absolute()), ENVIRONMENT.get(peer, {})
        self._child = Child(python, script, [peer, str(path), str(length)], None, **environment)

    def first_s(self, prompt: list[int]) -> float:
        """Seconds until a prompt's first token."""
        return float(self._child.ask(prompt=prompt)["seconds"])

    def close(self) -> None:
        """End the process."""
        self._child.close()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="a directory; none: the reference model, made anew")
    parser.add_argument("--shared", type=int, default=900)
    parser.add_argument("--own", type=int, default=100)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--peers", default="", help=f"other engines, by comma: {', '.join(PEERS)}")
    parser.add_argument(
        "--peer-folder", type=Path, default=Path("build/peers"), help="their environments (peers/install.sh)"
    )
    parser.add_argument("--warm", action="store_true", help="prompts whose beginning is known, and no others")
    parser.add_argument("--tiers", action="store_true", help="storage tiers, too")
    parser.add_argument("--kv-memory", default="24MiB", help="with --tiers: of a pool that has storage")
    parser.add_argument("--steps", type=int, default=0, help="CPU seconds of a prompt and of so many steps after it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(args.model) if args.model else make(Path(folder), "bfloat16")
        way = measure_tiers if args.tiers else measure_steps if args.steps else measure
        results = way(path, args)
    settings: dict[str, Any] = {
        name: value for name, value in vars(args).items() if name in ("shared", "own", "turns", "warm", *OTHERS)
    }
    print(record("bench_prefix", settings, results, write=args.write))


def measure(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Medians and ratios."""
    draw, length = random.Random(0), args.shared + args.own
    known = words(draw, args.shared)
    ways, kinds = (("with",), ("warm",)) if args.warm else (("without", "with"), ("cold", "warm"))
    players: dict[str, PrefixPlayer] = {way: PrefixLamina(path, length, caches=way == "with") for way in ways}
    peers = list(filter(None, args.peers.split(",")))
    players |= {name: PrefixPeer(args.peer_folder, name, path, length) for name in peers}
    seconds: dict[str, list[float]] = {f"{name} {kind}": [] for name in players for kind in kinds}
    cpu: dict[str, list[float]] = {"without": [], "with": []}
    pressure = []
    try:
        for player in players.values():
            player.first_s([*known, *words(draw, args.own)])
        print("all have begun", file=sys.stderr)
        for _ in range(args.turns):
            cold, warm = words(draw, length), [*known, *words(draw, args.own)]
            for name in draw.sample(sorted(players), len(players)):
                player = players[name]
                time.sleep(REST_S)
                if not args.warm:
                    seconds[f"{name} cold"].append(player.first_s(cold))
                    if isinstance(player, PrefixLamina):
                        cpu[name].append(player.cpu_s)
                seconds[f"{name} warm"].append(player.first_s(warm))
            pressure.append(cpu_pressure())
    finally:
        for player in players.values():
            player.close()
    middle = {name: statistics.median(each) for name, each in seconds.items()}
    figures: dict[str, Any] = {"first_s": {name: spread(each) for name, each in seconds.items()}}
    if not args.warm:
        figures |= {
            "cpu_s_cold": {name: spread(each) for name, each in cpu.items()},
            "gain": middle["without warm"] / middle["with warm"],
            "cost_without_hits": middle["with cold"] / middle["without cold"] - 1,
            "cpu_cost_without_hits": statistics.median(cpu["with"]) / statistics.median(cpu["without"]) - 1,
        }
    figures["cpu_pressure_avg10"] = pressure
    figures["warm_of_peers"] = {name: middle["with warm"] / middle[f"{name} warm"] for name in peers}
    return figures


def measure_tiers(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Medians, and medians of ratios by turn."""
    draw, length = random.Random(0), args.shared + args.own
    known = words(draw, args.shared)
    with tempfile.TemporaryDirectory() as folder:
        small = {"kv_memory": args.kv_memory, "caches": True}
        places: dict[str, dict[str, Any]] = {
            "none": small,
            "pool": {"caches": True},
            "host": {**small, "kv_offloading_size": "1GiB"},
            "file": {**small, "kv_store_dir": f"{folder}/kv", "kv_store_size": "1GiB"},
        }
        players = {name: PrefixLamina(path, length, **options) for name, options in places.items()}
        kinds = ("warm", "cold pair", "cold pair cpu", "cached tokens")
        seen: dict[str, list[float]] = {f"{name} {kind}": [] for name in players for kind in kinds}
        pressure = []
        try:
            for player in players.values():
                player.first_s([*known, *words(draw, args.own)])
            for _ in range(args.turns):
                cold, warm = [words(draw, length), words(draw, length)], [*known, *words(draw, args.own)]
                for name in draw.sample(sorted(players), len(players)):
                    player, before = players[name], players[name].used_s()
                    seen[f"{name} cold pair"].append(sum(map(player.first_s, cold)))
                    time.sleep(SAVED_S)
                    seen[f"{name} cold pair cpu"].append(player.used_s() - before)
                    seen[f"{name} warm"].append(player.first_s(warm))
                    seen[f"{name} cached tokens"].append(player.cached)
                    time.sleep(SAVED_S)
                pressure.append(cpu_pressure())
        finally:
            for player in players.values():
                player.close()
    ratios = {
        f"{name} {kind} to none": spread(
            [a / b for a, b in zip(seen[f"{name} {kind}"], seen[f"none {kind}"], strict=True)]
        )
        for name in players
        for kind in kinds[:3]
    }
    return {
        "seen": {name: spread(each) for name, each in seen.items()},
        "ratios": ratios,
        "cpu_pressure_avg10": pressure,
    }


def measure_steps(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Medians of CPU seconds, and of their ratios by turn."""
    draw, length = random.Random(0), args.own
    players = {
        way: PrefixLamina(path, length + args.steps, caches=way == "with", max_num_seqs=BATCH)
        for way in ("without", "with")
    }
    cpu: dict[str, list[float]] = {f"{way} {kind}": [] for way in players for kind in ("prompt", "step")}
    pressure = []
    try:
        for player in players.values():
            player.cpu_of([words(draw, length) for _ in range(BATCH)], 2)
        print("all have begun", file=sys.stderr)
        for _ in range(args.turns):
            asked = [[words(draw, length) for _ in range(BATCH)] for _ in range(2)]
            for way in draw.sample(sorted(players), len(players)):
                time.sleep(REST_S)
                alone = players[way].cpu_of(asked[0], 1)
                both = players[way].cpu_of(asked[1], 1 + args.steps)
                cpu[f"{way} prompt"].append(alone / BATCH)
                cpu[f"{way} step"].append((both - alone) / args.steps)
            pressure.append(cpu_pressure())
    finally:
        for player in players.values():
            player.close()
    ratios = {
        kind: spread([a / b for a, b in zip(cpu[f"with {kind}"], cpu[f"without {kind}"], strict=True)])
        for kind in ("prompt", "step")
    }
    medians = {
        kind: statistics.median(cpu[f"with {kind}"]) / statistics.median(cpu[f"without {kind}"])
        for kind in ("prompt", "step")
    }
    figures = {"cpu_s": {name: spread(each) for name, each in cpu.items()}, "ratio_by_turn": ratios}
    return {**figures, "ratio_of_medians": medians, "cpu_pressure_avg10": pressure}


def words(draw: random.Random, count: int) -> list[int]:
    """Token ids of no earlier prompt."""
    return [draw.randrange(5, WORDS) for _ in range(count)]


if __name__ == "__main__":
    main()
