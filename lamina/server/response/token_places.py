"""The places of tokens in a returned text: the offset of each token, and its text there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lamina.models.tokenizer import Detokenizer

Place = tuple[int, str]


def has_lost_space(name: str, piece: str) -> bool:
    """Return True if a token whose text is ``name`` has the text ``piece`` at its place, without the space before it.
    Decoders drop that space at the beginning of a text.
    """
    return name.startswith(" ") and not (piece[:1].isspace() or piece.startswith("\ufffd"))


class Places:
    """The places of tokens in the text that a detokenizer makes of them."""

    def __init__(self, detokenizer: Detokenizer, start: int = 0) -> None:
        """``start``: the offset of the first token."""
        self._detokenizer = detokenizer
        self._offset = start

    def of(self, tokens: Iterable[int]) -> Iterator[Place]:
        """Yield the places of the next tokens."""
        for token in tokens:
            offset, piece = self._offset, self._detokenizer.push([token])
            self._offset += len(piece)  # before it is read: a reader that has enough does not come back
            yield offset, piece


def places_in_text(tokenizer: Any, text: str, tokens: Sequence[int]) -> Iterator[Place]:
    """Yield the places of the tokens of a client's ``text``. Those that the tokenizer has added have no text there."""
    made = _tokenized(tokenizer, text, tokens)
    own = [token for token, added in zip(tokens, made["special_tokens_mask"], strict=True) if not added]
    if "offset_mapping" in made and tokenizer.decode(own, clean_up_tokenization_spaces=False) != text:
        offsets = _offsets(text, made["offset_mapping"], made["special_tokens_mask"])
        yield from ((begin, text[begin:end]) for begin, end in pairwise([*offsets, len(text)]))
        return
    places, offset = Places(Detokenizer(tokenizer, skip_special_tokens=False)), 0
    for token, added in zip(tokens, made["special_tokens_mask"], strict=True):
        if added:
            yield offset, ""
            continue
        for begin, piece in places.of([token]):
            yield begin, piece
            offset = min(begin + len(piece), len(text))


def _tokenized(tokenizer: Any, text: str, tokens: Sequence[int]) -> Mapping[str, Any]:
    """Return the tokenizer's word on ``text``, whose tokens are ``tokens`` with or without special ones."""
    options = {"return_special_tokens_mask": True, "return_offsets_mapping": tokenizer.is_fast, "verbose": False}
    made: Mapping[str, Any] = tokenizer(text, add_special_tokens=True, **options)
    if made["input_ids"] != list(tokens):
        made = tokenizer(text, add_special_tokens=False, **options)
    return made


def _offsets(text: str, spans: Iterable[tuple[int, int]], added: Iterable[int]) -> list[int]:
    """Return where each token begins, with the spaces before it, which some tokenizers leave out of their spans."""
    offsets, last, end = list[int](), 0, 0
    for (first, stop), is_added in zip(spans, added, strict=True):
        if is_added:
            offset = end
        elif first < end:  # a part of the same character as the token before it
            offset = first
        else:
            offset = end + len(text[end:first].rstrip())
        offsets.append(last := max(last, offset))
        end = max(end, stop)
    return offsets
