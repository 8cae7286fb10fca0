"""Borrowing by an engine of the memory that its scheduler lacks, first of what it lends itself (``lend`` of --lending).

A loan joins as one more memory worker of each rank, on which no sequence begins. They leave together: once they are not
needed, or if one of them is recalled or lost.
"""

from __future__ import annotations

import logging
import math
import secrets
import socket
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress

from lamina.config.engine_config import EngineConfig
from lamina.config.flag_groups import flag_name
from lamina.engine.engine import Engine
from lamina.engine.feature import EngineFeature
from lamina.engine.scheduler_factory import check_kv_capacity
from lamina.executor.elastic import MemoryResizer
from lamina.executor.worker_group import WorkerGroup
from lamina.executor.worker_registry import RegisteredWorker, WorkerRegistry
from lamina.lending.lending_messages import NEVER
from lamina.protocol.control import LinkClosedError

from .borrower_links import BorrowerLinks, GuestWorker
from .colocated_lender import ColocatedLender, overload_reason
from .lender_service import BLOCK_BYTES
from .lending_listener import key_of, parse_address

log = logging.getLogger(__name__)
LOOK_S = 0.1
MOMENT_S = 0.01
SPARE = 1.1  # times the lacking memory is requested, as layers with windows need some of it
UNUSED_S = 3.0  # for which loans stay after they are not needed
STRANDED_S = 1.0  # between two calls of ``on_idle``, after which the wait begins anew


