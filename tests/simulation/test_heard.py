"""The outputs that a server has received when their engine dies are what another engine needs: readers get the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from lamina.request import RequestOutput
from lamina.scheduler.sessions.cache_options import DEFAULT_CACHE_OPTIONS
from lamina.server.engine_client.engine_restarts import PromptProgress
from lamina.server.engine_client.live_request import ActivePrompt
from lamina.server.engine_client.messages import AddPrompt, Delta
from simulation.model import Letters
from simulation.run import EnginePlay, with_seeds
from simulation.scenario import Scenario, scenario

SEEDS, PARTS = 48, 2
DEATHS = 3  # of engines, one after the other


def sent(message: Any) -> Any:
    """Returns a message as it comes out at the other end of a link."""
    return msgspec.msgpack.Decoder(type(message)).decode(msgspec.msgpack.Encoder().encode(message))


@dataclass
class Reader:
    """The outputs that a client has of a prompt, and what the server keeps for the next engine."""

    hearing: PromptProgress
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    scores: dict[int, list[Any]] = field(default_factory=dict)
    ends: dict[int, Any] = field(default_factory=dict)
    prompt_scores: Any = None
    ended: bool = False

    def take(self, delta: Delta) -> None:
        assert delta.index not in self.ends, "something behind the end"
        self.tokens[delta.index] = self.tokens.get(delta.index, []) + delta.token_ids
        self.texts[delta.index] = self.texts.get(delta.index, "") + delta.text
        self.scores[delta.index] = self.scores.get(delta.index, []) + (delta.logprobs or [])
        if delta.finish_reason is not None:
            self.ends[delta.index] = delta.finish_reason, delta.stop_reason
        self.prompt_scores = delta.prompt_logprobs or self.prompt_scores
        self.ended = delta.times is not None
        if not self.ended:
            self.hearing.take(delta)

    @property
    def answer(self) -> tuple[Any, ...]:
        """Returns all that it was sent."""
        return self.tokens, self.texts, self.scores, self.ends, self.prompt_scores


class ServedPlay(EnginePlay):
    """An engine whose outputs go to a server as deltas. ``readers``: by place, as an engine before has left them."""

    def __init__(self, of: Scenario, readers: dict[int, Reader], left: Sequence[Any] | None = None) -> None:
        super().__init__(of)
        self.readers, self._lives = readers, dict[int, ActivePrompt]()
        if left is not None:
            self.left = list(left)
        for place, reader in readers.items():
            if not reader.ended:
                add: AddPrompt = sent(reader.hearing.request_message(place))
                request = self._engine.add(
                    add.prompt, add.params, make_detokenizer=Letters, resume_from=add.resumed, accepted=add.accepted
                )
                self._lives[request], self.asked[request] = ActivePrompt(add, request), (place, of.asks[place])

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            place, ask = self.asked[output.request_id]
            if place not in self.readers:
                self.readers[place] = Reader(PromptProgress(list(ask.prompt), ask.sampling, DEFAULT_CACHE_OPTIONS))
            if output.request_id not in self._lives:
                self._lives[output.request_id] = ActivePrompt(
                    self.readers[place].hearing.request_message(place), output.request_id
                )
            for delta in self._lives[output.request_id].deltas(output):
                self.readers[place].take(sent(delta))


def answers(of: Scenario, deaths: Sequence[int]) -> tuple[dict[int, tuple[Any, ...]], int]:
    """Returns all answers that no client cancels, where engines die after so many steps; and how many had begun by
    then.
    """
    readers, left, begun = dict[int, Reader](), None, 0
    for steps in deaths:
        served = ServedPlay(of, readers, left)
        served.take_steps(steps)
        begun += sum(bool(r.tokens) and not r.ended for r in readers.values())
        waiting = [place for place, _ in served.asked.values() if place not in readers]  # the server has them
        left = [*((place, of.asks[place]) for place in waiting), *served.left]
    ServedPlay(of, readers, left).run()
    return {place: r.answer for place, r in readers.items() if of.asks[place].cancel_s is None}, begun


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_readers_get_what_one_engine_would_have_told(part: int) -> None:
    begun = 0
    for seed in range(part, SEEDS, PARTS):
        of, rng = with_seeds(scenario(seed)), random.Random(seed)
        calm, _ = answers(of, [])
        told, count = answers(of, [rng.randint(1, 30) for _ in range(rng.randint(1, DEATHS))])
        assert told == calm, seed
        begun += count
    assert begun > SEEDS / PARTS / 2, "few had begun when it died"


@pytest.mark.parametrize("name", ["token_ids", "num_chars", "is_finished"])
def test_what_was_not_heard_is_missed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = PromptProgress.request_message
    nothing: dict[str, Any] = {"token_ids": [], "num_chars": 0, "is_finished": False}

    def forgetful(self: PromptProgress, key: int) -> AddPrompt:
        add = right(self, key)
        told = [msgspec.convert({**msgspec.to_builtins(one), name: nothing[name]}, type(one)) for one in add.resumed]
        return msgspec.structs.replace(add, resumed=told)

    monkeypatch.setattr(PromptProgress, "request_message", forgetful)
    with pytest.raises((AssertionError, ValueError)):
        test_readers_get_what_one_engine_would_have_told(0)
