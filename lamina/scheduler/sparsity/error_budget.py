"""Monitors the errors of sparse attention against a budget, by a sequential test. Pure policy: no torch, no I/O.

Each token is compared with the same model on all KV. Two errors are measured: if the most likely token differs, and the
KL divergence (nats, clipped so that one token cannot decide). Errors within a completion are correlated, so each
completion counts by its mean alone.

The test is a betting martingale (Ville 1939; Waudby-Smith and Ramdas, arXiv 2010.09686). It bets that the mean error is
above half of the budget. It stakes a share of its wealth on the mean of each completion, in the order of their first
tokens. The payoff is fair if the true mean is half of the budget. If the true mean is at most that, the wealth ever
grows n-fold with a probability of at most 1/n, whatever the distribution is.

An unfinished completion counts as if all of its later tokens were right. So a test at any time claims no more than one
at the end. It does not matter where in completions errors lie, how long completions are, or how many run at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from lamina.config.sparsity import ErrorBudget

MIN_TOKENS = 24  # a completion with fewer tokens counts less
BET_FRACTIONS = 0.3, 0.9  # shares of the wealth; half of the wealth is bet with each, since neither is always best
MAX_KL = 1.0  # nats; a token's KL is clipped to this
FALSE_ALARM_RATE = 0.01  # the probability of an alarm, ever, if the true mean is at most half of the budget


@dataclass(eq=False)
class CompletionErrors:
    """The measured errors of a completion that is also decoded with all KV."""

    max_tokens: int  # the most tokens that will be measured
    tokens: int = 0
    num_top1_changed: float = 0.0  # positions with another most likely token
    kl: float = 0.0  # nats, clipped

    def end(self, *, whole: bool) -> None:
        """Record that no more tokens follow. ``whole``: the completion was measured to its end; else it is ignored."""
        if not whole:
            self.tokens, self.num_top1_changed, self.kl = 0, 0.0, 0.0
        self.max_tokens = self.tokens


class ErrorMonitor:
    """The test over all sequences with one sparsity. An alarm stays."""

    def __init__(self, budget: ErrorBudget) -> None:
        self._budget, self._seen = budget, CompletionErrors(0)
        self._open = deque[CompletionErrors]()  # by their first tokens, from the first one that is unfinished
        self._top1, self._kl = SequentialTest(budget.top1 / 2), SequentialTest(budget.kl / 2)
        self.alarm = ""  # the reason; "": no alarm

    @property
    def tokens(self) -> int:
        """The number of measured tokens."""
        return self._seen.tokens

    @property
    def top1(self) -> float:
        """The share of measured tokens whose most likely token differs."""
        return self._seen.num_top1_changed / max(1, self.tokens)

    @property
    def kl(self) -> float:
        """The mean KL in nats, clipped."""
        return self._seen.kl / max(1, self.tokens)

    def add(self, completion: CompletionErrors, *, top1_changed: bool, kl: float) -> bool:
        """Add a token's errors. Returns True if there is an alarm. A KL that is not finite counts as the largest."""
        kl = min(max(kl, 0.0), MAX_KL) if math.isfinite(kl) else MAX_KL
        if not completion.tokens:
            self._open.append(completion)
        for each in (completion, self._seen):
            each.tokens, each.num_top1_changed, each.kl = (
                each.tokens + 1,
                each.num_top1_changed + top1_changed,
                each.kl + kl,
            )
        while self._open and self._open[0].tokens >= self._open[0].max_tokens:
            ended = self._open.popleft()
            self._top1.add_completion(ended.max_tokens, ended.num_top1_changed)
            self._kl.add_completion(ended.max_tokens, ended.kl)
        self.alarm = self.alarm or self._check()
        return bool(self.alarm)

    def _check(self) -> str:
        """The reason of an alarm: a measured mean exceeds the budget, and the test rejects half of the budget."""
        budget, enough = self._budget, math.log(2.0 / FALSE_ALARM_RATE)  # half of the rate for each test
        if (
            self.top1 > budget.top1
            and self._top1.log_wealth((c.max_tokens, c.num_top1_changed) for c in self._open) > enough
        ):
            return f"{self.top1:.1%} of {self.tokens} tokens would be others, {budget.top1:.1%} may be"
        if self.kl > budget.kl and self._kl.log_wealth((c.max_tokens, c.kl) for c in self._open) > enough:
            return f"{self.kl:.3f} nats of KL over {self.tokens} tokens, {budget.kl:.3f} may be"
        return ""


class SequentialTest:
    """Tests if numbers in [0, 1], grouped by completions, have a mean above ``mean``."""

    def __init__(self, mean: float) -> None:
        self._mean, self._gains = mean, [0.0] * len(BET_FRACTIONS)

    def add_completion(self, count: int, total: float) -> None:
        """Add a finished completion with ``count`` numbers, whose sum is ``total``."""
        self._gains = self._after(self._gains, count, total)

    def log_wealth(self, others: Iterable[tuple[int, float]]) -> float:
        """The logarithm of the wealth over the initial wealth.

        ``others``: the final count and the sum so far of unfinished completions, in order. The best of their prefixes
        counts.
        """
        gains, best = self._gains, _log_mean(self._gains)
        for count, total in others:
            gains = self._after(gains, count, total)
            best = max(best, _log_mean(gains))
        return best

    def _after(self, gains: list[float], count: int, total: float) -> list[float]:
        """The log wealth of each bet fraction after one more completion."""
        edge = (total - count * self._mean) / (max(count, MIN_TOKENS) * self._mean)  # the gain of a stake of 1
        return [gain + math.log(1.0 + stake * edge) for gain, stake in zip(gains, BET_FRACTIONS, strict=True)]


def _log_mean(gains: list[float]) -> float:
    most = max(gains)
    return most + math.log(sum(math.exp(gain - most) for gain in gains) / len(BET_FRACTIONS))