class Borrower(EngineFeature):
    """Borrows memory for one engine, of which it is a feature: between steps it adds and releases guests."""

    def __init__(
        self,
        config: EngineConfig,
        registry: WorkerRegistry,
        worker_group: WorkerGroup,
        elastic: MemoryResizer,
        links: BorrowerLinks,
        own: ColocatedLender | None = None,
    ) -> None:
        """``own``: what this engine lends itself, of which it borrows first."""
        self.own = own
        self._registry, self._workers, self._resizer, self._links = registry, worker_group, elastic, links
        self._most = config.topology.borrow_bytes // BLOCK_BYTES  # blocks of other deployments
        self._homes, self.wait_s = config.topology.memory_workers, config.launch.borrow_wait_s
        self._size = config.topology.tensor_parallel_size  # memory workers of a loan: one for each rank
        self._looked = self._asked = self._stranded = 0.0
        self._unused: float | None = None  # the time since which loans are unused
        self._epoch = time.time() - time.monotonic()  # from the engine's clock to the one that hosts share
        self._least = 0, 0, 1  # memory workers, the most blocks tried with them, and what ``_least_useful`` has found
        self._pause: Callable[[], object] = lambda: time.sleep(MOMENT_S)

    @property
    def by_creditor(self) -> dict[str, int]:
        """The borrowed bytes by creditor."""
        return {name: blocks * BLOCK_BYTES for name, blocks in self._links.by_creditor.items()}

    @property
    def refusals(self) -> int:
        return self._links.refusals

    @property
    def debt_cycles(self) -> int | None:
        """The number of debt cycles among all deployments, as the ledger last reported; None: no report yet."""
        return self._links.debt_cycles

    def on_idle(self, engine: Engine) -> str | None:
        if not engine.scheduler.waiting:
            return None
        now = time.monotonic()
        if now - self._asked > STRANDED_S:
            self._stranded = now
        self._asked = now
        if self._resizer.in_progress or now - self._stranded < self.wait_s:
            self._pause()
            return ""
        self._stranded = now
        limit = f"{flag_name('borrow_wait_s')} {self.wait_s:g}"
        return (
            f"it does not fit into the memory here, and no deployment has lent {self._lacking(engine)} MiB more in "
            f"time ({limit})"
        )

    def between_rounds(self, engine: Engine) -> None:
        """Add or release guests, if that is due."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        self._resizer.reap()
        if self._resizer.in_progress:
            return
        if (gone := next((i for i, m in enumerate(self._registry.memory) if self._is_to_leave(i, m)), -1)) >= 0:
            self._release(gone, "recall")
        elif come := len(self._links.arrived) // self._size * self._size:
            self._add_guests([self._links.arrived.popleft() for _ in range(come)])
        else:
            self._ask(engine, now)

    @property
    def lent_blocks(self) -> dict[str, int] | None:
        """The blocks of this deployment by the deployment that has them, itself too; None if it lends none."""
        return self.own.lent_blocks if self.own is not None else None

    def close(self) -> None:
        """Give all back, and lend nothing more."""
        self._links.close()
        if self.own is not None:
            self.own.close()

    def _is_to_leave(self, index: int, worker: RegisteredWorker) -> bool:
        handle = worker.handle
        return index >= self._homes and not (isinstance(handle, GuestWorker) and not handle.is_recalled)

    def _add_guests(self, guests: list[GuestWorker]) -> None:
        loans = [guests[n : n + self._size] for n in range(0, len(guests), self._size)]
        guests = [guest for loan in loans if self._is_of_use(loan) for guest in loan]
        if not guests:
            return
        try:
            change, members = self._resizer.plan_borrowed([g.nbytes for g in guests], []), list[RegisteredWorker]()
            for index, guest in enumerate(guests, len(self._registry.memory)):
                guest.index = index
                members.append(self._registry.prepare(guest, on_loan=True))
                with suppress(LinkClosedError):  # its end is noticed when it is to take its place
                    members[-1].link.send(self._workers.start_borrowed(guest, guest.key))
            self._resizer.begin(change, coming=members, reason="borrow")
        except (ValueError, OSError) as error:
            log.warning("borrowed memory cannot be used: %s", error)
            for guest in guests:
                guest.join(0.0)

    def _is_of_use(self, guests: list[GuestWorker]) -> bool:
        """Return whether the guests of a loan can be used; else give it back."""
        if why := self._refusal(sum(guest.nbytes for guest in guests)):
            log.warning("memory of %s cannot be used: %s", guests[0].loan.creditor, why)
            for guest in guests:
                guest.sock.close()  # it ends by itself, as it has received no message
                guest.join(0.0)
        return not why

    def _refusal(self, nbytes: int) -> str:
        """Return why a loan of ``nbytes`` is useless, such as too small for a stripe; "" if not so."""
        try:
            self._resizer.plan_borrowed([nbytes // self._size] * self._size, [])
        except ValueError as error:
            return str(error)
        return ""

    def _least_useful(self, most: int) -> int:
        """Return the blocks of the smallest loan that can be used; more than ``most`` if all up to that are useless."""
        members, (had, tried, least) = len(self._registry.memory), self._least
        if members != had or tried < min(least, most):
            useful = bisect_left(range(1, most + 1), True, key=lambda blocks: not self._refusal(blocks * BLOCK_BYTES))
            least = 1 + useful
            self._least = members, most, least
        return least

    def _loan_of(self, index: int) -> list[int]:
        """Return the numbers of the memory workers of a loan, of which ``index`` is one."""
        first = index // self._size * self._size
        return list(range(first, first + self._size))

    def _release(self, index: int, reason: str) -> None:
        leaving = self._loan_of(index)
        try:
            self._resizer.begin(self._resizer.plan_borrowed([], leaving), leaving, reason=reason)
        except (ValueError, OSError) as error:
            log.warning("memory worker %d stays: %s", index, error)

    def _ask(self, engine: Engine, now: float) -> None:
        """Request what the first waiting sequence lacks, of other deployments only after all memory of its own that
        can come. Loans that are not needed go back after a while.
        """
        lacking, guests = self._lacking(engine), len(self._registry.memory) - self._homes
        since = self._first_arrival(engine)
        if self.own is not None:
            self.own.lacks_since = since if lacking or self._links.is_seeking else NEVER
            self.own.local_need = overload_reason(engine.slo_admission.counts())
        lent = sum(sum(rank[self._homes // self._size :]) for rank in self._workers.kv_bytes)
        coming = self._links.borrowed_blocks - -(-lent // BLOCK_BYTES)
        wanted = lacking if coming <= 0 else 0
        reclaimable, most = self._links.reclaimable, max(0, self._most - self._links.borrowed_from_others)
        least = self._least_useful(max(reclaimable, most)) if wanted else 1
        needed = max(wanted, least) if wanted else 0  # a smaller loan is of no use
        if (own := min(needed, reclaimable)) >= least:
            self._links.reclaim(own)
        else:
            own = 0
        of_others = 0 if own else min(needed, most)
        if of_others < least:
            of_others, least = 0, 1
        self._links.request_blocks(of_others, since, is_waiting=lacking > 0, least=least)
        if lacking or not guests or coming > 0:
            self._unused = None
        elif self._unused is None:
            self._unused = now
        elif now - self._unused > UNUSED_S:
            self._unused, last = now, self._first_to_go()
            if self._fits_without(engine, last):
                self._release(last, "return")

    def _first_arrival(self, engine: Engine) -> float:
        """Return when the oldest unfinished request came, by the clock that hosts share."""
        return min((self._epoch + request.output.times.arrival_s for request in engine.requests), default=NEVER)

    def _first_to_go(self) -> int:
        """Return the guest to release first: those of others before its own, the latest first."""
        handles = [member.handle for member in self._registry.memory[self._homes :]]
        others = [
            i for i, h in enumerate(handles) if isinstance(h, GuestWorker) and h.loan.creditor != self._links.name
        ]
        return self._homes + (others or range(len(handles)))[-1]

    def _fits_without(self, engine: Engine, index: int) -> bool:
        try:
            capacity = self._resizer.plan_borrowed([], self._loan_of(index)).capacity
            check_kv_capacity(engine.scheduler, engine.worker_info, capacity)
        except ValueError:
            return False
        return True

    def _lacking(self, engine: Engine) -> int:
        """Return the blocks to borrow for the next sequence, in whole stripes, beyond those that are free here; 0: it
        waits for something else.
        """
        first = next((s for s in engine.scheduler.waiting if not s.finished), None)
        if first is None:
            return 0
        info, stripe = engine.worker_info, max(1, engine.worker_info.stripe_blocks)
        whole = sum(min(n) for n, w in zip(info.num_blocks, info.windows, strict=True) if not w)
        free = sum(n // stripe for n, window in zip(engine.free_blocks, info.windows, strict=True) if not window)
        stripes = -(-first.max_len // (stripe * info.block_size)) - free
        if stripes <= 0:
            return 0
        of_block = sum(map(sum, self._workers.kv_bytes)) / max(1, whole)
        return math.ceil(SPARE * (stripes * stripe + 1) * of_block / BLOCK_BYTES) + 1  # and a null block


def open_borrower(
    config: EngineConfig, registry: WorkerRegistry, worker_group: WorkerGroup, elastic: MemoryResizer
) -> Borrower:
    """Connect to the ledger, and lend if configured. Raises ValueError, and OSError if it is absent or refuses."""
    key, host = key_of(config.topology.loan_flag), socket.gethostname()
    ledger = parse_address(config.launch.ledger, flag_name("ledger"))
    name = f"engine-{host[:16]}-{secrets.token_hex(4)}"
    own = ColocatedLender(config, ledger, key, name) if config.topology.lend else None
    try:
        place = config.launch.lending_place or host
        parts = config.topology.tensor_parallel_size
        links = BorrowerLinks(ledger, key, name, place, own.service if own is not None else None, parts)
    except BaseException:
        if own is not None:
            own.close()
        raise
    return Borrower(config, registry, worker_group, elastic, links, own)
