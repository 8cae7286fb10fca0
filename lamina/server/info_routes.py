"""Facts of the server: models, health, load, version, metrics, tokens."""

from __future__ import annotations

import asyncio
from html import escape

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from lamina import __version__

from .call import Service
from .errors import ApiError, json_response
from .memory_limits import LIST_TOKEN, TOKEN_NAME
from .openapi import body_of, responses_of
from .request.intake import TextRoom
from .request.openai_protocol import DetokenizeRequest, TokenizeRequest
from .request.request_bodies import parse
from .request.tool_request import tool_variables
from .response.event_stream import json_answer
from .response.rows import Rows
from .tenants import salt_of

router = APIRouter()


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


@router.get("/health", responses=responses_of(503))
async def health(request: Request) -> Response:
    """200 while the engine makes progress, or is idle and all its workers reply. Otherwise 503 with the reason; it is
    "recovering" while a lost worker is being replaced, after which all requests continue. ``journal``: why it cannot
    be written, if so.
    """
    service = _service(request)
    illness, error = service.unhealthy_reason, service.journal_error
    journal = {} if error is None else {"journal": f"cannot be written: {error}"}
    if illness is None:
        return json_response({"status": "ok", **journal})
    return json_response({"status": illness, **journal}, 503, {"Retry-After": "5"})


@router.get("/ping", responses=responses_of(503))
async def ping(request: Request) -> Response:
    """Return what /health returns, by SageMaker's name."""
    return await health(request)


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """All routes as a page, without scripts from elsewhere."""
    paths = request.app.openapi()["paths"]
    lines = (
        f"<tr><td>{method.upper()}<td><code>{escape(path)}</code><td>{escape(about.get('description', ''))}"
        for path, methods in paths.items()
        for method, about in methods.items()
    )
    head = "<!doctype html><meta charset=utf-8><title>Lamina</title><p><a href=openapi.json>openapi.json</a>"
    policy = {"Content-Security-Policy": "default-src 'none'"}
    return HTMLResponse(f"{head} has all fields.<table>{''.join(lines)}</table>", headers=policy)


@router.get("/version", responses=responses_of())
async def version() -> Response:
    """The version of Lamina."""
    return json_response({"version": __version__})


@router.get("/load", responses=responses_of())
async def load(request: Request) -> Response:
    """Running completions: ``server_load`` in this server; ``running`` and ``waiting`` as the engine last reported."""
    service = _service(request)
    state = service.client.state
    return json_response(
        {
            "server_load": service.queue_limit.completions,
            "running": state.running if state else 0,
            "waiting": state.waiting if state else 0,
            "kv_usage": service.engine_metrics.kv_usage,
        }
    )


@router.get("/metrics", response_class=PlainTextResponse, responses=responses_of(kinds=("text/plain",)))
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format."""
    service = _service(request)
    text = service.metrics.render(vllm=service.config.metrics_compat == "vllm")
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models", responses=responses_of())
async def models(request: Request) -> Response:
    """All names of the one model."""
    service = _service(request)
    return json_response({"object": "list", "data": [_card(service, name) for name in service.names]})


@router.get("/v1/models/{model:path}", responses=responses_of(404))
async def model(request: Request, model: str) -> Response:
    """One name of the model."""
    service = _service(request)
    return json_response(_card(service, service.check_model(model)))


@router.post("/load_model", responses=responses_of(kinds=("text/event-stream",)))
async def load_model_for_transformers_chat() -> Response:
    """The first request of `transformers chat`: replies that the model is loaded, as the one event of a stream."""
    return Response('data: {"status": "ready", "cached": true}\n\n', media_type="text/event-stream")


@router.post("/tokenize", openapi_extra=body_of(TokenizeRequest), responses=responses_of(body=True))
async def tokenize(request: Request) -> Response:
    """Token ids of a prompt or of a conversation."""
    service, body = _service(request), await parse(TokenizeRequest, request)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt", code="invalid_value")
    if body.tools and body.messages is None:
        raise ApiError(400, "tools belong to messages: send those, or leave tools out", param="tools")
    prompter, special, intake = service.prompt_processor, body.add_special_tokens, request.state.intake
    room = TextRoom(intake, service.text_lines, salt_of(request.state.key_id, None))
    if body.messages is not None:
        variables = await prompter.variables(body) | tool_variables(body)
        ids = (await prompter.chat(body.messages, variables, room, special=bool(special), counts=True)).ids
    else:
        ids = await prompter.encode(body.prompt or "", room, special=special is not False)
    intake.add((TOKEN_NAME if body.return_token_strs else LIST_TOKEN) * len(ids), "the prompt")
    names = await asyncio.to_thread(prompter.tokenizer.convert_ids_to_tokens, ids) if body.return_token_strs else None
    limit = service.client.ready.max_model_len
    answer = {
        "tokens": Rows(ids, len(ids)),
        "count": len(ids),
        "max_model_len": limit,
        "token_strs": None if names is None else Rows(names, len(names)),
    }
    return json_answer(answer, service.encoder)


@router.post("/detokenize", openapi_extra=body_of(DetokenizeRequest), responses=responses_of(body=True))
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    service, body = _service(request), await parse(DetokenizeRequest, request)
    service.check_model(body.model)
    return json_response({"prompt": await service.prompt_processor.decode(body.tokens)})


def _card(service: Service, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "lamina",
        "root": service.root,
        "max_model_len": service.client.ready.max_model_len,
    }
