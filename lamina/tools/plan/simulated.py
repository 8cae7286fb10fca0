"""The deployments of a plan, each run by the engine's own scheduler on the same requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from lamina.facts.report import table
from lamina.tools.request_traces import spread_arrivals
from lamina.utils.progress import OnProgress

from .plan_report import dollars_text, shortlist
from .ranking import OperatingPoint, Planner, Ranking
from .replay import NotSimulatableError, ReplayResult, replay
from .tables import dollars_of

MIN_REQUESTS_PER_SEQUENCE = (
    4  # least requests for each decoding sequence, so that beginning and end of a run weigh little
)
_SEED = 0  # for the place of a request in a tick of the trace's clock


class SimulatedRow(NamedTuple):
    """A row of a plan: ``point`` by the closed form, ``run`` by the scheduler, or ``why_not`` it was not run."""

    point: OperatingPoint
    run: ReplayResult | None
    why_not: str = ""
    refused: float = 0.0  # as in OperatingPoint, of the requests of the run

    @property
    def with_simulated_numbers(self) -> OperatingPoint | None:
        """The row with the numbers of its run; None if there is none."""
        if self.run is None:
            return None
        tokens_s = self.run.tokens_s
        dollars = self.point.dollars_at(dollars_of(self.point.hour, tokens_s), self.refused)
        return self.point._replace(batch=self.run.batch, tbt_s=self.run.tbt_p50_s, tokens_s=tokens_s, dollars=dollars)

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain data."""
        label = self.point.deployment.label
        if self.run is None or self.with_simulated_numbers is None:
            return {"devices": label, "why_not": self.why_not}
        money = {"hour": self.point.hour, "dollars": self.with_simulated_numbers.dollars}
        shares = {"tokens_s": self.run.tokens_s, "refused": self.refused}
        return {"devices": label, **shares, **money, **self.run._asdict()}


def filled_rows(played: Sequence[SimulatedRow]) -> list[OperatingPoint]:
    """Return the runs with at least MIN_REQUESTS_PER_SEQUENCE requests for each sequence, as rows. Shorter runs never
    fill their deployments, so they prove nothing. Empty if any run is that short.
    """
    runs = [
        (row.with_simulated_numbers, row.run)
        for row in played
        if row.with_simulated_numbers is not None and row.run is not None
    ]
    return (
        [point for point, _ in runs]
        if all(run.requests >= MIN_REQUESTS_PER_SEQUENCE * run.batch for _, run in runs)
        else []
    )


def _quiet(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


def simulate_rows(
    planner: Planner,
    ranking: Ranking,
    rows: int,
    requests: int,
    rate: float | None = None,
    on_progress: OnProgress = _quiet,
) -> list[SimulatedRow]:
    """Run ``requests`` of the ranked trace, each deployment those that it holds. They come as soon as they fit, and the
    trace is repeated; or the first ones come so many a second (0: as they came).
    """
    trace, outcomes = ranking.trace.repeated(requests), list[SimulatedRow]()
    if rate is not None:
        trace = ranking.trace.first(requests)
        trace = spread_arrivals(trace.at_rate(rate) if rate else trace, _SEED)
    for point in shortlist(ranking, rows):
        most = 0 if point.limit.startswith("memory") else max(1, round(point.batch))
        tell = partial(on_progress, f"playing {point.deployment.label}")
        paced, own = rate is not None, trace.within(point.room)
        refused = 1 - own.num_answer_tokens / trace.num_answer_tokens
        try:
            played = replay(
                planner.costs,
                planner.memory,
                point.deployment,
                own,
                most,
                paced=paced,
                chunk=planner.chunk,
                on_progress=tell,
            )
        except NotSimulatableError as error:
            outcomes.append(SimulatedRow(point, None, str(error)))
        else:
            outcomes.append(SimulatedRow(point, played, refused=refused))
    return outcomes


def simulated_text(played: Sequence[SimulatedRow], rate: float | None = None) -> str:
    """Return both results next to each other; "" if nothing was run. ``rate``: see ``simulate_rows``."""
    if not played:
        return ""
    more = ["closed form"] if rate is None else ["first token p50", "p99"]
    rows = [["played", "sequences", "tokens/s", "$/Mtoken", "TBT p50", "p99", "preempted", *more]]
    for row in played:
        point, run, known = row.point, row.run, row.with_simulated_numbers
        if run is not None and known is not None:
            seen = _ms(run.first_p50_s, run.first_p99_s) if rate is not None else [f"{point.tokens_s:.0f} tokens/s"]
            counts = [f"{run.batch:.1f}", f"{run.tokens_s:.0f}", dollars_text(known.dollars)]
            times = _ms(run.tbt_p50_s, run.tbt_p99_s)
            rows.append([point.deployment.label, *counts, *times, str(run.preemptions), *seen])
    lines = ["", *table(rows)] if len(rows) > 1 else [""]
    for why in dict.fromkeys(p.why_not for p in played if p.run is None):
        labels = [p.point.deployment.label for p in played if p.why_not == why]
        all_of_them = 1 < len(labels) == len(played)
        lines.append(f"  no row was played: {why}" if all_of_them else f"  not played: {'; '.join(labels)}: {why}")
    if rate is None:
        if not filled_rows(played):
            most = MIN_REQUESTS_PER_SEQUENCE * max(math.ceil(p.point.batch) for p in played)
            each = f"{MIN_REQUESTS_PER_SEQUENCE} requests for each sequence"
            lines.append(f"  runs decide the verdict if they have {each}: --simulate {most}")
    else:
        came = f"{rate:g} requests a second" if rate else "requests come as in the trace"
        lines.append(f"  {came}, spread within ticks of its clock; a prompt elsewhere takes no time")
    return "\n".join(lines) + "\n"


def _ms(*seconds: float) -> list[str]:
    return [f"{s * 1e3:.1f} ms" for s in seconds]
