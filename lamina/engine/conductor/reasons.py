"""Why a prompt is computed where it is, why it decodes where it does, and what the other ways would have cost: an event
for each, for whoever keeps a trace. Pure policy: no torch, no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lamina.protocol.control import ComputeReady
from lamina.protocol.placement import Place
from lamina.request import Refusal

from .choice import NOBODY, PromptChoice

CHOICE, REFUSAL = "choice", "refusal"
MOST_PRICES = 8  # of the cheapest ways
INLINE = "inline"  # compute workers compute the prompt, in the steps of decoding
AFTER_PREFILL = "after prefill"  # of a limit: it was looked at again once the prompt was computed
Said = dict[str, Any]  # numbers, text and lists of these, as JSON takes them


def prefill_name(worker: int, stages: int) -> str:
    """The Conductor's ``worker`` by the names of its processes: prefill-1, and of a group of two prefill-2..3."""
    first = worker * stages
    return f"prefill-{first}" + (f"..{first + stages - 1}" if stages > 1 else "")


class Seat(NamedTuple):
    """Where a sequence decodes, as it is chosen. ``loads``: tokens that the attention of each batch reads, of which the
    least is taken. ``why``: there, of all places. ``left``: KV blocks that nobody has been promised, by layer group.
    """

    batch: int
    loads: Sequence[int]
    place: Place
    why: str
    left: Sequence[int]


class AskedPrompt(NamedTuple):
    """A prompt of so many tokens: of which request, and of its completions the so-manyth."""

    request: int
    completion: int
    tokens: int


@dataclass
class Reasons:
    """``write`` takes the name of an event and its words. ``stages``: prefill workers of each group; 0: there are none,
    and compute workers do it.
    """

    write: Callable[[str, Said], None]
    stages: int = 1
    info: ComputeReady | None = None  # of the view

    def name(self, worker: int) -> str:
        """Of a worker of the Conductor: its processes, or INLINE."""
        return prefill_name(worker, self.stages) if self.stages else INLINE

    def refused(self, asked: AskedPrompt, refusal: Refusal, prices: Sequence[PromptChoice]) -> None:
        """It is not taken."""
        self._refused(asked, refusal.reason, refusal, prices)

    def refused_late(self, asked: AskedPrompt, refusal: Refusal) -> None:
        """Its prompt is computed, and it is not decoded."""
        self._refused(asked, f"{refusal.reason} {AFTER_PREFILL}", refusal, ())

    def _refused(self, asked: AskedPrompt, limit: str, refusal: Refusal, prices: Sequence[PromptChoice]) -> None:
        expected = {"ttft_s": refusal.ttft_s, "tbt_s": refusal.tbt_s, "retry_after_s": refusal.retry_after_s}
        self.write(REFUSAL, {**asked._asdict(), "limit": limit, **expected, "prices": self._told(prices)})

    def taken(
        self,
        asked: AskedPrompt,
        cached: int,
        by: str,
        reason: str,
        choice: PromptChoice | None,
        prices: Sequence[PromptChoice],
        seat: Seat,
    ) -> None:
        """``by`` whom it is computed, behind ``cached`` tokens: a prefill worker, or INLINE. ``choice``: of the
        Conductor at its arrival, None where nobody asked; ``prices``: of all ways then.
        """
        said = {**asked._asdict(), "cached": cached, "by": by, "reason": reason}
        foreseen = self._price(choice) if choice else {}
        self.write(CHOICE, {**said, **foreseen, "prices": self._told(prices), **self._seat(seat)})

    def _seat(self, seat: Seat) -> Said:
        said = {"batch": seat.batch, "batch_loads": list(seat.loads), "lane": seat.place.lane, "lane_reason": seat.why}
        return {**said, "memory": self._memory(seat.place), "blocks_left": list(seat.left)}

    def _memory(self, place: Place) -> list[int]:
        """The memory workers that have some of a sequence that begins at ``place``."""
        info = self.info
        if info is None:
            return []
        goes_on = info.stripe > 0 and not info.stays
        there = zip(info.lanes, info.holders, strict=True)
        return sorted({w for lanes, holders in there if goes_on or place.lane in lanes for w in holders})

    def _told(self, prices: Sequence[PromptChoice]) -> list[Said]:
        return [{"by": self.name(way.worker), "way": way.reason, **self._price(way)} for way in prices[:MOST_PRICES]]

    def _price(self, way: PromptChoice) -> Said:
        said: Said = {"prefix": way.prefix, "queue_s": way.queue_s, "prefill_s": way.prefill_s, "ttft_s": way.ttft_s}
        if way.source != NOBODY:
            said |= {"source": self.name(way.source), "moved": way.moved, "transfer_s": way.transfer_s}
        return said
