"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from .call import Call, Service, SessionTurn
from .errors import ApiError
from .journal.journal_entry import JournalEntry
from .journal.journal_records import AcceptedRecord, JournalPrompt
from .memory_limits import PROMPT_TOKEN
from .openapi import body_of, responses_of
from .queue_limit import QueueTicket
from .reasoning_parsers import REASONING_PARSERS
from .request.accepted_request import new_accepted_request
from .request.intake import TextRoom
from .request.openai_protocol import ChatRequest, CompletionRequest, Sampling, StreamOptions
from .request.prompt_processing import Prompt, echoed_text, split_prompts
from .request.request_bodies import parse
from .request.sampling_request import chat_params, completion_params
from .request.structured_output import compile_structure
from .request.tool_request import rules_of_calls, set_tools, tool_use_of, tool_variables
from .response.answer_memory import answer_costs, reserve_answer
from .response.event_stream import EventStream, json_response_of, run_until_disconnect
from .response.message_reader import rules_before
from .response.openai_shapes import response_shape
from .session_routes import begin_turn
from .tenants import cache_options_of, salt_of

JOURNAL_RETRY_S = 5
router = APIRouter()
_ANSWERS = responses_of(429, 503, kinds=("application/json", "text/event-stream"), body=True)


@router.post("/v1/completions", openapi_extra=body_of(CompletionRequest), responses=_ANSWERS)
async def completions(request: Request) -> Response:
    """Complete prompts."""
    service: Service = request.app.state.service
    tenant = salt_of(request.state.key_id, None)
    service.queue_limit.check(1, tenant)  # before the body is read, so that a refusal costs next to nothing
    body = await parse(CompletionRequest, request)
    name = service.check_model(body.model)
    params = completion_params(body, service.config, service.client.ready, service.defaults)
    parts = split_prompts(body.prompt, service.config.max_prompts)
    max_tokens = 0 if body.max_tokens == 0 else params.max_tokens
    special = body.add_special_tokens is not False
    salt, only_prompt = salt_of(request.state.key_id, body.cache_salt), body.max_tokens == 0
    echo, by_number = bool(body.echo), service.config.return_tokens_as_token_ids
    asked = new_accepted_request(
        "cmpl", name, params, body, salt, tokens_as_ids=by_number, echo=echo, only_prompt=only_prompt
    )
    with begin_turn(request, body, len(parts)) as turn, _room(service, len(parts) * params.n, tenant) as ticket:
        cut = service.prompt_processor.truncation_of(body, max_tokens)
        room = TextRoom(request.state.intake, service.text_lines, tenant)
        prompts = await service.prompt_processor.completions(parts, room, special=special, cut=cut)
        await service.prompt_processor.set_bad_words(params)
        await compile_structure(service.grammars, body, params)
        call = await _call(request, body, asked, prompts, ticket, turn)
    return await _answer(request, body, call)


@router.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest), responses=_ANSWERS)
async def chat(request: Request) -> Response:
    """Complete a conversation."""
    service: Service = request.app.state.service
    tenant = salt_of(request.state.key_id, None)
    service.queue_limit.check(1, tenant)
    body = await parse(ChatRequest, request)
    name = service.check_model(body.model)
    params = chat_params(body, service.config, service.client.ready, service.defaults)
    use = tool_use_of(body, service.tool_parser)
    set_tools(params, use)
    if use is not None:
        service.note_tools()
    variables = await service.prompt_processor.variables(body) | tool_variables(body)
    reasoning = service.config.reasoning_parser
    if reasoning and REASONING_PARSERS[reasoning].has_special:
        params.skip_special_tokens = False
    salt, by_number = salt_of(request.state.key_id, body.cache_salt), service.config.return_tokens_as_token_ids
    echo = echoed_text(body.messages) if body.echo else ""
    asked = new_accepted_request(
        "chatcmpl",
        name,
        params,
        body,
        salt,
        tokens_as_ids=by_number,
        echo=bool(echo),
        tool_use=use,
        reasoning=reasoning,
    )
    with begin_turn(request, body) as turn, _room(service, params.n, tenant) as ticket:
        most = params.max_tokens if body.max_completion_tokens or body.max_tokens else None  # a default shrinks to fit
        special, cut = bool(body.add_special_tokens), service.prompt_processor.truncation_of(body, most)
        room = TextRoom(request.state.intake, service.text_lines, tenant)
        prompt = await service.prompt_processor.chat(body.messages, variables, room, special=special, cut=cut)
        await service.prompt_processor.set_bad_words(params)
        if params.structured_outputs is not None:
            tokenizer = service.prompt_processor.tokenizer
            before = rules_before(reasoning, tokenizer, prompt.ids) if reasoning else ""
            instead = rules_of_calls(use, tokenizer)
            await compile_structure(service.grammars, body, params, before=before, instead=instead, use=use)
        call = await _call(request, body, asked, [replace(prompt, text=echo)], ticket, turn)
    return await _answer(request, body, call)


