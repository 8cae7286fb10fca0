"""The memory that requests may take, as ``--limits`` names it, and what each part of a request costs."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from lamina.config.flag_groups import flag_name, flag_text
from lamina.config.option import parse_size, size_flag

BODY_PART, ANSWER_PART = 16, 8  # the defaults are a 16th and an 8th of the memory
LEAST = 64 << 20  # bytes of either, where nothing is set
SPARE = 8  # a large body leaves the 8th part of the room to bodies of a few KiB

# Measured: with tracemalloc on decoded bodies, and by the resident memory of a process that tokenizes.
DECODING, DECODING_SMALL, DECODING_MOST = 10, 40, 16 << 20
TOKENIZING = 256  # bytes for a byte of text, while it is tokenized
LIST_TOKEN = 40  # of a token id in a list
PROMPT_TOKEN = 80  # of a prompt's token: in the server, and in the engine
ANSWER_TOKEN = 80  # of a token of an answer, with its text
SCORE = 150  # of a log-probability of a generated token: 25 in the server, the rest in the engine
PROMPT_SCORE = 40  # of one of a prompt's token, which the engine has for a short time
TOKEN_NAME = 120  # of a token id and its name, in an answer of /tokenize
FIELD = 600  # of a message, or of another object
_EMPTY = sys.getsizeof("")


class MemoryLimits(NamedTuple):
    """``body_total``: bytes of all bodies and prompts in the server; ``answer_total``: bytes that accepted requests may
    bring.
    """

    body_total: int
    answer_total: int


def memory_limits(body_total: str, answer_total: str, memory: int, max_body: int) -> MemoryLimits:
    """The limits that these sizes set, and defaults for empty ones on a host with ``memory`` bytes. Raises
    ValueError.
    """
    least = least_total(max_body)
    bodies = _size("body_total", body_total) or max(memory // BODY_PART, LEAST, least)
    if bodies < least:
        size = size_flag(max_body)
        raise ValueError(
            f"{flag_text('body_total', size_flag(bodies))}: to decode a body of {flag_text('max_body', size)} takes "
            f"{size_flag(least, least=True)}: raise it, or lower {flag_name('max_body')}"
        )
    return MemoryLimits(bodies, _size("answer_total", answer_total) or max(memory // ANSWER_PART, LEAST))


def _size(name: str, text: str) -> int:
    """Bytes of an option's text; 0 of none."""
    return parse_size(text, flag_name(name)) if text else 0


def least_total(max_body: int) -> int:
    """The least ``body_total`` that a body of ``max_body`` bytes needs."""
    return -(-decoding_bytes(max_body) * SPARE // (SPARE - 1))


def decoding_bytes(size: int) -> int:
    """Bytes at most that a body of ``size`` bytes takes while it is decoded, the body included."""
    return DECODING * size + min(DECODING_SMALL * size, DECODING_MOST)


def held_bytes(value: Any) -> int:
    """Bytes of a decoded value."""
    if isinstance(value, str):
        return sys.getsizeof(value) if value.isascii() else 2 * sys.getsizeof(value)  # its UTF-8 may be kept, too
    if isinstance(value, dict):
        return FIELD + sum(_EMPTY + len(k) + held_bytes(v) for k, v in value.items())
    if isinstance(value, list):
        if value and isinstance(value[0], int | float):
            return LIST_TOKEN * len(value)
        return FIELD + sum(map(held_bytes, value))
    return LIST_TOKEN
