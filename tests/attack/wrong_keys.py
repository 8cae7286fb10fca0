"""Requests without a key, with parts of one, and with another role's: no route takes them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from target import ADMIN, KEYS, Target
from verdict import Verdict, first_failure

ROUTES = (
    ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/load"),
    ("GET", "/version"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/tokenize"),
    ("POST", "/scale"), ("POST", "/drain"), ("POST", "/cordon"), ("GET", "/v1/sessions"),
)  # fmt: skip
WRONG = ("", "Bearer", "Bearer ", f"Bearer {KEYS[0][:-1]}", f"Bearer {KEYS[0]}x", f"Basic {KEYS[0]}", "Bearer \u00e9")


def attack(folder: Path, server: Callable[..., AbstractContextManager[Target]]) -> Verdict:
    with server(folder) as target:
        open_to, tried = list[str](), 0
        for method, path in ROUTES:
            body = {"prompt": "import", "max_tokens": 1} if method == "POST" else None
            for given in WRONG:
                status, _ = target.ask(method, path, body, **({"Authorization": given} if given else {}))
                tried += 1
                if status < 400:
                    open_to.append(f"{method} {path} with {given!r}")
        client = [p for m, p in ROUTES[-4:-1] if target.ask(m, p, {}, key=KEYS[0])[0] < 400]
        checks = {
            f"no route is open: {open_to[:1]}": not open_to,
            f"a client's key does not operate: {client[:1]}": not client,
            "the operator's key does not complete": target.ask("POST", ROUTES[6][1], {}, key=ADMIN)[0] == 401,
            "each key is served": all(target.serves(key) for key in KEYS),
        }
    return first_failure(checks, f"{tried} requests on {len(ROUTES)} routes got no answer")
