"""Logs each routing decision as an event of the trace: the chosen workers, the reasons, and the other candidates.

Pure policy: no torch, no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lamina.protocol.control import ComputeReady
from lamina.protocol.kv_placement import KvLocation
from lamina.request import Refusal
from lamina.scheduler.starts import DecodePlacement

from .routing import MEMORY, NO_WORKER, RoutingDecision

CHOICE, REFUSAL = "choice", "refusal"
MAX_LOGGED_CANDIDATES = 8  # those with the lowest TTFT
INLINE = "inline"  # compute workers compute the prompt, in steps that also decode
AFTER_PREFILL = "after prefill"  # the limit was checked once the prompt was computed
LogFields = dict[str, Any]  # numbers, text and lists of these, as JSON takes them


def prefill_worker_name(worker: int, stages: int) -> str:
    """The names of the processes of the Conductor's ``worker``: prefill-1, or prefill-2..3 for a pipeline of two."""
    first = worker * stages
    return f"prefill-{first}" + (f"..{first + stages - 1}" if stages > 1 else "")


class LoggedPrompt(NamedTuple):
    """A prompt: the ids of its request and completion, and its number of tokens."""

    request: int
    completion: int
    tokens: int


@dataclass
class DecisionLog:
    """Writes decisions as events.

    ``write`` takes an event's name and fields. ``stages``: prefill workers in each pipeline; 0: compute workers run
    prompts.
    """

    write: Callable[[str, LogFields], None]
    stages: int = 1
    info: ComputeReady | None = None  # what the compute workers of this epoch reported

    def worker_name(self, worker: int) -> str:
        """The name of a worker's processes; INLINE for compute workers."""
        return prefill_worker_name(worker, self.stages) if self.stages else INLINE

    def log_refused(self, prompt: LoggedPrompt, refusal: Refusal, prices: Sequence[RoutingDecision]) -> None:
        """Log a prompt that is rejected when it arrives."""
        self._refused(prompt, refusal.reason, refusal, prices)

    def log_refused_late(self, prompt: LoggedPrompt, refusal: Refusal) -> None:
        """Log a prompt that is rejected after its prefill."""
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
        """Log where a prompt is computed and where it decodes.

        ``by``: the worker that computes it, or INLINE; ``cached``: its cached tokens. ``choice``: the Conductor's
        decision when the prompt arrived, if it made one; ``prices``: all candidates then.
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
        """The memory workers that hold KV of a sequence that begins at ``location``."""
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
                "source": "memory workers" if way.source == MEMORY else self.worker_name(way.source),
                "moved": way.transferred_tokens,
                "transfer_s": way.transfer_s,
            }
        return fields
