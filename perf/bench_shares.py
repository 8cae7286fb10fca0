"""The time to the first token of one API key while another one attacks the server, as a multiple of an idle one's.

The attacker has 128 streams that it never reads, and three clients that repeat bodies of 8 MB, which are refused. It is
a process of its own and goes last for a core, as it would have its own elsewhere. Idle and attacked turns alternate.
Prints one JSON line; exit status 1 if the multiple exceeds --limit. --write appends it to
perf/results/bench_shares.jsonl.

    python perf/bench_shares.py --write
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common import cpu_pressure, parser_of, record

from lamina.tools.bench.bench_report import percentile
from lamina.tools.bench.openai_client import COMPLETIONS, body_of, open_client, send_request

ROOT = Path(__file__).resolve().parents[1]
MODEL = "examples/tiny_lm/model"
VICTIM, ATTACKER = "victim-key", "attacker-key"
BODY = 8 << 20
PATIENCE_S = 120.0
WORDS = ("import", "os", "def", "return", "class", "self", "value", "for", "while", "if", "else", "print", "range")


def text_of(rng: random.Random, chars: int) -> str:
    """A prompt that no request has had before."""
    words = list[str]()
    while chars > 0:
        words.append(rng.choice(WORDS))
        chars -= len(words[-1]) + 1
    return " ".join(words)


def refused_bodies(most_chars: int) -> Iterator[bytes]:
    """Bodies of 8 MB that a server reads whole and refuses, of each kind in turn. ``most_chars``: of a text that is
    tokenized before it is refused.
    """
    rng = random.Random(0)
    long_text = text_of(rng, most_chars)[:most_chars]

    def padded(fields: dict[str, Any]) -> bytes:
        data = json.dumps(fields).encode()
        return data + b" " * (BODY - len(data))

    kinds = [
        padded({"prompt": "a" * (BODY - 64)}),
        padded({"prompt": [5] * ((BODY - 64) // 3)}),
        padded({"prompt": long_text}),
        padded({"prompt": "\u00e9" * ((BODY - 64) // 6)}),
        b'{"prompt": "' + b"a" * (BODY - 12),
    ]
    while True:
        yield from kinds


def head(size: int) -> bytes:
    return (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {ATTACKER}\r\nContent-Length: {size}\r\n\r\n"
    ).encode()


async def _never_reads(place: tuple[str, int]) -> None:
    """Ask for a long stream and read none of it; again when the server ends the connection."""
    loop, rng = asyncio.get_running_loop(), random.Random()
    while True:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            with suppress(OSError):
                await loop.sock_connect(sock, place)
                body = {"prompt": text_of(rng, 200), "max_tokens": 1900, "ignore_eos": True, "stream": True}
                data = json.dumps(body).encode()
                await loop.sock_sendall(sock, head(len(data)) + data)
                ended = asyncio.Event()
                await asyncio.sleep(0.5)
                while not ended.is_set():  # TCP_INFO's first byte is the state; 1 = established
                    if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != 1:
                        ended.set()
                    await asyncio.sleep(0.5)


async def _repeats(place: tuple[str, int], bodies: Iterator[bytes], statuses: dict[str, int]) -> None:
    """Send one refused body after another."""
    while True:
        body = next(bodies)
        try:
            reader, writer = await asyncio.open_connection(*place)
            writer.write(head(len(body)))
            for at in range(0, len(body), 1 << 16):
                writer.write(body[at : at + (1 << 16)])
                await writer.drain()
            status = (await reader.readline()).decode().partition(" ")[2].strip()
            writer.close()
        except OSError:
            status = "closed"
        statuses[status] = statuses.get(status, 0) + 1


async def _attack(url: str, streams: int, repeaters: int, most_chars: int) -> None:
    """Attack until a line comes on standard input; then print how often each reply came."""
    parts = urlsplit(url)
    place, statuses = (parts.hostname or "", parts.port or 0), dict[str, int]()
    tasks = [asyncio.create_task(_never_reads(place)) for _ in range(streams)]
    tasks += [asyncio.create_task(_repeats(place, refused_bodies(most_chars), statuses)) for _ in range(repeaters)]
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    print(json.dumps(statuses))


@contextmanager
def attacking(url: str, args: argparse.Namespace) -> Iterator[dict[str, int]]:
    """The attacker's process; the dict has its replies at the end."""
    command = ["nice", "-n", "19", sys.executable, __file__, "--attack", url, "--streams", str(args.streams)]
    command += ["--repeaters", str(args.repeaters), "--most-chars", str(args.most_chars)]
    statuses: dict[str, int] = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as attacker:
        assert attacker.stdout is not None
        attacker.stdout.readline()
        try:
            yield statuses
        finally:
            out, _ = attacker.communicate("\n", timeout=60)
    statuses |= json.loads(out)


