"""GET /v1/completions/{id} and /v1/chat/completions/{id}: replies from the journal, even to an earlier server's
requests.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from lamina.server.call import Service
from lamina.server.errors import ApiError, engine_error, json_response
from lamina.server.openapi import responses_of
from lamina.server.request.sampling_request import PARAMS
from lamina.server.response.event_stream import json_answer, whole_answer
from lamina.server.response.openai_shapes import response_shape

router = APIRouter()
RETRY_AFTER_S = 1


@router.get("/v1/completions/{answer_id}", responses=responses_of(202, 400, 404, 503))
async def completion(request: Request, answer_id: str) -> Response:
    """A completion by the id of its reply: the whole one, or 202 while it is computed."""
    return _answer(request.app.state.service, answer_id, "cmpl")


@router.get("/v1/chat/completions/{answer_id}", responses=responses_of(202, 400, 404, 503))
async def chat_completion(request: Request, answer_id: str) -> Response:
    """A chat completion by the id of its reply: the whole one, or 202 while it is computed."""
    return _answer(request.app.state.service, answer_id, "chatcmpl")


def _answer(service: Service, answer_id: str, kind: str) -> Response:
    entry = service.journal.find(answer_id) if service.journal is not None else None
    if entry is None or entry.accepted.kind != kind:
        raise ApiError(404, "the journal has no such reply: its client has left, or it is too old", code="not_found")
    if entry.refusal is not None:
        raise ApiError(entry.refusal.status, entry.refusal.message, code=entry.refusal.code)
    if (failed := entry.failed) is not None:
        raise engine_error(str(failed.stop_reason), failed.blame, PARAMS)
    shape = response_shape(entry.accepted, entry.prompts, service.texts_of(entry.accepted))
    if not entry.ended:
        head = {**shape.head(stream=False), "status": "in_progress"}
        return json_response(head, 202, {"Retry-After": str(RETRY_AFTER_S)})
    deltas = sorted(entry.deltas, key=lambda delta: (entry.prompt_index(delta.key), delta.index))
    numbered = [(entry.prompt_index(delta.key), delta) for delta in deltas]
    return json_answer(whole_answer(shape, numbered, entry.usage), service.encoder)
