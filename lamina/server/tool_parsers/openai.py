"""Calls of gpt-oss: messages to functions in OpenAI's harmony format. What it thinks is no content."""

from __future__ import annotations

from .contract import Arguments, CallBegin, Event, Format, Text, Tools
from .harmony import CHANNEL, FUNCTIONS, HarmonyMessages, Piece


class _Calls:
    def __init__(self) -> None:
        self._messages = HarmonyMessages()
        self._has_calls = False

    def push(self, text: str) -> list[Event]:
        return [event for piece in self._messages.push(text) for event in self._events_of(piece)]

    def finish(self, *, cut: bool = False) -> list[Event]:
        return [event for piece in self._messages.finish(cut=cut) for event in self._events_of(piece)]

    def _events_of(self, piece: Piece) -> list[Event]:
        if piece.recipient.startswith(FUNCTIONS):
            self._has_calls = True
            begin: list[Event] = [CallBegin(piece.recipient[len(FUNCTIONS) :])] if piece.begins else []
            return [*begin, *([Arguments(piece.text)] if piece.text else [])]
        is_content = piece.channel != "analysis" and not piece.recipient and piece.text and not self._has_calls
        return [Text(piece.text)] if is_content else []


def _begins(tools: Tools) -> tuple[str, ...]:
    to = [f"to={FUNCTIONS}{name}" for name in tools]
    return (*(f"{CHANNEL}commentary {one}" for one in to), *(f" {one}{CHANNEL}commentary" for one in to))


FORMAT = Format(("<|channel|>", "<|constrain|>"), True, _begins, lambda tools: _Calls())
