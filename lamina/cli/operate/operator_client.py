"""Requests of an operator to a running server: the flags for it, the question, and what a refusal means."""

from __future__ import annotations

import argparse
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from lamina.protocol.executor import WorkerError

BAD_REQUEST_STATUSES = (400, 401, 404, 409)  # by the asker's fault
MAX_TIMEOUT_S = 1e9  # that a socket can wait


def add_server(parser: argparse.ArgumentParser) -> None:
    """The server, and the key to it."""
    parser.add_argument("url", help="the server's address, such as http://127.0.0.1:8000")
    parser.add_argument(
        "--admin-key",
        default="",
        help="the server's admin key; default: LAMINA_ADMIN_KEY, which other users cannot see",
    )


def check_url(url: str) -> None:
    """Raises ValueError for what is no address of a server."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        known = known and bool(parts.netloc.encode("idna"))
    except ValueError:  # of the port, or of a name
        known = False
    if not known:
        raise ValueError(f"{url!r} is no address of a server: give one such as http://127.0.0.1:8000")


def check_key(key: str, source: str) -> None:
    """Raises ValueError for what no request can bear, without the key."""
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{source} has characters that no request bears: take ASCII letters")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses to follow a server to another address, which would get the key, too."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> Any:
        raise ValueError(f"{req.full_url} redirects to {newurl!r}: give the address of the server itself")


def open_url(request: urllib.request.Request, limit_s: float) -> Any:
    """Does as ``urllib.request.urlopen``, without redirects: these raise ValueError."""
    return urllib.request.build_opener(_NoRedirects).open(request, timeout=limit_s)


def check_timeout(limit_s: float, *, none: bool = False) -> None:
    """``none``: whether 0 is one. Raises ValueError for what is no time to wait."""
    if not 0.0 <= limit_s <= MAX_TIMEOUT_S or not (limit_s or none):
        raise ValueError(f"--timeout-s must be a number of seconds{', or 0' if none else ''}, not {limit_s:g}")


def check_worker(number: int) -> None:
    """Raises ValueError for what is no number of a memory worker."""
    if number < 0:
        raise ValueError(f"--memory-worker {number}: memory workers are counted from 0")


def request(args: argparse.Namespace, path: str, body: Mapping[str, Any], limit_s: float, *has: str) -> dict[str, Any]:
    """Returns the server's answer, which must have the fields ``has``, within ``limit_s`` seconds.

    Raises ValueError for bad input, OSError if the server does not answer, and WorkerError if it fails.
    """
    key = args.admin_key or os.environ.get("LAMINA_ADMIN_KEY", "")
    if not key:
        raise ValueError("the server's key is needed: set LAMINA_ADMIN_KEY, here and where the server starts")
    check_key(key, "LAMINA_ADMIN_KEY, or --admin-key,")
    return send_request(args.url, path, key, limit_s, *has, body=body, missing="start it with LAMINA_ADMIN_KEY set")


def no_answer_text(url: str, reason: object) -> str:
    """Return why a server did not answer. ``reason``: an exception, or words."""
    untrusted = isinstance(reason, ssl.SSLCertVerificationError)
    return f"{url} does not answer: {reason}{': set SSL_CERT_FILE to its certificate' if untrusted else ''}"


def send_request(
    server: str,
    path: str,
    key: str,
    limit_s: float,
    *has: str,
    method: str | None = None,
    body: Mapping[str, Any] | None = None,
    missing: str = "",
    keyless: str = "",
) -> dict[str, Any]:
    """Do as ``request``, with ``key`` if it is not empty. ``method``: None = POST with a body, else GET; ``missing``:
    how the server comes to have ``path``. ``keyless``: what to say where the server wants a key.
    """
    url, headers = server.rstrip("/") + path, {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with open_url(request, limit_s) as response:
            return _answer(url, response.read(), has)
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error_words(error.read())
    except TimeoutError:
        raise OSError(f"{url} has not answered for {limit_s:g} s") from None
    except (urllib.error.URLError, HTTPException, ConnectionError) as error:
        reason = getattr(error, "reason", "") or f"{type(error).__name__}: {error}"
        raise OSError(no_answer_text(url, reason)) from None
    if status == 404 and missing:
        raise ValueError(f"this server has no {path}: {missing}")
    if status == 401 and keyless:
        raise ValueError(keyless)
    raise (ValueError if status in BAD_REQUEST_STATUSES else WorkerError)(text or f"status {status}")


def _answer(url: str, text: bytes, has: Sequence[str]) -> dict[str, Any]:
    """Raises OSError where it is none of a server of Lamina."""
    try:
        answer: dict[str, Any] = json.loads(text)
        if isinstance(answer, dict) and all(name in answer for name in has):
            return answer
    except ValueError:
        pass
    raise OSError(f"{url} has answered something else: is it the address of a server of Lamina?")


def error_words(text: bytes) -> str:
    """Return the message of a server's error; "" if it has none."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
