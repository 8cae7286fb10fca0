"""How many batches take turns, found by trying: a pure function of the rounds that were done, and when.

What n costs and gains depends on the devices, the model and the load in ways that no formula knows beforehand: two
batches read the weights twice as often as one, and keep both pools busy. So each n serves some rounds, and the one
whose rounds are the shortest stays until the load has changed.
"""

from __future__ import annotations

from statistics import median

from .steps import Round

WARM_ROUNDS = 2  # behind a change, until all batches are under way again
TRIAL_ROUNDS = 7  # whose median counts
TIE = 0.03  # a gain too small for more batches, which wait longer for each token
SAME_LOAD = 1.3  # a trial begins anew when rows or tokens change by more than this factor
NEW_LOAD = 2.0  # a decision holds until then
ROW_TOKENS = 128  # added for each row, so that the first tokens of short texts are no new load


class Tuner:
    """``n``: the batches that are wanted now. ``reason``: what was chosen last and why, in one line."""

    def __init__(self, most: int) -> None:
        self.n = 1
        self.reason = "1 batch: nothing has been measured yet"
        self._most = most
        self._load = (0, 0)  # of the trials or of the choice
        self._left: list[int] = []  # numbers still to try
        self._seconds: list[float] = []  # of rounds with n
        self._found: dict[int, float] = {}  # n -> median seconds of a round
        self._last = 0.0

    def observe(self, done: Round, now: float) -> bool:
        """A round was done at time ``now``; whether a choice has been made by that."""
        took, self._last = now - self._last, now
        if not done.steady or done.num_batches != self.n:
            return False
        if self._differs(done, SAME_LOAD if self._left else NEW_LOAD):
            self._restart(done)
            return False
        if not self._left:
            return False
        self._seconds.append(took)
        if len(self._seconds) < WARM_ROUNDS + TRIAL_ROUNDS:
            return False
        self._found[self.n] = median(self._seconds[WARM_ROUNDS:])
        self._left.pop(0)
        if self._left:
            self._try(self._left[0])
            return False
        return self._choose(done)

    def _differs(self, done: Round, factor: float) -> bool:
        pairs = zip(self._load, _load_of(done), strict=True)
        return any(now > before * factor or before > now * factor for before, now in pairs)

    def _restart(self, done: Round) -> None:
        self._load, self._found = _load_of(done), {}
        self._left = list(range(1, min(self._most, done.rows) + 1))
        self._try(1)

    def _try(self, n: int) -> None:
        self.n, self._seconds = n, []

    def _choose(self, done: Round) -> bool:
        best = min(self._found.values())
        self.n = next(n for n, seconds in sorted(self._found.items()) if seconds <= best * (1 + TIE))
        self._load = _load_of(done)
        measured = ", ".join(f"{seconds * 1e3:.1f} ms with {n}" for n, seconds in sorted(self._found.items()))
        sequences = f"{done.rows} sequence" + "s" * (done.rows != 1)
        self.reason = f"{self.n} batch{'es' * (self.n > 1)}: a token of {sequences} takes {measured}"
        return True


def _load_of(done: Round) -> tuple[int, int]:
    return done.rows, done.tokens + done.rows * ROW_TOKENS
