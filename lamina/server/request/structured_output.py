"""Structured output of a request: its two fields as parameters, and the errors that name these fields."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lamina.grammar.front_end import GrammarFrontEnd
from lamina.request import SamplingParams
from lamina.request.structured_outputs import StructuredOutputsParams
from lamina.server.errors import ApiError
from lamina.server.journal.journal_records import ToolUse
from lamina.server.tool_parsers import FORCED

from .openai_protocol import Sampling
from .tool_request import tool_error

FORMAT, OWN = "response_format", "structured_outputs"
_FIELDS = frozenset(StructuredOutputsParams.__dataclass_fields__) - {"compiled", "before", "instead"}
_SCHEMA = frozenset({"name", "description", "schema", "strict"})


def structure_of(body: Sampling) -> StructuredOutputsParams | None:
    """Return the structure that a request asks for, not compiled yet; None for free text. Raises ApiError."""
    given = _given_format(body.response_format)
    if own := body.structured_outputs:
        if given is not None:
            raise _error(f"{FORMAT} and {OWN} both ask for a structure: leave one out", FORMAT)
        if unknown := next((name for name in own if name not in _FIELDS), None):
            raise _error(f"{OWN} has no field {unknown[:64]!r}: it has {', '.join(sorted(_FIELDS))}", OWN)
        given = own
    if given is None:
        return None
    try:
        return StructuredOutputsParams(**given)
    except (TypeError, ValueError) as e:
        raise _named(body, str(e)) from e


async def compile_structure(
    grammars: GrammarFrontEnd,
    body: Sampling,
    params: SamplingParams,
    *,
    before: str = "",
    instead: str = "",
    use: ToolUse | None = None,
) -> None:
    """Compile the structured outputs of ``params``, within a deadline. ``before``, ``instead``: of
    StructuredOutputsParams. Raises ApiError that names what is not supported.
    """
    if params.structured_outputs is not None:
        params.structured_outputs = replace(params.structured_outputs, before=before, instead=instead)
    of_tools = use is not None and use.parser in FORCED
    try:
        await grammars.fill_async(params)
    except ValueError as e:
        raise (tool_error(str(e)) if of_tools else _named(body, str(e))) from e


def _given_format(value: dict[str, Any] | None) -> dict[str, Any] | None:
    kind = (value or {"type": "text"}).get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": value}
    if kind != "json_schema":
        raise _error(
            f"{FORMAT}.type must be text, json_object, json_schema or structural_tag, not {str(kind)[:64]!r}", FORMAT
        )
    asked = (value or {}).get("json_schema")
    if not isinstance(asked, dict) or not isinstance(asked.get("schema"), dict):
        raise _error(f"{FORMAT}.json_schema must be an object with a name and a schema", FORMAT)
    if unknown := next((name for name in asked if name not in _SCHEMA), None):
        raise _error(f"{FORMAT}.json_schema has no field {unknown[:64]!r}: leave it out", FORMAT)
    return {"json": asked["schema"]}


def _named(body: Sampling, text: str) -> ApiError:
    """Return the error by the field that the client sent."""
    if body.structured_outputs:
        return _error(text, OWN)
    text = text.replace(f"{OWN}.json", f"{FORMAT}.json_schema.schema").replace(f"{OWN}.structural_tag", FORMAT)
    return _error(text.replace(OWN, FORMAT), FORMAT)


def _error(text: str, param: str) -> ApiError:
    return ApiError(400, text, param=param, code="invalid_value")
