"""The turns that find their KV, and where, with the product's policy in a modelled world: CachedAttention's, a tenth of
it.
"""

from __future__ import annotations

from functools import cache

import pytest

from lamina.scheduler.kv_manager.prefetch import PrefetchHints
from simulation.conversations import AHEAD, FIFO, LRU, Conversations, ConversationWorld, TierHits

LLAMA_13B = ConversationWorld(0.78, 128_000, 2_000_000, served=2.0)
IDLE = 8.0  # turns in a second, more than come


@cache
def played(policy: str, served: float = LLAMA_13B.served) -> TierHits:
    world = LLAMA_13B.scaled(0.1)
    return Conversations(ConversationWorld(**{**vars(world), "served": served * 0.1}), policy).run()


@pytest.mark.long
def test_the_experiment_is_the_papers() -> None:
    """9,000 sessions of 5.75 turns, and the first 10,000 turns are not counted."""
    idle, busy = played(LRU, IDLE), played(AHEAD)
    turns = 900 * (5.75 - 1) - 1000 * 4.75 / 5.75  # after the first ones
    assert busy.turns == pytest.approx(turns, rel=0.1)
    assert idle.waiting < 3
    assert busy.waiting > 200


@pytest.mark.long
def test_ahead_of_both_once_the_line_is_long() -> None:
    ahead, lru, fifo = (played(policy) for policy in (AHEAD, LRU, FIFO))
    assert ahead.waiting == lru.waiting == fifo.waiting, "the world is the same"
    assert ahead.hit > 1.5 * max(lru.hit, fifo.hit)


@pytest.mark.long
def test_nearly_all_hits_are_in_memory_then() -> None:
    assert played(AHEAD).in_memory_deep > 0.99
    assert played(LRU).in_memory_deep < 0.5, "the control"


@pytest.mark.long
def test_as_lru_where_nobody_waits() -> None:
    assert played(AHEAD, IDLE).hit == pytest.approx(played(LRU, IDLE).hit, abs=0.01)


@pytest.mark.long
def test_a_line_that_is_not_told_is_lru(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coming pages are ignored: that would be seen above."""
    monkeypatch.setattr(PrefetchHints, "next_ops", lambda self, waiting, find: [])
    world = LLAMA_13B.scaled(0.1)
    assert Conversations(world, AHEAD).run() == played(LRU)
