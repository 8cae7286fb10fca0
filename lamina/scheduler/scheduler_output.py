"""The scheduler's output: steps, and rounds of steps. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lamina.protocol.control import SampledToken
from lamina.protocol.step_plan import StepPlan

from .sequence import Sequence


class ScheduledStep:
    """A StepPlan with its sequences: ``sequences[i]`` owns ``plan.rows[i]``.

    ``sampled_sequences``: those that sample after their last row. ``prompt_logprob_requests``: the owners of prompt
    log-probabilities, which precede the samples; the engine fills it. ``side_worker``: the one that runs the step, in
    no round; None: the compute workers. Set once it is done: ``fetch_s``, the seconds of its prefix fetch, and
    ``drawn``, the tokens of ``sampled_sequences``. ``warnings``: lines for the log.
    """

    def __init__(
        self, plan: StepPlan, parts: list[Sequence], draws: list[Sequence], side_worker: int | None = None
    ) -> None:
        self.plan = plan
        self.sequences = parts
        self.sampled_sequences = draws
        self.side_worker, self.fetch_s = side_worker, 0.0
        self.prompt_logprob_requests: list[Sequence] = []
        self.drawn: Several[SampledToken] = ()
        self.warnings: list[str] = []
        self.tokens = tokens = list[int]()
        for sequence, row in zip(parts, plan.rows, strict=True):
            if row.count == 1:  # most rows
                tokens.append(sequence.tokens[row.first] if row.first < len(sequence.tokens) else -1)
            else:
                tokens += sequence.tokens_at(row.first, row.count)

    @property
    def num_attended_pairs(self) -> int:
        """The number of pairs of a row and a token that its attention sees."""
        return sum(row.count * row.first + row.count * (row.count + 1) // 2 for row in self.plan.rows)


class TransferResult(NamedTuple):
    """The result of all transfers of a sequence.

    ``loaded_sequence``: it, after loads. ``error``: why pages are missing; ``is_fatal``: so it ends, else their tokens
    are computed.
    """

    loaded_sequence: Sequence | None
    error: str
    is_fatal: bool = False


@dataclass
class Round:
    """One step of every batch that has work."""

    unfinished_steps: set[ScheduledStep]  # those that have not completed
    num_batches: int  # batches over which the sequences are distributed
    rows: int
    prompt_rows: int  # rows after which nothing is sampled
    tokens: int  # tokens that attention reads
    is_decode_only: bool  # every row decodes, and another round was in flight before it


class ReadingBatch(Protocol):
    """A batch with the load of its attention."""

    @property
    def load(self) -> int: ...


def round_of(steps: list[ScheduledStep], batches: Several[ReadingBatch], *, follows: bool) -> Round:
    """Returns the round of ``steps``. ``follows``: another round is in flight."""
    rows, drawn = sum(s.plan.num_rows for s in steps), sum(len(s.sampled_sequences) for s in steps)
    steady = follows and rows > 0 and all(len(s.sampled_sequences) == s.plan.num_rows for s in steps)
    return Round(set(steps), len(batches), rows, rows - drawn, sum(b.load for b in batches), steady)


def commit(plan: StepPlan, picked: Mapping[Sequence, int]) -> ScheduledStep:
    """Returns the step of ``plan``, and counts its rows as computed in each sequence."""
    # All before any: a sequence that is decoded again for reference has the placeholders of the one that it follows.
    draws = [s for s, count in picked.items() if s.num_computed_tokens + count == s.num_tokens_with_placeholders]
    step = ScheduledStep(plan, list(picked), draws)
    for sequence, count in picked.items():
        sequence.num_computed_tokens += count
    for sequence in draws:
        sequence.num_output_placeholders += 1
    return step
