"""The tokenizer process: tokenizes long texts of a server's clients, within bounds of the kernel.

A text of 8 MB takes a core for many seconds, and memory of hundreds of times its size. Here it keeps no other request
waiting, and its time and memory have an end. The parent is ``lamina.executor.long_texts``.
"""

from __future__ import annotations

import os
import resource
import socket
from array import array
from contextlib import suppress
from typing import Any

import msgspec

from lamina.models.model_files import one_line
from lamina.models.template_process import bounded
from lamina.protocol.control import ControlLink, LinkClosedError


class UseTokenizer(msgspec.Struct, frozen=True, kw_only=True, tag="use-tokenizer"):
    """Parent -> tokenizer process, once. ``tokenizer``: as its library writes it, JSON. ``split_special_tokens``: texts
    of special tokens are plain text. There is no reply.
    """

    tokenizer: str
    split_special_tokens: bool


class Encode(msgspec.Struct, frozen=True, kw_only=True, tag="encode"):
    """Parent -> tokenizer process: tokenize each of ``texts``; with ``special``, add the tokenizer's special
    tokens. The reply is Encoded or EncodeFailed.
    """

    texts: list[str]
    special: bool
    timeout_s: float
    memory: int  # bytes


class Encoded(msgspec.Struct, frozen=True, tag="encoded"):
    """Tokenizer process -> parent. ``ids``: those of each text, of 4 bytes each in this host's order."""

    ids: list[bytes]


class EncodeFailed(msgspec.Struct, frozen=True, kw_only=True, tag="encode-failed"):
    """Tokenizer process -> parent: the tokenizer fails, for the reason in ``text``."""

    text: str


class TokenizerReady(msgspec.Struct, frozen=True, tag="tokenizer-ready"):
    """Tokenizer process -> parent, first message: all is imported."""


FROM_PARENT = UseTokenizer | Encode
FROM_TOKENIZER = TokenizerReady | Encoded | EncodeFailed


def serve_tokenizer(sock: socket.socket) -> None:
    """Serve one parent over ``sock`` until the link ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads' stacks would count as memory of a text
    from tokenizers import Tokenizer

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its memory has texts of clients
    link, tokenizer = ControlLink(sock, FROM_PARENT), None
    with suppress(LinkClosedError):
        link.send(TokenizerReady())
        while True:
            message = link.recv()
            if isinstance(message, UseTokenizer):
                tokenizer = Tokenizer.from_str(message.tokenizer)
                tokenizer.no_truncation()
                tokenizer.no_padding()
                tokenizer.encode_special_tokens = message.split_special_tokens
                continue
            with bounded(message.timeout_s, message.memory):
                link.send(_encoded(tokenizer, message))
    link.close()


def _ids(tokenizer: Any, text: str, special: bool) -> bytes:
    return array("I", tokenizer.encode(text, add_special_tokens=special).ids).tobytes()


def _encoded(tokenizer: Any, message: Encode) -> Encoded | EncodeFailed:
    try:
        return Encoded([_ids(tokenizer, text, message.special) for text in message.texts])
    except BaseException as error:  # noqa: BLE001 - any class: a panic of the library is no Exception
        return EncodeFailed(text=f"the model's tokenizer fails on this prompt: {one_line(error)}")
