"""``lamina-launch bench serve``: latency and throughput of a running server, ours or another with OpenAI's API."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.cli.common.flags import check_at_least
from lamina.facts.report import count_text
from lamina.tools.request_traces import TRACE_HELP, RequestTrace, read_trace, spread_arrivals
from lamina.utils.install_command import install_command

from .workload import (
    DATASETS,
    LoadRequest,
    at_rate,
    file_requests,
    random_requests,
    tokens_of,
    trace_requests,
)

if TYPE_CHECKING:
    import aiohttp

    from .openai_client import Answer, TimedRequest

POOL_TEXT = "The five boxing wizards jump quickly: 0123456789 def main(argv): return [x + 1 for x in range(len(argv))]"
ENDPOINTS = ("/v1/completions", "/v1/chat/completions")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags, with the names of ``vllm bench serve`` where it has the same flag."""
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", default="", help="such as http://host:8000; empty = --host and --port")
    server.add_argument("--host", default="127.0.0.1", help="of the server (default: 127.0.0.1)")
    server.add_argument("--port", type=int, default=8000, help="of the server (default: 8000)")
    server.add_argument("--endpoint", choices=ENDPOINTS, default=ENDPOINTS[0],
                        help=f"where requests go (default: {ENDPOINTS[0]})")  # fmt: skip
    server.add_argument("--model", default="", help="as the server calls it; empty = its first model")
    server.add_argument(
        "--api-key", default="", help="the server's API key; default: LAMINA_API_KEY, which other users cannot see"
    )
    server.add_argument("--timeout-s", type=float, default=300.0, help="silence that fails a request (default: 300)")
    load = parser.add_argument_group("load")
    load.add_argument("--dataset-name", choices=DATASETS, default="random",
                      help="what prompts are made of, without a trace (default: random)")  # fmt: skip
    load.add_argument("--dataset-path", default="", help="file of the prompts, for sharegpt and custom")
    load.add_argument("--num-prompts", type=int, default=0, help="requests (default: 100, or all of a trace)")
    load.add_argument("--random-input-len", type=int, default=128, help="tokens of a random prompt (default: 128)")
    load.add_argument("--random-output-len", type=int, default=64, help="tokens of each answer (default: 64)")
    load.add_argument("--random-range-ratio", type=float, default=0.0, help="+- share of both lengths (default: 0)")
    load.add_argument("--output-len", type=int, default=0, help="tokens of each answer, for sharegpt and custom")
    load.add_argument("--request-rate", type=float, default=float("inf"), help="requests/s, Poisson (default: inf)")
    load.add_argument("--max-concurrency", type=int, default=0, help="requests under way at most; 0 = any number")
    load.add_argument("--trace", default="", metavar="FILE", nargs="+", action=_OneFile, help=f"replay {TRACE_HELP}")
    load.add_argument("--speed-up", type=float, default=1.0, help="replay the trace so many times as fast (default: 1)")
    load.add_argument("--spread-ticks", action=argparse.BooleanOptionalAction, default=True,
                      help="spread arrivals that a trace rounds to ticks (default: yes)")  # fmt: skip
    load.add_argument(
        "--max-model-len", type=int, default=0, help="drop longer rows of a trace; 0 = the server's limit"
    )
    load.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
                      help="answers have exactly the length asked for (default: yes)")  # fmt: skip
    load.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default: 0)")
    load.add_argument("--seed", type=int, default=0, help="of lengths, tokens and arrivals (default: 0)")
    load.add_argument("--num-warmups", type=int, default=1, help="requests before, which do not count (default: 1)")
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    out.add_argument("--save-result", action="store_true", help="write the JSON to a file too")
    out.add_argument("--save-detailed", action="store_true", help="with the values of every request")
    out.add_argument("--result-dir", default=".", help="folder of that file (default: the current one)")
    out.add_argument("--result-filename", default="", help="default: lamina-bench-<time>.json")
    parser.add_argument("--dry-run", action="store_true", help="print what would be sent, and exit")


