"""Whether answers with some of the KV left out are within their budget of errors: statistics of tokens. Pure policy: no
torch, no I/O, no clock.

Of a token two things are measured against the same model with all KV: whether its most likely token is another one, and
how far the distributions lie apart (KL, in nats, clipped so that one token cannot decide). Wrong tokens come in clumps,
so the tokens of one completion are no independent witnesses, and each completion counts by its mean alone.

Somebody bets that the mean is above half of the budget: of all that he has he stakes a share on the mean of each
completion, in the order of their first tokens, and is paid what would be fair if the truth were half of the budget.
While it is, or is less, he is ever n times as rich with a chance of 1/n at most, whatever distribution there is (Ville
1939; Waudby-Smith and Ramdas, arXiv 2010.09686). A completion that goes on counts by the least that it can come to, as
if all of its tokens to come were right. So a look in the midst sees no more than one at the ends would, and it matters
neither where in completions wrong tokens lie, nor how long they are, nor how many go on at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from lamina.config.sparsity import ErrorBudget

MIN_TOKENS = 24  # tokens: a completion that has shown fewer counts less
BET_FRACTIONS = 0.3, 0.9  # shares of what one has; half of all is bet with each, as neither pays best always
MAX_KL = 1.0  # nats of one token that count
FALSE_ALARM_RATE = 0.01  # of an alarm, ever, where the truth is at most half of the budget


@dataclass(eq=False)
class CompletionErrors:
    """A completion that has a shadow: what its tokens have shown."""

    max_tokens: int  # tokens that it will have shown, at most
    tokens: int = 0
    num_top1_changed: float = 0.0  # positions with another most likely token
    kl: float = 0.0  # nats, clipped

    def end(self, *, whole: bool) -> None:
        """No more tokens come. One that has not seen its completion's end counts for nothing."""
        if not whole:
            self.tokens, self.num_top1_changed, self.kl = 0, 0.0, 0.0
        self.max_tokens = self.tokens


class ErrorMonitor:
    """Over all sequences that keep or attend as much. Once it is over budget it stays so."""

    def __init__(self, budget: ErrorBudget) -> None:
        self._budget, self._seen = budget, CompletionErrors(0)
        self._witnesses = deque[
            CompletionErrors
        ]()  # in the order of their first tokens, from the first one that goes on
        self._top1, self._kl = SequentialTest(budget.top1 / 2), SequentialTest(budget.kl / 2)
        self.alarm = ""  # why; empty: it is not

    @property
    def tokens(self) -> int:
        """By which it was measured."""
        return self._seen.tokens

    @property
    def top1(self) -> float:
        """Share of tokens whose most likely one would have been another, as far as it was seen."""
        return self._seen.num_top1_changed / max(1, self.tokens)

    @property
    def kl(self) -> float:
        """Mean in nats, clipped."""
        return self._seen.kl / max(1, self.tokens)

    def add(self, completion: CompletionErrors, *, top1_changed: bool, kl: float) -> bool:
        """One more token; whether it is over budget. A KL that is no number counts as the largest."""
        kl = min(max(kl, 0.0), MAX_KL) if math.isfinite(kl) else MAX_KL
        if not completion.tokens:
            self._witnesses.append(completion)
        for each in (completion, self._seen):
            each.tokens, each.num_top1_changed, each.kl = (
                each.tokens + 1,
                each.num_top1_changed + top1_changed,
                each.kl + kl,
            )
        while self._witnesses and self._witnesses[0].tokens >= self._witnesses[0].max_tokens:
            ended = self._witnesses.popleft()
            self._top1.add_completion(ended.max_tokens, ended.num_top1_changed)
            self._kl.add_completion(ended.max_tokens, ended.kl)
        self.alarm = self.alarm or self._look()
        return bool(self.alarm)

    def _look(self) -> str:
        """An alarm takes both: more was seen than the budget allows, and half of it is not to be believed."""
        budget, enough = self._budget, math.log(2.0 / FALSE_ALARM_RATE)  # half of the risk for each
        if (
            self.top1 > budget.top1
            and self._top1.log_wealth((w.max_tokens, w.num_top1_changed) for w in self._witnesses) > enough
        ):
            return f"{self.top1:.1%} of {self.tokens} tokens would be others, {budget.top1:.1%} may be"
        if self.kl > budget.kl and self._kl.log_wealth((w.max_tokens, w.kl) for w in self._witnesses) > enough:
            return f"{self.kl:.3f} nats of KL over {self.tokens} tokens, {budget.kl:.3f} may be"
        return ""


class SequentialTest:
    """That numbers in 0 .. 1, of which each completion has some, have a mean above ``mean``."""

    def __init__(self, mean: float) -> None:
        self._mean, self._gains = mean, [0.0] * len(BET_FRACTIONS)

    def add_completion(self, count: int, total: float) -> None:
        """A completion has shown ``count`` numbers, ``total`` together."""
        self._gains = self._behind(self._gains, count, total)

    def log_wealth(self, others: Iterable[tuple[int, float]]) -> float:
        """Logarithm of how many times as rich as at first one is, behind as many of ``others``, in their order, as pay
        best; of each the ``count`` and the ``total`` that it will have shown.
        """
        gains, best = self._gains, _together(self._gains)
        for count, total in others:
            gains = self._behind(gains, count, total)
            best = max(best, _together(gains))
        return best

    def _behind(self, gains: list[float], count: int, total: float) -> list[float]:
        """By stake, once one more completion is paid for."""
        edge = (total - count * self._mean) / (max(count, MIN_TOKENS) * self._mean)  # of a stake of 1
        return [gain + math.log(1.0 + stake * edge) for gain, stake in zip(gains, BET_FRACTIONS, strict=True)]


def _together(gains: list[float]) -> float:
    most = max(gains)
    return most + math.log(sum(math.exp(gain - most) for gain in gains) / len(BET_FRACTIONS))
