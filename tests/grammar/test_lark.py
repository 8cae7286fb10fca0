"""The parts around a structure, before it and in its place, with marks that are special tokens or plain text.

Covers: lamina/grammar/lark.py.
"""

from __future__ import annotations

import re

import pytest

from lamina.grammar.compiler import GrammarCompiler, source_of
from lamina.grammar.lark import Specials, one_of, sequence, up_to
from lamina.protocol.control import Vocabulary
from lamina.request import StructuredOutputsParams

MARKS = {"<end>": 256, "</think>": 257, "[CALL]": 258, "<think>": 259}
SPECIAL = Vocabulary(
    tokens=[*(bytes([i]) for i in range(256)), *(b"\xff" + mark.encode() for mark in MARKS)],
    special_token_ids=[*MARKS.values()],
    end_token_ids=[256],
)
PLAIN = Vocabulary(tokens=[*SPECIAL.tokens[:257], b"x", b"y", b"z"], special_token_ids=[256], end_token_ids=[256])


def tokens_of(text: str, specials: Specials) -> list[int]:
    parts = re.split("|".join(f"({re.escape(mark)})" for mark in specials), text)
    return [token for part in parts if part for token in ([specials[part]] if part in specials else part.encode())]


@pytest.mark.parametrize("vocabulary", [SPECIAL, PLAIN], ids=["special", "plain"])
@pytest.mark.parametrize("optional", [True, False])
def test_around_a_structure(vocabulary: Vocabulary, optional: bool) -> None:
    specials = MARKS if vocabulary is SPECIAL else {"<end>": 256}
    begin = "<think>" if optional else ""
    before = "before: think?\nlead: think?\n" if optional else "before: think\nlead: think\n"
    before += up_to("think", ["</think>"], specials, begins=[begin] if begin else [])
    asked = StructuredOutputsParams(
        choice=["ja", "nein"], before=before, instead=one_of("calls", ["[CALL]", "(/"], specials)
    )
    matcher = GrammarCompiler(vocabulary).compile(source_of(asked))
    cases = {
        "ja": optional,
        f"{begin}a\n/b</think>nein": True,
        f"{begin}</think>[CALL]what/\never": True,
        f"{begin}</think>(/x[CALL]y": True,
        f"{begin}</think>x": False,
        f"{begin}</think>jan": False,
        "[CALL]": optional,
        "(": optional,
    }
    for text, is_right in cases.items():
        matcher.reset()
        tokens = tokens_of(text, specials)
        whole = matcher.validate_tokens(tokens) == len(tokens)
        if not optional and not is_right:
            assert not (whole and matcher.consume_tokens(tokens) and matcher.is_accepting()), text
        else:
            assert whole == is_right, text


def test_a_longer_mark_comes_first() -> None:
    assert sequence('a<b>"c', {"<b": 5, "<b>": 6}) == '"a" <[6]> "\\"c"'
