"""Synthetic tasks that only attention over the distance can solve: key-value recall and copying of random tokens.

A pair is stated in one line of a text and asked for in a later one; ordinary text fills the distance:

    # remember socket = thread header
    ...
    # recall socket = thread header

Keys and values are random words, so that nothing but the earlier line predicts the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float32]

VALUE_WORDS = 2
_ANSWER_WEIGHT = 4.0


@dataclass(frozen=True)
class RecallPrompt:
    """One question: the model is right if it continues ``tokens`` greedily with ``answer`` (VALUE_WORDS tokens)."""

    tokens: list[int]
    answer: list[int]
    asked: int  # tokens of the question, at the end of ``tokens``


class RecallTask:
    """Builds recall sequences in the vocabulary of one tokenizer; keys and values are words of a single token."""

    def __init__(self, tokenizer: Any) -> None:
        words = [index for token, index in tokenizer.get_vocab().items() if re.fullmatch("\u0120[a-z]{3,}", token)]
        self._words = np.array(sorted(words), dtype=np.int64)

        def encode(text: str) -> list[int]:
            return [int(index) for index in tokenizer.encode(text, add_special_tokens=False)]

        self._remember, self._recall = encode("\n# remember"), encode("\n# recall")
        self._equals, self._newline = encode(" ="), encode("\n")

    def _pairs(self, rng: np.random.Generator, count: int) -> list[tuple[int, list[int]]]:
        keys = rng.choice(self._words, count, replace=False)
        return [(int(key), [int(word) for word in rng.choice(self._words, VALUE_WORDS)]) for key in keys]

    def _question(self, key: int) -> list[int]:
        return [*self._recall, key, *self._equals]

    def _statement(self, key: int, value: list[int]) -> list[int]:
        return [*self._remember, key, *self._equals, *value, *self._newline]

    def prompts(self, filler: Ids, distance: int, *, count: int, pairs: int = 4, seed: int = 0) -> list[RecallPrompt]:
        """Questions about one of ``pairs`` pairs, asked ``distance`` tokens of ``filler`` after the last of them.

        ``filler``: token ids of ordinary text, longer than ``distance``; each prompt takes a random cut of it.
        """
        if len(filler) <= distance:
            raise ValueError(f"filler has {len(filler)} tokens; distance={distance} needs more text than that")
        rng = np.random.default_rng(seed)
        prompts = []
        for _ in range(count):
            stated = self._pairs(rng, pairs)
            start = int(rng.integers(len(filler) - distance))
            tokens = [token for key, value in stated for token in self._statement(key, value)]
            tokens += filler[start : start + distance].tolist()
            key, value = stated[int(rng.integers(pairs))]
            question = self._question(key)
            prompts.append(RecallPrompt(tokens + question, value, len(question)))
        return prompts

    def training_sequence(self, rng: np.random.Generator, filler: Ids) -> tuple[Ids, Weights]:
        """A sequence as long as ``filler`` with statements, mostly early, and questions spread after them.

        Returns the token ids and, for each, the weight of its prediction in the loss. Answers weigh most. Stated values
        and keys cannot be predicted, and weigh nothing. Neither do markers, so that the model does not write them
        unasked.
        """
        length = len(filler)
        events: list[tuple[float, list[int], list[float]]] = []
        for key, value in self._pairs(rng, int(rng.integers(4, 5 + length // 64))):
            stated = float(rng.beta(1, 4))
            events.append((stated, *self._weighted(self._remember, key, value, 0.0)))
            for _ in range(int(rng.integers(1, 3))):
                asked = stated + (1 - stated) * float(rng.uniform())
                events.append((asked, *self._weighted(self._recall, key, value, _ANSWER_WEIGHT)))
        return _spread(events, filler)

    def _weighted(self, start: list[int], key: int, value: list[int], weight: float) -> tuple[list[int], list[float]]:
        tokens = [*start, key, *self._equals, *value, *self._newline]
        unasked = len(start) + 1 + len(self._equals)
        return tokens, [0.0] * unasked + [weight] * len(value) + [0.1] * len(self._newline)


def _spread(events: list[tuple[float, list[int], list[float]]], filler: Ids) -> tuple[Ids, Weights]:
    """Place events, each at a fraction of the sequence, between pieces of the filler; the length is the filler's."""
    events = sorted(events, key=lambda event: event[0])
    room = max(len(filler) - sum(len(tokens) for _, tokens, _ in events), 0)
    ids: list[int] = []
    weights: list[float] = []
    used = 0
    for place, tokens, token_weights in events:
        upto = max(used, int(place * room))
        ids += [*filler[used:upto].tolist(), *tokens]
        weights += [1.0] * (upto - used) + token_weights
        used = upto
    ids += filler[used:].tolist()
    weights += [1.0] * (len(filler) - used)
    return np.array(ids[: len(filler)]), np.array(weights[: len(filler)], dtype=np.float32)


def copy_sequence(rng: np.random.Generator, length: int, vocabulary: int) -> tuple[Ids, Weights]:
    """Random tokens, repeated until ``length``; every token that repeats one a period earlier is to be predicted."""
    period = int(rng.integers(min(16, length // 2), length // 2 + 1))
    ids = np.resize(rng.integers(0, vocabulary, period), length)
    weights = np.where(np.arange(length) > period, 0.5, 0.0).astype(np.float32)
    return ids, weights
