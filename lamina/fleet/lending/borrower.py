"""How an engine borrows, first of what it lends itself (``--lend``): it asks for the memory that its scheduler lacks. A
loan joins as one more memory worker, on which no sequence begins, and leaves again when it is not needed, is wanted
back, or is lost.

Loans come and go by the same change of the view as an operator's workers (fleet/elastic.py): KV moves, nothing is
loaded. A worker of this host takes the place of a guest that dies, until the next change lets it go.
"""

from __future__ import annotations

import logging
import math
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from lamina.engine.configured import check_room
from lamina.fleet.cohort import Cohort
from lamina.fleet.elastic import Elastic
from lamina.fleet.members import Member, Members
from lamina.protocol.control import LinkClosedError
from lamina.protocol.options.engine import EngineConfig

from .lend_service import BLOCK_BYTES
from .links import key_of, parse_place
from .loan_links import GuestWorker, LoanLinks
from .own_lending import OwnLending, overload

if TYPE_CHECKING:
    from lamina.engine.engine import Engine

log = logging.getLogger(__name__)
LOOK_S = 0.1
MOMENT_S = 0.01
SPARE = 1.1  # times what is lacking is asked for, as layers with windows need some of it
UNUSED_S = 3.0  # that loans stay, once they are not needed
STRANDED_S = 1.0  # without a question, the line is another one


