"""Memory workers' parts of the work, by what they have measured. Policy: no I/O."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


def shared_weights(rates: list[float], ranks: int) -> list[float]:
    """Of memory workers that read so many bytes a second, dealt to the ranks in turn: the same for every rank."""
    slowest = [min(rates[w - w % ranks :][:ranks]) for w in range(len(rates))]
    weights = weights_of(slowest)
    texts = [f"{w:g} ({r / 1e9:.1f} GB/s)" for w, r in zip(weights, slowest, strict=True)]
    log.info("--memory-weights measured: %s", ", ".join(texts))
    return weights


def weights_of(rates: list[float]) -> list[float]:
    """Parts of the work for memory workers that read so many bytes a second: of the fastest one's, in tenths.

    Workers that differ by less than that are alike: rates that are measured never agree exactly, and equal parts are
    the better ones where heads are shared.
    """
    return [max(0.1, round(rate / max(rates), 1)) for rate in rates]
