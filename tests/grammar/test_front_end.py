"""Structured outputs get their compiled form, or an error, within a deadline."""

from __future__ import annotations

import asyncio
import threading

import pytest

from lamina.grammar.front_end import GrammarFrontEnd
from lamina.protocol.control import Vocabulary
from lamina.request import SamplingParams, StructuredOutputsParams


def test_both_ways_fill_in_the_same(vocabulary: Vocabulary) -> None:
    made = []
    front = GrammarFrontEnd(lambda: made.append(1) or vocabulary)  # type: ignore[func-returns-value]
    asked = [SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+")) for _ in range(2)]
    front.fill(asked[0])
    asyncio.run(front.fill_async(asked[1]))
    first, second = (params.structured_outputs for params in asked)
    assert first is not None
    assert first == second
    assert first.compiled
    assert made == [1]
    plain = SamplingParams()
    front.fill(plain)
    assert plain.structured_outputs is None


def test_a_grammar_that_takes_too_long_is_refused() -> None:
    held = threading.Event()

    def never() -> Vocabulary:
        held.wait(60)
        raise ValueError

    front = GrammarFrontEnd(never, limit_s=0.05)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    try:
        with pytest.raises(ValueError, match=r"did not compile within 0.05 s"):
            front.fill(params)
        with pytest.raises(ValueError, match=r"did not compile within 0.05 s"):
            asyncio.run(front.fill_async(params))
    finally:
        held.set()
