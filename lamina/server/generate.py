"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from lamina.request import SamplingParams

from .admission import Ticket
from .answer.answers import EventStream, whole
from .answer.logprobs import TokenNumbers, TokenTexts
from .answer.shapes import FINGERPRINT, ChatShape, CompletionShape, Shape
from .calls import Call, Service
from .door.bodies import described, parse
from .request.params import chat_params, completion_params
from .request.prompts import Prompt, split_prompts
from .request.protocol import ChatRequest, CompletionRequest, Sampling

router = APIRouter()
_ANSWERS: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}


@router.post("/v1/completions", openapi_extra=described(CompletionRequest), responses=_ANSWERS)
async def completions(request: Request) -> Response:
    """Complete prompts."""
    service: Service = request.app.state.service
    body = await parse(CompletionRequest, request)
    name = service.check_model(body.model)
    params = completion_params(body, service.config, service.client.ready, service.defaults)
    parts = split_prompts(body.prompt, service.config.max_prompts)
    max_tokens = 0 if body.max_tokens == 0 else params.max_tokens
    special = body.add_special_tokens is not False
    with _room(service, len(parts) * params.n) as ticket:
        prompts = await service.prompter.completions(parts, max_tokens, special=special)
        call = _call(request, prompts, params, ticket, only_prompt=body.max_tokens == 0)
    shape = CompletionShape(call, _texts(service, body), _head("cmpl", name), echo=bool(body.echo))
    return await _answer(request, body, call, shape)


@router.post("/v1/chat/completions", openapi_extra=described(ChatRequest), responses=_ANSWERS)
async def chat(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    body = await parse(ChatRequest, request)
    name = service.check_model(body.model)
    params = chat_params(body, service.config, service.client.ready, service.defaults)
    variables = service.prompter.variables(body)
    with _room(service, params.n) as ticket:
        prompt = await service.prompter.chat(
            body.messages, params.max_tokens, variables, special=bool(body.add_special_tokens)
        )
        call = _call(request, [prompt], params, ticket)
    return await _answer(request, body, call, ChatShape(call, _texts(service, body), _head("chatcmpl", name)))


def _texts(service: Service, body: Sampling) -> TokenTexts:
    """By which tokens are named in log-probabilities."""
    return TokenNumbers(service.texts.tokenizer) if body.return_tokens_as_token_ids else service.texts


@contextmanager
def _room(service: Service, completions: int) -> Iterator[Ticket]:
    """Taken at once, so that who is refused is told at once; given back where no call comes of it."""
    ticket = service.admission.enter(completions)
    try:
        yield ticket
    except BaseException:
        ticket.close()
        raise


def _call(
    request: Request, prompts: list[Prompt], params: SamplingParams, ticket: Ticket, *, only_prompt: bool = False
) -> Call:
    service: Service = request.app.state.service
    call = Call(service, prompts, params, ticket, request.state.arrival_s, only_prompt=only_prompt)
    request.state.call = call
    return call


async def _answer(request: Request, body: Sampling, call: Call, shape: Shape) -> Response:
    if not body.stream:
        return await whole(request, call, shape)
    alive_s = request.app.state.service.config.sse_keep_alive_s
    return EventStream(call, shape, body.stream_options, alive_s=alive_s)


def _head(prefix: str, model: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{secrets.token_hex(16)}",
        "object": "",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": FINGERPRINT,
    }
