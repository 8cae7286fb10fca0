"""The texts, bytes and offsets of tokens in answers are those of the text, for six kinds of tokenizer.

Covers: lamina/server/request/prompt_processing.py, lamina/server/response/openai_logprobs.py,
lamina/server/response/openai_shapes.py, lamina/server/response/token_places.py.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import BOS, END, KINDS, USER, tokenizer_of

from lamina.engine.request import TextStream
from lamina.models.tokenizer import Detokenizer
from lamina.request import SamplingParams
from lamina.server.engine_client.messages import Delta, encode_scores
from lamina.server.journal.journal_records import AcceptedRecord
from lamina.server.request.prompt_processing import Prompt
from lamina.server.response.openai_logprobs import TokenTexts
from lamina.server.response.openai_shapes import response_shape
from lamina.server.response.rows import encode

made = cache(tokenizer_of)
ALPHABET = st.sampled_from(
    ["a", "b", "c", "o", "e", " ", "  ", "\n", "the", " cat", "\u00e9", "\u20ac", "\U0001f600", USER, END]
)
TEXTS = st.lists(ALPHABET, max_size=12).map("".join)


def answered(
    kind: str, prompt: str | list[int], ids: list[int], *, chat: bool = False, echo: bool = False, others: Any = (),
    skip: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return the choice with log-probabilities that a client gets, of a completion of ``prompt`` by ``ids``."""
    tokenizer = made(kind)
    params = SamplingParams(logprobs=len(others), skip_special_tokens=skip)
    record = AcceptedRecord(
        id="x", kind="chatcmpl" if chat else "cmpl", model="m", created=0, params=params, prompts=[], echo=echo
    )
    known = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    stream = TextStream(Detokenizer(tokenizer, known, skip_special_tokens=skip), ())
    for token in ids:
        stream.push(token, search=False)
    stream.finish(search=False)
    entries = [encode_scores([(token, -0.5, 1), *((other, -1.0, 2) for other in others)]) for token in ids]
    delta = Delta(key=0, index=0, token_ids=ids, text=stream.text, logprobs=entries, finish_reason="length")
    text = prompt if isinstance(prompt, str) and not chat else ""
    shape = response_shape(record, [Prompt(known, text)], TokenTexts(tokenizer))
    found: dict[str, Any] = json.loads(encode(shape.full_choice(0, delta)))
    return found


def bytes_of(name: str) -> bytes:
    if not name.startswith("bytes:"):
        return name.encode()
    return bytes(int(digits, 16) for digits in name.removeprefix("bytes:").split("\\x")[1:])


def split(kind: str, text: str, at: int) -> tuple[list[int], list[int]]:
    ids = made(kind)(text)["input_ids"]
    return ids[:at], ids[at:]


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, at=st.integers(1, 6), chat=st.booleans())
@settings(max_examples=60, deadline=None)
def test_texts_and_bytes_of_tokens_make_the_text(kind: str, text: str, at: int, chat: bool) -> None:
    prompt, ids = split(kind, text, at)
    tokenizer = made(kind)
    if tokenizer.decode(prompt).endswith("\ufffd") or not prompt:
        return  # the answer's first character begins in the prompt
    choice = answered(kind, prompt, ids, chat=chat)
    if chat:
        items = choice["logprobs"]["content"]
        assert b"".join(bytes(item["bytes"]) for item in items) == choice["message"]["content"].encode()
        names = [item["token"] for item in items]
    else:
        names = choice["logprobs"]["tokens"]
        assert b"".join(map(bytes_of, names)) == choice["text"].encode()
    if not any(name.startswith("bytes:") for name in names):
        assert "".join(names) == tokenizer.decode([*prompt, *ids])[len(tokenizer.decode(prompt)) :]


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, at=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_an_echo_of_token_ids_joins_with_the_answer(kind: str, text: str, at: int) -> None:
    prompt, ids = split(kind, text, at)
    choice = answered(kind, prompt, ids, echo=True)
    assert choice["text"] == made(kind).decode([*prompt, *ids])
    names, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert b"".join(map(bytes_of, names)) == choice["text"].encode()
    assert offsets == sorted(offsets)
    for name, offset in zip(names, offsets, strict=True):
        assert name.startswith("bytes:") or choice["text"].startswith(name, offset)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, answer=TEXTS, skip=st.booleans())
