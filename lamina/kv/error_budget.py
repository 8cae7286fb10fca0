"""Whether answers with some of the KV left out are within a budget of errors: statistics of tokens. Pure policy: no
torch, no I/O, no clock.

Of a token two things are measured against the same model with all KV: whether its most likely token is another one, and
how far the distributions lie apart (KL, in nats, clipped so that one token cannot decide). Wrong tokens come in clumps,
so the tokens of one completion are no independent witnesses, and each completion counts by its mean alone.

Somebody bets that the mean is above half of the budget: of all that he has he stakes a share on the mean of each
completion, and is paid what would be fair if the truth were half of the budget. While it is, or is less, he is n times
as rich with a chance of 1/n at most behind any completion, ever, whatever distribution there is (Ville 1939;
Waudby-Smith and Ramdas, arXiv 2010.09686). One looks in the midst of completions, too, which that does
not cover: where completions begin worse than they go on, and many begin together, alarms are more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lamina.protocol.options.sparsity import ErrorBudget

CLUMP = 24  # tokens: a completion that has shown fewer counts less
STAKES = 0.3, 0.9  # shares of what one has; half of all is bet with each, as neither pays best always
MOST_KL = 1.0  # nats of one token that count
RISK = 0.01  # of an alarm, ever, where the truth is at most half of the budget


@dataclass
class Witness:
    """A completion that has a shadow: what its tokens have shown."""

    tokens: int = 0
    different: float = 0.0  # tokens whose most likely one was another
    kl: float = 0.0  # nats, clipped


class ErrorWatch:
    """Over all sequences that keep or attend as much. Once it is over budget it stays so."""

    def __init__(self, budget: ErrorBudget) -> None:
        self._budget, self._seen = budget, Witness()
        self._top1, self._kl = Bet(budget.top1 / 2), Bet(budget.kl / 2)
        self.over = ""  # why; empty: it is not

    @property
    def tokens(self) -> int:
        """By which it was measured."""
        return self._seen.tokens

    @property
    def top1(self) -> float:
        """Share of tokens whose most likely one would have been another, as far as it was seen."""
        return self._seen.different / max(1, self.tokens)

    @property
    def kl(self) -> float:
        """Mean in nats, clipped."""
        return self._seen.kl / max(1, self.tokens)

    def add(self, by: Witness, *, different: bool, kl: float) -> bool:
        """One more token; whether it is over budget. A KL that is no number counts as the largest."""
        kl = min(max(kl, 0.0), MOST_KL) if math.isfinite(kl) else MOST_KL
        self._top1.add(by.tokens, by.different, different)
        self._kl.add(by.tokens, by.kl, kl)
        for each in (by, self._seen):
            each.tokens, each.different, each.kl = each.tokens + 1, each.different + different, each.kl + kl
        self.over = self.over or self._look()
        return bool(self.over)

    def _look(self) -> str:
        """An alarm takes both: more was seen than the budget allows, and half of it is not to be believed."""
        budget, enough = self._budget, math.log(2.0 / RISK)  # half of the risk for each
        if self.top1 > budget.top1 and self._top1.gain > enough:
            return f"{self.top1:.1%} of {self.tokens} tokens would be others, {budget.top1:.1%} may be"
        if self.kl > budget.kl and self._kl.gain > enough:
            return f"{self.kl:.3f} nats of KL over {self.tokens} tokens, {budget.kl:.3f} may be"
        return ""


class Bet:
    """That numbers in 0 .. 1, of which each completion has some, have a mean above ``mean``."""

    def __init__(self, mean: float) -> None:
        self._mean, self._gains = mean, [0.0] * len(STAKES)

    @property
    def gain(self) -> float:
        """Logarithm of how many times as rich as at first one is."""
        most = max(self._gains)
        return most + math.log(sum(math.exp(gain - most) for gain in self._gains) / len(STAKES))

    def add(self, count: int, total: float, number: float) -> None:
        """One more number of a completion that had ``count``, ``total`` together."""
        before, now = self._edge(count, total), self._edge(count + 1, total + number)
        for at, stake in enumerate(STAKES):
            self._gains[at] += math.log((1.0 + stake * now) / (1.0 + stake * before))

    def _edge(self, count: int, total: float) -> float:
        """What a completion pays for a stake of 1, or takes of it."""
        return (total - count * self._mean) / (max(count, CLUMP) * self._mean)
