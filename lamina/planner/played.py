"""The deployments that a plan shows, each played by the engine's own scheduler on the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lamina.facts.report import table

from .rank import Operating, Planner, Ranking
from .replay import Replayed, replay
from .words import shortlist


class PlayedRow(NamedTuple):
    """A row of a plan: ``point`` by the closed form, ``found`` by the scheduler."""

    point: Operating
    found: Replayed

    def told(self) -> dict[str, Any]:
        """For JSON."""
        return {"devices": self.point.deployment.label, "tokens_s": self.found.tokens_s, **self.found._asdict()}


def play(planner: Planner, ranking: Ranking, rows: int, requests: int) -> list[PlayedRow]:
    """The first ``requests`` of the ranked trace. Raises ValueError for models that a replay does not know."""
    trace = ranking.trace.first(requests)

    def most(point: Operating) -> int:
        limited = not point.limit.startswith("memory")
        return max(1, round(point.batch)) if limited else 0

    return [
        PlayedRow(p, replay(planner.costs, planner.memory, p.deployment, trace, most(p)))
        for p in shortlist(ranking, rows)
    ]


def played_text(played: Sequence[PlayedRow]) -> str:
    """Both side by side; empty where nothing was played."""
    if not played:
        return ""
    head = ["played", "sequences", "tokens/s", "closed form", "TBT p50", "p99", "preempted"]
    rows = [
        [
            p.point.deployment.label, f"{p.found.batch:.1f}", f"{p.found.tokens_s:.0f}", f"{p.point.tokens_s:.0f}",
            f"{p.found.tbt_p50_s * 1e3:.1f} ms", f"{p.found.tbt_p99_s * 1e3:.1f} ms", str(p.found.preemptions),
        ]
        for p in played
    ]  # fmt: skip
    note = "  few requests never fill large deployments: play several times as many as there are sequences"
    return "\n".join(["", *table([head, *rows]), note]) + "\n"
