"""The request that makes engines fail is found, is refused for ten minutes, and costs two engines; others go on."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.server.engine_client.suspects import LONG_PROOF, PROOF, Suspects

MOST_TICKS = 100_000


@dataclass
class Prompt:
    """``fatal``: the token at which it makes an engine fail; None: it does not."""

    length: int
    fatal: int | None = None
    comes: int = 0
    tokens: int = 0


@dataclass
class World:
    """Engines, each of which computes a token of every prompt that it has in a tick, and loses the last ``lost`` that
    it has not sent when it fails.
    """

    prompts: dict[int, Prompt]
    order: random.Random
    lost: int = 0
    suspects: Suspects = field(default_factory=Suspects)
    failures: int = 0
    guilty: list[int] = field(default_factory=list)
    most_at_once: int = 0

    def run(self) -> None:
        tick = 0
        while self.prompts:
            tick += 1
            assert tick < MOST_TICKS, "nothing comes to its end"
            there = [k for k, p in self.prompts.items() if p.comes <= tick and self.suspects.may_go(k)]
            self.most_at_once = max(self.most_at_once, len(there))
            self.order.shuffle(there)
            if any(self.prompts[key].tokens == self.prompts[key].fatal for key in there):
                self._fail(there)
                continue
            for key in there:
                self._grow(key)

    def _grow(self, key: int) -> None:
        prompt = self.prompts[key]
        prompt.tokens += 1
        if prompt.tokens >= prompt.length:
            del self.prompts[key]
            self.suspects.ended(key)
        else:
            self.suspects.grown(key, 1)

    def _fail(self, there: list[int]) -> None:
        self.failures += 1
        for key in there:
            self.prompts[key].tokens = max(0, self.prompts[key].tokens - self.lost)
        if (guilty := self.suspects.failed(there)) is not None:
            self.guilty.append(guilty)
            assert self.prompts.pop(guilty).fatal is not None, "nobody is refused who does nothing"
            self.suspects.ended(guilty)
        self.suspects.started()


PROMPTS = st.builds(
    lambda length, fatal, comes: Prompt(length, fatal if fatal is not None and fatal < length else None, comes),
    st.integers(1, 60), st.none() | st.none() | st.integers(0, 59), st.integers(0, 40),
)  # fmt: skip


@given(st.lists(PROMPTS, min_size=1, max_size=12), st.integers(0, 4), st.randoms(use_true_random=False))
def test_each_prompt_that_makes_engines_fail_costs_two_at_most_and_no_other_one_is_refused(
    prompts: list[Prompt], lost: int, order: random.Random
) -> None:
    world = World(dict(enumerate(prompts)), order, lost)
    fatal = {key for key, prompt in world.prompts.items() if prompt.fatal is not None}
    world.run()
    assert {*world.guilty} == fatal
    assert world.failures <= 2 * len(fatal)


def test_one_that_fails_later_than_its_trial_is_found_once_engines_had_it_alone() -> None:
    """It counts from its start in each engine: none of its trials reaches the place, but for the long one."""
    suspects = Suspects()
    assert suspects.failed([1, 2, 3]) is None
    for key in (1, 2, 3):
        assert suspects.grown(key, PROOF)
    assert not suspects.searching
    assert suspects.failed([4, 3, 1]) is None
    assert [key for key in range(5) if suspects.may_go(key)] == [3], "there at both failures, unlike 4"
    assert not suspects.grown(3, LONG_PROOF - 1)
    assert suspects.failed([3]) == 3
    assert not suspects.searching


def test_others_wait_for_a_trial_and_go_on_behind_it() -> None:
    suspects = Suspects()
    assert suspects.may_go(1)
    assert suspects.failed([1, 2]) is None
    assert [key for key in (1, 2, 3) if suspects.may_go(key)] == [1]
    assert not suspects.grown(2, 100), "what it says of others is old"
    assert not suspects.grown(1, PROOF - 1)
    suspects.started()
    assert not suspects.grown(1, PROOF - 1), "another engine, that nobody blames: the trial begins anew"
    assert suspects.grown(1, 1)
    assert [key for key in (1, 2, 3) if suspects.may_go(key)] == [2]
    assert suspects.ended(2)
    assert all(map(suspects.may_go, (1, 2, 3)))


def test_one_that_has_gone_is_not_tried() -> None:
    suspects = Suspects()
    suspects.failed([1, 2, 3])
    assert not suspects.ended(2)
    assert suspects.ended(1)
    assert [key for key in (1, 2, 3) if suspects.may_go(key)] == [3]


@pytest.mark.parametrize("together", [True, False])
def test_a_failure_is_explained_by_the_guilty_one_and_counts_no_more(together: bool) -> None:
    suspects = Suspects()
    suspects.failed([1, 2])
    assert suspects.failed([1]) == 1
    suspects.ended(1)
    assert suspects.failed([2, 3] if together else [2]) is None, "there at two failures, of which one is another's"
