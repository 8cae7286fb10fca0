"""Shadows measure whether answers with a part of the KV are within their error budget; where they are not, more KV is
kept. Pure policy: no torch, no I/O, no clock.

Of a share of completions a shadow is computed with all KV; compute workers tell how far the distributions of both are
apart. Over budget, later sequences keep or attend twice as many tokens, on the last rung all; running sequences are
computed again with all KV, behind the tokens that they have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Several

import msgspec

from lamina.kv.error_budget import ErrorWatch
from lamina.protocol.control import Drawn
from lamina.protocol.options.sparsity import ErrorBudget, SparsityOptions

from .blocks.newcomers import Batch, come_back
from .blocks.relief import Relief
from .checks import DENSE
from .sequence import Sequence, Shadow

RUNGS = 3  # budgets, each twice the one below it; behind them all KV


class ErrorState(msgspec.Struct, frozen=True, kw_only=True):
    """Errors that shadows have measured, of completions that keep or attend as much KV as new ones."""

    tokens: int
    kl: float  # nats, in the mean
    top1: float  # share of tokens whose most likely one would have been another
    budget: int  # tokens that new completions keep or attend; 0: all
    rebuilt: int  # completions that were computed again with all KV


class Shadows:
    """Of one engine, whose sequences keep or attend some of their KV."""

    def __init__(self, options: SparsityOptions, budget: ErrorBudget) -> None:
        self._options, self._budget = options, budget
        self._rung = 0
        self._credit = 1.0 - budget.shadow  # of a shadow: the first sequence has one
        self._stale = False  # whether sequences of a lower rung may run
        self.watch = ErrorWatch(budget)  # of the rung
        self.num_rebuilt = 0  # sequences that were computed again with all KV

    @property
    def tokens(self) -> int:
        """That a sequence keeps or attends which begins now; 0: all."""
        return self._options.kv_budget << self._rung if self._rung < RUNGS else 0

    @property
    def errors(self) -> ErrorState:
        watch = self.watch
        return ErrorState(
            tokens=watch.tokens, kl=watch.kl, top1=watch.top1, budget=self.tokens, rebuilt=self.num_rebuilt
        )

    def begin(self, sequence: Sequence) -> Shadow | None:
        """Have a new sequence keep or attend as many tokens as the budget. Returns its shadow, if it gets one."""
        if not self._approximates(sequence):
            return None
        if not self.tokens:
            self._keep_all(sequence)
            return None
        sequence.budget = self.tokens
        self._credit += self._budget.shadow
        if self._credit < 1.0 or sequence.held:
            return None
        self._credit -= 1.0
        shadow = Shadow(sequence)
        self._keep_all(shadow)
        return shadow

    def take(self, shadow: Shadow, drawn: Drawn) -> str:
        """What a step says of a token. What follows from it, in a line; empty: nothing."""
        if shadow.finished or drawn.apart is None or self._stale:
            return ""
        different, kl = drawn.apart
        if not self.watch.add(shadow.witness, different=different, kl=kl):
            return ""
        why, self._rung = self.watch.over, self._rung + 1
        self._stale, self.watch = True, ErrorWatch(self._budget)
        now = f"{self.tokens} tokens" if self.tokens else "all"
        return f"{why}: running completions begin anew with all KV, new ones have {now} of it in sparse layers"

    def tend(self, batches: Several[Batch], waiting: deque[Sequence], relief: Relief) -> None:
        """Between two rounds: end the shadows of sequences that go on no more, and have sequences of a lower rung begin
        anew.
        """
        if self._stale:
            self._stale = False
            for sequence in filter(self._approximates, waiting):
                if sequence.num_outputs:
                    self._rebuild(sequence)
                elif self.tokens:
                    sequence.budget, sequence.scores = self.tokens, None
                else:
                    self._keep_all(sequence)
            for batch in batches:
                for sequence in [s for s in reversed(batch.running) if self._outdated(s)]:
                    relief.preempt(batch, sequence)
                    self._rebuild(sequence)
                    come_back(waiting, sequence)
        for sequence in (*waiting, *(s for batch in batches for s in batch.running)):
            if isinstance(sequence, Shadow) and sequence.lost:
                sequence.finish("abort")

    @staticmethod
    def forget(sequences: Iterable[Sequence]) -> None:
        """Behind a loss, or where sequences are dealt out anew: shadows go on no more."""
        for sequence in sequences:
            if isinstance(sequence, Shadow):
                sequence.finish("abort")

    def _approximates(self, sequence: Sequence) -> bool:
        return sequence.sparse or (self._options.selects and not sequence.dense)

    def _outdated(self, sequence: Sequence) -> bool:
        return self._approximates(sequence) and not sequence.finished and sequence.budget != self.tokens

    def _rebuild(self, sequence: Sequence) -> None:
        self._keep_all(sequence)
        sequence.output.kv_rebuilt = True
        self.num_rebuilt += 1

    def _keep_all(self, sequence: Sequence) -> None:
        sequence.sparse, sequence.budget, sequence.scores = False, 0, None
        if self._options.selects and not sequence.dense:
            sequence.dense, sequence.salt = True, sequence.salt + DENSE
            sequence.page_keys.clear()
            sequence.part_keys.clear()
