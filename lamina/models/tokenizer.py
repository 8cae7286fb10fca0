"""Tokenizers: text from tokens as they arrive, and stop strings."""

from __future__ import annotations

import json
import os
import re
from codecs import getincrementaldecoder
from collections.abc import Collection, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from lamina.utils.background_thread import LowPriorityCall

from .checkpoint import find_checkpoint
from .errors import ModelError
from .model_files import one_line, read_json
from .quantization import gguf_file

_PROCESSOR_TEMPLATE = "chat_template.json"  # of older multimodal models
_CONTEXT = 8  # most tokens kept as the context of the next one
MAX_PENDING_BYTES = 3  # most bytes of an incomplete UTF-8 character; a token has at least one byte
_REPLACEMENT = "\ufffd"
_DECODER = getincrementaldecoder("utf-8")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _printable() -> dict[str, int]:
    """Return character -> byte of byte-level vocabularies: printable bytes are themselves, the rest begin at 256."""
    keep = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in keep}
    rest = [b for b in range(256) if b not in set(keep)]
    return table | {chr(256 + i): b for i, b in enumerate(rest)}


_BYTES = _printable()


def load_tokenizer(source: Any, *, trust_remote_code: bool = False) -> Any:
    """Return the Hugging Face tokenizer of a model directory or hub id; a tokenizer is returned as it is. None for a
    module, and if the model has none. Raises ModelError.
    """
    # transformers replaces its own module during its import. An import statement that waits for another thread's import
    # continues with the replaced module, which lacks names; import_module returns the new one.
    import_module("transformers")
    from transformers import PreTrainedTokenizerBase

    if source is None or isinstance(source, PreTrainedTokenizerBase):
        return source
    if not isinstance(source, str | os.PathLike):
        from torch import nn  # not above: processes that only tokenize start without torch

        if isinstance(source, nn.Module):
            return None
        raise ModelError(f"tokenizer must be a path, a hub id or a Hugging Face tokenizer, not {type(source).__name__}")
    directory = find_checkpoint(source, trust_remote_code=trust_remote_code, weights=False)
    if gguf_file.is_gguf(directory):
        return gguf_file.load_tokenizer(directory)
    if not any((directory / n).exists() for n in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    try:
        if _needs_no_class(directory):
            from transformers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        else:
            from transformers import AutoTokenizer

            if not trust_remote_code:
                _check_class(directory)
            tokenizer = AutoTokenizer.from_pretrained(
                directory, trust_remote_code=trust_remote_code, local_files_only=True, use_fast=True
            )
    except ModelError:
        raise
    except Exception as error:  # any class: it reads config.json too, which architectures check by their own code
        raise ModelError(f"the tokenizer in {directory} cannot be loaded: {one_line(error)}") from error
    if getattr(tokenizer, "chat_template", "") is None and (directory / _PROCESSOR_TEMPLATE).exists():
        tokenizer.chat_template = read_json(directory / _PROCESSOR_TEMPLATE, "").get("chat_template")
    return tokenizer


def token_ids(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Return the token ids of ``text``. ``options``: the tokenizer's own. Raises ValueError if the text is not valid
    UTF-8.
    """
    check_encoding(text)
    # Not verbose: the engine reports texts that are too long, as it knows the limit with which the model is served.
    try:
        return list(tokenizer(text, verbose=False, **options)["input_ids"])
    except Exception:
        raise
    except BaseException as error:  # such as a pattern that never ends, which a panic of the library ends
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the model's tokenizer fails on this prompt: {one_line(error)}") from error


def check_encoding(text: str) -> None:
    """Raise ValueError for a text that has halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"prompt {text[:80]!r} is not UTF-8 at character {error.start}") from None


def load_in_background(source: Any, *, trust_remote_code: bool, here: bool, limit_s: float) -> LowPriorityCall[Any]:
    """Start ``load_tokenizer`` while workers start. Callers wait no longer than ``limit_s`` seconds for its end.
    ``here``: workers are threads of this process, so it waits until loading is done: two threads must not import
    transformers at once. Then raises TimeoutError after ``limit_s``.
    """
    work = partial(load_tokenizer, source, trust_remote_code=trust_remote_code)
    loading = LowPriorityCall(work, "loading the tokenizer (--start-timeout-s)")
    if here:
        loading.result(limit_s)
    return loading


def _needs_no_class(directory: Path) -> bool:
    """Return whether tokenizer.json suffices. AutoTokenizer would return the same, but imports torch and the model's
    configuration for a class: 4 s of a core.
    """
    path = directory / "tokenizer_config.json"
    if not path.exists() or not (directory / "tokenizer.json").exists():
        return False
    config = json.loads(path.read_text())
    return config.get("tokenizer_class") == "TokenizersBackend" and "auto_map" not in config


def _check_class(directory: Path) -> None:
    """Raise ModelError for a ``tokenizer_class`` that is another class of transformers: some read pickled files."""
    from transformers import PreTrainedTokenizerBase
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name
    from transformers.utils import DummyObject

    for name in ("tokenizer_config.json", "config.json"):
        if not (directory / name).exists() or (kind := read_json(directory / name, "").get("tokenizer_class")) is None:
            continue
        tokenizer_class: Any = tokenizer_class_from_name(kind) if isinstance(kind, str) else kind
        # transformers reports itself which package one of its placeholders needs.
        is_absent = tokenizer_class is None or isinstance(tokenizer_class, DummyObject)
        if not is_absent and not (
            isinstance(tokenizer_class, type) and issubclass(tokenizer_class, PreTrainedTokenizerBase)
        ):
            raise ModelError(
                f"{directory} names {kind!r} (tokenizer_class in {name}), which is no tokenizer and is not used by "
                f"default: pass --trust-remote-code if you trust it, or remove the key"
            )


class Detokenizer:
    """Returns the text of one completion, piece by piece.

    ``push`` returns text that later tokens cannot change. Tokens are decoded together with the ones before them, as
    tokenizers space and merge by context. An incomplete character at the end is held back. The pieces and ``finish``
    together are the decoded text of prompt and completion, without the decoded text of the prompt.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        """``prompt``: the token ids that the completion continues."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        open_tail = self._open_tail(list(prompt[-_CONTEXT:]))
        # The last tokens whose text was returned.
        self._context = self._last_characters(list(prompt[: len(prompt) - open_tail]))
        self._pending = list(prompt[len(prompt) - open_tail :])

    @property
    def num_pending(self) -> int:
        """Tokens whose text is held back; at first those of the prompt that begin a character."""
        return len(self._pending)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the new text that is certain; empty while a character is incomplete."""
        self._pending.extend(token_ids)
        for count in range(len(self._pending), 0, -1):
            text = self._text(count)
            # A character that looks broken may lack its last bytes, which may still come.
            if not text.endswith(_REPLACEMENT) or len(self._pending) - count >= MAX_PENDING_BYTES:
                return self._take(count, text)
        return ""

    def finish(self) -> str:
        """Return the text that was held back, with U+FFFD for a character that was never completed."""
        return self._take(len(self._pending), self._text(len(self._pending)))

    def special_tokens(self, texts: Sequence[str]) -> dict[int, str]:
        """Return the special tokens that are left out, by id, whose text occurs in one of ``texts``."""
        if not self._skip:
            return {}
        added = self._tokenizer.added_tokens_decoder.items()
        return {token: a.content for token, a in added if a.special and any(a.content in text for text in texts)}

    def _text(self, count: int) -> str:
        """Return the text that the first ``count`` pending tokens add to the text of the context."""
        pending = self._pending[:count]
        before, both = self._decode(self._context), self._decode(self._context + pending)
        if both.startswith(before):
            return both[len(before) :]
        return self._decode(pending)  # some decoders turn a whole run of bytes into U+FFFD while its end is open

    def _take(self, count: int, text: str) -> str:
        taken, self._pending = self._pending[:count], self._pending[count:]
        # A context must begin at a character; tokens without text (special ones) are no context by themselves.
        self._context = taken if text else (self._context + taken)[-_CONTEXT:]
        return text

    def _open_tail(self, prompt: list[int]) -> int:
        """Return how many tokens at the end of a prompt begin a character that the completion must finish."""
        for size in range(min(MAX_PENDING_BYTES, len(prompt)) + 1):
            if not self._decode(prompt[: len(prompt) - size]).endswith(_REPLACEMENT):
                return size
        return 0

    def _last_characters(self, prompt: list[int]) -> list[int]:
        """Return the end of the prompt, from the beginning of a character on."""
        for count in range(_CONTEXT, _CONTEXT + MAX_PENDING_BYTES):
            if not self._decode(prompt[-count:]).startswith(_REPLACEMENT):
                return prompt[-count:]
        return prompt[-_CONTEXT:]

    def _decode(self, token_ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(token_ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)
        )


class TokenBytes:
    """The bytes that each token adds to a text, cached: with its space, which some decoders drop at a text's start."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def _find(self, token: int) -> bytes:
        alone, twice = self._decode([token]), self._decode([token, token])
        text = twice[len(alone) :] if twice.startswith(alone) else alone
        if _REPLACEMENT not in text:
            return text.encode()
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if match := _BYTE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return bytes(_BYTES[c] for c in piece) if all(c in _BYTES for c in piece) else text.encode()

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))


