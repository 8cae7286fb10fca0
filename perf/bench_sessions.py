"""Seconds to the first token of each turn of a few conversations, by where their KV is kept meanwhile, compared with
computing them anew. Conversations take turns, so that each other's KV pushes theirs out of a pool that holds one of
them.

- none: nothing is kept, and each turn computes the whole conversation
- pool: the pool holds all of them
- host: a pool of --kv-memory, and host memory
- file: the same pool, and a directory
- layered: the same pool, host memory of --host-memory, which holds one conversation, and a directory

All play the same conversations, in turns; a turn is asked for when the one before has been answered. At the end the
next turns of all conversations are asked for at once: a line, whose KV is fetched ahead where that can be. Prints a
table by tier, and one JSON line; --write appends it to perf/results/bench_sessions.jsonl.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import BrokenError, cpu_pressure, parser_of, record, spread
from reference_model import make

from lamina import LLM, SamplingParams

WORDS = 30_000
SAVED_S = 0.3  # until an answer's KV is saved
SETTINGS = ("conversations", "turns", "opening", "new", "answer", "kv_memory", "host_memory")


class ReplayedChat:
    """An engine, and the conversations as it has answered them."""

    def __init__(self, path: Path, args: argparse.Namespace, *, keeps: bool = True, **more: Any) -> None:
        length = args.opening + (args.turns + 1) * (args.new + args.answer)
        self._llm = LLM(
            str(path), dtype="bfloat16", memory_workers=1, max_model_len=length, enable_prefix_caching=keeps, **more,
        )  # fmt: skip
        self._keeps = keeps
        self._params = SamplingParams(temperature=0.0, max_tokens=args.answer, ignore_eos=True)
        self.said: dict[int, list[int]] = {}

    def turn(self, number: int, new: list[int]) -> tuple[float, float]:
        """Asks a turn of conversation ``number``: seconds to the first token, and the share of the conversation that
        was there.
        """
        before = len(self.said.get(number, []))
        self.said[number] = [*self.said.get(number, []), *new]
        name = str(number) if self._keeps else None
        (output,) = self._llm.generate([self.said[number]], self._params, session_id=name)
        self.said[number] += output.outputs[0].token_ids
        times = output.times
        assert times.first_token_s is not None
        return times.first_token_s - times.arrival_s, (output.num_cached_tokens or 0) / max(1, before)

    def line(self, new: dict[int, list[int]]) -> tuple[float, int]:
        """The next turns of all at once: seconds for all, and pages that were fetched ahead."""
        start, before = time.perf_counter(), self._fetched()
        outputs = self._llm.generate([[*self.said[n], *words] for n, words in new.items()], self._params)
        took = time.perf_counter() - start
        for number, output in zip(new, outputs, strict=True):
            self.said[number] += [*new[number], *output.outputs[0].token_ids]
        return took, int(self._fetched() - before)

    def _fetched(self) -> float:
        return sum(stats.get("kv_fetched_pages", 0.0) for stats in self._llm.stats().values())

    def close(self) -> None:
        """End its workers."""
        self._llm.close()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="a directory; none: the reference model, made anew")
    parser.add_argument("--conversations", type=int, default=3)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--opening", type=int, default=600, help="tokens of the first turn")
    parser.add_argument("--new", type=int, default=60, help="tokens that each other turn adds")
    parser.add_argument("--answer", type=int, default=8)
    parser.add_argument("--kv-memory", default="18MiB", help="of a pool that has storage")
    parser.add_argument("--host-memory", default="20MiB", help="before the directory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(args.model) if args.model else make(Path(folder) / "model", "bfloat16")
        results = measure(path, args, Path(folder))
    print(table(results))
    print(record("bench_sessions", {name: getattr(args, name) for name in SETTINGS}, results, write=args.write))


def table(results: dict[str, Any]) -> str:
    """Medians of the later turns, by the tier where KV slept."""
    seconds, ratios, hits = results["first_token_s"], results["to_none"], results["hit"]
    rows = [f"{'tier':8}{'hit':>6}{'first token':>14}{'to computing all':>18}"]
    for name, hit in hits.items():
        rows.append(f"{name:8}{hit:6.2f}{seconds[name]['median']:12.3f} s{ratios[name]['median']:18.2f}")
    return "\n".join(rows)


def measure(path: Path, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Medians and ratios. Raises BrokenError where two places do not give the same answers."""
    small, draw = {"kv_memory": args.kv_memory}, random.Random(0)
    places: dict[str, dict[str, Any]] = {
        "none": {"keeps": False},
        "pool": {"kv_memory": "128MiB"},
        "host": {**small, "kv_offloading_size": "1GiB"},
        "file": {**small, "kv_store_dir": f"{folder}/file"},
        "layered": {**small, "kv_store_dir": f"{folder}/layered", "kv_offloading_size": args.host_memory},
    }
    players = {name: ReplayedChat(path, args, **options) for name, options in places.items()}
    seconds: dict[str, list[float]] = {name: [] for name in players}
    hits: dict[str, list[float]] = {name: [] for name in players}
    opening: dict[str, list[float]] = {name: [] for name in players}
    pressure, chats = [], range(args.conversations)
    try:
        for turn in range(args.turns):
            for number in chats:
                new = [draw.randrange(1, WORDS) for _ in range(args.new if turn else args.opening)]
                for name in draw.sample(sorted(players), len(players)):
                    took, hit = players[name].turn(number, new)
                    (seconds if turn else opening)[name].append(took)
                    hits[name] += [hit] if turn else []
                    time.sleep(SAVED_S)
            pressure.append(cpu_pressure())
        last = {number: [draw.randrange(1, WORDS) for _ in range(args.new)] for number in chats}
        lines = {name: players[name].line(last) for name in draw.sample(sorted(players), len(players))}
        alike = {name: sum(p.said[n] == players["none"].said[n] for n in chats) for name, p in players.items()}
    finally:
        for player in players.values():
            player.close()
    if any(players[name].said != players["host"].said for name in ("file", "layered")):
        raise BrokenError("KV from two places gave two answers")
    return {
        "first_token_s": {name: spread(each) for name, each in seconds.items()},
        "to_none": {
            name: spread([a / b for a, b in zip(each, seconds["none"], strict=True)]) for name, each in seconds.items()
        },
        "opening_s": {name: spread(each) for name, each in opening.items()},
        "hit": {name: statistics.mean(each) for name, each in hits.items()},
        "line_s": {name: took for name, (took, _) in lines.items()},
        "fetched_pages": {name: pages for name, (_, pages) in lines.items()},
        "conversations_as_none": alike,
        "cpu_pressure_avg10": pressure,
    }


if __name__ == "__main__":
    main()
