"""Every family through real memory workers: two processes over shared memory, three families over TCP as well."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from families import Case, each_family
from split import MemoryWorkers, SplitRunner
from test_families import LEAST_DISTINCT, LEAST_MARGIN, RED, SHORT, TOLERANCE, compare, decode

from lamina.executor.launchers import local

OVER_TCP = ("llama-gqa", "gpt2", "gpt-oss")


# Of the session, as tests of two files that share a family's conversion run one after another.
@pytest.fixture(scope="session")
def over_shm() -> Iterator[MemoryWorkers]:
    workers = MemoryWorkers("shm", ["memory", "memory"])
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def over_tcp() -> Iterator[MemoryWorkers]:
    workers = MemoryWorkers("tcp", ["memory", "memory"])
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def one_forgets() -> Iterator[MemoryWorkers]:
    """Two memory workers, the second of which stores zeros."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(local.ROLES, "forgetful", ("forgetful", "serve_memory"))
        workers = MemoryWorkers("shm", ["memory", "forgetful"])
    yield workers
    workers.close()


def check(case: Case, workers: MemoryWorkers) -> None:
    family, model, program = case
    before = workers.stats()
    with workers.connect(program, num_workers=2) as pool:
        texts = decode(SplitRunner(program, pool))
        outcome = compare(model, texts)
    assert outcome.error < TOLERANCE
    assert outcome.wrong == 0
    assert outcome.distinct >= LEAST_DISTINCT
    assert outcome.margin > LEAST_MARGIN * outcome.error
    assert len({os.getpid(), *workers.pids}) == 3, "memory workers are processes of their own"
    rows = sum(len(t.logits) for t in texts)
    wire = rows * sum(c.q_bytes + c.kv_bytes for c in program.calls)
    received = [a["bytes_received"] - b["bytes_received"] for a, b in zip(workers.stats(), before, strict=True)]
    assert wire <= sum(received) <= 1.5 * wire + 65536, "all of Q, K and V crossed the wire, once"
    least = 0 if family.kv_heads % 2 else wire / 2  # the tokens of a head that both have are dealt out
    assert all(r > least for r in received), "each worker had its part"


@pytest.mark.long(but=["llama-gqa"])
@each_family()
def test_two_memory_workers_over_shared_memory(case: Case, over_shm: MemoryWorkers) -> None:
    check(case, over_shm)


@pytest.mark.long
@each_family(*OVER_TCP)
def test_two_memory_workers_over_tcp(case: Case, over_tcp: MemoryWorkers) -> None:
    check(case, over_tcp)


@pytest.mark.long(but=["llama-gqa"])
@each_family()
def test_kv_lost_on_one_worker_is_noticed(case: Case, one_forgets: MemoryWorkers) -> None:
    _, model, program = case
    with one_forgets.connect(program, num_workers=2, backend="reference") as pool:
        outcome = compare(model, decode(SplitRunner(program, pool), SHORT))
    assert outcome.error > RED * TOLERANCE