class TokenSpeller:
    """The texts of single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._bytes = TokenBytes(tokenizer)

    def __call__(self, token: int, before: Sequence[int]) -> str:
        """Return the text of a token. ``before``: the tokens before it. Empty for a part of a character that is not its
        end.
        """
        own = self._bytes(token)
        try:
            return own.decode()
        except UnicodeDecodeError:
            decoder = _DECODER("replace")
            decoder.decode(b"".join(map(self._bytes, before[-MAX_PENDING_BYTES:])))
            return decoder.decode(own).strip(_REPLACEMENT)


def bad_words_ids(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    """Return the tokens of each word at the beginning of a text and, if only their first token differs, after a space.
    Raises ValueError for a word that has no tokens.
    """
    spellings: list[list[int]] = []
    for word in words:
        plain, spaced = (token_ids(tokenizer, space + word.lstrip(), add_special_tokens=False) for space in ("", " "))
        if not plain:
            raise ValueError(f"bad_words has {word!r}, which has no tokens: leave it out")
        spellings.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            spellings.append(spaced)
    return spellings


def find_stop(text: str, stops: Collection[str], start: int = 0) -> tuple[int, str] | None:
    """Return the first stop string in ``text`` from ``start`` on: its position and itself; the longest of several
    there.
    """
    hits = [(at, -len(s), s) for s in stops if s and (at := text.find(s, start)) >= 0]
    if not hits:
        return None
    at, _, stop = min(hits)
    return at, stop


def num_held_back(text: str, stops: Collection[str]) -> int:
    """Return how many characters at the end of ``text`` may begin a stop string, so must not be shown yet."""
    longest = max((len(s) for s in stops), default=0) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(s.startswith(text[-size:]) for s in stops if len(s) > size):
            return size
    return 0
