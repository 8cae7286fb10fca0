"""Stop strings match special tokens by their texts, whether these are in the text or not.

Covers: lamina/engine/request.py.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from engine_api import make_engine, run
from fake_executor import Letters, continuation
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import END, KINDS, USER, tokenizer_of

from lamina.engine.request import TextStream
from lamina.models.tokenizer import Detokenizer
from lamina.request import SamplingParams

made = cache(tokenizer_of)


def stopped(kind: str, ids: list[int], *stops: str, include: bool = False, skip: bool = True) -> tuple[str, str | None]:
    """Return the text of ``ids`` and the stop string that ended it. No reader ever saw more than that text."""
    stream = TextStream(Detokenizer(made(kind), [], skip_special_tokens=skip), stops, include_stop=include)
    seen = list[str]()
    stop = None
    for token in ids:
        stop = stream.push(token, search=True)
        seen.append(stream.text)
        if stop is not None:
            break
    else:
        stop = stream.finish(search=True)
    assert all(stream.text.startswith(text) for text in seen)
    return stream.text, stop


def ids_of(kind: str, text: str) -> list[int]:
    return list(made(kind)(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_token_matches_by_its_text(kind: str) -> None:
    ids = ids_of(kind, f"the cat{USER}o")
    assert stopped(kind, ids, USER) == ("the cat", USER)
    assert stopped(kind, ids, "x", f"cat{USER}") in [("the ", f"cat{USER}"), ("the", f"cat{USER}")]
    assert stopped(kind, ids, USER, include=True) == (f"the cat{USER}", USER)
    assert stopped(kind, ids, USER, skip=False)[1] == USER


def test_a_special_token_is_no_text_for_other_stop_strings() -> None:
    ids = ids_of("byte_level", f"the cat{END}o{USER}")
    assert stopped("byte_level", ids, "user", USER) == ("the cato", USER)
    assert stopped("byte_level", ids, "|", "s>") == ("the cato", None)


def test_what_may_begin_such_a_stop_string_is_held_back() -> None:
    stop = f" cat{USER}"
    stream = TextStream(Detokenizer(made("byte_level"), []), [stop])
    texts = list[str]()
    for token in ids_of("byte_level", f"the cat{END} cat{USER}"):
        found = stream.push(token, search=True)
        texts.append(stream.text)
    assert texts == ["the", "the", "the", "the cat", "the cat"]
    assert found == stop


def test_the_text_of_a_special_token_in_ordinary_tokens_matches_too() -> None:
    letters = [ids_of("byte_level", c)[0] for c in USER]
    assert stopped("byte_level", [*ids_of("byte_level", "the"), *letters], USER) == ("the", USER)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "wordpiece"])  # which prints a space before
@given(
    parts=st.lists(st.sampled_from(["a", "b", " ", "\u20ac", USER, END]), max_size=10), stop=st.text("ab ", max_size=2)
)
@settings(max_examples=40, deadline=None)
def test_the_text_ends_where_the_printed_text_has_the_stop_string(kind: str, parts: list[str], stop: str) -> None:
    """``stop``: what comes before the special token in the stop string."""
    tokenizer, ids = made(kind), ids_of(kind, "".join(parts))
    decode: Any = lambda some, skip: tokenizer.decode(some, skip_special_tokens=skip)  # noqa: E731
    printed = decode(ids, False)
    text, found = stopped(kind, ids, stop + USER)
    if USER not in ids_of(kind, printed) and f"{stop}{USER}" not in printed:
        assert (text, found) == (decode(ids, True), None)
        return
    assert found == stop + USER
    assert decode(ids, True).startswith(text)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_in_the_text_if_that_is_asked_for(include: bool) -> None:
    tokens = continuation([1, 2, 3], 5)
    engine = make_engine()
    params = SamplingParams(max_tokens=9, stop_token_ids=tokens[4:], include_stop_str_in_output=include)
    request = engine.add([1, 2, 3], params, make_detokenizer=Letters)
    (output,) = run(engine)[request].outputs
    shown = tokens.index(tokens[4]) + include
    assert output.text == Letters().push(tokens[:shown])
    assert (output.finish_reason, output.stop_reason) == ("stop", tokens[4])
