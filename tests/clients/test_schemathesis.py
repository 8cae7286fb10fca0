"""schemathesis against our own /openapi.json, and OpenAI's where it is at hand: no 500, no hang, no status of ours that
is not described.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from running import Running, alive

ROUTES = ("/completions", "/chat/completions", "/models", "/models/{model}")  # of OpenAI's, those that are served
CHECKS = "not_a_server_error,content_type_conformance"
OWN_CHECKS = "response_schema_conformance,status_code_conformance"  # of our description, which says it all
HANG_S = 120
CONTEXT = 256  # tokens; what a case without max_tokens takes, so that thousands take minutes
FUZZ_S = 3000
OWN_OPERATIONS = 5  # of ours, those that take parameters
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * FUZZ_S + 600), pytest.mark.usefixtures("client")]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    flags = ("--dtype=float32", "--served-model-name=tiny", "--max-num-seqs=16", f"--max-model-len={CONTEXT}")
    running = Running(tmp_path / "log", *flags)
    yield running
    running.kill()


@pytest.mark.client("schemathesis")
def test_no_500_and_no_hang(server: Running, environment: Callable[..., Path], run: Callable[..., str]) -> None:
    """LAMINA_FUZZ_CASES cases (default 5000), half of them by OpenAI's description if LAMINA_OPENAPI names its file
    (YAML or JSON); the server lives and is idle afterwards.
    """
    program = environment("schemathesis", "schemathesis") / "schemathesis"
    before = alive(server.descendants())
    cases, theirs = int(os.environ.get("LAMINA_FUZZ_CASES", "5000")), os.environ.get("LAMINA_OPENAPI", "")
    specs = [([f"{server.url}/openapi.json", "--checks", f"{CHECKS},{OWN_CHECKS}"], OWN_OPERATIONS)]
    if theirs:
        paths = [word for route in ROUTES for word in ("--include-path", route)]
        specs.append(([theirs, "--url", f"{server.url}/v1", "--checks", CHECKS, *paths], len(ROUTES)))
    tried = 0
    for words, operations in specs:
        said = run(
            program, "run", *words, "--request-timeout", HANG_S, "--phases", "examples,coverage,fuzzing",
            "--max-examples", -(-cases // len(specs) // operations), "--seed", 1, "--no-color",
            timeout_s=FUZZ_S,
        )  # fmt: skip
        tried += sum(int(n.replace(",", "")) for n in re.findall(r"([\d,]+) generated", said))
    print(f"{tried} cases")
    assert tried >= cases
    with httpx.Client(base_url=server.url, timeout=HANG_S) as http:
        assert http.get("/health").status_code == 200
        assert http.get("/load").json()["server_load"] == 0
    assert alive(before) == before
