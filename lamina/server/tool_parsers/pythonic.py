"""Calls of Llama 3.2 and 4 and of ToolACE: the whole text is a Python list of calls with constants as arguments."""

from __future__ import annotations

import ast
import json
from typing import Any

from .contract import Arguments, CallBegin, Event, Format, Text, Tools

_TAGS = ("<|python_start|>", "<|python_end|>")
MOST = 1 << 16  # characters of a list of calls


class _List:
    """Holds a text that begins with a bracket until it ends, as Python is not valid before."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> list[Event]:
        if not self._is_text:
            self._held += text
            start = self._held.lstrip().removeprefix(_TAGS[0]).lstrip()
            if not start or start[0] == "[" or _TAGS[0].startswith(start):
                return []
            self._is_text, text = True, self._held
        return [Text(text)] if text else []

    def finish(self, *, cut: bool = False) -> list[Event]:
        if self._is_text or not self._held:
            return []
        text = self._held.strip().removeprefix(_TAGS[0]).removesuffix(_TAGS[1]).strip()
        return self._calls(text) or ([] if cut else [Text(self._held)])

    def _calls(self, text: str) -> list[Event]:
        """Return the calls; none if the text is anything else."""
        events = list[Event]()
        try:
            body = ast.parse(text[: MOST + 1], mode="eval").body
            calls = body.elts if isinstance(body, ast.List) else []
            for call in calls:
                if not isinstance(call, ast.Call) or call.args or (name := ast.unparse(call.func)) not in self._tools:
                    return []
                values = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
                events += [CallBegin(name), Arguments(_json(values))]
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            return []
        return events


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False, allow_nan=False)


FORMAT = Format(
    ("[func_name1(params_name1=params_value1",), True, lambda tools: (_TAGS[0], *(f"[{name}(" for name in tools)), _List
)
