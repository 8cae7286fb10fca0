"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from lamina.request import SamplingParams

from .answers import EventStream, whole
from .bodies import described, parse
from .calls import Call, Service
from .params import chat_params, completion_params
from .prompts import Prompt, split_prompts
from .protocol import ChatRequest, CompletionRequest, Sampling
from .shapes import FINGERPRINT, ChatShape, CompletionShape, Shape

router = APIRouter()
_ANSWERS: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}


@router.post("/v1/completions", openapi_extra=described(CompletionRequest), responses=_ANSWERS)
async def completions(request: Request) -> Response:
    """Complete prompts."""
    service: Service = request.app.state.service
    body = parse(CompletionRequest, request)
    name = service.check_model(body.model)
    params = completion_params(body, service.config, service.client.ready)
    service.admission.check(len(split_prompts(body.prompt, service.config.max_prompts)) * params.n)
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    prompts = await service.prompter.completions(body.prompt, service.config.max_prompts, max_tokens)
    call = _call(request, service, prompts, params, only_prompt=body.max_tokens == 0)
    shape = CompletionShape(call, service.texts, _head("cmpl", name), echo=bool(body.echo))
    return await _answer(request, body, call, shape)


@router.post("/v1/chat/completions", openapi_extra=described(ChatRequest), responses=_ANSWERS)
async def chat(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    body = parse(ChatRequest, request)
    name = service.check_model(body.model)
    params = chat_params(body, service.config, service.client.ready)
    service.admission.check(params.n)
    prompt = await service.prompter.chat(body.messages, params.max_tokens)
    call = _call(request, service, [prompt], params)
    return await _answer(request, body, call, ChatShape(call, service.texts, _head("chatcmpl", name)))


def _call(
    request: Request, service: Service, prompts: list[Prompt], params: SamplingParams, *, only_prompt: bool = False
) -> Call:
    call = Call(service, prompts, params, request.state.arrival_s, only_prompt=only_prompt)
    request.state.call = call
    return call


async def _answer(request: Request, body: Sampling, call: Call, shape: Shape) -> Response:
    config = request.app.state.service.config
    if not body.stream:
        return await whole(request, call, shape)
    slow_s, alive_s = config.slow_reader_timeout_s, config.sse_keep_alive_s
    return EventStream(call, shape, body.stream_options, slow_s=slow_s, alive_s=alive_s)


def _head(prefix: str, model: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{secrets.token_hex(16)}",
        "object": "",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": FINGERPRINT,
    }
