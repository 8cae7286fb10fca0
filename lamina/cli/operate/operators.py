"""What an operator asks of a server that runs: the flags for it, the question, and what a refusal means."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from lamina.engine.wire import WorkerError

WRONG = (400, 401, 404, 409)  # by the asker's fault


def add_server(parser: argparse.ArgumentParser) -> None:
    """The server, and the key to it."""
    parser.add_argument("url", help="of the server, such as http://127.0.0.1:8000")
    parser.add_argument("--admin-key", default="", help="the key that the server was given; better LAMINA_ADMIN_KEY")


def check_url(url: str) -> None:
    """Raises ValueError for what is no address of a server."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is no address of a server: give one such as http://127.0.0.1:8000")


def ask(args: argparse.Namespace, path: str, body: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """What the server answers, within so many seconds. Raises ValueError where the asker can put it right, OSError
    where nobody answers, WorkerError where the server cannot.
    """
    key = args.admin_key or os.environ.get("LAMINA_ADMIN_KEY", "")
    if not key:
        raise ValueError("the server's key is needed: set LAMINA_ADMIN_KEY, here and where the server starts")
    return call(args.url, path, key, limit_s, body=body, missing="start it with LAMINA_ADMIN_KEY set")


def call(
    server: str,
    path: str,
    key: str,
    limit_s: float,
    *,
    method: str | None = None,
    body: Mapping[str, Any] | None = None,
    missing: str = "",
) -> dict[str, Any]:
    """As ``ask``, with ``key`` where it is not empty. ``method``: None = POST with a body, else GET; ``missing``: how
    the server comes to have ``path``.
    """
    url, headers = server.rstrip("/") + path, {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, _words(error.read())
    except TimeoutError:
        raise OSError(f"{url} has not answered for {limit_s:g} s") from None
    except urllib.error.URLError as error:
        raise OSError(f"{url} does not answer: {error.reason}") from None
    if status == 404 and missing:
        raise ValueError(f"this server has no {path}: {missing}")
    raise (ValueError if status in WRONG else WorkerError)(text or f"status {status}")


def _words(text: bytes) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
