"""Lamina's server and vLLM's under the same load, in turns: requests/s, TTFT and TPOT by the number of clients.

Both serve the reference model of bench_decode.py, with a tokenizer that is made on the spot. Clients are a closed loop
of ``lamina-launch bench serve``, with the same requests for each server; ``--drivers lamina,vllm`` adds turns of ``vllm
bench serve``. The idle server computes nothing. vLLM is an environment of its own (peers/install.sh); without it Lamina
is alone. --also adds Lamina's server with other flags. Prints a table and one JSON line; --write appends that to
perf/results/bench_serve_peers.jsonl. Exit status 1 where a request failed.

    python perf/bench_serve_peers.py --peers build/peers --clients 4,16,64 --rounds 3 --write
    python perf/bench_serve_peers.py --also "chunk 128=--prefill-chunk 128" --clients 16
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from common import cpu_pressure, parser_of, record
from reference_model import SHAPE, make

HERE = Path(__file__).resolve().parents[1]
LAUNCH = [sys.executable, "-m", "lamina.cli.launch"]
VLLM_BENCH_SERVE = """
from argparse import ArgumentParser
from vllm.benchmarks.serve import add_cli_args, main
parser = ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
START_S = 600.0  # vLLM compiles
POLL_S = 0.5
TIMES = [f"{share}_{name}_ms" for name in ("ttft", "tpot") for share in ("median", "p95", "p99")]
FIGURES = ["request_throughput", *TIMES]


def add_tokenizer(folder: Path, size: int = SHAPE["vocab_size"]) -> None:
    """Write a tokenizer with a token for each number of the model: 256 bytes, and words that no text gives."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"w{i}" for i in range(size - len(alphabet))]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, *words])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def serving(command: list[str], port: int, log: Path, **environment: str) -> Iterator[str]:
    """Run a server while the block runs. Yields its URL once it is healthy; SystemExit says why it does not start."""
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=HERE, env={**os.environ, **environment}, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{shlex.join(command)} has not started:\n{log.read_text()[-2000:]}")
            time.sleep(POLL_S)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=POLL_S) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def servers(args: argparse.Namespace, model: Path, stack: ExitStack) -> dict[str, str]:
    """Start all. Returns their URLs by name."""
    urls, longest = {}, str(args.max_model_len)
    named = {"lamina": args.lamina_flags, **dict(each.split("=", 1) for each in args.also)}
    for name, flags in named.items():
        port = free_port()
        command = [*LAUNCH, "serve", str(model), "--port", str(port), "--no-enable-log-requests"]
        command += ["--max-model-len", longest, "--no-enable-prefix-caching", *shlex.split(flags)]
        urls[name] = stack.enter_context(serving(command, port, model / f"{name}.log"))
    if args.peers:
        port = free_port()
        command = [_python(args), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--port", str(port), "--max-model-len", longest]
        command += ["--dtype", "bfloat16", "--no-enable-prefix-caching"]
        command += ["--max-num-batched-tokens", str(args.vllm_budget)]
        urls["vllm"] = stack.enter_context(
            serving(
                command, port, model / "vllm.log", VLLM_CPU_OMP_THREADS_BIND="nobind",
                VLLM_CPU_KVCACHE_SPACE=str(args.vllm_gib),
            )
        )  # fmt: skip
    return urls


def _python(args: argparse.Namespace) -> str:
    """Return vLLM's Python: its build for CPUs has a command ``vllm`` that looks for the other distribution's name."""
    folder: Path = args.peers
    return str(folder.absolute() / "vllm" / "bin" / "python")


def load(driver: str, url: str, model: Path, args: argparse.Namespace, clients: int, seed: int) -> dict[str, Any]:
    """Return the results of one turn: equal seeds of a driver send equal requests."""
    flags = {
        "--base-url": url, "--model": str(model), "--num-prompts": clients * args.requests_each,
        "--max-concurrency": clients, "--random-input-len": args.input_len, "--random-output-len": args.output_len,
        "--random-range-ratio": args.range_ratio, "--seed": seed, "--result-dir": str(model),
        "--result-filename": "turn.json",
    }  # fmt: skip
    words = [str(word) for pair in flags.items() for word in pair] + ["--save-result"]
    if driver == "lamina":
        command = [*LAUNCH, "bench", "serve", "--num-warmups", "1", "--json", *words]
    else:
        command = [_python(args), "-c", VLLM_BENCH_SERVE, "--backend", "openai", "--dataset-name", "random"]
        command += ["--ignore-eos", "--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,95,99", *words]
    subprocess.run(command, cwd=HERE, stdout=subprocess.DEVNULL, check=True)
    results: dict[str, Any] = json.loads((model / "turn.json").read_text())
    return results


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All servers in turns; which one is first alternates. Returns medians by driver, clients and server."""
    model = make(folder, "bfloat16", max_len=args.max_model_len)
    add_tokenizer(model)
    found: dict[str, Any] = {}
    pressure, lost = [], 0
    with ExitStack() as stack:
        urls = servers(args, model, stack)
        for driver in args.drivers.split(","):
            for clients in map(int, args.clients.split(",")):
                turns: dict[str, list[dict[str, Any]]] = {name: [] for name in urls}
                for turn in range(args.rounds):
                    for name in list(urls)[:: 1 if turn % 2 == 0 else -1]:
                        turns[name].append(load(driver, urls[name], model, args, clients, 1 + turn))
                    pressure.append(cpu_pressure())
                lost += sum(t.get("failed", 0) + t.get("refused", 0) for x in turns.values() for t in x)
                of = {name: {f: median(t[f] for t in x) for f in FIGURES} for name, x in turns.items()}
                found.setdefault(driver, {})[str(clients)] = of
                for name, figures in of.items():
                    print(_row(driver, clients, name, figures), flush=True)
    return {"turns": found, "not_served": lost, "cpu_pressure_avg10": pressure}


