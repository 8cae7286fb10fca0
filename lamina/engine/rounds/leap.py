"""Rounds that are all alike, skipped: nobody comes, ends or lacks KV blocks. Pure policy: no torch, no I/O, no clock.

A simulator has most of its rounds from here, in which every running sequence takes one more token. It must know the
token that a row draws, and when each round is done; both pools and the order of their messages do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import NamedTuple

import msgspec

from lamina.engine.blocks.ledger import Ledger
from lamina.engine.blocks.newcomers import Batch
from lamina.engine.blocks.room import Room
from lamina.engine.sequence import Sequence
from lamina.protocol.plan import Rows, StepPlan

from .steps import ScheduledStep


class Standing(NamedTuple):
    """One round is in flight, of which nothing is done. ``steps``: of it, by batch. ``head``: the first who waits."""

    batches: Several[Batch]
    steps: Several[ScheduledStep]
    head: Sequence | None


class Leaps:
    """The leaps of one scheduler over rounds that are alike. Where some layers have a window, blocks are given back on
    the way: no round is skipped.
    """

    def __init__(self, ledger: Ledger, room: Room, max_num_seqs: int) -> None:
        self._ledger, self._room, self._max_num_seqs = ledger, room, max_num_seqs

    def longest(self, at: Standing, token: int) -> int:
        """The number of rounds behind the one in flight that are like it, if each row draws ``token``."""
        if any(self._ledger.windows) or not _decodes(at, token) or not self._stands(at):
            return 0
        rounds = min(s.max_len - len(s.tokens) - 1 for step in at.steps for s in step.parts)
        return self._with_blocks(at.steps, rounds) if rounds > 0 else 0

    def skip(self, steps: Several[ScheduledStep], rounds: int, token: int) -> None:
        """Make of the round in flight, whose steps these are, the one that comes so many rounds later. The routes of
        its plans are left as they are.
        """
        ends = self._take_blocks([s.plan for s in steps], rounds)
        for plan in (s.plan for s in steps):
            behind = [(r, r.first + rounds - ends[r.sequence]) for r in plan.rows]
            late = [Rows(r.sequence, ends[r.sequence], count, r.place) for r, count in behind if count > 0]
            if late:
                self._ledger.apply(_moved(plan, rounds - 1, late))
        for step in steps:
            later = [Rows(r.sequence, r.first + rounds, 1, r.place) for r in step.plan.rows]
            step.plan, step.tokens = _moved(step.plan, rounds, later), [-1] * len(later)
            self._ledger.apply(step.plan)
            for sequence in step.parts:
                sequence.tokens += [token] * rounds
                sequence.num_scheduled += rounds

    def _stands(self, at: Standing) -> bool:
        """Whether nobody who waits can come in while all others decode: they only take blocks."""
        running = [s for b in at.batches for s in b.running]
        if at.head is None or len(running) >= self._max_num_seqs:
            return True
        if at.head.finished:  # it leaves the line with the next round
            return False
        if self._room.lacks(at.head):
            return True
        left = self._room.left(running, dict.fromkeys(running, 1))
        return self._room.fit(at.head, None, left, (), running) is None

    def _with_blocks(self, steps: Several[ScheduledStep], rounds: int) -> int:
        """As many of ``rounds`` as there are free blocks for."""
        rows, free = [row for step in steps for row in step.plan.rows], self._ledger.free_blocks

        def fits(count: int) -> bool:
            more = [Rows(r.sequence, r.first + 1, count, r.place) for r in rows]
            return all(n <= f for n, f in zip(self._ledger.blocks_needed(more), free, strict=True))

        low, high = 0, rounds  # ``low`` fit
        if fits(high):
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _take_blocks(self, plans: Several[StepPlan], rounds: int) -> dict[int, int]:
        """Take the blocks that rows of all rounds but the last begin, in the order of these rows; returns where each
        sequence ends then.
        """
        size = self._ledger.block_size
        ends = {row.sequence: row.first + 1 for plan in plans for row in plan.rows}
        begun: dict[tuple[int, int], list[Rows]] = {}  # by round and plan
        for number, plan in enumerate(plans):
            for row in plan.rows:
                for later in range(-row.first % size or size, rounds, size):
                    begun.setdefault((later, number), []).append(row)
        for (later, number), rows in sorted(begun.items(), key=lambda x: x[0]):
            taken = [Rows(r.sequence, ends[r.sequence], r.first + later + 1 - ends[r.sequence], r.place) for r in rows]
            self._ledger.apply(_moved(plans[number], later, taken))
            ends |= {r.sequence: r.first + later + 1 for r in rows}
        return ends


def _decodes(at: Standing, token: int) -> bool:
    """Whether every running sequence has one row in flight and one in the next round, and no plan does more."""
    with_rows = [b.running for b in at.batches if b.running]
    if [s.parts for s in at.steps] != with_rows:
        return False
    return all(
        not step.plan.ops and step.draws == step.parts and all(_goes_on(s, token) for s in step.parts)
        for step in at.steps
    )


def _goes_on(sequence: Sequence, token: int) -> bool:
    """Whether it has a row in flight, behind its first token, and ``token`` changes nothing for it."""
    plain = not sequence.held and not sequence.params.adjusts_logits and sequence.output.logprobs is None
    alone = not sequence.num_prefilling and sequence.prefill_worker is None and not sequence.num_loading
    draws = sequence.num_drawing == 1 and sequence.num_scheduled == len(sequence.tokens) > len(sequence.prompt)
    return draws and plain and alone and not sequence.finished and token not in sequence.stop_tokens


def _moved(plan: StepPlan, rounds: int, rows: list[Rows]) -> StepPlan:
    return msgspec.structs.replace(plan, step=plan.step + rounds, rows=rows)
