"""Plays a scenario of lending, and checks it at each event."""

from __future__ import annotations

import random
from collections.abc import Callable
from pprint import pformat
from typing import NamedTuple

import msgspec

from lamina.lending.creditor import RESERVE_S
from lamina.lending.debt_ledger import DebtLedger
from lamina.lending.debtor import LEDGER, Outgoing
from lamina.lending.lending_messages import (
    CandidatesRequest,
    CreditorRefused,
    Heartbeat,
    LoanRequest,
    Renew,
)
from lamina.tools.plan.simulator.clock import VirtualClock

from .instance import SimInstance
from .oracle import LendingOracle
from .scenario import LendingScenario

TICK_S = 0.3
RESTART_S = 1.0


class LendingPlayed(NamedTuple):
    """Counts of what has happened. ``borrowed``: that one instance had at most at one time."""

    messages: int
    granted: int
    refused: int
    crashes: int
    borrowed: int


class BrokenLendingError(AssertionError):
    """A scenario in which something does not hold; the text has it."""


def check_lending(of: LendingScenario) -> LendingPlayed:
    """Raises BrokenLendingError."""
    try:
        return LendingWorld(of).play()
    except Exception as error:
        raise BrokenLendingError(f"{type(error).__name__}: {error}\n{pformat(of)}") from error


