"""Log-probabilities in the formats of OpenAI's two endpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from msgspec import Raw

from lamina.models.tokenizer import Detokenizer
from lamina.request import Score
from lamina.server.engine_client.messages import Logprobs, decode_scores

from .rows import Rows

SCORE_BYTES = 12  # of a log-probability as the link encodes it, at least
MIN_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have


def _printable() -> dict[str, int]:
    """Return character -> byte of byte-level vocabularies: printable bytes are themselves, the rest begin at 256."""
    keep = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in keep}
    rest = [b for b in range(256) if b not in set(keep)]
    return table | {chr(256 + i): b for i, b in enumerate(rest)}


_BYTES = _printable()


class TokenTexts:
    """The text and the bytes of single tokens, cached."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def __call__(self, token: int) -> tuple[str, list[int]]:
        """Return a token's text and bytes. A part of a character has the text ``bytes:\\xe2``, so different tokens have
        different texts.
        """
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def _find(self, token: int) -> tuple[str, list[int]]:
        text = str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))
        if "\ufffd" not in text:
            return text, list(text.encode())
        piece = str(self.tokenizer.convert_ids_to_tokens(token))
        if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
            raw = [int(match[1], 16)]
        elif all(c in _BYTES for c in piece):
            raw = [_BYTES[c] for c in piece]
        else:
            return text, list(text.encode())
        return "bytes:" + "".join(f"\\x{b:02x}" for b in raw), raw


class TokenNumbers(TokenTexts):
    """Texts such as ``token_id:5`` in place of a token's text, as in vLLM: no two tokens have the same text."""

    def _find(self, token: int) -> tuple[str, list[int]]:
        text = f"token_id:{token}"
        return text, list(text.encode())


def chat_logprobs(texts: TokenTexts, entries: Sequence[Raw]) -> dict[str, Any]:
    """Return the log-probabilities of a chat completion: one item for each token. Among its alternatives the token
    itself comes first, as in vLLM. If it is none of the best, it replaces the last of them.
    """

    def items() -> Iterator[dict[str, Any]]:
        for entry in map(scores_of, entries):
            top = _distinct(entry)[: len(entry) - 1]
            yield {**_item(texts, entry[0]), "top_logprobs": [_item(texts, x) for x in top]}

    return {"content": Rows(items(), len(entries), _units(entries))}


def prompt_logprobs_of(texts: TokenTexts, entries: Sequence[Raw]) -> Rows:
    """Return ``prompt_logprobs`` as vLLM does. Each prompt token has a map from token id to log-probability, rank and
    text: the token itself first, then the best.
    """

    def items() -> Iterator[dict[str, Any] | None]:
        for entry in map(decode_scores, entries):
            yield None if entry is None else _ranked(texts, entry)

    return Rows(items(), len(entries), _units(entries))


def scores_of(raw: Raw) -> Logprobs:
    """Decode the log-probabilities of a generated token."""
    entry = decode_scores(raw)
    if entry is None:
        raise ValueError("the engine has sent a token without its log-probability")
    return entry


def _units(entries: Sequence[Raw]) -> int:
    """Return about how many units one of ``entries`` has; the first one of a prompt has none."""
    return 1 + memoryview(entries[-1]).nbytes // SCORE_BYTES if entries else 1


def _ranked(texts: TokenTexts, entry: Logprobs) -> dict[str, Any]:
    return {
        str(token): {"logprob": max(value, MIN_LOGPROB), "rank": rank, "decoded_token": texts(token)[0]}
        for token, value, rank in _distinct(entry)
    }


def _distinct(entry: Logprobs) -> Logprobs:
    """Return the token itself, then the best without it."""
    return [entry[0], *(x for x in entry[1:] if x[0] != entry[0][0])]


def _item(texts: TokenTexts, score: Score) -> dict[str, Any]:
    text, raw = texts(score[0])
    return {"token": text, "logprob": max(score[1], MIN_LOGPROB), "bytes": raw}


class CompletionLogprobs:
    """The log-probabilities of one completion as parallel lists, with the offset of each token in the returned text."""

    def __init__(self, texts: TokenTexts, prompt: list[int], start: int, *, skip_special_tokens: bool) -> None:
        """``prompt``: what the tokens continue; ``start``: the offset of the first token."""
        self._texts = texts
        self._pieces = Detokenizer(texts.tokenizer, prompt, skip_special_tokens=skip_special_tokens)
        self._offset = start

    def block(self, tokens: Sequence[int], entries: Sequence[Raw]) -> Block:
        """Return the next tokens. An entry of None, the first token of a prompt, has no log-probability."""
        return Block(self._texts, tokens, entries, self._offsets(tokens))

    def _offsets(self, tokens: Sequence[int]) -> Iterator[int]:
        for token in tokens:
            yield self._offset
            self._offset += len(self._pieces.push([token]))


class Block(NamedTuple):
    """Tokens of one completion, or of its prompt. ``offsets``: an iterator, read once."""

    texts: TokenTexts
    tokens: Sequence[int]
    entries: Sequence[Raw]
    offsets: Iterator[int]

    @property
    def names(self) -> Iterator[str]:
        """The texts of the tokens."""
        return (self.texts(token)[0] for token in self.tokens)

    @property
    def values(self) -> Iterator[float | None]:
        """The log-probabilities of the tokens."""
        for entry in map(decode_scores, self.entries):
            yield None if entry is None else max(entry[0][1], MIN_LOGPROB)

    @property
    def tops(self) -> Iterator[dict[str, float] | None]:
        """The best tokens at each place, with the token itself."""
        for entry in map(decode_scores, self.entries):
            yield None if entry is None else self._top(entry)

    def _top(self, entry: Logprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, value, _ in entry:
            top.setdefault(self.texts(token)[0], max(value, MIN_LOGPROB))
        return top


def joined_logprobs(blocks: Sequence[Block]) -> dict[str, Any]:
    """Return the blocks of one completion as the parallel lists of OpenAI's reply."""
    count = sum(len(block.tokens) for block in blocks)
    alternatives = max((_units(block.entries) for block in blocks), default=1)
    return {
        "text_offset": Rows(chain.from_iterable(b.offsets for b in blocks), count),
        "tokens": Rows(chain.from_iterable(b.names for b in blocks), count),
        "token_logprobs": Rows(chain.from_iterable(b.values for b in blocks), count, alternatives),
        "top_logprobs": Rows(chain.from_iterable(b.tops for b in blocks), count, alternatives),
    }
