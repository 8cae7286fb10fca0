"""An engine that borrows, and stores KV or has two ranks: the bits of a large one while guests are killed and recalled.

Covers: lamina/executor/kv_storage.py.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from lending_fixture import LendingProcesses
from test_lending import KEY, LONG, PARAMS, SHORT, SPILL, TINY, Lent, llama, told, until

from lamina import LLM

OTHERS = [[(13 * i + n) % 300 + 5 for i in range(230)] for n in range(4)]  # two stripes each, of four at home
END = (None, "recalled", "killed")


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("longer")
    llama(max_position_embeddings=2048).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module", params=["host", "disk"])
def stored(request: pytest.FixtureRequest, longer: str, tmp_path_factory: Any) -> Iterator[Lent]:
    folder = str(tmp_path_factory.mktemp("store"))
    options = {"kv_store_dir": folder} if request.param == "disk" else {"kv_offloading_size": "64MiB"}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAMINA_CLUSTER_KEY", KEY)
        yield Lent(longer, stack, **options)


def counted(lent: Lent, name: str, *, on_loan: bool = False) -> float:
    """The sum of a counter over the memory workers at home, or over those on loan."""
    each = {int(n[7:]): s for n, s in lent.llm.stats().items() if n.startswith("memory")}
    return sum(s[name] for worker, s in each.items() if (worker >= lent.homes) == on_loan)


def forget(llm: LLM) -> None:
    """Evict all KV from the pool: guests go back, and then other prompts take all homes."""
    borrower = llm.pools.borrower
    assert borrower is not None
    until(lambda: (llm.engine.check_workers(), not borrower.by_creditor)[1], "it keeps what it does not need")
    told(llm, OTHERS)


def streamed(lent: Lent, end: str | None) -> list[list[int]]:
    """Stream a prompt of more than there is, and a short one. Its guest ends in the midst, if it is to."""
    gone, tokens = end is None, dict[int, list[int]]()
    for output in lent.llm.stream([LONG, SHORT], PARAMS):
        tokens[output.request_id] = output.outputs[0].token_ids
        if not gone and len(output.prompt_token_ids) > 500 and len(output.outputs[0].token_ids) > 3:
            creditor, pid = lent.guests()[0]
            gone = True
            if end == "killed":
                os.kill(pid, signal.SIGKILL)
            else:
                creditor.recall(1)
    assert gone, "nobody has lent anything"
    return [tokens[number] for number in sorted(tokens)]


@pytest.mark.no_retry
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("end", END)
def test_pages_are_saved_at_home_and_not_by_guests(end: str | None, stored: Lent) -> None:
    large = [ids for ids, _ in stored.large]
    assert streamed(stored, None) == large
    forget(stored.llm)
    assert counted(stored, "kv_saved_bytes") > 0
    assert streamed(stored, end) == large
    assert stored.guests() or end, "a part of it lies with a guest"
    assert counted(stored, "kv_saved_bytes", on_loan=True) == 0.0, "which stores nothing"


@pytest.fixture(scope="module")
def of_ranks(longer: str) -> Iterator[Lent]:
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAMINA_CLUSTER_KEY", KEY)
        yield Lent(longer, stack, ranks=2)


@pytest.mark.no_retry
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("end", END)
def test_each_rank_has_a_guest_of_a_loan(end: str | None, of_ranks: Lent) -> None:
    assert streamed(of_ranks, end) == [ids for ids, _ in of_ranks.large]
    assert sum(name.startswith("compute") for name in of_ranks.llm.pools.pids) == 2
    if end is None:
        guests = [of_ranks.llm.stats()[f"memory-{worker}"] for worker in (4, 5)]
        assert all(guest["stored_bytes"] > 0 for guest in guests), "each attends what it holds"
        loans = Counter(creditor.name for creditor, _ in of_ranks.guests())
        assert {*loans.values()} == {2}, "of one creditor, one for each rank"


@pytest.mark.no_retry
@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_host_that_lends_dies_while_ranks_and_storage_are_in_use(longer: str, tmp_path: Path) -> None:
    """All are processes. The sequence goes on with the memory of another host."""
    parallel: dict[str, Any] = {**TINY, "tensor_parallel_size": 2}
    with LLM(longer, transport="loopback", memory_workers=2, kv_memory="8MB", **parallel) as llm:
        (large, _), *_ = told(llm, [LONG])
    processes, killed, tokens = LendingProcesses(KEY), list[str](), list[int]()
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        stack.callback(processes.end)
        patch.setenv("LAMINA_CLUSTER_KEY", KEY)
        lend = ("lend", "--ledger", processes.place, "--lend-memory", "2MiB")
        hosts = {host.first_line.partition(" ")[0]: host for host in (processes.start(*lend) for _ in range(2))}
        options: dict[str, Any] = {
            **SPILL,
            **parallel,
            "memory_workers": 4,
            "kv_memory": "145KB",
            "kv_store_dir": str(tmp_path / "kv"),
        }
        loans: dict[str, Any] = {"borrow": "4MiB", "ledger": processes.place, "borrow_wait_s": 100.0}
        llm = stack.enter_context(LLM(longer, transport="shm", **options, **loans))
        borrower = llm.pools.borrower
        assert borrower is not None
        for output in llm.stream([LONG], PARAMS):
            tokens = output.outputs[0].token_ids
            if len(tokens) > 3 and not killed:
                killed += borrower.by_creditor
                for name in killed:
                    hosts[name].end()
        assert len(killed) == 1
        assert tokens == large
        assert set(borrower.by_creditor) == set(hosts) - set(killed), "another one lends"
        told(llm, OTHERS[:1])  # which evicts the sequence
        until(lambda: sum(s.get("kv_saved_bytes", 0.0) for s in llm.stats().values()) > 0, "nothing is saved")
