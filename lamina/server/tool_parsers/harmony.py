"""Messages of gpt-oss (OpenAI's harmony format), as they come: the channel, the recipient, and the text of each."""

from __future__ import annotations

from typing import NamedTuple

from lamina.models.tokenizer import find_stop, num_held_back

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_TO, _TYPE = "to=", "<|constrain|>"
FUNCTIONS = "functions."


class Piece(NamedTuple):
    """A piece of a message's text. ``begins``: the message's first one, which may be empty."""

    channel: str  # analysis, commentary or final; "": text without a header
    recipient: str  # "": the user
    text: str
    begins: bool
    header: str  # as the model wrote it


class HarmonyMessages:
    """Reads one completion, whose prompt ends with the beginning of the assistant's message."""

    def __init__(self) -> None:
        self._text = ""
        self._header: tuple[str, str, str] | None = None  # channel, recipient, as written; None: it is still to come
        self._begins = False
        self._is_first = True  # nothing but spaces has come

    @property
    def held(self) -> str:
        """The text of which it is not certain yet what it is."""
        return self._text

    def push(self, text: str) -> list[Piece]:
        """Add text, and return what is certain now."""
        self._text += text
        pieces = list[Piece]()
        while self._step(pieces):
            pass
        return pieces

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """Return the rest. A header that has not ended is no text, nor is a part of a mark if the text was ``cut``."""
        text, self._text = self._text, ""
        text = text[: len(text) - num_held_back(text, (*ENDS, START))] if cut else text
        if self._header is None:
            return []
        return [self._piece(text)] if text or self._begins else []

    def _step(self, pieces: list[Piece]) -> bool:
        if self._header is None:
            return self._step_header()
        if match := find_stop(self._text, (*ENDS, START)):
            at, end = match
            if at or self._begins:
                pieces.append(self._piece(self._text[:at]))
            self._text, self._header = self._text[at + (0 if end == START else len(end)) :], None
            return bool(self._text)
        certain = len(self._text) - num_held_back(self._text, (*ENDS, START))
        if certain or self._begins:
            pieces.append(self._piece(self._text[:certain]))
            self._text = self._text[certain:]
        return False

    def _step_header(self) -> bool:
        head = self._text.lstrip()
        if (
            self._is_first
            and head
            and not any(mark.startswith(head) or head.startswith(mark) for mark in (START, CHANNEL, _TO))
        ):  # a text that has no header
            self._header, self._begins, self._is_first = ("", "", ""), True, False
            return True
        header, separator, rest = self._text.partition(MESSAGE)
        if not separator:
            return False
        self._is_first, self._text, self._begins = False, rest, True
        before, _, after = header.partition(CHANNEL)
        words = after.partition(_TYPE)[0].split()
        channel = words[0] if words else ""
        named = [word for word in (*before.split(), *words) if word.startswith(_TO)]
        recipient = named[0][len(_TO) :] if named else ""
        self._header = (channel, recipient, header + MESSAGE)
        return True

    def _piece(self, text: str) -> Piece:
        assert self._header is not None
        channel, recipient, header = self._header
        begins, self._begins = self._begins, False
        return Piece(channel, recipient, text, begins, header)
