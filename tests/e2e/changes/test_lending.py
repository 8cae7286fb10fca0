"""An engine that borrows: one sequence over the memory of other deployments, with the bits of a large one."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tiny import llama

from lamina import LLM, SamplingParams
from lamina.config.flat_options import make_config
from lamina.executor.lending import borrower
from lamina.executor.lending.borrower_links import BorrowerLinks
from lamina.executor.lending.ledger_service import LedgerService
from lamina.executor.lending.lender_service import LenderService
from lamina.executor.worker_group import WorkerGroup
from lamina.lending.creditor import LendingTerms
from lamina.scheduler.kv_manager.migration import KvMigration

KEY = "ab" * 32
HERE = "127.0.0.1", 0
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=3)
LONG = [(7 * i + 3) % 300 + 5 for i in range(1030)]
SHORT = [(11 * i + 3) % 300 + 5 for i in range(100)]
CROWD = [[(5 * i + n) % 300 + 5 for i in range(200)] for n in range(2)] + [LONG]
CROWDED = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (16, 16, 100)]
TINY = {"dtype": "float32", "prefill_chunk": 128, "max_model_len": 1152, "deterministic": True}
SPILL = {"partition": "spill", "kv_memory": "290KB", "memory_workers": 2}  # two stripes of 128 tokens on each
Told = list[tuple[list[int], Any]]


class Lent:
    """Two creditors of a block each, their ledger, and an engine that borrows. ``ranks``: of the engine, each with two
    memory workers. ``options``: its others.
    """

    def __init__(self, path: str, stack: ExitStack, ranks: int = 1, **options: Any) -> None:
        self._stack, self._over = stack, threading.Event()
        self.path, self.ledger = path, LedgerService(HERE, bytes.fromhex(KEY))
        self._run(self.ledger)
        self.creditors, self.homes = [self._creditor(name) for name in ("c1", "c2")], 2 * ranks
        parallel: dict[str, Any] = {**TINY, "tensor_parallel_size": ranks}
        with LLM(path, transport="loopback", memory_workers=ranks, kv_memory="8MB", **parallel) as llm:
            self.large = told(llm, [LONG, SHORT])
            self.crowd = [o.token_ids for r in llm.generate(CROWD, CROWDED) for o in r.outputs]
        borrowing = {"borrow": "4MiB", "ledger": self.ledger.address, "borrow_wait_s": 30.0}
        borrowing |= options or {"enable_prefix_caching": False}  # so homes are empty once requests have ended
        pool = {**SPILL, "memory_workers": self.homes, "kv_memory": f"{290 // ranks}KB"}
        self.llm: LLM = stack.enter_context(LLM(path, transport="shm", **{**pool, **borrowing, **parallel}))

    def _run(self, service: Any) -> None:
        thread = threading.Thread(target=service.serve, args=(self._over,))
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(service.close)
        self._stack.callback(self._over.set)

    def _creditor(self, name: str) -> LenderService:
        place = "127.0.0.1", int(self.ledger.address.rpartition(":")[2])
        service = LenderService(HERE, place, bytes.fromhex(KEY), name, 1, LendingTerms(1, 1), threads=1)
        self._run(service)
        return service

    def guests(self) -> list[tuple[LenderService, int]]:
        """Returns the borrowed memory workers that are members: their creditors and their processes."""
        names = [getattr(m.handle, "loan", None) for m in self.llm.pools.registry.memory]
        members = {loan.creditor for loan in names if loan is not None}
        return [(s, g.process.pid) for s in self.creditors for g in s.guests.values() if s.name in members]


def told(llm: LLM, prompts: list[list[int]]) -> Told:
    return [(o.token_ids, o.logprobs) for r in llm.generate(prompts, PARAMS) for o in r.outputs]


@pytest.fixture(scope="module")
def lent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lent]:
    path: Path = tmp_path_factory.mktemp("longer")
    llama(max_position_embeddings=2048).save_pretrained(path)
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAMINA_CLUSTER_KEY", KEY)
        yield Lent(str(path), stack)


@pytest.mark.no_retry
@pytest.mark.long
def test_a_prompt_of_more_than_there_is_has_a_large_ones_bits(lent: Lent) -> None:
    assert told(lent.llm, [LONG]) == lent.large[:1]
    assert lent.llm.pools.borrower is not None
    assert set(lent.llm.pools.borrower.by_creditor) <= {"c1", "c2"}
    stats = {n: s for n, s in lent.llm.stats().items() if n.startswith("memory") and int(n[7:]) >= 2}
    assert stats, "nobody has lent anything"
    guest = stats["memory-2"]
    assert guest["stored_bytes"] > 0, "a creditor attends what it holds"
    assert guest["bytes_sent"] < guest["stored_bytes"] / 4, "and returns results, not K and V"
    processes = [g for s in lent.creditors for g in s.guests.values()]
    until(lambda: any(g.read_bytes > 0 for g in processes), "its host does not know how much it reads")


@pytest.mark.long
def test_what_a_guest_holds_goes_home_while_its_sequence_decodes(lent: Lent, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes as soon as short sequences have made room there, so that a recall finds less to move."""
    monkeypatch.setattr(borrower, "UNUSED_S", 600.0)  # a slow host decodes for longer than an empty guest stays
    told(lent.llm, [LONG[::-1]])  # so another deployment has lent
    moves, pauses = lent.llm.engine.scheduler.features[KvMigration], lent.llm.pools.resizer.moved_bytes
    before, paused = moves.num_moved_blocks, pauses.total()
    assert [o.token_ids for r in lent.llm.generate(CROWD, CROWDED) for o in r.outputs] == lent.crowd
    assert moves.num_moved_blocks > before
    assert pauses.total() == paused, "and no epoch changes for it"


