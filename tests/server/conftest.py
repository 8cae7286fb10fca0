"""One server for all tests of this folder that do not end theirs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import pytest
from running import Running

if TYPE_CHECKING:  # a second and a half, in each process that runs tests
    from openai import OpenAI

FLAGS = (
    "--dtype=float32", "--max-num-seqs=8", "--max-num-queued-reqs=24", "--metrics-compat=vllm", "--log-json",
    "--served-model-name=tiny,other", "--log-stats-s=1", "--limits=body=1MiB", "--timeouts=body=2",
)  # fmt: skip


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("server") / "log", *FLAGS)
    yield running
    running.kill()


@pytest.fixture(scope="session")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def openai(server: Running) -> Iterator[OpenAI]:
    from openai import OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
