"""schemathesis against our own /openapi.json: no 500, no hang, wrong requests refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from running import Running, alive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000), pytest.mark.usefixtures("client")]


@pytest.mark.client("schemathesis")
def test_no_500_and_no_hang(
    server: Running, environment: Callable[..., Path], run: Callable[..., str], tmp_path: Path
) -> None:
    """For LAMINA_FUZZ_S seconds (default 120); the server lives and is idle afterwards."""
    program = environment("schemathesis", "schemathesis") / "schemathesis"
    before = alive(server.descendants())
    checks = "not_a_server_error,response_schema_conformance,content_type_conformance"
    run(
        program, "run", f"{server.url}/openapi.json", "--checks", checks, "--request-timeout", "60",
        "--phases", "examples,coverage,fuzzing", "--max-time", os.environ.get("LAMINA_FUZZ_S", "120"),
        "--max-examples", "1000", "--seed", "1", "--no-color",
    )  # fmt: skip
    with httpx.Client(base_url=server.url, timeout=60) as http:
        assert http.get("/health").status_code == 200
        assert http.get("/load").json()["server_load"] == 0
    assert alive(before) == before