async def _times(url: str, args: argparse.Namespace, rng: random.Random) -> list[float]:
    """Times to first token of requests that come at their times, whatever becomes of earlier ones; a refused one is
    infinite.
    """
    tasks = []
    async with open_client(url, VICTIM, PATIENCE_S) as http:
        start = time.perf_counter()
        for number in range(int(args.turn_s * args.rate)):
            await asyncio.sleep(max(0.0, start + number / args.rate - time.perf_counter()))
            body = body_of(COMPLETIONS, MODEL, text_of(rng, args.chars), args.output_len, temperature=0.0)
            tasks.append(asyncio.create_task(send_request(http, COMPLETIONS, body)))
        answers = await asyncio.gather(*tasks)
    return [answer.ttft_s if answer.ok else float("inf") for answer in answers]


class Server:
    """A server process with two keys."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "lamina.cli.launch", "serve", MODEL, "--port", "0", *flags]
        env = {**os.environ, "LAMINA_API_KEY": f"{VICTIM},{ATTACKER}"}
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=env)
        line = self._process.stdout.readline() if self._process.stdout else ""
        if " on " not in line:
            raise ValueError("the server did not start")
        self.url = line.rsplit(" on ", 1)[1].strip()

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(60)


def measure(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Idle and attacked turns, one after another."""
    rng, idle, attacked, replies = random.Random(1), list[float](), list[float](), list[dict[str, int]]()
    asyncio.run(_times(server.url, args, rng))  # warm
    for _ in range(args.rounds):
        idle += asyncio.run(_times(server.url, args, rng))
        with attacking(server.url, args) as statuses:
            time.sleep(args.settle_s)
            attacked += asyncio.run(_times(server.url, args, rng))
        replies.append(statuses)
        time.sleep(args.settle_s)
    at_rest, under = percentile(idle, 95), percentile(attacked, 95)
    return {
        "idle_ms": {"p50": statistics.median(idle) * 1e3, "p95": at_rest * 1e3},
        "attacked_ms": {"p50": statistics.median(attacked) * 1e3, "p95": under * 1e3},
        "multiple_of_p95": under / at_rest,
        "refused": sum(t == float("inf") for t in attacked),
        "replies_to_the_attacker": replies,
        "cpu_pressure_avg10": cpu_pressure(),
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="idle and attacked turns")
    parser.add_argument("--turn-s", type=float, default=40.0, help="above the 30 s after which a stream is cut off")
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second of the other key")
    parser.add_argument("--chars", type=int, default=800, help="of a prompt")
    parser.add_argument("--output-len", type=int, default=8)
    parser.add_argument("--streams", type=int, default=128, help="that are never read")
    parser.add_argument("--repeaters", type=int, default=3, help="clients that repeat bodies of 8 MB")
    parser.add_argument("--most-chars", type=int, default=70_000, help="of a text that is tokenized, then refused")
    parser.add_argument("--settle-s", type=float, default=1.0)
    parser.add_argument("--limit", type=float, default=3.0, help="the largest multiple of the idle server's p95")
    parser.add_argument("--attack", default="", help=argparse.SUPPRESS)
    args, flags = parser.parse_known_args()
    if args.attack:
        asyncio.run(_attack(args.attack, args.streams, args.repeaters, args.most_chars))
        return 0
    server = Server("--no-enable-log-requests", *flags)
    try:
        figures = measure(server, args)
    finally:
        server.end()
    settings = {name: value for name, value in vars(args).items() if name != "attack"} | {"flags": flags}
    print(record("bench_shares", settings, figures, write=args.write))
    return 0 if figures["multiple_of_p95"] <= args.limit else 1


if __name__ == "__main__":
    sys.exit(main())
