"""Prints a digest of all rounds that engines submit in the scenarios of some seeds.

python -m simulation.plan_hash [FIRST [COUNT [KIND]]], in the folder ``tests``. A change of the scheduler's structure
keeps the digest. A change of its policy changes it. ``KIND``: ``kept`` for sessions and KV sparsity, which the first
digest has not.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any
from unittest.mock import patch

import msgspec
from msgspec import structs

from lamina.protocol.control import RunRound

from .run import EnginePlay
from .scenario import Scenario, leaving, planned, scenario, sparse, talking
from .workers import MOST_KEPT

PLAN_VERSION = 18  # of the digests to which this one is compared, whichever the protocol has
KINDS = {"all": (scenario, planned, leaving), "kept": (talking, sparse)}


def encoded(work: RunRound) -> bytes:
    """Return the bytes of a round, whose plans all have one version."""
    steps = [structs.replace(step, plan=structs.replace(step.plan, version=PLAN_VERSION)) for step in work.steps]
    return msgspec.msgpack.encode(structs.replace(work, steps=steps))


def hash_rounds(of: Scenario) -> bytes:
    """Play a scenario and return the digest of its rounds, those of prefill workers among them, in order."""
    play, digest = EnginePlay(of), hashlib.sha256()
    executor: Any = play.executor
    submit, submit_prefill = executor.submit, executor.submit_prefill

    def submitted(work: RunRound) -> None:
        digest.update(encoded(work))
        submit(work)

    def submitted_to_prefill(worker: int, work: RunRound) -> None:
        digest.update(worker.to_bytes(4, "little") + encoded(work))
        submit_prefill(worker, work)

    executor.submit, executor.submit_prefill = submitted, submitted_to_prefill
    play.run()
    return digest.digest()


def main(first: int = 0, count: int = 100, kind: str = "all") -> None:
    """Print the digest over one scenario of each kind for each seed."""
    total = hashlib.sha256()
    for seed in range(first, first + count):
        for make in KINDS[kind]:
            kept = MOST_KEPT if kind == "all" else 20 * MOST_KEPT  # pages outside of each pool
            with (
                patch("secrets.token_bytes", bytes),  # keys of swapped pages are secret, and other ones in each run
                patch("simulation.workers.MOST_KEPT", kept),
                patch("simulation.wire.MOST_KEPT", kept),
            ):
                total.update(hash_rounds(make(seed)))
    sys.stdout.write(f"{len(KINDS[kind]) * count} scenarios from {first} on: {total.hexdigest()[:16]}\n")


if __name__ == "__main__":
    first, count, kind = (*sys.argv[1:4], *("0", "100", "all")[len(sys.argv) - 1 :])
    main(int(first), int(count), kind)
