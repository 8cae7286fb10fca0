"""The memory limits of requests (``--limits``), and estimates of what each part of a request takes."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from lamina.config.flag_groups import flag_name, flag_text
from lamina.config.option import parse_size, size_flag

BODY_PART, ANSWER_PART = 16, 8  # the defaults are a 16th and an 8th of the host's memory
LEAST = 64 << 20  # the least default of either, in bytes
SPARE = 8  # a large body leaves an 8th of the total to bodies of a few KiB

# Measured with tracemalloc on decoded bodies.
DECODING, DECODING_SMALL, DECODING_MOST = 10, 40, 16 << 20
LIST_TOKEN = 40  # bytes for a token id in a list
PROMPT_TOKEN = 80  # bytes for a token of a prompt: in the server, and in the engine
ANSWER_TOKEN = 80  # bytes for a token of a reply, with its text
SCORE = 150  # bytes for a log-probability of a generated token: 25 in the server, the rest in the engine
PROMPT_SCORE = 40  # bytes for one of a prompt token, which the engine holds for a short time
TOKEN_NAME = 120  # bytes for a token id and its name, in a reply of /tokenize
FIELD = 600  # bytes for a message, or another object
_EMPTY = sys.getsizeof("")


class MemoryLimits(NamedTuple):
    """``body_total``: bytes of all bodies and prompts in the server; ``answer_total``: bytes that the replies to
    accepted requests may take.
    """

    body_total: int
    answer_total: int


def memory_limits(body_total: str, answer_total: str, memory: int, max_body: int) -> MemoryLimits:
    """Return the limits. An empty text means the default for a host with ``memory`` bytes. Raises ValueError."""
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
    """Return the bytes that an option's text names; 0 for an empty one."""
    return parse_size(text, flag_name(name)) if text else 0


def least_total(max_body: int) -> int:
    """Return the least ``body_total`` that a body of ``max_body`` bytes needs."""
    return -(-decoding_bytes(max_body) * SPARE // (SPARE - 1))


def decoding_bytes(size: int) -> int:
    """Return the most bytes that decoding a body of ``size`` bytes takes, the body included."""
    return DECODING * size + min(DECODING_SMALL * size, DECODING_MOST)


def held_bytes(value: Any) -> int:
    """Return the bytes that a decoded value takes."""
    if isinstance(value, str):
        return sys.getsizeof(value) if value.isascii() else 2 * sys.getsizeof(value)  # CPython may keep its UTF-8, too
    if isinstance(value, dict):
        return FIELD + sum(_EMPTY + len(k) + held_bytes(v) for k, v in value.items())
    if isinstance(value, list):
        if value and isinstance(value[0], int | float):
            return LIST_TOKEN * len(value)
        return FIELD + sum(map(held_bytes, value))
    return LIST_TOKEN
