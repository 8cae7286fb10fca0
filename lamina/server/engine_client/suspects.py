"""The search for the prompt that makes engines fail. Policy: no I/O, no clock.

A prompt is guilty that an engine had alone as it failed by a defect, and that another engine had which failed before.
So the prompts of a failed engine, the suspects, are tried: the next engine gets them one by one, and all others wait. A
suspect is cleared once it has grown past the place where the engine failed. Once all are cleared, all go on together.

Where engines fail later than that, the prompts are tried again that were there at the most failures, for longer.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

# Tokens by which each completion of a suspect grows until it is cleared. A failed engine was ahead of what its server
# has heard by fewer: some steps, or those of some tenths of a second in which the server was busy.
PROOF = 16
LONG_PROOF = 128  # the same, of one that was there at more failures than one


class Suspects:
    """Prompts by their keys."""

    def __init__(self) -> None:
        self._failures = Counter[int]()  # prompt -> failures, not explained yet, of engines that had it
        self._untried = deque[int]()
        self._trial: int | None = None
        self._proof = self._left = 0.0  # tokens that clear a suspect; that the one on trial still needs

    @property
    def searching(self) -> bool:
        """Whether a suspect is on trial."""
        return self._trial is not None

    def may_go(self, key: int) -> bool:
        """Whether the engine may have this prompt now."""
        return self._trial in (None, key)

    def failed(self, had: Sequence[int]) -> int | None:
        """An engine has failed that had these prompts, the likeliest suspects first. Returns the guilty one; None where
        it is not known yet: then the search begins.
        """
        self._failures.update(had)
        self._trial = None
        self._untried.clear()
        most = max(self._failures[key] for key in had)
        if most > 1 and len(had) == 1:
            self._failures.clear()  # they are explained
            return had[0]
        self._proof = float(PROOF if most == 1 else LONG_PROOF)
        self._untried.extend(key for key in had if self._failures[key] == most)
        self._try_next()
        return None

    def started(self) -> None:
        """Another engine is there: a trial that the last one could not end begins anew."""
        self._left = self._proof

    def grown(self, key: int, tokens: float) -> bool:
        """A prompt has grown by so many tokens, in the mean of its completions. Whether it is cleared by that."""
        if key != self._trial:
            return False
        self._left -= tokens
        if self._left > 0:
            return False
        self._try_next()
        return True

    def ended(self, key: int) -> bool:
        """A prompt has come to its end, or nobody wants it any more. Whether it was on trial."""
        del self._failures[key]
        if key != self._trial:
            return False
        self._try_next()
        return True

    def _try_next(self) -> None:
        """Whoever is next and still open; where nobody is left, the search is over."""
        self._trial, self._left = None, self._proof
        while self._untried and self._trial is None:
            key = self._untried.popleft()
            if key in self._failures:
                self._trial = key
