"""Bounds of the values that clients send and get back: one place for requests and exported sessions.

A value within its bound fits every layer. These are the 64 bits of msgpack and SQLite, the 32 bits of a stored token,
and the 53 bits of a float64, in which many JSON readers hold integers.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

INT64 = 1 << 63  # integers of messages are in -INT64 .. INT64 - 1
MOST_COUNT = (1 << 53) - 1  # the largest integer up to which a float64 holds all integers exactly
MOST_TOKEN = (1 << 32) - 1
MOST_TEXT = 1 << 28  # characters of a prompt or a message, or bytes of a session: --limits body= allows less
MOST_LABEL = 1 << 12  # characters of a model's or a user's name
MOST_WORD = 1 << 8  # characters of a session's name, and of other short names
MOST_ITEMS = 1 << 15  # items of a list or an object that is no prompt and no conversation
MOST_MESSAGES = 1 << 14

Count = Annotated[int, Meta(ge=0, le=MOST_COUNT)]
Word = Annotated[str, Meta(min_length=1, max_length=MOST_WORD)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]  # SHA-256
Salt = Annotated[bytes, Meta(max_length=128)]  # a tenant and a division, 32 bytes each, and a mark of the KV's format
Identity = Annotated[bytes, Meta(max_length=64)]
TokenBytes = Annotated[bytes, Meta(max_length=MOST_TEXT)]  # 4 bytes a token
