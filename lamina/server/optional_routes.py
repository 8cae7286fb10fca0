"""Routes that an operator enables by flags."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from .call import Service
from .errors import engine_gone, json_response
from .openapi import responses_of

tokenizer_info = APIRouter()
development = APIRouter()
_PLACES = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path")  # paths on this machine


@tokenizer_info.get("/tokenizer_info", responses=responses_of())
async def tokenizer_configuration(request: Request) -> Response:
    """The tokenizer's configuration, as in tokenizer_config.json."""
    service: Service = request.app.state.service
    tokenizer = service.prompt_processor.tokenizer
    config = {k: _plain(v) for k, v in (getattr(tokenizer, "init_kwargs", None) or {}).items() if k not in _PLACES}
    config["tokenizer_class"] = type(tokenizer).__name__
    if template := getattr(tokenizer, "chat_template", None):
        config["chat_template"] = template
    return Response(json.dumps(config), media_type="application/json")  # some numbers exceed 64 bits


@development.post("/reset_prefix_cache", responses=responses_of(503))
async def reset_prefix_cache(request: Request) -> Response:
    """Let prompts that come after this request find no KV of earlier ones."""
    service: Service = request.app.state.service
    if service.client.failure is not None:
        raise engine_gone(service.client.failure)
    service.client.reset_prefix_cache()
    return json_response({"success": True})


def _plain(value: Any) -> Any:
    """Convert a value to one that JSON can hold; a token becomes its text."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return str(getattr(value, "content", value))
