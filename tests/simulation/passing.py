"""Steps that are on their way through simulated workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from lamina.ops.sampling.token_history import PendingHistory
from lamina.protocol.control import RunStep, SampledToken


@dataclass
class Passing:
    """A step on its way."""

    run: RunStep
    due: list[dict[int, PendingHistory]]  # by replica
    begun: set[int] = field(default_factory=set)  # memory workers that have applied the plan
    written: set[int] = field(default_factory=set)
    executed: bool = False


@dataclass
class Chunk:
    """A prefill worker's step on its way. ``values`` once it is computed."""

    run: RunStep
    worker: int
    values: list[int] = field(default_factory=list)
    drawn: list[SampledToken] = field(default_factory=list)
    stored: set[int] = field(default_factory=set)
    granted: set[int] = field(default_factory=set)
