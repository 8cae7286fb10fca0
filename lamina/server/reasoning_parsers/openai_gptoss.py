"""Reasoning of gpt-oss: messages of the channel analysis in OpenAI's harmony format."""

from __future__ import annotations

from lamina.grammar.lark import Specials, sequence
from lamina.server.tool_parsers.harmony import CHANNEL, ENDS, MESSAGE, START, HarmonyMessages, Piece

from .contract import Parts, ReasoningFormat


class _Channels:
    """A final message, or a call, ends the reasoning. What a tool parser reads comes as the model wrote it."""

    def __init__(self) -> None:
        self.has_ended = False
        self._messages = HarmonyMessages()
        self._has_reasoning = False

    def rules_before(self, specials: Specials) -> str:
        thought = sequence(f"{CHANNEL}analysis{MESSAGE}", specials)
        end = sequence(f"{ENDS[0]}{START}assistant", specials)
        final = sequence(f"{CHANNEL}final", specials)
        kind, message = sequence("<|constrain|>", specials), sequence(MESSAGE, specials)
        analysis = f"analysis: {thought} /(.|\\n)*/ {end}\n"
        header = f'header: {final} (" "? {kind} "json")? {message}\n'
        return f"before: analysis* header\nlead: analysis*\n{analysis}{header}"

    def push(self, text: str) -> Parts:
        if self.has_ended:
            return Parts("", text)
        return self._parts(self._messages.push(text))

    def finish(self, *, cut: bool = False) -> Parts:
        return Parts("", "") if self.has_ended else self._parts(self._messages.finish(cut=cut))

    def _parts(self, pieces: list[Piece]) -> Parts:
        reasoning = answer = ""
        for piece in pieces:
            if self.has_ended:
                answer += (piece.header if piece.begins else "") + piece.text
            elif piece.channel == "analysis":
                if piece.begins and self._has_reasoning:
                    reasoning += "\n"
                self._has_reasoning = True
                reasoning += piece.text
            else:
                self.has_ended = bool(piece.recipient) or piece.channel in ("final", "")
                answer += (piece.header if piece.recipient else "") + piece.text
        if self.has_ended:
            answer += self._messages.held
        return Parts(reasoning, answer)


FORMAT = ReasoningFormat(("<|channel|>",), True, lambda prompt_end: _Channels())
