"""Two servers that lend to each other, with real processes: a request of each needs the memory of both."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from lending_fixture import DebtorServer, DrillSizes, LendingProcesses, StreamReader, seconds_until

from lamina import LLM, SamplingParams

MODEL = str(Path(__file__).resolve().parents[2] / "examples" / "tiny_lm" / "model")
SIZES = DrillSizes(pool=640 << 10, loan=2 << 20)
TOKENS, EARLY, LIMIT_S = 200, 8, 240.0
PROMPTS = [[(step * n + 3) % 300 + 5 for n in range(1500)] for step in (7, 11)]


class Peers(NamedTuple):
    """The servers, and the tokens of each prompt on one that has enough memory of its own."""

    processes: LendingProcesses
    servers: tuple[DebtorServer, DebtorServer]
    plain: list[list[int]]

    def ask(self, number: int) -> StreamReader:
        """Send the server ``number`` its prompt."""
        body: dict[str, Any] = {
            "prompt": PROMPTS[number], "temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "stream": True,
            "return_token_ids": True,
        }  # fmt: skip
        return StreamReader(self.servers[number].url, body, LIMIT_S)

    def found(self, readers: tuple[StreamReader, StreamReader]) -> list[list[int]]:
        """Return the tokens of both streams."""
        return [reader.join().ids.get(0, [reader.record.error]) for reader in readers]  # type: ignore[list-item]


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(MODEL, transport="loopback", kv_memory="64MiB", deterministic=True) as llm:
        plain = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]
    processes = LendingProcesses()
    try:
        yield Peers(processes, (processes.serve(MODEL, *SIZES.both), processes.serve(MODEL, *SIZES.both)), plain)
    finally:
        processes.end()


def begun(reader: StreamReader) -> bool:
    return seconds_until(lambda: reader.tokens >= EARLY or reader.has_ended, LIMIT_S) is not None


@pytest.mark.slow
@pytest.mark.no_retry
@pytest.mark.timeout(600)
def test_one_is_served_then_the_other(peers: Peers) -> None:
    """Both requests come at once. The one that is served has all memory of both, so the streams do not overlap."""
    readers = peers.ask(0), peers.ask(1)
    assert seconds_until(lambda: any(reader.tokens >= EARLY for reader in readers), LIMIT_S) is not None
    assert sorted(bool(reader.tokens) for reader in readers) == [False, True]
    assert max(peers.processes.lent().values()) > 0, "the ledger knows of no loan"
    assert peers.found(readers) == peers.plain
    first, last = sorted(readers, key=lambda reader: reader.record.times[0])
    assert first.record.times[-1] < last.record.times[0]


@pytest.mark.slow
@pytest.mark.no_retry
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["debtor", "lender"])
def test_the_end_of_one_costs_no_token_of_either(victim: str, peers: Peers) -> None:
    """The first request is served with the memory of the other server, whose own request waits for it."""
    first = peers.ask(0)
    assert begun(first)
    readers = first, peers.ask(1)
    server = peers.servers[victim == "lender"]
    os.kill(server.pid_of("engine"), signal.SIGKILL)
    assert peers.found(readers) == peers.plain
    assert server.has_logged("another one replaces it", first.has_begun)
