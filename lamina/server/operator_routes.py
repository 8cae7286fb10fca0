"""Routes for the operator's key. POST /scale changes the numbers of workers while streams are open. POST /drain pauses
new requests, or removes memory workers. POST /cordon keeps new sequences off one memory worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from lamina.config.engine_config import EngineConfig
from lamina.config.flat_options import flat_options, make_config
from lamina.config.option import MEASURED
from lamina.config.resolve import ModelLimits, check_model, kv_heads_of
from lamina.config.topology import MAX_BATCHES, MAX_WORKERS
from lamina.models.checkpoint import peek_config

from .call import Service
from .engine_client.messages import EngineReady
from .errors import ApiError, json_response
from .openapi import body_of, responses_of
from .request.openai_protocol import Int, Strict, Word
from .request.request_bodies import parse

ELEMENT_BYTES = {"float32": 4}
router = APIRouter()


class ScaleRequest(Strict):
    """POST /scale; a field that is not given stays unchanged."""

    memory_workers: Int | None = Field(None, ge=1, le=MAX_WORKERS)
    prefill_workers: Int | None = Field(None, ge=0, le=MAX_WORKERS)
    tensor_parallel_size: Int | None = Field(None, ge=1, le=MAX_WORKERS)
    pipeline: Int | None = Field(None, ge=1, le=MAX_BATCHES)


class DrainRequest(Strict):
    """POST /drain. ``memory_worker``: remove this worker for good; the server continues. ``host``: remove all on that
    host.
    """

    on: bool = True
    memory_worker: Int | None = Field(None, ge=0, le=MAX_WORKERS)
    host: Word | None = None


class CordonRequest(Strict):
    """POST /cordon."""

    memory_worker: Int = Field(ge=0, le=MAX_WORKERS)
    on: bool = True


SCALE_FIELDS = tuple(ScaleRequest.model_fields)


@router.post("/scale", openapi_extra=body_of(ScaleRequest), responses=responses_of(401, 409, 503, body=True))
async def scale(request: Request) -> Response:
    """Change the numbers of workers. The reply comes when the engine runs with them; streams pause meanwhile."""
    service: Service = request.app.state.service
    body, before = await parse(ScaleRequest, request), service.client.config
    asked = {name: value for name in SCALE_FIELDS if (value := getattr(body, name)) is not None}
    if not asked:
        raise ApiError(400, f"name what to change: {', '.join(SCALE_FIELDS)}", code="invalid_value")
    had = sizes_of(before)
    if had == had | asked:
        return json_response({"before": had, "after": had, "pause_s": 0.0})
    if before.launch.is_static:
        text = "workers of --launcher static are started by hand: drain some, or start the server with other numbers"
        raise ApiError(400, text, code="invalid_value")
    try:
        wanted = await asyncio.to_thread(_wanted, service.root, before, asked, service.client.ready)
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value") from None
    return json_response({"before": had, "after": sizes_of(wanted), "pause_s": await _change(service, wanted)})


@router.post("/drain", openapi_extra=body_of(DrainRequest), responses=responses_of(401, 409, 503, body=True))
async def drain(request: Request) -> Response:
    """Refuse new requests, or accept them again (``on`` false). Running requests continue; the reply counts them. With
    a worker or a host: move the KV of these memory workers to others and end them; streams pause meanwhile.
    """
    service: Service = request.app.state.service
    body = await parse(DrainRequest, request)
    named = [name for name in ("memory_worker", "host") if getattr(body, name) is not None]
    if len(named) > 1 or (named and not body.on):
        text = "name memory_worker or host, or on: only one of them, and a removed worker does not come back"
        raise ApiError(400, text, code="invalid_value")
    if body.host is not None:
        return json_response(
            await _dismiss(service, workers_on_host(service.client.ready, body.host), f"--host {body.host}")
        )
    if (worker := body.memory_worker) is not None:
        return json_response(await _dismiss(service, [worker], f"--memory-worker {worker}"))
    service.queue_limit.is_closed = body.on
    return json_response({"draining": body.on, "completions": service.queue_limit.completions})


@router.post("/cordon", openapi_extra=body_of(CordonRequest), responses=responses_of(401, 409, 503, body=True))
async def cordon(request: Request) -> Response:
    """Let no new sequence begin on a memory worker, or allow it again (``on`` false). Sequences that are there
    continue. The reply lists all cordoned memory workers.
    """
    service: Service = request.app.state.service
    body = await parse(CordonRequest, request)
    _check_running(service)
    return json_response({"cordoned": await service.client.cordon(body.memory_worker, on=body.on)})


def workers_on_host(ready: EngineReady, host: str) -> list[int]:
    """Return the memory workers of a host. Raises ApiError if there are none, or other workers with them."""
    there = sorted(name for name, at in ready.hosts.items() if at == host)
    if not there:
        known = ", ".join(sorted({*ready.hosts.values()}))
        raise ApiError(400, f"--host {host}: no worker is there; they are on {known}", param="host")
    if others := [name for name in there if not name.startswith("memory-")]:
        raise ApiError(
            400, f"--host {host}: {others[0]} is there, too, and memory workers alone can leave: drain them by number",
            param="host",
        )  # fmt: skip
    return [int(name.partition("-")[2]) for name in there]


async def _dismiss(service: Service, workers: Sequence[int], asked: str) -> dict[str, Any]:
    """Remove memory workers. ``asked``: the flag that named them. Returns the reply. Raises ApiError."""
    before = service.client.config
    count = before.topology.memory_workers
    left = count - len(workers)
    if not all(0 <= worker < count for worker in workers) or not left:
        there = f"memory workers 0 to {count - 1}" if left else "no other memory worker, so it cannot go"
        raise ApiError(400, f"{asked}: there is {there}", code="invalid_value")
    try:
        wanted = await asyncio.to_thread(_wanted, service.root, before, {"memory_workers": left}, service.client.ready)
    except ValueError as error:
        raise ApiError(400, f"{asked}: {error}", code="invalid_value") from None
    return {"memory_workers": left, "pause_s": await _change(service, wanted, workers)}


async def _change(service: Service, wanted: EngineConfig, leaving: Sequence[int] = ()) -> float:
    _check_running(service)
    return round(await service.client.replace_engine(wanted, leaving), 3)


def _check_running(service: Service) -> None:
    if service.queue_limit.is_draining:
        raise ApiError(503, "the server is shutting down", code="shutting_down")


def _wanted(model: str, before: EngineConfig, asked: dict[str, int], ready: EngineReady) -> EngineConfig:
    """Return ``before`` with other sizes. Raises ValueError, naming the flag and the fix, if the model cannot be
    divided among these workers.
    """
    wanted = scaled_config(before, asked)
    raw = peek_config(model, before.model)
    text: dict[str, Any] = raw.get("text_config", raw)
    heads = kv_heads_of(text.get)
    window = n if isinstance(n := text.get("sliding_window"), int) else 0
    elements = ready.row_bytes["kv"] // ELEMENT_BYTES.get(ready.dtype, 2)
    check_model(wanted, ModelLimits(ready.max_model_len, heads, elements, window))
    return wanted


def scaled_config(before: EngineConfig, asked: dict[str, int]) -> EngineConfig:
    """Return ``before`` with other sizes. A given number of batches replaces a plan that chooses it; then memory
    workers keep measured weights. Raises ValueError.
    """
    options, had = flat_options(before) | asked, before.topology
    if "pipeline" in asked and had.measures_pipeline:
        options |= {"plan": "", "memory_weights": MEASURED if had.measures_weights else had.memory_weights}
    return make_config(options)


def sizes_of(config: EngineConfig) -> dict[str, Any]:
    """Return the sizes. If the plan chooses the number of batches, the plan is in its place."""
    sizes = {name: getattr(config.topology, name) for name in SCALE_FIELDS}
    return sizes | ({"pipeline": config.topology.plan} if config.topology.measures_pipeline else {})