class _OneFile(argparse.Action):
    """Takes one file, and explains itself to those who name its kind too."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        *more, path = values
        if more:
            text = f"--trace {' '.join(values)}: the kind is read from the file itself: give --trace {path}"
            raise argparse.ArgumentError(None, text)
        setattr(namespace, self.dest, path)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark. Returns exit status 0, or 1 if a request failed. Raises ValueError, OSError, ImportError."""
    check_at_least(args, 0, "num_prompts", "max_concurrency", "num_warmups", "output_len")
    check_at_least(args, 1, "random_input_len", "random_output_len")
    url = args.base_url.rstrip("/").removesuffix("/v1") or f"http://{args.host}:{args.port}"
    trace = _trace(args)
    if args.dry_run:
        asks, dropped = _asks(args, trace, args.max_model_len or sys.maxsize)
        tokens = sum(a.output_len for a in asks)
        count, last_s = count_text(len(asks), "request"), asks[-1].arrival_s
        print(f"would send {count} to {url}{args.endpoint}, the last {last_s:.1f} s after the")
        of_trace = f"; {count_text(dropped, 'request')} of the trace dropped" if trace is not None else ""
        print(f"first, for {tokens} output tokens{of_trace}")
        return 0
    try:
        import aiohttp
        import uvloop
    except ImportError as e:
        raise ImportError(f"bench serve needs {e.name}: {install_command(str(e.name))}") from e
    try:
        result = uvloop.run(_measure(args, url, trace))
    except aiohttp.ClientConnectorError as e:
        raise OSError(_unreachable(e)) from e
    except (aiohttp.ClientError, TimeoutError) as e:
        text = f"{url} does not answer: {type(e).__name__}: {e}"
        if isinstance(e, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError) and url.startswith("http:"):
            text += f": is it HTTPS? --base-url {url.replace('http', 'https', 1)}"
        raise OSError(text) from e
    _show(args, result)
    return 1 if result["failed"] else 0


def _unreachable(error: aiohttp.ClientConnectorError) -> str:
    number = error.os_error.errno or 0
    cause = os.strerror(number) if number > 0 else error.os_error.strerror or str(error.os_error)
    where = "--base-url, or --host and --port, say where it is"
    return f"nothing answers at {error.host}:{error.port}: {cause}: is the server up? {where}"


def _trace(args: argparse.Namespace) -> RequestTrace | None:
    if not args.trace:
        return None
    trace = read_trace(args.trace).first(args.num_prompts or None)
    return spread_arrivals(trace, args.seed) if args.spread_ticks else trace


def _asks(args: argparse.Namespace, trace: RequestTrace | None, limit: int) -> tuple[list[LoadRequest], int]:
    if trace is not None:
        kept = trace.within(limit)
        if not kept.requests:
            raise ValueError(f"--trace: all {kept.dropped} requests are longer than {limit} tokens")
        return trace_requests(kept, args.speed_up), kept.dropped
    count, seed = args.num_prompts or 100, args.seed
    if args.dataset_name == "random":
        lengths = (args.random_input_len, args.random_output_len)
        asks = random_requests(count, *lengths, range_ratio=args.random_range_ratio, seed=seed)
    else:
        asks = file_requests(args.dataset_name, args.dataset_path, count, args.output_len, seed=seed)
    return at_rate(asks, args.request_rate, seed), 0


