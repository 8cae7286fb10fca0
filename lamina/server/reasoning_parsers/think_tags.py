"""Reasoning between <think> and </think>."""

from __future__ import annotations

from lamina.grammar.lark import Specials, up_to
from lamina.server.tool_parsers.tagged import held_back

from .contract import Parts

BEGIN, END = "<think>", "</think>"
SPACES = "spaces: /[ \\t\\r\\n]{0,4}/\n"  # between reasoning and the answer


class ThinkTags:
    """Reasoning at the beginning of a completion. Its first mark may be in the prompt, and so may both."""

    def __init__(self, prompt_end: str, *, always: bool) -> None:
        """``always``: the model reasons, unless the prompt has ended that; else only after the first mark."""
        end = prompt_end.rstrip()
        self.has_ended = end.endswith(END)
        self._is_open = always or end.endswith(BEGIN)
        self._held = ""
        self._is_first = True  # nothing but spaces has come

    def rules_before(self, specials: Specials) -> str:
        if self.has_ended:
            return ""
        think = up_to("think", END, specials, begin="" if self._is_open else BEGIN)
        optional = "think spaces" if self._is_open else "(think spaces)?"
        return f"before: {optional}\nlead: {optional}\n{think}{SPACES}"

    def push(self, text: str) -> Parts:
        self._held += text
        if self.has_ended:
            return self._answer()
        if self._is_first:
            start = self._held.lstrip()
            if BEGIN.startswith(start):
                if start != BEGIN:
                    return Parts("", "")
                start, self._is_open = "", True
            elif start.startswith(BEGIN):
                start, self._is_open = start[len(BEGIN) :].lstrip(), True
            elif not self._is_open:
                self.has_ended, self._is_first = True, False
                return self._take()
            self._held, self._is_first = start, not start
            if not start:
                return Parts("", "")
        reasoning, separator, rest = self._held.partition(END)
        if separator:
            self._held, self.has_ended, self._is_first = rest, True, True
            return Parts(reasoning.rstrip(), self._answer().answer)
        certain = self._held[: len(self._held) - held_back(self._held, (END,))].rstrip()
        self._held = self._held[len(certain) :]
        return Parts(certain, "")

    def finish(self) -> Parts:
        rest = self._held
        self._held = ""
        if self._is_open and not self.has_ended:
            return Parts(rest.rstrip(), "")
        return Parts("", rest)

    def _answer(self) -> Parts:
        """Return all that is held, without the spaces after the reasoning."""
        if self._is_first and self._is_open:
            self._held = self._held.lstrip()
        self._is_first = self._is_first and not self._held
        return self._take()

    def _take(self) -> Parts:
        text, self._held = self._held, ""
        return Parts("", text)
