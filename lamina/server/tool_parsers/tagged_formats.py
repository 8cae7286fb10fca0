"""The formats whose calls stand between tags in free text, by family of models."""

# ruff: noqa: RUF001 - DeepSeek's marks have wide bars

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .contract import Event, Format, Tools
from .json_text import CallBody, JsonCall, JsonCalls, NameAndJson
from .tagged import TaggedCalls
from .tagged_parameters import Form, TaggedParameters

_DEEPSEEK = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_AROUND_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_NAME = "<｜tool▁sep｜>"
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_GLM = Form(
    ("\n", "<arg_key>", "</tool_call>"), "<arg_key>", "<arg_value>", "</arg_value>", "</tool_call>",
    kept=("<arg_key>", "</tool_call>"), closes_key="</arg_key>",
)  # fmt: skip
_MINIMAX = Form((">",), "<parameter name=", ">", "</parameter>", "</invoke>")
_QWEN = Form((">",), "<parameter=", ">", "</parameter>", "</function>", on_lines=True, after_call="</tool_call>")


def _kimi_name(id: str) -> str:
    return id.strip().removeprefix("functions.").rpartition(":")[0]


def _phi_list() -> JsonCalls:
    calls = JsonCalls()
    calls.push("[", [])
    return calls


class _MistralCalls:
    """A list of objects, or in newer models a name and its arguments: the form that the first character shows."""

    def __init__(self) -> None:
        self._body: CallBody | None = None

    @property
    def has_begun(self) -> bool:
        return self._body is not None and self._body.has_begun

    @property
    def is_broken(self) -> bool:
        return self._body is not None and self._body.is_broken

    def push(self, text: str, events: list[Event]) -> str | None:
        if self._body is None:
            if not (text := text.lstrip()):
                return None
            by_name = NameAndJson("[ARGS]", lambda head: head.partition("[CALL_ID]")[0])
            self._body = JsonCalls() if text[0] == "[" else by_name
        return self._body.push(text, events)


def _tagged(
    begin: str,
    end: str,
    body: Callable[[Tools], CallBody],
    around: tuple[str, ...] = (),
    *,
    marks: tuple[str, ...],
    special: bool = False,
    begins: tuple[str, ...] | None = None,
) -> Format:
    """Return the format of TaggedCalls. ``begins``: None for the first mark around calls and ``begin``."""
    first = (*around[:1], begin) if begins is None else begins
    return Format(
        marks, special, lambda tools: first, lambda tools: TaggedCalls(begin, end, lambda: body(tools), around)
    )


# Hermes 2 Pro, Qwen 2.5 and Qwen 3: an object between two tags.
HERMES = _tagged("<tool_call>", "</tool_call>", lambda _: JsonCall(), marks=("<tool_call>", '"arguments":'))
GRANITE4 = _tagged("<tool_call>", "</tool_call>", lambda _: JsonCall(), marks=("<tool_call>", "<|start_of_role|>"))
# Qwen3-Coder and Qwen 3.5: parameters in tags, their values on lines of their own.
QWEN3_CODER = _tagged(
    "<function=", "", partial(TaggedParameters, _QWEN), ("<tool_call>", "</tool_call>"),
    marks=("<function=", "<parameter="),
)  # fmt: skip
# GLM 4.5 and 4.6: a name, and keys and values in tags of their own.
GLM45 = _tagged("<tool_call>", "", partial(TaggedParameters, _GLM), marks=("<tool_call>", "<arg_key>"), special=True)
MINIMAX_M2 = _tagged(  # invocations with parameters in tags
    "<invoke name=", "", partial(TaggedParameters, _MINIMAX), ("<minimax:tool_call>", "</minimax:tool_call>"),
    marks=("<minimax:tool_call>",), special=True, begins=("<minimax:tool_call>",),
)  # fmt: skip
# Kimi K2: an id, which has the name, and JSON between tags. Replies of tools go by that id.
KIMI_K2 = _tagged(
    "<|tool_call_begin|>", "<|tool_call_end|>", lambda _: NameAndJson(_KIMI_ARGUMENTS, _kimi_name, id_of=str.strip),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), marks=(_KIMI_ARGUMENTS,), special=True,
)  # fmt: skip
DEEPSEEK_V3 = _tagged(  # and R1: a name and a block of JSON between tags
    *_DEEPSEEK, lambda _: NameAndJson("\n```json\n", lambda head: head.partition(_DEEPSEEK_NAME)[2]), _AROUND_DEEPSEEK,
    marks=(_DEEPSEEK[0], "```json"), special=True,
)  # fmt: skip
DEEPSEEK_V31 = _tagged(  # a name and JSON between tags
    *_DEEPSEEK, lambda _: NameAndJson(_DEEPSEEK_NAME, str), _AROUND_DEEPSEEK,
    marks=(_DEEPSEEK[0], _DEEPSEEK_NAME), special=True,
)  # fmt: skip
PHI4_MINI_JSON = _tagged("functools[", "", lambda _: _phi_list(), marks=("functools[",))  # a list after a word
MISTRAL = _tagged("[TOOL_CALLS]", "", lambda _: _MistralCalls(), marks=("[TOOL_CALLS]",), special=True)
