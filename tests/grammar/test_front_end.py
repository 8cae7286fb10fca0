"""Structured outputs get their compiled form, or an error, within a deadline."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from lamina.grammar.compiler import GrammarCompiler, source_of
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


def test_many_texts_to_choose_from_are_one_choice(vocabulary: Vocabulary) -> None:
    texts = [f"{i * 7919:08}" for i in range(4000)]
    matcher = GrammarCompiler(vocabulary).compile(source_of(StructuredOutputsParams(choice=texts)))
    for count, char in enumerate(texts[1234].encode()):
        assert matcher.consume_token(vocabulary.tokens.index(bytes([char]))), count
    assert matcher.is_accepting()


def test_a_slow_grammar_keeps_no_other_and_waiting_is_not_compiling(vocabulary: Vocabulary) -> None:
    """``make`` stands for slow work: it holds the thread of the first grammar, and not the one of the second."""
    held, begun = threading.Event(), threading.Event()

    class Slow(GrammarFrontEnd):
        def compile_source(self, source: str) -> str:
            if "slow" in source:
                begun.set()
                held.wait(60)
            return super().compile_source(source)

    front = Slow(lambda: vocabulary)
    slow, fast = (SamplingParams(structured_outputs=StructuredOutputsParams(choice=[one])) for one in ("slow", "fast"))
    thread = threading.Thread(target=front.fill, args=(slow,))
    thread.start()
    try:
        assert begun.wait(60)
        asyncio.run(front.fill_async(fast))
        assert fast.structured_outputs is not None
        assert fast.structured_outputs.compiled
        assert slow.structured_outputs is not None
        assert slow.structured_outputs.compiled is None
    finally:
        held.set()
        thread.join()
    assert slow.structured_outputs.compiled


@pytest.mark.long
def test_the_library_bounds_what_a_step_may_take() -> None:
    """Counts bound it, which are the same for all ranks: the same error at the same token, each time."""
    dice, letters = random.Random(0), 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJ0123456789 "{}[]:,.-\n'
    words = {"".join(dice.choices(letters, k=dice.randrange(2, 8))).encode() for _ in range(131_000)}
    tokens = [*(bytes([i]) for i in range(256)), *sorted(words), b"\xff<end>"]
    end = len(tokens) - 1
    compiler = GrammarCompiler(Vocabulary(tokens=tokens, special_token_ids=[end], end_token_ids=[end]))
    regex = "|".join(f"(.*{chr(97 + i)}.{{{i + 10}}})" for i in range(20))
    errors = []
    for _ in range(2):
        matcher = compiler.compile(source_of(StructuredOutputsParams(regex=regex)))
        count = 0
        while not matcher.is_error() and count < 40:
            matcher.consume_token(97 + count % 20)
            matcher.compute_bitmask()
            count += 1
        errors.append((count, matcher.get_error()))
    assert errors[0] == errors[1]
    assert errors[0][0] < 40, "without a limit it goes on"


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
