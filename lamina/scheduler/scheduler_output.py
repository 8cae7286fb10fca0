"""Steps, and rounds of them, as the scheduler returns them. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lamina.protocol.control import SampledToken
from lamina.protocol.step_plan import StepPlan

from .sequence import Sequence


class ScheduledStep:
    """A StepPlan and the sequences of its rows: ``sequences[i]`` owns ``plan.rows[i]``; ``sampled_sequences`` sample
    after their last row. ``prompt_logprob_requests``: owners of the log-probabilities of prompt tokens that come before
    the draws; the engine fills it. ``prefill_worker``: the one that runs it; None: the compute workers do. Once it is
    done it has ``fetch_s``, the seconds of its prefix fetch, and ``drawn``, the tokens of ``sampled_sequences``.
    ``warnings``: lines for the log.
    """

    def __init__(
        self, plan: StepPlan, parts: list[Sequence], draws: list[Sequence], prefill_worker: int | None = None
    ) -> None:
        self.plan = plan
        self.sequences = parts
        self.sampled_sequences = draws
        self.prefill_worker, self.fetch_s = prefill_worker, 0.0
        self.prompt_logprob_requests: list[Sequence] = []
        self.drawn: Several[SampledToken] = ()
        self.warnings: list[str] = []
        self.tokens = list[int]()
        for sequence, row in zip(parts, plan.rows, strict=True):
            self.tokens += sequence.tokens_at(row.first, row.count)

    @property
    def num_attended_pairs(self) -> int:
        """The number of pairs of a row and a token that its attention sees."""
        return sum(row.count * row.first + row.count * (row.count + 1) // 2 for row in self.plan.rows)


class TransferResult(NamedTuple):
    """All transfers of a sequence have ended. ``loaded_sequence``: the sequence, where they were loads; else
    ``saved_sequence`` has its number. ``error``: why not all pages are where they were to be.
    """

    loaded_sequence: Sequence | None
    saved_sequence: int
    error: str


@dataclass
class Round:
    """One step of every batch that has something to do."""

    unfinished_steps: set[ScheduledStep]  # not done yet
    num_batches: int  # that the sequences were dealt to
    rows: int
    prompt_rows: int  # after which nothing is drawn
    tokens: int  # that its attention reads
    is_decode_only: bool  # every row continues a sequence that decodes, and another round was under way already


class ReadingBatch(Protocol):
    """A batch, by what its attention reads."""

    @property
    def load(self) -> int: ...


def round_of(steps: list[ScheduledStep], batches: Several[ReadingBatch], *, follows: bool) -> Round:
    """The round of these steps. ``follows``: whether another one is under way."""
    rows, drawn = sum(s.plan.num_rows for s in steps), sum(len(s.sampled_sequences) for s in steps)
    steady = follows and rows > 0 and all(len(s.sampled_sequences) == s.plan.num_rows for s in steps)
    return Round(set(steps), len(batches), rows, rows - drawn, sum(b.load for b in batches), steady)


def commit(plan: StepPlan, picked: Mapping[Sequence, int]) -> ScheduledStep:
    """The step of ``plan``, which is sent off: its sequences have so many rows more under way."""
    draws = [s for s, count in picked.items() if s.num_computed_tokens + count == s.num_tokens_with_placeholders]
    step = ScheduledStep(plan, list(picked), draws)
    for sequence, count in picked.items():
        sequence.num_computed_tokens += count
    for sequence in draws:
        sequence.num_output_placeholders += 1
    return step
