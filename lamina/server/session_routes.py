"""Sessions over HTTP: the field ``session_id`` of a body, GET /v1/sessions and DELETE /v1/sessions/ID. GET
/v1/sessions/ID/export and POST /v1/sessions/import move a session to another server. A client sees the sessions of its
own API key.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from lamina.scheduler.sessions.session_table import SessionCopy, SessionName
from lamina.scheduler.sessions.session_turns import (
    EMPTY_TRANSCRIPT,
    SessionBusyError,
    TranscriptDigest,
    TurnTranscript,
    messages_transcript,
    prompt_transcript,
)

from .call import Service, SessionTurn
from .engine_client.messages import SessionsReply, SessionsRequest
from .errors import ApiError, json_response
from .openapi import body_of, responses_of
from .request.openai_protocol import ChatRequest, CompletionRequest, Strict, Text
from .request.request_bodies import parse
from .tenants import salt_of

PARAM = "session_id"
router = APIRouter()


@contextmanager
def begin_turn(
    request: Request, body: ChatRequest | CompletionRequest, prompts: int = 1
) -> Iterator[SessionTurn | None]:
    """Begin a turn of the session that ``body`` names. Its call ends the turn; an exception before that undoes it.
    Raises ApiError.
    """
    if body.session_id is None:
        yield None
        return
    service: Service = request.app.state.service
    if not service.client.ready.caches_prefixes:
        text = f"{PARAM} is not supported: start the server with --enable-prefix-caching, or leave it out"
        raise ApiError(400, text, param=PARAM, code="unsupported_value")
    if (body.n or 1) > 1 or prompts > 1:
        raise ApiError(400, f"{PARAM} goes with one prompt and n of 1", param=PARAM, code="invalid_value")
    name = SessionName(salt_of(request.state.key_id, None), body.session_id)
    with _refusals():
        service.session_turns.begin(name, _transcript_of(body))
    try:
        yield SessionTurn(service.session_turns, name)
    except BaseException:
        service.session_turns.end(name, answered=False)
        raise


@router.get("/v1/sessions", responses=responses_of(503))
async def list_sessions(request: Request) -> Response:
    """All sessions of the client's key: name, turns, tokens of KV, and the tier that has them."""
    service: Service = request.app.state.service
    sessions = (await _query(service, SessionsRequest(0, salt_of(request.state.key_id, None)))).sessions
    data = [{"id": s.name, "object": "session", "turns": s.turns, "tokens": s.tokens, "tier": s.tier} for s in sessions]
    return json_response({"object": "list", "data": data})


@router.delete("/v1/sessions/{session_id:path}", responses=responses_of(404, 409, 503))
async def delete_session(request: Request, session_id: str) -> Response:
    """Forget a session and free its KV, except pages that other sequences have too."""
    service: Service = request.app.state.service
    name = SessionName(salt_of(request.state.key_id, None), session_id)
    with _refusals():
        service.session_turns.drop_session(name)
        answer = await _query(service, SessionsRequest(0, name.tenant, drop=session_id))
    if not answer.sessions:
        raise ApiError(404, f"there is no session {session_id[:128]!r}", param=PARAM, code="session_not_found")
    return json_response({"id": session_id, "object": "session.deleted", "deleted": True})


class PortedSession(msgspec.Struct, frozen=True):
    """A session on its way between servers. ``spoken``: a digest of what its last turn sent."""

    copy: SessionCopy
    spoken: TranscriptDigest | None


class ImportRequest(Strict):
    """POST /v1/sessions/import. ``session``: from an export."""

    session: Text


@router.get("/v1/sessions/{session_id:path}/export", responses=responses_of(400, 404, 409, 503))
async def export_session(request: Request, session_id: str) -> Response:
    """A session without its KV, which the next server finds in storage by its tokens."""
    service: Service = request.app.state.service
    name = SessionName(salt_of(request.state.key_id, None), session_id)
    with _refusals():
        spoken = service.session_turns.last_transcript(name)
        answer = await _query(service, SessionsRequest(0, name.tenant, copy=session_id))
    if answer.copy is None:
        raise ApiError(404, f"there is no session {session_id[:128]!r}", param=PARAM, code="session_not_found")
    data = msgspec.msgpack.encode(PortedSession(answer.copy, spoken))
    return json_response({"id": session_id, "object": "session.export", "session": base64.b64encode(data).decode()})


@router.post(
    "/v1/sessions/import", openapi_extra=body_of(ImportRequest), responses=responses_of(400, 409, 503, body=True)
)
async def import_session(request: Request) -> Response:
    """Take over a session that another server has exported to the same API key."""
    service: Service = request.app.state.service
    body = await parse(ImportRequest, request)
    try:
        ported = msgspec.msgpack.decode(base64.b64decode(body.session, validate=True), type=PortedSession)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        raise ApiError(400, "session is no export of a session", param="session", code="invalid_value") from None
    name = SessionName(salt_of(request.state.key_id, None), ported.copy.name)
    with _refusals(), service.session_turns.import_session(name, ported.spoken):
        await _query(service, SessionsRequest(0, name.tenant, import_=ported.copy))
    return json_response({"id": name.name, "object": "session", "turns": ported.copy.turns})


async def _query(service: Service, query: SessionsRequest) -> SessionsReply:
    """Send a query to the engine. Raises ValueError if the engine refuses, and as ``EngineClient.query``."""
    answer = await service.client.query(query)
    if answer.refusal:
        raise ValueError(answer.refusal)
    return answer


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except SessionBusyError as e:
        raise ApiError(409, str(e), param=PARAM, code="session_busy") from e
    except ValueError as e:
        raise ApiError(400, str(e), param=PARAM, code="session_mismatch") from e


def _transcript_of(body: ChatRequest | CompletionRequest) -> TurnTranscript:
    if isinstance(body, ChatRequest):
        return messages_transcript([m.model_dump(exclude_none=True) for m in body.messages])
    prompt = body.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    known = isinstance(prompt, str) or (isinstance(prompt, list) and all(type(token) is int for token in prompt))
    return prompt_transcript(prompt) if known else EMPTY_TRANSCRIPT  # the engine refuses the prompt