def _row(driver: str, clients: int, name: str, figures: dict[str, float]) -> str:
    cells = " ".join(f"{figures[f]:9.0f}" for f in TIMES)
    return f"{driver:<7} {clients:4} {name:<14} {figures['request_throughput']:7.3f} {cells}"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--peers", type=Path, help="the folder of peers/install.sh; unset = Lamina alone")
    parser.add_argument("--also", action="append", default=[], metavar="NAME=FLAGS", help="another server of Lamina's")
    parser.add_argument("--lamina-flags", default="", help="of serve")
    parser.add_argument("--vllm-budget", type=int, default=4096, help="vLLM's --max-num-batched-tokens")
    parser.add_argument("--vllm-gib", type=int, default=2, help="of vLLM's KV cache")
    parser.add_argument("--drivers", default="lamina", help="lamina, vllm or both: whose bench serve")
    parser.add_argument("--clients", default="4,16,64", help="requests under way, each in turns of its own")
    parser.add_argument("--requests-each", type=int, default=4, help="requests of a turn, by client")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input-len", type=int, default=340)
    parser.add_argument("--output-len", type=int, default=75)
    parser.add_argument("--range-ratio", type=float, default=0.3, help="+- share of both lengths")
    parser.add_argument("--max-model-len", type=int, default=4096)
    args = parser.parse_args()
    titles = " ".join(f"{f.removesuffix('_ms'):>9}"[-9:] for f in TIMES)
    print(f"driver  clients server       req/s {titles}   (ms)")
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(args, Path(folder) / "model")
    settings = {k: v for k, v in vars(args).items() if k not in ("peers", "write")} | {"vllm": bool(args.peers)}
    print(record("bench_serve_peers", settings, figures, write=args.write))
    return 1 if figures["not_served"] else 0


if __name__ == "__main__":
    sys.exit(main())
