"""A web page of another site: by DNS rebinding it has the server's address under its own name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from target import Target
from verdict import Verdict, first_failure

BODY = {"prompt": "import", "max_tokens": 2}


def attack(folder: Path, server: Callable[..., AbstractContextManager[Target]]) -> Verdict:
    with server(folder, keys=False) as target:
        tries = {
            "another name": {"Host": "evil.example"},
            "another name with a dot": {"Host": f"localhost.evil.example:{target.port}"},
            "another origin": {"Origin": "http://evil.example"},
            "an origin of another port": {"Origin": f"http://127.0.0.1:{target.port + 1}"},
            "no origin at all": {"Origin": "null"},
        }
        statuses = {what: target.ask("POST", "/v1/completions", BODY, **given)[0] for what, given in tries.items()}
        checks = {f"{what} gets 403, not {status}": status == 403 for what, status in statuses.items()}
        checks["its own name is served"] = target.serves()
    return first_failure(checks, f"{len(tries)} foreign names and origins got 403")