@contextmanager
def _room(service: Service, completions: int, tenant: bytes) -> Iterator[QueueTicket]:
    """Take a place in the queue before any other work, so that a refused client learns it at once. An exception frees
    it.
    """
    ticket = service.queue_limit.admit(completions, tenant)
    try:
        yield ticket
    except BaseException:
        ticket.close()
        raise


async def _call(
    request: Request,
    body: Sampling,
    record: AcceptedRecord,
    prompts: list[Prompt],
    ticket: QueueTicket,
    turn: SessionTurn | None,
) -> Call:
    service: Service = request.app.state.service
    lengths = [len(p.ids) for p in prompts]
    request.state.intake.add(PROMPT_TOKEN * sum(lengths), "the prompt")
    costs = answer_costs(record, lengths, service.client.ready)
    tenant = salt_of(request.state.key_id, None)
    room = reserve_answer(service.answers, costs, service.metrics.on_rejected, tenant)
    request.state.at_end.callback(room.close)
    entry = await _journaled(service, record, prompts)
    try:
        call = Call(
            service,
            record,
            prompts,
            ticket,
            request.state.arrival_s,
            cache_options=cache_options_of(request.state.key_id, record.salt, turn.name if turn else None, body),
            entry=entry,
            turn=turn,
        )
    except BaseException:
        if service.journal is not None:
            service.journal.drop(record.id)
        raise
    request.state.call = call
    request.state.at_end.callback(call.close)
    return call


async def _journaled(service: Service, record: AcceptedRecord, prompts: list[Prompt]) -> JournalEntry | None:
    """Write the request to the journal, if there is one. It is on disk when this returns."""
    if (journal := service.journal) is None:
        return None
    keys, seed = journal.new_keys(len(prompts)), service.client.with_seed
    kept = [JournalPrompt(k, p.ids, p.text, seed(record.params).seed or 0) for k, p in zip(keys, prompts, strict=True)]
    try:
        return await journal.accept(msgspec.structs.replace(record, prompts=kept))
    except OSError as e:
        text = f"the server's journal cannot be written: {e.strerror}"
        raise ApiError(503, text, code="journal_unwritable", retry_after_s=JOURNAL_RETRY_S) from e


async def _answer(request: Request, body: Sampling, call: Call) -> Response:
    service: Service = request.app.state.service
    shape = response_shape(call.record, call.prompts, service.texts_of(call.record))
    if not body.stream:
        return await json_response_of(request, call, shape, service.encoder)
    config = service.config
    if config.has_slo or service.client.config.topology.may_borrow:
        await _begun(request, call, config.sse_keep_alive_s)
    options = body.stream_options
    if config.enable_force_include_usage:
        options = StreamOptions(include_usage=True, continuous_usage_stats=True)
    return EventStream(call, shape, options, service.encoder, alive_s=config.sse_keep_alive_s)


async def _begun(request: Request, call: Call, alive_s: float) -> None:
    """Wait at most ``alive_s`` seconds (0: without limit) for the first token of a stream. Its status is 429 if that
    comes too late, 503 if no memory comes for it. A proxy closes a connection that stays silent for long.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(alive_s or None):
            await run_until_disconnect(request.receive, call.wait_first_token())
