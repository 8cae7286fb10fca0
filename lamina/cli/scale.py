"""``lamina-launch scale URL --memory-workers N``: other numbers of workers for a server that runs."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from typing import Any

from lamina.protocol.declare import flag

SIZES = {
    "memory_workers": "memory workers, which share the KV cache and the attention over it",
    "prefill_workers": "workers of their own for prompts; 0 = the compute workers do them",
    "tensor_parallel_size": "compute workers that share the weights of a replica",
    "pipeline": "batches that take turns; n > 2 rotate over n - 1 replicas",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this sub-command."""
    parser.add_argument("url", help="of the server, such as http://127.0.0.1:8000")
    for name, help in SIZES.items():
        parser.add_argument(flag(name), type=int, metavar="N", help=f"{help} (default: as many as there are)")
    parser.add_argument("--admin-key", default="", help="the key that the server was given; better LAMINA_ADMIN_KEY")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="seconds to wait for its answer (default: 900)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be asked for, and exit")


def run(args: argparse.Namespace) -> int:
    """Exit status: 0 once the server goes on with these numbers, 1 where it does not. Raises ValueError, OSError."""
    asked = {name: value for name in SIZES if (value := getattr(args, name)) is not None}
    if not asked:
        raise ValueError(f"nothing is to change: give {', '.join(map(flag, SIZES))}")
    if not args.url.startswith(("http://", "https://")):
        raise ValueError(f"{args.url!r} is no address of a server: give one such as http://127.0.0.1:8000")
    if args.dry_run:
        print(f"would ask {args.url} for {_listed(asked)}")
        return 0
    key = args.admin_key or os.environ.get("LAMINA_ADMIN_KEY", "")
    if not key:
        raise ValueError("the server's key is needed: set LAMINA_ADMIN_KEY, here and where the server starts")
    status, answer = _ask(args.url.rstrip("/") + "/scale", asked, key, args.timeout_s)
    if status != 200:
        return _refused(status, answer)
    changed = {name: n for name, n in answer["after"].items() if answer["before"][name] != n}
    before = {name: answer["before"][name] for name in changed}
    if not changed:
        print(f"nothing to do: it has {_listed(asked)}")
    else:
        print(f"{_listed(before)} -> {_listed(changed)}; streams paused for {answer['pause_s']:.2f} s")
    return 0


def _refused(status: int, answer: Any) -> int:
    error = answer.get("error") if isinstance(answer, dict) else None
    text = error["message"] if isinstance(error, dict) and "message" in error else f"status {status}"
    if status == 404:
        text = "this server has no /scale: start it with LAMINA_ADMIN_KEY set"
    if status in (400, 401, 404):
        raise ValueError(text)
    print(f"lamina-launch scale: {text}")
    return 1


def _ask(url: str, asked: dict[str, int], key: str, limit_s: float) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(asked).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _json(error.read())
    except urllib.error.URLError as error:
        raise OSError(f"{url} does not answer: {error.reason}") from None


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{flag(name)} {n}" for name, n in sizes.items())