async def _measure(args: argparse.Namespace, url: str, trace: RequestTrace | None) -> dict[str, Any]:
    from .bench_report import summary
    from .openai_client import open_client, send_all

    key = args.api_key or os.environ.get("LAMINA_API_KEY", "")
    async with open_client(url, key, args.timeout_s) as http:
        model, limit = await _model(http, args.model)
        asks, dropped = _asks(args, trace, args.max_model_len or limit or sys.maxsize)
        requests = await _requests(args, http, model, asks)
        warm = await send_all(http, args.endpoint, [requests[0]] * args.num_warmups, 1)
        if bad := [a for a in warm if not a.ok]:
            raise OSError(f"the first request failed with status {bad[0].status}: {bad[0].error}")
        with _progress(len(requests), quiet=args.json) as on_answer:
            answers = await send_all(http, args.endpoint, requests, args.max_concurrency, on_answer)
    settings = {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "endpoint": args.endpoint,
        "model_id": model,
        "num_prompts": len(requests),
        "request_rate": "inf" if args.request_rate == float("inf") else args.request_rate,
        "max_concurrency": args.max_concurrency or None,
        "seed": args.seed,
    }
    traced = {"trace": args.trace, "speed_up": args.speed_up, "dropped": dropped} if trace is not None else {}
    return {**settings, **traced, **summary(answers, details=args.save_detailed)}


async def _model(http: aiohttp.ClientSession, wanted: str) -> tuple[str, int]:
    """Return the name to use and the longest sequence, 0 = the server does not report it."""
    async with http.get("v1/models") as response:
        if response.status == 401:
            wrong = "does not take this API key" if "authorization" in http.headers else "wants an API key"
            raise OSError(f"the server {wrong}: set LAMINA_API_KEY, or --api-key")
        if response.status != 200:
            raise OSError(f"GET /v1/models answered {response.status}: {(await response.text())[:200]}")
        cards = {card["id"]: card for card in (await response.json(content_type=None))["data"]}
    name = wanted or next(iter(cards), "")
    if name not in cards:
        raise ValueError(f"--model {wanted!r}: the server has {', '.join(cards) or 'none'}")
    return name, int(cards[name].get("max_model_len") or 0)


async def _requests(
    args: argparse.Namespace, http: aiohttp.ClientSession, model: str, asks: list[LoadRequest]
) -> list[TimedRequest]:
    from .openai_client import TimedRequest, body_of

    more = {"temperature": args.temperature} | ({"ignore_eos": True} if args.ignore_eos else {})
    pool = await _tokenize(http, model, POOL_TEXT) if any(a.text is None for a in asks) else []
    requests = []
    for number, ask in enumerate(asks):
        prompt: str | list[int] = ask.text if ask.text is not None else tokens_of(ask, number, pool, args.seed)
        if args.endpoint == ENDPOINTS[1] and not isinstance(prompt, str):
            prompt = str((await _post(http, "/detokenize", {"model": model, "tokens": prompt}))["prompt"])
        output_len = ask.output_len or len(await _tokenize(http, model, ask.answer)) or 1
        requests.append(TimedRequest(ask.arrival_s, body_of(args.endpoint, model, prompt, output_len, **more)))
    return requests


async def _tokenize(http: aiohttp.ClientSession, model: str, text: str) -> list[int]:
    """Return the tokens of a text. Raises OSError if the server cannot tokenize."""
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    return list((await _post(http, "/tokenize", body))["tokens"])


async def _post(http: aiohttp.ClientSession, route: str, body: dict[str, Any]) -> dict[str, Any]:
    async with http.post(route.lstrip("/"), json=body) as response:
        if response.status != 200:
            reply = (await response.text())[:200]
            raise OSError(f"POST {route} answered {response.status}: {reply}; use --dataset-name custom")
        answer: dict[str, Any] = await response.json(content_type=None)
    return answer


@contextlib.contextmanager
def _progress(total: int, *, quiet: bool) -> Any:
    from tqdm import tqdm

    with tqdm(total=total, unit="request", disable=quiet or not sys.stderr.isatty()) as bar:

        def on_answer(answer: Answer) -> None:
            bar.update()

        yield on_answer


def _show(args: argparse.Namespace, result: dict[str, Any]) -> None:
    from .bench_report import table

    print(json.dumps(result) if args.json else table(result))
    if args.save_result:
        name = args.result_filename or f"lamina-bench-{result['date']}.json"
        path = Path(args.result_dir) / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result) + "\n")
        except OSError as error:
            raise OSError(f"--save-result: {path} cannot be written: {error.strerror}") from error
        print(f"written to {path}", file=sys.stderr)
