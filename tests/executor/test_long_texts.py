"""Long texts are tokenized in a process of their own: with the same ids, and within bounds of time and memory.

Covers: lamina/executor/bounded_process.py, lamina/executor/tokenizer_process.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from forked import launch
from running import alive, eventually
from tokenizer_kinds import KINDS, TEXT, USER, tokenizer_of

from lamina.executor import long_texts
from lamina.executor.long_texts import LongTexts
from lamina.models.chat_template import RenderedChat
from lamina.models.tokenizer import token_ids

TEXTS = [*TEXT, f"{USER}the cat{USER}", "", " ", "\n\n x  y", "caf\u00e9 \U0001f600" * 50, "the cat sat " * 2000]
SOON_S = 60.0
NAME = "--timeouts tokenizer="


@pytest.fixture(scope="module", autouse=True)
def forks() -> None:
    """The processes are forked, as those of a server are: they start at once."""
    launch("--version")


def ids_of(texts: LongTexts, text: str, *, special: bool = True) -> list[int]:
    (ids,) = texts.encode([text], special=special)
    return list(ids)


@pytest.fixture
def texts() -> Iterator[LongTexts]:
    made = LongTexts(tokenizer_of("byte_level"), SOON_S, NAME)
    yield made
    made.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_are_those_of_hugging_faces_tokenizer(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    for split in (False, True):
        tokenizer.split_special_tokens = split
        made = LongTexts(tokenizer, SOON_S, NAME)
        try:
            for special in (False, True):
                expected = [tokenizer(text, add_special_tokens=special)["input_ids"] for text in TEXTS]
                assert [list(ids) for ids in made.encode(TEXTS, special=special)] == expected
            assert made.pid is not None
        finally:
            made.close()


def test_a_text_that_takes_too_long_is_refused_and_the_next_one_is_tokenized() -> None:
    made = LongTexts(tokenizer_of("byte_level"), 0.5, NAME)
    try:
        ids_of(made, "the cat")
        first = made.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        why = (
            "^the prompt has taken 0.5 s to tokenize and was given up: shorten it, send token ids, or raise --timeouts"
        )
        with pytest.raises(ValueError, match=why):
            made.encode(["the cat"], special=False)
        assert eventually(lambda: not alive([first]), SOON_S)
        assert eventually(lambda: tokenizes(made), SOON_S)
        assert made.pid != first
    finally:
        made.close()


def tokenizes(made: LongTexts) -> bool:
    try:
        return ids_of(made, "the cat") == token_ids(tokenizer_of("byte_level"), "the cat")
    except ValueError:  # on a busy machine
        return False


def test_a_text_that_takes_too_much_memory_is_refused(texts: LongTexts, monkeypatch: pytest.MonkeyPatch) -> None:
    ids_of(texts, "the cat")
    monkeypatch.setattr(long_texts, "TOKENIZING", 0)
    monkeypatch.setattr(long_texts, "SPARE", 1 << 20)
    with pytest.raises(ValueError, match="tokenizer"):
        texts.encode(["the cat sat " * 1_000_000], special=False)
    monkeypatch.undo()
    assert ids_of(texts, "the cat")


def test_a_process_that_is_ended_is_replaced(texts: LongTexts) -> None:
    expected = ids_of(texts, "the cat")
    assert texts.pid is not None
    os.kill(texts.pid, signal.SIGKILL)
    assert eventually(lambda: not alive([texts.pid or 0]), SOON_S)
    assert ids_of(texts, "the cat") == expected


def test_a_conversation_in_a_template_is_a_text_like_any_other(texts: LongTexts) -> None:
    assert ids_of(texts, RenderedChat("the cat")) == ids_of(texts, "the cat")


def test_half_of_a_pair_is_refused_in_the_words_of_short_texts(texts: LongTexts) -> None:
    with pytest.raises(ValueError, match=r"^prompt 'ab\\ud800' is not UTF-8 at character 2$"):
        texts.encode(["ab\ud800"], special=False)


def test_a_tokenizer_with_code_of_its_own_runs_here() -> None:
    class Own(type(tokenizer_of("byte_level"))):  # type: ignore[misc]
        def _encode_plus(self, text: Any, **options: Any) -> Any:
            return {"input_ids": [7]}

    own = Own(tokenizer_object=KINDS["byte_level"]())
    made = LongTexts(own, SOON_S, NAME)
    assert ids_of(made, "the cat") == [7]
    assert made.pid is None


def test_none_starts_after_the_end(texts: LongTexts) -> None:
    texts.close()
    with pytest.raises(ValueError, match="^this model is closed: it tokenizes no more prompts$"):
        texts.encode(["x"], special=False)
