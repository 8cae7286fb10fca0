"""Whether answers with some of the KV left out are within a budget of errors: statistics of tokens. Pure policy: no
torch, no I/O, no clock.

Of a token two things are measured against the same model with all KV: whether its most likely token is another one, and
how far the distributions lie apart (KL, in nats, clipped so that one token cannot decide). Both are bounded without
assumptions on their distribution: the rate by Clopper and Pearson (1934), the mean by the empirical Bernstein bound of
Maurer and Pontil (2009, theorem 4). Every LOOK tokens one looks again, and each look may err with a share of what all
looks together may, so it does not matter how many there will be.
"""

from __future__ import annotations

import math

from lamina.protocol.options.sparsity import ErrorBudget

LOOK = 25  # tokens from one look to the next
MOST_KL = 1.0  # nats of one token that count
RISK = 0.01  # of an alarm, ever, where the truth is at most half of the budget


class ErrorWatch:
    """Over the tokens of all sequences that keep or attend as much. Once it is over budget it stays so."""

    def __init__(self, budget: ErrorBudget) -> None:
        self._budget = budget
        self.tokens = 0
        self.different = 0  # tokens whose most likely one was another
        self._kl = self._kl_squares = 0.0
        self.over = ""  # why; empty: it is not

    @property
    def top1(self) -> float:
        """Share of tokens, as far as it was seen."""
        return self.different / max(1, self.tokens)

    @property
    def kl(self) -> float:
        """Mean in nats, clipped."""
        return self._kl / max(1, self.tokens)

    def add(self, *, different: bool, kl: float) -> bool:
        """One more token; whether it is over budget. A KL that is no number counts as the largest."""
        kl = min(max(kl, 0.0), MOST_KL) if math.isfinite(kl) else MOST_KL
        self.tokens += 1
        self.different += different
        self._kl += kl
        self._kl_squares += kl * kl
        if not self.over and self.tokens % LOOK == 0:
            self.over = self._look(self.tokens // LOOK)
        return bool(self.over)

    def _look(self, number: int) -> str:
        """An alarm takes both: more was seen than the budget allows, and half of it is not to be believed."""
        risk = RISK / (number * (number + 1)) / 2  # all looks together take all of it; half for each
        budget = self._budget
        if self.top1 > budget.top1 and chance(self.different, self.tokens, budget.top1 / 2) < risk:
            return f"{self.top1:.1%} of {self.tokens} tokens would be others, {budget.top1:.1%} may be"
        if self.kl > budget.kl and self._kl_at_least(risk) > budget.kl / 2:
            return f"{self.kl:.3f} nats of KL over {self.tokens} tokens, {budget.kl:.3f} may be"
        return ""

    def _kl_at_least(self, risk: float) -> float:
        variance = max(0.0, self._kl_squares - self.tokens * self.kl**2) / (self.tokens - 1)
        return mean_at_least(self.kl, variance, self.tokens, MOST_KL, risk)


def mean_at_least(mean: float, variance: float, count: int, most: float, risk: float) -> float:
    """What the mean of numbers in 0 .. ``most`` is at least, of which ``count`` have this mean and sample variance."""
    share = math.log(2.0 / risk)
    return mean - math.sqrt(2.0 * variance * share / count) - 7.0 * most * share / (3.0 * (count - 1))


def chance(hits: int, tries: int, rate: float) -> float:
    """Of at least so many hits, where each try is one at ``rate``. At the least rate that a risk does not refute
    (Clopper and Pearson) it is that risk.
    """
    if rate <= 0.0 or rate >= 1.0:
        return float(rate >= 1.0 or hits <= 0)
    ways = math.lgamma(tries + 1) - math.lgamma(hits + 1) - math.lgamma(tries - hits + 1)
    term = math.exp(ways + hits * math.log(rate) + (tries - hits) * math.log1p(-rate))
    total, odds = term, rate / (1.0 - rate)
    for k in range(hits, tries):
        term *= odds * (tries - k) / (k + 1)
        total += term
        if term < 1e-17 * total and k > tries * rate:
            break
    return min(1.0, total)
