"""Load that a server must hold: overload is refused and not suffered, and clients that leave take all their state with
them.

Starts a server with the shipped model and tries it in phases. They are a closed loop that finds its peak, arrivals at a
multiple of that peak, and both in turns. The last is a mixture with clients that disconnect and requests that are
wrong. Prints one JSON line; exit status 1 where a limit was missed. --write appends it to
perf/results/bench_serve_load.jsonl.

    python perf/bench_serve_load.py --minutes 10 --requests 10000 --write
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from common import cpu_pressure, parser_of, record

from lamina.tools.bench.bench_report import percentile
from lamina.tools.bench.openai_client import COMPLETIONS, Answer, body_of, events, open_client, send_request
from lamina.utils.proc import descendants_of

ROOT = Path(__file__).resolve().parents[1]
ROUTE = COMPLETIONS.lstrip("/")
TURN_S = 12.0
PATIENCE_S = 120.0  # of silence in a request, and for everything to end
WRONG: tuple[dict[str, Any], ...] = (
    {"prompt": []}, {"prompt": [-1]}, {"prompt": "x", "max_tokens": -1}, {"prompt": "x", "n": 10**6},
    {"prompt": "x", "temperature": -1}, {"prompt": "x", "model": "unknown"}, {"prompt": [5] * 10**4}, {},
)  # fmt: skip


class ServerLoad:
    """Requests to one server: random prompts of one length, answers of one length."""

    def __init__(self, url: str, model: str, *, input_len: int, output_len: int, vocab: int, seed: int = 0) -> None:
        self.url = url
        self._model = model
        self._lengths = (input_len, output_len)
        self._vocab = vocab
        self._rng = random.Random(seed)

    def body(self) -> dict[str, Any]:
        """A request that was never sent before."""
        input_len, output_len = self._lengths
        prompt = [self._rng.randrange(2, self._vocab) for _ in range(input_len)]
        return body_of(COMPLETIONS, self._model, prompt, output_len, ignore_eos=True, temperature=0.0)

    async def peak(self, streams: int, seconds: float) -> dict[str, float]:
        """Tokens and requests per second of ``streams`` clients that send one request after the other."""
        answers: list[Answer] = []

        async def client(http: aiohttp.ClientSession) -> None:
            while time.perf_counter() < end:
                answers.append(await send_request(http, COMPLETIONS, self.body()))

        async with open_client(self.url, "", PATIENCE_S) as http:
            start = time.perf_counter()
            end = start + seconds
            await asyncio.gather(*(client(http) for _ in range(streams)))
        goodput = _goodput(answers, start + seconds * 0.2, end)
        return {"tokens_per_s": goodput, "requests_per_s": goodput / self._lengths[1], "failed": _failed(answers)}

    async def overload(self, requests_per_s: float, streams: int, seconds: float) -> dict[str, Any]:
        """Poisson arrivals, whatever becomes of them; one that finds ``streams`` under way is not sent. What is under
        way at the end finishes.
        """
        under_way: set[asyncio.Task[Answer]] = set()
        sent, unsent, arrival = [], 0, 0.0
        async with open_client(self.url, "", PATIENCE_S) as http:
            start = time.perf_counter()
            while arrival < seconds:
                if (delay := start + arrival - time.perf_counter()) > 0:
                    await asyncio.sleep(delay)  # a late one does not wait for its turn among hundreds of streams
                arrival += self._rng.expovariate(requests_per_s)
                if len(under_way) >= streams:
                    unsent += 1
                    continue
                task = asyncio.create_task(send_request(http, COMPLETIONS, self.body()))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
                sent.append(task)
            end = time.perf_counter()
            answers = await asyncio.gather(*sent)
        refusals = [a.end_s - a.start_s for a in answers if a.refused]
        served = [a.ttft_s for a in answers if a.ok]
        return {
            "tokens_per_s": _goodput(answers, start + seconds * 0.2, end),
            "offered": len(answers) + unsent,
            "not_sent": unsent,
            "served": len(served),
            "refused": len(refusals),
            "failed": _failed(answers),
            "errors": sorted({f"{a.status} {a.error[:120]}" for a in answers if not a.ok and not a.refused})[:5],
            "seconds": end - start,
            "refusal_p50_ms": percentile(refusals, 50) * 1e3,
            "refusal_p99_ms": percentile(refusals, 99) * 1e3,
            "ttft_p50_ms": percentile(served, 50) * 1e3,
        }

    async def mixture(self, count: int, streams: int, leaving: float = 0.3, wrong: float = 0.1) -> dict[str, float]:
        """``count`` requests of which a share leaves at a random token and a share is wrong; then all ends."""
        kinds = {"served": 0, "left": 0, "wrong": 0, "refused": 0, "failed": 0}
        left = iter(range(count))

        async def client(http: aiohttp.ClientSession) -> None:
            for _ in left:
                draw = self._rng.random()
                kinds[await self._one(http, draw < wrong, wrong <= draw < wrong + leaving)] += 1

        async with open_client(self.url, "", PATIENCE_S) as http:
            await asyncio.gather(*(client(http) for _ in range(streams)))
            return {**kinds, **await _drained(http)}

    async def _one(self, http: aiohttp.ClientSession, wrong: bool, leaving: bool) -> str:
        if wrong:
            async with http.post(ROUTE, json={**self._rng.choice(WRONG)}) as response:
                status = response.status
            return "wrong" if 400 <= status < 429 else "refused" if status == 429 else "failed"
        if not leaving:
            answer = await send_request(http, COMPLETIONS, self.body())
            return "served" if answer.ok else "refused" if answer.refused else "failed"
        chunks = self._rng.randrange(self._lengths[1])
        async with http.post(ROUTE, json=self.body()) as response:
            if response.status != 200:
                return "refused" if response.status == 429 else "failed"
            async for _ in events(response):
                chunks -= 1
                if chunks < 0:
                    break
        return "left"


def _goodput(answers: list[Answer], start: float, end: float) -> float:
    """Tokens per second, between two times, of requests that were served to their end."""
    tokens = 0.0
    for answer in (a for a in answers if a.ok):
        at, times = answer.first_s, []
        for gap in [0.0, *answer.gaps_s]:
            at += gap
            times.append(at)
        tokens += sum(start <= t < end for t in times) * answer.output_tokens / len(times)
    return tokens / (end - start)


def _failed(answers: list[Answer]) -> int:
    return sum(not a.ok and not a.refused for a in answers)


async def _drained(http: aiohttp.ClientSession) -> dict[str, float]:
    """Seconds until nothing runs, and the KV blocks that are in use then."""
    start = time.perf_counter()
    while time.perf_counter() - start < PATIENCE_S:
        async with http.get("load") as response:
            load = await response.json()
        if load["server_load"] == load["running"] == load["waiting"] == load["kv_usage"] == 0:
            break
        await asyncio.sleep(0.1)
    async with http.get("metrics") as response:
        text = await response.text()
    used = re.findall(r'^lamina:kv_blocks\{.*state="used".*\} (\S+)$', text, re.MULTILINE)
    if not used:
        raise ValueError("the server exports no lamina:kv_blocks")
    return {"drain_s": time.perf_counter() - start, "kv_blocks_left": sum(map(float, used))}


@contextlib.contextmanager
def probing(url: str) -> Iterator[dict[str, float]]:
    """Asks for /health from a process of its own; the dict is filled at the end."""
    health: dict[str, float] = {}
    command = [sys.executable, str(ROOT / "perf" / "health_probe.py"), url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as probe:
        try:
            yield health
        finally:
            out, _ = probe.communicate("\n", timeout=60)
    answers = json.loads(out)
    times = [seconds for _, seconds in answers]
    health |= {"count": len(times), "p50_ms": percentile(times, 50) * 1e3, "p99_ms": percentile(times, 99) * 1e3}
    health["not_200"] = sum(status != 200 for status, _ in answers)


class Server:
    """A server process with the shipped model, and what its processes hold in memory."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "lamina.cli.launch", "serve", "examples/tiny_lm/model", "--port", "0"]
        self._process = subprocess.Popen([*command, *flags], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        line = self._process.stdout.readline() if self._process.stdout else ""
        if " on " not in line:
            raise ValueError("the server did not start")
        self.url = line.rsplit(" on ", 1)[1].strip()

    def rss_bytes(self) -> int:
        """Resident memory of the server and everything that it has started."""
        pids = [self._process.pid, *descendants_of(self._process.pid)]
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * 4096

    def end(self) -> int:
        """Exit status after an orderly end."""
        self._process.terminate()
        return self._process.wait(60)


async def _rss_after(server: Server, seconds: float) -> int:
    await asyncio.sleep(seconds)
    return server.rss_bytes()


async def in_turns(load: ServerLoad, args: argparse.Namespace, requests_per_s: float) -> dict[str, Any]:
    """Returns the served part of too many requests, as a share of the peak at about the same time. A machine that
    others use too is not equally fast from one minute to the next.
    """
    peaks, loads, failed = list[float](), list[float](), 0.0
    for _ in range(args.rounds):
        peak = await load.peak(args.running, TURN_S)
        overload = await load.overload(args.factor * requests_per_s, args.streams * 5 // 4, TURN_S)
        peaks.append(peak["tokens_per_s"])
        loads.append(overload["tokens_per_s"])
        failed += peak["failed"] + overload["failed"]
    share = statistics.median(x / y for x, y in zip(loads, peaks, strict=True))
    return {"share": share, "peak_tokens_per_s": peaks, "overload_tokens_per_s": loads, "failed": failed}


async def measure(server: Server, load: ServerLoad, args: argparse.Namespace) -> dict[str, Any]:
    """All phases; what is held to a limit is in "limits"."""
    await load.peak(args.streams // 8, 5.0)  # warm
    peak_s, seconds = max(20.0, args.minutes * 6), args.minutes * 60
    before = await load.peak(args.running, peak_s)
    with probing(server.url) as health:
        early = asyncio.create_task(_rss_after(server, seconds * 0.2))
        overload = await load.overload(args.factor * before["requests_per_s"], args.streams * 5 // 4, seconds)
    growth = server.rss_bytes() / await early - 1
    turns = await in_turns(load, args, before["requests_per_s"])
    mixture = await load.mixture(args.requests, args.running)
    limits = {
        "goodput_share": (turns["share"], ">=", 0.9),
        "health_p99_ms": (health["p99_ms"], "<=", 200.0),
        "rss_growth": (growth, "<=", 0.1),
        "kv_blocks_left": (mixture["kv_blocks_left"], "<=", 0.0),
        "failed": (sum(p["failed"] for p in (before, overload, turns, mixture)) + health["not_200"], "<=", 0.0),
    }
    held = {k: value >= limit if sign == ">=" else value <= limit for k, (value, sign, limit) in limits.items()}
    return {
        "limits": {k: {"value": v[0], "limit": f"{v[1]} {v[2]:g}", "held": held[k]} for k, v in limits.items()},
        "peak": before, "turns": turns, "overload": overload, "health": health, "mixture": mixture,
        "exit_status": server.end(), "cpu_pressure_avg10": cpu_pressure(),
    }  # fmt: skip


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of overload")
    parser.add_argument("--rounds", type=int, default=12, help="of both in turns, half a minute each")
    parser.add_argument("--requests", type=int, default=10_000, help="of the mixture")
    parser.add_argument("--streams", type=int, default=256, help="held under overload; those above are refused")
    parser.add_argument("--running", type=int, default=32, help="of them decode at once; the others wait")
    parser.add_argument("--factor", type=float, default=4.0, help="arrivals, as a multiple of the peak")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    server = Server(
        "--dtype", args.dtype, "--max-num-seqs", str(args.running), "--max-num-queued-reqs",
        str(args.streams - args.running), "--no-enable-log-requests",
    )  # fmt: skip
    try:
        load = ServerLoad(server.url, "examples/tiny_lm/model", input_len=args.input_len, output_len=args.output_len,
                    vocab=2000)  # fmt: skip
        figures = uvloop.run(measure(server, load, args))
    finally:
        server.end()
    print(record("bench_serve_load", vars(args), figures, write=args.write))
    return 0 if all(limit["held"] for limit in figures["limits"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
