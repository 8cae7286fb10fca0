"""Why a prompt is computed where it is, why it decodes where it does, and what the other ways would have cost: an event
for each, for whoever keeps a trace. Pure policy: no torch, no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lamina.protocol.control import ComputeReady
from lamina.protocol.kv_placement import KvLocation
from lamina.request import Refusal
from lamina.scheduler.starts import DecodePlacement

from .routing import NO_WORKER, RoutingDecision

CHOICE, REFUSAL = "choice", "refusal"
MAX_LOGGED_CANDIDATES = 8  # of the cheapest ways
INLINE = "inline"  # compute workers compute the prompt, in the steps of decoding
AFTER_PREFILL = "after prefill"  # of a limit: it was looked at again once the prompt was computed
LogFields = dict[str, Any]  # numbers, text and lists of these, as JSON takes them


def prefill_worker_name(worker: int, stages: int) -> str:
    """The Conductor's ``worker`` by the names of its processes: prefill-1, and of a group of two prefill-2..3."""
    first = worker * stages
    return f"prefill-{first}" + (f"..{first + stages - 1}" if stages > 1 else "")


class LoggedPrompt(NamedTuple):
    """A prompt of so many tokens: of which request, and of its completions the so-manyth."""

    request: int
    completion: int
    tokens: int


@dataclass
class DecisionLog:
    """``write`` takes the name of an event and its words. ``stages``: prefill workers of each group; 0: there are none,
    and compute workers do it.
    """

    write: Callable[[str, LogFields], None]
    stages: int = 1
    info: ComputeReady | None = None  # of the epoch

    def worker_name(self, worker: int) -> str:
        """Of a worker of the Conductor: its processes, or INLINE."""
        return prefill_worker_name(worker, self.stages) if self.stages else INLINE

    def log_refused(self, prompt: LoggedPrompt, refusal: Refusal, prices: Sequence[RoutingDecision]) -> None:
        """It is not taken."""
        self._refused(prompt, refusal.reason, refusal, prices)

    def log_refused_late(self, prompt: LoggedPrompt, refusal: Refusal) -> None:
        """Its prompt is computed, and it is not decoded."""
        self._refused(prompt, f"{refusal.reason} {AFTER_PREFILL}", refusal, ())

    def _refused(self, prompt: LoggedPrompt, limit: str, refusal: Refusal, prices: Sequence[RoutingDecision]) -> None:
        expected = {"ttft_s": refusal.ttft_s, "tbt_s": refusal.tbt_s, "retry_after_s": refusal.retry_after_s}
        self.write(REFUSAL, {**prompt._asdict(), "limit": limit, **expected, "prices": self._candidate_fields(prices)})

    def log_routed(
        self,
        prompt: LoggedPrompt,
        cached: int,
        by: str,
        reason: str,
        choice: RoutingDecision | None,
        prices: Sequence[RoutingDecision],
        seat: DecodePlacement,
    ) -> None:
        """``by`` whom it is computed, behind ``cached`` tokens: a prefill worker, or INLINE. ``choice``: of the
        Conductor at its arrival, None where nobody asked; ``prices``: of all ways then.
        """
        fields = {**prompt._asdict(), "cached": cached, "by": by, "reason": reason}
        foreseen = self._candidate_field(choice) if choice else {}
        self.write(
            CHOICE, {**fields, **foreseen, "prices": self._candidate_fields(prices), **self._placement_fields(seat)}
        )

    def _placement_fields(self, seat: DecodePlacement) -> LogFields:
        fields = {
            "batch": seat.batch,
            "batch_loads": list(seat.loads),
            "lane": seat.location.kv_shard,
            "lane_reason": seat.reason,
        }
        return {**fields, "memory": self._memory(seat.location), "blocks_left": list(seat.free_blocks)}

    def _memory(self, location: KvLocation) -> list[int]:
        """The memory workers that have some of a sequence that begins at ``location``."""
        info = self.info
        if info is None:
            return []
        goes_on = info.stripe_blocks > 0 and not info.single_shard
        there = zip(info.kv_shards, info.holders, strict=True)
        return sorted({w for lanes, holders in there if goes_on or location.kv_shard in lanes for w in holders})

    def _candidate_fields(self, prices: Sequence[RoutingDecision]) -> list[LogFields]:
        return [
            {"by": self.worker_name(way.worker), "way": way.reason, **self._candidate_field(way)}
            for way in prices[:MAX_LOGGED_CANDIDATES]
        ]

    def _candidate_field(self, way: RoutingDecision) -> LogFields:
        fields: LogFields = {
            "prefix": way.prefix,
            "queue_s": way.queue_s,
            "prefill_s": way.prefill_s,
            "ttft_s": way.ttft_s,
        }
        if way.source != NO_WORKER:
            fields |= {
                "source": self.worker_name(way.source),
                "moved": way.transferred_tokens,
                "transfer_s": way.transfer_s,
            }
        return fields