@settings(max_examples=60, deadline=None)
def test_offsets_of_a_clients_text_never_fall_and_cover_it(kind: str, text: str, answer: str, skip: bool) -> None:
    tokenizer = made(kind)
    prompt, ids = tokenizer(text)["input_ids"], tokenizer(answer, add_special_tokens=False)["input_ids"]
    if not text or not prompt:
        return
    choice = answered(kind, text, ids, echo=True, skip=skip)
    assert choice["text"].startswith(text)
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert offsets[-1] <= len(choice["text"])
    if ids:
        assert offsets[len(prompt)] == len(text)
    if kind not in ("normalizing", "wordpiece"):  # these change a text
        for name, offset in zip(choice["logprobs"]["tokens"][: len(prompt)], offsets, strict=False):
            assert name.startswith("bytes:") or text.startswith(name, offset) or name == BOS


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_of_a_stream_are_those_of_the_whole_answer(echo: bool) -> None:
    tokenizer, prompt = made("byte_level"), "the cat"
    known, ids = tokenizer(prompt)["input_ids"], tokenizer("sat on the mat", add_special_tokens=False)["input_ids"]
    whole = answered("byte_level", prompt, ids, echo=echo)["logprobs"]
    record = AcceptedRecord(
        id="x", kind="cmpl", model="m", created=0, params=SamplingParams(logprobs=0), prompts=[], echo=echo
    )
    shape = response_shape(record, [Prompt(known, prompt)], TokenTexts(tokenizer))
    streamed = dict[str, list[Any]]()
    for token in ids:
        delta = Delta(key=0, index=0, token_ids=[token], text="", logprobs=[encode_scores([(token, -0.5, 1)])])
        for name, values in json.loads(encode(shape.choices(0, delta)[-1]))["logprobs"].items():
            streamed.setdefault(name, []).extend(values)
    assert streamed == whole


def test_offsets_of_a_prompt_to_which_the_tokenizer_adds_a_token() -> None:
    choice = answered(
        "byte_level", "import os", made("byte_level")(" b c", add_special_tokens=False)["input_ids"], echo=True
    )
    assert choice["logprobs"]["tokens"] == [BOS, "import", " os", " b", " c"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 6, 9, 11]


def test_offsets_of_a_prompt_that_the_tokenizer_normalizes() -> None:
    choice = answered(
        "normalizing", "cafe\u0301 os", made("normalizing")(" b c", add_special_tokens=False)["input_ids"], echo=True
    )
    assert choice["logprobs"]["tokens"] == [BOS, "caf\u00e9", " os", " b", " c"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 5, 8, 10]


def test_offsets_of_a_prompt_with_special_tokens_inside() -> None:
    choice = answered("sentencepiece_with_bos", f"a{USER}b{END}", [], echo=True)
    assert choice["logprobs"]["tokens"] == [BOS, "a", USER, "b", END]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 9, 10]


def test_tokens_keep_the_space_that_is_written_as_a_mark() -> None:
    tokenizer = made("sentencepiece")
    prompt, ids = split("sentencepiece", "the cat o", 1)
    assert answered("sentencepiece", prompt, ids)["logprobs"]["tokens"] == [" cat", " o"]
    items = answered("sentencepiece", prompt, ids, chat=True)["logprobs"]["content"]
    assert [item["bytes"] for item in items] == [list(b" cat"), list(b" o")]
    assert answered("sentencepiece", [tokenizer.convert_tokens_to_ids(USER)], ids, skip=True)["logprobs"]["tokens"] == [
        "cat", " o",
    ]  # fmt: skip


def test_alternatives_that_print_alike_stay_apart() -> None:
    tokenizer = made("byte_fallback")
    o, marked, byte, open_, user = tokenizer.convert_tokens_to_ids(["o", "\u2581o", "<0x6F>", "<0xE2>", USER])
    (top,) = answered("byte_fallback", [user], [o], others=[marked, byte, open_, user])["logprobs"]["top_logprobs"]
    assert top == {"o": -0.5, " o": -1.0, f"token_id:{byte}": -1.0, "bytes:\\xe2": -1.0, USER: -1.0}
    assert next(iter(top)) == "o", "the token itself has its text"
    (top,) = answered("byte_fallback", [user], [byte], others=[o])["logprobs"]["top_logprobs"]
    assert top == {"o": -0.5, f"token_id:{o}": -1.0}


def test_bytes_that_are_a_whole_character_are_text() -> None:
    tokenizer = made("byte_level")
    ids = tokenizer("\ufffd", add_special_tokens=False)["input_ids"]
    assert len(ids) == 3, "the model's own replacement character"
    choice = answered("byte_level", [1], ids)
    assert b"".join(map(bytes_of, choice["logprobs"]["tokens"])) == "\ufffd".encode()
