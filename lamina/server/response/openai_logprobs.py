"""Log-probabilities in the formats of OpenAI's two endpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice, tee
from typing import Any

from msgspec import Raw

from lamina.models.tokenizer import TokenBytes
from lamina.request import Score
from lamina.server.engine_client.messages import Logprobs, decode_scores

from .rows import Rows
from .token_places import Place, Places, has_lost_space

SCORE_BYTES = 12  # of a log-probability as the link encodes it, at least
MIN_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have


class TokenTexts:
    """The text and the bytes of single tokens, cached."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._bytes = TokenBytes(tokenizer)
        self._known: dict[int, tuple[str, list[int]]] = {}

    def __call__(self, token: int) -> tuple[str, list[int]]:
        """Return a token's text and bytes. Bytes that are no text, a part of a character, are named ``bytes:\\xe2``."""
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def _find(self, token: int) -> tuple[str, list[int]]:
        raw = self._bytes(token)
        try:
            return raw.decode(), list(raw)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw), list(raw)


class TokenNumbers(TokenTexts):
    """Texts such as ``token_id:5`` in place of a token's text, as in vLLM: no two tokens have the same text."""

    def _find(self, token: int) -> tuple[str, list[int]]:
        text = number_of(token)
        return text, list(text.encode())


def number_of(token: int) -> str:
    """Return a token's name that no other token has."""
    return f"token_id:{token}"


def chat_logprobs(texts: TokenTexts, entries: Sequence[Raw], places: Places) -> dict[str, Any]:
    """Return the log-probabilities of a chat completion: one item for each token. Among its alternatives the token
    itself comes first, as in vLLM. If it is none of the best, it replaces the last of them.
    """

    def items() -> Iterator[dict[str, Any]]:
        for entry in map(scores_of, entries):
            ((_, piece),) = places.of([entry[0][0]])
            own, *others = (_item(texts, x) for x in _distinct(entry))
            if has_lost_space(own["token"], piece):
                own |= {"token": own["token"][1:], "bytes": own["bytes"][1:]}
            yield {**own, "top_logprobs": [own, *others][: len(entry) - 1]}

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


class Block:
    """Tokens of one completion, or of its prompt, with their log-probabilities. Each property is read once."""

    def __init__(
        self, texts: TokenTexts, tokens: Sequence[int], entries: Sequence[Raw], places: Iterator[Place]
    ) -> None:
        """An entry of None, the first token of a prompt, has no log-probability."""
        self.tokens, self.entries = tokens, entries
        self._texts = texts
        self._places, *self._again = tee(islice(places, len(tokens)), 3)

    @property
    def offsets(self) -> Iterator[int]:
        """The offsets of the tokens in the returned text."""
        return (offset for offset, _ in self._places)

    @property
    def names(self) -> Iterator[str]:
        """The texts of the tokens."""
        return (self._name(token, piece) for token, (_, piece) in zip(self.tokens, self._again[0], strict=True))

    @property
    def values(self) -> Iterator[float | None]:
        """The log-probabilities of the tokens."""
        for entry in map(decode_scores, self.entries):
            yield None if entry is None else max(entry[0][1], MIN_LOGPROB)

    @property
    def tops(self) -> Iterator[dict[str, float] | None]:
        """The best tokens at each place, with the token itself."""
        for entry, (_, piece) in zip(map(decode_scores, self.entries), self._again[1], strict=True):
            yield None if entry is None else self._top(entry, piece)

    def _top(self, entry: Logprobs, piece: str) -> dict[str, float]:
        (token, value, _), *others = _distinct(entry)
        top = {self._name(token, piece): max(value, MIN_LOGPROB)}
        for other, value, _ in others:
            name = self._texts(other)[0]
            top[number_of(other) if name in top else name] = max(value, MIN_LOGPROB)
        return top

    def _name(self, token: int, piece: str) -> str:
        name = self._texts(token)[0]
        return name[1:] if has_lost_space(name, piece) else name


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
