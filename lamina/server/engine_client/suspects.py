"""The search for the prompt that makes engines fail. Policy: no I/O, no clock.

A prompt is guilty if an engine failed by a defect while it had this prompt alone, and an earlier engine with it failed
too. So the prompts of a failed engine, the suspects, are tried: the next engine gets them one by one, and all others
wait. A suspect is cleared once it has grown past the place where the engine failed. After all are cleared, all continue
together. If engines fail later than that, the prompts with the most failures are tried again, for longer.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

# Tokens by which each completion of a suspect must grow to be cleared. A failed engine was ahead of what its server had
# received by fewer tokens: some steps, or tenths of a second in which the server was busy.
PROOF = 16
LONG_PROOF = 128  # the same, for a prompt with more than one failure


class Suspects:
    """The suspects, by the keys of their prompts."""

    def __init__(self) -> None:
        self._failures = Counter[int]()  # prompt -> unexplained failures of engines that had it
        self._untried = deque[int]()
        self._trial: int | None = None
        self._proof = self._left = 0.0  # tokens that clear a suspect; tokens that the one on trial still needs

    @property
    def searching(self) -> bool:
        """True while a suspect is on trial."""
        return self._trial is not None

    def may_go(self, key: int) -> bool:
        """Return True if the engine may have this prompt now."""
        return self._trial in (None, key)

    def failed(self, had: Sequence[int]) -> int | None:
        """Note that an engine with these prompts has failed; the likeliest suspects come first. Returns the guilty
        prompt, or None if it is unknown; then the search begins.
        """
        self._failures.update(had)
        self._trial = None
        self._untried.clear()
        most = max(self._failures[key] for key in had)
        if most > 1 and len(had) == 1:
            self._failures.clear()  # the failures are explained
            return had[0]
        self._proof = float(PROOF if most == 1 else LONG_PROOF)
        self._untried.extend(key for key in had if self._failures[key] == most)
        self._try_next()
        return None

    def started(self) -> None:
        """Note that another engine is ready: a trial that the last one did not finish begins anew."""
        self._left = self._proof

    def grown(self, key: int, tokens: float) -> bool:
        """Note that a prompt has grown by ``tokens``, the mean of its completions. Returns True if that clears it."""
        if key != self._trial:
            return False
        self._left -= tokens
        if self._left > 0:
            return False
        self._try_next()
        return True

    def ended(self, key: int) -> bool:
        """Note that a prompt has ended or was cancelled. Returns True if it was on trial."""
        del self._failures[key]
        if key != self._trial:
            return False
        self._try_next()
        return True

    def _try_next(self) -> None:
        """Try the next open suspect; if none is left, the search is over."""
        self._trial, self._left = None, self._proof
        while self._untried and self._trial is None:
            key = self._untried.popleft()
            if key in self._failures:
                self._trial = key