@pytest.mark.no_retry
@pytest.mark.long
@pytest.mark.parametrize("end", ["recalled", "killed"])
def test_a_guest_that_goes_in_the_midst_costs_no_token(end: str, lent: Lent) -> None:
    gone, tokens = list[int](), dict[int, list[int]]()
    for output in lent.llm.stream([LONG, SHORT], PARAMS):
        tokens[output.request_id] = output.outputs[0].token_ids
        if not gone and len(output.prompt_token_ids) > 500 and len(output.outputs[0].token_ids) > 3:
            creditor, pid = lent.guests()[0]
            gone.append(pid)
            if end == "killed":
                os.kill(pid, signal.SIGKILL)
            else:
                creditor.recall(1)
    assert gone
    assert [tokens[number] for number in sorted(tokens)] == [ids for ids, _ in lent.large]


@pytest.mark.long
def test_what_is_not_needed_goes_back(lent: Lent) -> None:
    told(lent.llm, [LONG])
    for _ in range(3000):
        lent.llm.engine.check_workers()
        if all(s.creditor.free_blocks == 1 for s in lent.creditors):
            break
        threading.Event().wait(0.02)
    assert all(s.creditor.free_blocks == 1 for s in lent.creditors)
    assert told(lent.llm, [SHORT]) == lent.large[1:], "and short ones need none"


def until(true: Callable[[], Any], what: str) -> Any:
    for _ in range(6000):
        if value := true():
            return value
        threading.Event().wait(0.01)
    pytest.fail(what)


@pytest.mark.long
def test_what_an_engine_lends_comes_back_as_it_is_needed(lent: Lent) -> None:
    """Another deployment has its region, two blocks; the prompt that needs it waits until it has been given back."""
    lending = {"lend": 0.8425, "kv_memory": "1400KB", "ledger": lent.ledger.address}
    with LLM(lent.path, transport="shm", **{**SPILL, **lending}, **TINY) as llm, ExitStack() as stack:
        borrower = llm.pools.borrower
        assert borrower is not None
        assert borrower.own is not None
        service = borrower.own.service
        place = "127.0.0.1", int(lent.ledger.address.rpartition(":")[2])
        debtor = BorrowerLinks(place, bytes.fromhex(KEY), "d", socket.gethostname())
        stack.callback(debtor.close)
        until(lambda: service.name in lent.ledger.ledger.entries, "it does not tell what it would lend")
        debtor.request_blocks(2)
        until(lambda: debtor.arrived, "it lends nothing")
        guest = debtor.arrived.popleft()
        assert borrower.lent_blocks == {"d": 2}

        def heed() -> None:
            until(lambda: guest.is_recalled, "it wants nothing back")
            debtor.give_back(guest)

        heeding = threading.Thread(target=heed)
        heeding.start()
        assert told(llm, [LONG, SHORT]) == lent.large
        heeding.join()
        assert set(service.lent_blocks) == {service.name}, "what it lacked has come back"
        until(lambda: (llm.engine.check_workers(), not service.lent_blocks)[1], "it keeps what it does not need")
        debtor.request_blocks(1)
        until(lambda: debtor.arrived, "it is not lent again")


def test_without_a_creditor_a_request_ends_in_time(lent: Lent) -> None:
    for creditor in lent.creditors:
        creditor.close()
    assert lent.llm.pools.borrower is not None
    lent.llm.pools.borrower.wait_s = 1.0
    (ended,) = lent.llm.generate([LONG], PARAMS)
    assert ended.outputs[0].finish_reason == "error"
    assert "no deployment has lent" in str(ended.outputs[0].stop_reason)
    assert told(lent.llm, [SHORT]) == lent.large[1:]


def test_a_ledger_that_is_not_there_is_one_line_before_anything_starts(
    tiny_lm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerGroup, "start", lambda *_: pytest.fail("workers are started"))
    borrowing = {"borrow": "4MiB", "ledger": "127.0.0.1:9", "transport": "shm", **SPILL}
    monkeypatch.setenv("LAMINA_CLUSTER_KEY", KEY)
    with pytest.raises(OSError, match=r"there is no ledger at 127\.0\.0\.1:9: Connection refused"):
        LLM(str(tiny_lm), **borrowing)
    monkeypatch.delenv("LAMINA_CLUSTER_KEY")
    with pytest.raises(ValueError, match="borrow needs the cluster's key"):
        LLM(str(tiny_lm), **borrowing)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"borrow": "1GB", "ledger": "here"}, "--lending ledger must be HOST:PORT"),
        ({"borrow": "lots", "ledger": "a:1"}, "--lending borrow.max"),
        ({"lend": 1.5, "ledger": "a:1"}, "--lending lend.share must be at most 0.9"),
        ({"lend": 0.5, "ledger": "a:1", "lend_address": "here"}, "--lending lend.address must be HOST:PORT"),
    ],
)
def test_values_that_loans_cannot_have(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_config({"partition": "spill", **options})
