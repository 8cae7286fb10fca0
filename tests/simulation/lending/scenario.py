"""The events among instances that lend and borrow, as data: a seed makes them, and a failure prints them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

FEW, MANY = 8, 1000


@dataclass(frozen=True)
class LendingScenario:
    """``loss``, ``twice``: chances of each message; ``delay_s``: of most, ``late_s``: of one in twenty, at most.
    ``crashes``: of instances, ``ledger_crashes``, at times by chance within the first ``wild_s``; then the network is
    good, and most want nothing. ``recalls``: whether instances want lent blocks back when they are short themselves.
    ``one_way``: whether who lacks memory lends to earlier claims alone, and wants its own back first, as engines do.
    ``drift``: of each clock, as a part.
    """

    seed: int
    instances: int
    blocks: int = 40
    cap: int = 24
    debtor_cap: int = 16
    lease_s: float = 3.0
    beat_s: float = 0.7
    wild_s: float = 9.0
    calm_s: float = 8.0
    loss: float = 0.0
    twice: float = 0.0
    delay_s: float = 0.02
    late_s: float = 1.5
    crashes: int = 0
    ledger_crashes: int = 0
    recalls: bool = False
    one_way: bool = False
    drift: float = 0.02


def lending_scenario(seed: int, instances: int = 0) -> LendingScenario:
    """``instances``: how many; 0 = a few, by the seed."""
    rng = random.Random(f"lending {seed}")
    count = instances or rng.randint(2, FEW)
    return LendingScenario(
        seed=seed,
        instances=count,
        cap=rng.choice((12, 24, 40)),
        debtor_cap=rng.choice((6, 16, 40)),
        loss=rng.choice((0.0, 0.05, 0.3)),
        twice=rng.choice((0.0, 0.1, 0.4)),
        late_s=rng.choice((0.05, 1.5, 5.0)),
        crashes=rng.choice((0, 1, 3)),
        ledger_crashes=rng.choice((0, 0, 1, 2)),
        recalls=rng.random() < 0.5,
        one_way=rng.random() < 0.25,
    )


def rough(of: LendingScenario) -> LendingScenario:
    """The same over a network that is as bad as it gets."""
    return replace(of, loss=0.3, twice=0.4, late_s=5.0)
