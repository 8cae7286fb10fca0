"""Reasoning between two marks, such as <think> and </think>."""

from __future__ import annotations

from lamina.grammar.lark import Specials, up_to
from lamina.models.tokenizer import find_stop, num_held_back

from .contract import Parts

THINK = (("<think>",), ("</think>",))
SPACES = "spaces: /[ \\t\\r\\n]{0,4}/\n"  # between reasoning and the answer


class ThinkTags:
    """Reasoning at the beginning of a completion. Its first mark may be in the prompt, and so may both."""

    def __init__(
        self, prompt_end: str, marks: tuple[tuple[str, ...], tuple[str, ...]] = THINK, *, always: bool
    ) -> None:
        """``marks``: those that begin reasoning, and those that end it. ``always``: the model reasons, unless the
        prompt has ended that; else only after the first mark.
        """
        self._begins, self._ends = marks
        end = prompt_end.rstrip()
        self.has_ended = end.endswith(self._ends)
        self._is_open = always or end.endswith(self._begins)
        self._held = ""
        self._is_first = True  # nothing but spaces has come

    def rules_before(self, specials: Specials) -> str:
        if self.has_ended:
            return ""
        think = up_to("think", self._ends, specials, begins=() if self._is_open else self._begins)
        optional = "think spaces" if self._is_open else "(think spaces)?"
        return f"before: {optional}\nlead: {optional}\n{think}{SPACES}"

    def push(self, text: str) -> Parts:
        self._held += text
        if self.has_ended:
            return self._answer()
        if self._is_first:
            start = self._held.lstrip()
            begin = next((mark for mark in self._begins if start.startswith(mark)), None)
            if begin is not None:
                start, self._is_open = start[len(begin) :].lstrip(), True
            elif any(mark.startswith(start) for mark in self._begins):
                return Parts("", "")
            elif not self._is_open:
                self.has_ended, self._is_first = True, False
                return self._take()
            self._held, self._is_first = start, not start
            if not start:
                return Parts("", "")
        if match := find_stop(self._held, self._ends):
            at, end = match
            reasoning, self._held = self._held[:at].rstrip(), self._held[at + len(end) :]
            self.has_ended = self._is_first = True
            return Parts(reasoning, self._answer().answer)
        certain = self._held[: len(self._held) - num_held_back(self._held, self._ends)].rstrip()
        self._held = self._held[len(certain) :]
        return Parts(certain, "")

    def finish(self, *, cut: bool = False) -> Parts:
        rest, self._held = self._held, ""
        if cut and self._is_first and not self.has_ended:
            return Parts("", "")
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
