"""Tokenizes long texts in a process of their own, which a text can neither keep nor fill."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from lamina.models.tokenizer import check_encoding, token_ids

from .bounded_process import BoundedProcess, EndedWords
from .tokenizer_process import FROM_TOKENIZER, Encode, Encoded, EncodeFailed, UseTokenizer

TOKENIZING = 256  # bytes for a byte of text, while it is tokenized: by the resident memory of a process
SPARE = 64 << 20  # bytes of memory for texts of any length


class LongTexts:
    """Owns the tokenizer process, which starts with the first text. Safe from any thread; texts are tokenized one after
    another.
    """

    def __init__(self, tokenizer: Any, timeout_s: float, timeout_name: str) -> None:
        """``timeout_s``: of one text; ``timeout_name``: how the user sets it."""
        self._tokenizer, self._timeout_s = tokenizer, timeout_s
        words = EndedWords(
            what="the prompt's tokenizer",
            too_long=f"the prompt has taken {timeout_s:g} s to tokenize and was given up: shorten it, send token ids, "
            f"or raise {timeout_name}",
            too_large="the prompt takes too much memory to tokenize: shorten it, or send token ids",
            unsendable="prompt is not UTF-8",
            closed="this model is closed: it tokenizes no more prompts",
        )
        self._process = BoundedProcess("tokenizer", FROM_TOKENIZER, words)
        self._is_plain = _is_plain(tokenizer)

    def encode(self, texts: Sequence[str], *, special: bool) -> list[array[int]]:
        """Return the token ids of each text: those of ``token_ids``, 4 bytes each. Raises ValueError too if
        they take too long.
        """
        if not self._is_plain:
            return [array("I", token_ids(self._tokenizer, text, add_special_tokens=special)) for text in texts]
        for text in texts:
            check_encoding(text)
        nbytes = sum(len(text) * (1 if text.isascii() else 4) for text in texts)
        memory = TOKENIZING * nbytes + SPARE
        question = Encode(texts=list(map(str, texts)), special=special, timeout_s=self._timeout_s, memory=memory)
        reply = self._process.ask(question, self._timeout_s, self._first)
        if isinstance(reply, EncodeFailed):
            raise ValueError(reply.text)
        if not isinstance(reply, Encoded):
            raise ValueError(f"the tokenizer process has sent {type(reply).__name__}")
        return [array("I", ids) for ids in reply.ids]

    @property
    def pid(self) -> int | None:
        """The tokenizer process; None if there is none."""
        return self._process.pid

    def close(self) -> None:
        """End the tokenizer process, also while it works. Idempotent."""
        self._process.close()

    def _first(self) -> list[UseTokenizer]:
        tokenizer = self._tokenizer
        split = bool(getattr(tokenizer, "split_special_tokens", False))
        return [UseTokenizer(tokenizer=tokenizer.backend_tokenizer.to_str(), split_special_tokens=split)]


def _is_plain(tokenizer: Any) -> bool:
    """Return whether a tokenizer is its library's alone. Others have code of their own, which their user trusts."""
    import_module("transformers")  # see load_tokenizer
    from transformers import PreTrainedTokenizerFast

    return all(
        getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerFast, name)
        for name in ("__call__", "_encode_plus", "_convert_encoding")
    )