class Borrower:
    """``tend`` is for the engine's thread, between steps."""

    def __init__(
        self,
        config: EngineConfig,
        members: Members,
        cohort: Cohort,
        elastic: Elastic,
        links: LoanLinks,
        own: OwnLending | None = None,
    ) -> None:
        """``own``: what this engine lends itself, of which it borrows first."""
        self._own = own
        self._members, self._cohort, self._elastic, self._links = members, cohort, elastic, links
        self._most = config.topology.borrow_bytes // BLOCK_BYTES  # of others
        self._homes, self._wait_s = config.topology.memory_workers, config.launching.borrow_wait_s
        self._engine: Engine | None = None
        self._looked = self._asked = self._stranded = 0.0
        self._unused: float | None = None  # since when
        self._pause: Callable[[], object] = lambda: time.sleep(MOMENT_S)

    def attend(self, engine: Engine) -> None:
        """Borrow for this engine from now on."""
        self._engine, engine.hope = engine, self.hope

    @property
    def by_creditor(self) -> dict[str, int]:
        """Bytes."""
        return {name: blocks * BLOCK_BYTES for name, blocks in self._links.by_creditor.items()}

    @property
    def refusals(self) -> int:
        return self._links.refusals

    @property
    def debt_cycles(self) -> int | None:
        """Among all deployments, as the ledger said last; None: it has said nothing."""
        return self._links.debt_cycles

    def hope(self) -> str | None:
        """Asked where waiting requests have no room and nothing else runs: "" while memory may still come, else the
        reason why none will.
        """
        if self._engine is None or not self._engine.scheduler.waiting:
            return None
        now = time.monotonic()
        if now - self._asked > STRANDED_S:
            self._stranded = now
        self._asked = now
        self.tend()
        if self._elastic.under_way or now - self._stranded < self._wait_s:
            self._pause()
            return ""
        self._stranded = now
        limit = f"--borrow-wait-s {self._wait_s:g}"
        return f"it does not fit into the memory here, and nobody has lent {self._lacking()} MiB more in time ({limit})"

    def tend(self) -> None:
        """Have guests come or go, where that is due."""
        now = time.monotonic()
        if self._engine is None or now - self._looked < LOOK_S:
            return
        self._looked = now
        self._elastic.reap()
        if self._elastic.under_way:
            return
        if (gone := next((i for i, m in enumerate(self._members.memory) if self._must_go(i, m)), -1)) >= 0:
            self._let_go(gone, "recall")
        elif self._links.arrived:
            self._take_in([self._links.arrived.popleft() for _ in range(len(self._links.arrived))])
        else:
            self._ask(now)

    @property
    def lent(self) -> dict[str, int] | None:
        """Blocks of this deployment by who has them, itself too; None where it lends none."""
        return self._own.lent if self._own is not None else None

    def close(self) -> None:
        """Give all back, and lend nothing more."""
        self._links.close()
        if self._own is not None:
            self._own.close()

    def _must_go(self, index: int, member: Member) -> bool:
        handle = member.handle
        return index >= self._homes and not (isinstance(handle, GuestWorker) and not handle.recalled)

    def _take_in(self, guests: list[GuestWorker]) -> None:
        guests = [guest for guest in guests if self._is_of_use(guest)]
        if not guests:
            return
        try:
            change, members = self._elastic.plan_loans([g.nbytes for g in guests], []), list[Member]()
            for index, guest in enumerate(guests, len(self._members.memory)):
                guest.index = index
                members.append(self._members.prepare(guest, on_loan=True))
                with suppress(LinkClosedError):  # its end is noticed as it is to take its place
                    members[-1].link.send(self._cohort.adopt(guest, guest.key))
            self._elastic.begin(change, coming=members, reason="borrow")
        except (ValueError, OSError) as error:
            log.warning("what others lend is of no use: %s", error)
            for guest in guests:
                guest.join(0.0)

    def _is_of_use(self, guest: GuestWorker) -> bool:
        """Else it has gone back."""
        if why := self._refusal(guest.nbytes):
            log.warning("what %s lends is of no use: %s", guest.loan.creditor, why)
            guest.sock.close()  # it ends by itself, as nobody has told it anything
            guest.join(0.0)
        return not why

    def _refusal(self, nbytes: int) -> str:
        """Why one more memory worker of so many bytes is of no use: it is too small for a stripe, say; "" = it is."""
        try:
            self._elastic.plan_loans([nbytes], [])
        except ValueError as error:
            return str(error)
        return ""

    def _let_go(self, index: int, reason: str) -> None:
        try:
            self._elastic.begin(self._elastic.plan_loans([], [index]), [index], reason=reason)
        except (ValueError, OSError) as error:
            log.warning("memory worker %d stays: %s", index, error)

    def _ask(self, now: float) -> None:
        """For what the first one in line lacks, of others once it has all of its own that is of use; what was borrowed
        and is not needed goes back after a while.
        """
        assert self._engine is not None
        lacking, guests = self._lacking(), len(self._members.memory) - self._homes
        if self._own is not None:  # whoever borrows lends nothing: so no debts go round in a circle
            borrows = "it borrows itself" if lacking or self._links.seeks else ""
            self._own.needs = borrows or overload(self._engine.promises.counts())
        coming = self._links.borrowed - sum(self._cohort.kv_bytes[0][self._homes :]) // BLOCK_BYTES
        wanted = lacking if coming <= 0 else 0
        own = min(wanted, self._links.own_left)
        if own and not self._refusal(own * BLOCK_BYTES):
            self._links.reclaim(own)
        else:
            own = 0
        self._links.want(0 if own else min(wanted, self._most - self._links.of_others))
        if lacking or not guests or coming > 0:
            self._unused = None
        elif self._unused is None:
            self._unused = now
        elif now - self._unused > UNUSED_S:
            self._unused, last = now, self._first_to_go()
            if self._fits_without(last):
                self._let_go(last, "return")

    def _first_to_go(self) -> int:
        """Of the guests: those of others before its own, the last one that came."""
        handles = [member.handle for member in self._members.memory[self._homes :]]
        others = [
            i for i, h in enumerate(handles) if isinstance(h, GuestWorker) and h.loan.creditor != self._links.name
        ]
        return self._homes + (others or range(len(handles)))[-1]

    def _fits_without(self, index: int) -> bool:
        assert self._engine is not None
        try:
            capacity = self._elastic.plan_loans([], [index]).capacity
            check_room(self._engine.scheduler, self._engine.info, capacity)
        except ValueError:
            return False
        return True

    def _lacking(self) -> int:
        """Blocks to be lent, for whole stripes of the sequence that is to run next, beside those that are free here.
        0: it waits for something else.
        """
        assert self._engine is not None
        engine = self._engine
        first = next((s for s in engine.scheduler.waiting if not s.finished), None)
        if first is None:
            return 0
        info, stripe = engine.info, max(1, engine.info.stripe)
        whole = sum(min(n) for n, w in zip(info.num_blocks, info.windows, strict=True) if not w)
        free = sum(n // stripe for n, window in zip(engine.free_blocks, info.windows, strict=True) if not window)
        stripes = -(-first.max_len // (stripe * info.block_size)) - free
        if stripes <= 0:
            return 0
        of_block = sum(self._cohort.kv_bytes[0]) / max(1, whole)
        return math.ceil(SPARE * (stripes * stripe + 1) * of_block / BLOCK_BYTES) + 1  # and a null block


def open_borrower(config: EngineConfig, members: Members, cohort: Cohort, elastic: Elastic) -> Borrower:
    """Raises ValueError, OSError where there is no ledger, or it refuses this process."""
    key, host = key_of(config.topology.loan_flag), socket.gethostname()
    ledger = parse_place(config.launching.ledger, "--ledger")
    name = f"engine-{host[:16]}-{secrets.token_hex(4)}"
    own = OwnLending(config, ledger, key, name) if config.topology.lend else None
    try:
        links = LoanLinks(ledger, key, name, host, own.service if own is not None else None)
    except BaseException:
        if own is not None:
            own.close()
        raise
    return Borrower(config, members, cohort, elastic, links, own)
