"""The memory that requests may take, as ``--limits`` names it, and what each part of a request costs."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from lamina.config.option import parse_size, size_flag

BODY_TOTAL, ANSWER_TOTAL = "body-total", "answer-total"
KNOWN = (BODY_TOTAL, ANSWER_TOTAL)
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


def memory_limits(text: str, memory: int, max_body: int) -> MemoryLimits:
    """The limits that ``text`` sets, and defaults for the others on a host with ``memory`` bytes. Raises ValueError."""
    given = _parsed(text)
    least = least_total(max_body)
    body_total = given.get(BODY_TOTAL, max(memory // BODY_PART, LEAST, least))
    if body_total < least:
        needs = f"to decode a body of --max-body {size_flag(max_body)} takes {size_flag(least, least=True)}"
        given_total = f"--limits {BODY_TOTAL}={size_flag(body_total)}"
        raise ValueError(f"{given_total}: {needs}: raise it, or lower --max-body")
    return MemoryLimits(body_total, given.get(ANSWER_TOTAL, max(memory // ANSWER_PART, LEAST)))


def _parsed(text: str) -> dict[str, int]:
    given = dict[str, int]()
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in KNOWN:
            raise ValueError(f"--limits {name}: there is no such limit; known: {', '.join(KNOWN)}")
        if name in given:
            raise ValueError(f"--limits has {name} twice")
        given[name] = parse_size(value, f"--limits {name}")
    return given


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