class LendingWorld:
    """All instances, the ledger, and the network between them."""

    def __init__(self, of: LendingScenario) -> None:
        self.of, self.clock, self._rng = of, VirtualClock(), random.Random(of.seed)
        self.oracle = LendingOracle(of)
        self.instances: dict[str, SimInstance] = {}
        self._ledger: DebtLedger | None = None
        self._wild = True
        self._messages = self._granted = self._refused = self._crashes = self._borrowed = 0
        self._lives = 0

    def play(self) -> LendingPlayed:
        of, rng = self.of, self._rng
        self.begin()
        for _ in range(of.crashes):
            self.clock.later(rng.uniform(1.0, of.wild_s), self._crash)
        for _ in range(of.ledger_crashes):
            self.clock.later(rng.uniform(1.0, of.wild_s), self._crash_ledger)
        self._run(of.wild_s)
        self._calm()
        return LendingPlayed(self._messages, self._granted, self._refused, self._crashes, self._borrowed)

    def begin(self) -> None:
        """Start the ledger and all instances."""
        self._start_ledger()
        for index in range(self.of.instances):
            self._start(index)

    def _run(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self.clock.advance(end):
            pass

    def _calm(self) -> None:
        """The network is good, and one wants all that it may have: it has it soon. Then no instance wants anything."""
        self._wild = False
        big, *others = self.instances.values()
        for one in others:
            self._act(one, lambda one=one: one.want(0))  # type: ignore[misc]
        self._run(self.of.calm_s / 2)
        reach = self.of.blocks + len(others) * min(self.of.cap, self.of.debtor_cap, self.of.blocks)
        wanted = min(reach, 4 * self.of.blocks)
        self._act(big, lambda: big.want(wanted))
        self._run(self.of.calm_s)
        if big.swapped and self.of.one_way:  # a late request of a claim that has ended keeps room
            self._run(self.of.late_s + RESERVE_S)
        assert big.swapped == 0, f"{big.name} wants {wanted} blocks of {reach}, and {big.swapped} are in swap"
        self._borrowed = max(self._borrowed, big.debtor.num_borrowed)
        self._act(big, lambda: big.want(0))
        self._run(2.0)
        for one in self.instances.values():
            assert one.creditor.free_blocks == one.creditor.size, (
                f"{one.name}: blocks of {one.creditor.leases} are lost"
            )

    # Instances:
    def _start(self, index: int) -> None:
        of, rng = self.of, self._rng
        self._lives += 1
        name, rate, begun = f"i{index}.{self._lives}", 1.0 + rng.uniform(-of.drift, of.drift), rng.uniform(0.0, 1e4)
        one = SimInstance(name, f"rack{index % 3}/host{index}", of, lambda: begun + rate * self.clock.now, rng)
        self.instances[name] = one
        self._each(one, of.beat_s, self._beat)
        self._each(one, TICK_S, lambda one: self._act(one, one.tick))
        self._each(one, of.wild_s / 6, self._change)

    def _each(self, one: SimInstance, period_s: float, work: Callable[[SimInstance], None]) -> None:
        def again() -> None:
            if one.alive:
                work(one)
                self.clock.later(period_s * self._rng.uniform(0.8, 1.2), again)

        self.clock.later(period_s * self._rng.random(), again)

    def _beat(self, one: SimInstance) -> None:
        def beat() -> list[Outgoing]:
            one.creditor.expire(one.now())
            one.settle_down()
            self.oracle.instance(one, self.instances)
            message = one.creditor.heartbeat(one.now())
            self.oracle.beat(message)
            return [(LEDGER, message)]

        self._act(one, beat)

    def _change(self, one: SimInstance) -> None:
        """Mostly it has little, now and then much more than it can hold."""
        if self._wild:
            blocks, much = self.of.blocks, self._rng.random() < 0.4
            data = self._rng.randint(blocks, 3 * blocks) if much else self._rng.randint(0, blocks)
            self._act(one, lambda: one.want(data))

    def _act(self, one: SimInstance, work: Callable[[], list[Outgoing]]) -> None:
        out = work()
        self._borrowed = max(self._borrowed, one.debtor.num_borrowed)
        self.oracle.instance(one, self.instances)
        for to, message in out:
            self._send(one.name, to, message)

    def _crash(self) -> None:
        if len(self.instances) < 2:
            return
        one = self._rng.choice(sorted(self.instances.values(), key=lambda x: x.name))
        one.alive = False
        del self.instances[one.name]
        self._crashes += 1
        index = int(one.name[1:].split(".")[0])
        self.clock.later(RESTART_S, lambda: self._start(index))
        of = self.of
        slowest = of.lease_s * (1 + 2 * of.drift) + max(of.late_s, of.delay_s) + 2 * TICK_S
        self.clock.later(slowest, lambda: self._have_ended(one.name))

    def _have_ended(self, dead: str) -> None:
        for one in self.instances.values():
            self.oracle.ended(one, dead)

    # The ledger:
    def _start_ledger(self) -> None:
        self._ledger = DebtLedger(silent_s=4 * self.of.beat_s)
        self._forgetting(self._ledger)

    def _forgetting(self, ledger: DebtLedger) -> None:
        def again() -> None:
            if ledger is self._ledger:
                ledger.forget(self.clock.now)
                self.clock.later(self.of.beat_s, again)

        self.clock.later(self.of.beat_s, again)

    def _crash_ledger(self) -> None:
        if self._ledger is not None:
            self._ledger = None
            self._crashes += 1
            self.oracle.forgotten()
            self.clock.later(RESTART_S, self._start_ledger)

    def _tell_ledger(self, sender: str, message: msgspec.Struct) -> None:
        ledger = self._ledger
        if ledger is None:
            return
        if isinstance(message, Heartbeat):
            self.oracle.came(message)
            ledger.on_heartbeat(message, self.clock.now)
            self.oracle.entry(ledger.entries[message.name], self.instances)
        elif isinstance(message, CreditorRefused):
            self.oracle.came(message)
            ledger.on_refusal(message)
        elif isinstance(message, CandidatesRequest):
            answer = ledger.answer(message, self.clock.now)
            self.oracle.proposed(message, answer)
            self._send(LEDGER, sender, answer)

    # The network:
    def _send(self, sender: str, to: str, message: msgspec.Struct) -> None:
        of, rng = self.of, self._rng
        self._messages += 1
        copies = 1
        if self._wild:
            copies = 0 if rng.random() < of.loss else 2 if rng.random() < of.twice else 1
        for _ in range(copies):
            late = self._wild and rng.random() < 0.05
            self.clock.later(
                rng.uniform(0.001, of.late_s if late else of.delay_s), lambda: self._deliver(sender, to, message)
            )

    def _deliver(self, sender: str, to: str, message: msgspec.Struct) -> None:
        if to == LEDGER:
            self._tell_ledger(sender, message)
        elif (one := self.instances.get(to)) is not None:
            if isinstance(message, LoanRequest):
                self._watch(one, sender, message)
            else:
                if isinstance(message, Renew):
                    self.oracle.renewed(one, message)
                self._act(one, lambda: one.hear(sender, message))

    def _watch(self, one: SimInstance, sender: str, ask: LoanRequest) -> None:
        """An ask is answered at once, as the oracle counts, but where it has come before."""

        def hear() -> list[Outgoing]:
            assert sender == ask.debtor, f"{sender} passes on what {ask.debtor} asks for"
            fits = self.oracle.fits(one, ask)
            out = one.hear(sender, ask)
            if self.oracle.answered(one, ask, fits, out[0][1] if out and out[0][0] == sender else None):
                self._granted += fits
                self._refused += not fits
            return out

        self._act(one, hear)
