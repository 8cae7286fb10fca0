"""The bytes of each token, by which a grammar decides which tokens may come next. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lamina.models.tokenizer import TokenBytes
from lamina.protocol.control import Vocabulary

_MARK = 0xFF  # begins a special token for llguidance; no UTF-8 text has this byte


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the ids of the special tokens of a Hugging Face tokenizer, by their texts."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    own = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return {**dict(own), **{str(one.content): token for token, one in added.items() if one.special}}


def vocabulary_of(tokenizer: Any, size: int, end_token_ids: Sequence[int]) -> Vocabulary:
    """Return the vocabulary of a Hugging Face tokenizer for a model of ``size`` tokens. Tokens without text, and those
    that the tokenizer does not know, are empty: no grammar allows them. Raises ValueError if the model has no end
    token.
    """
    ends = sorted({token for token in end_token_ids if 0 <= token < size})
    if not ends:
        raise ValueError("structured_outputs need a model with an end token (eos_token_id in its configuration)")
    spell, known = TokenBytes(tokenizer), min(size, len(tokenizer))
    special = {token for token in (*special_tokens(tokenizer).values(), *ends) if token < size}
    tokens = [b"" if (text := spell(token))[:1] == bytes([_MARK]) else text for token in range(known)]
    tokens += [b""] * (size - known)
    for token in special:
        tokens[token] = bytes([_MARK]) + (tokens[token] or b"<%d>" % token)
    return Vocabulary(tokens=tokens, special_token_ids=sorted(special), end_token_ids=ends)
