"""The ASGI application: routes, and the layers that every request passes."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from lamina import __version__

from . import completion_routes, info_routes, operator_routes, optional_routes, session_routes
from .call import Service
from .engine_client.engine_client import EngineBusyError, EngineGoneError, QueryFailedError
from .engine_client.engine_restarts import PlanFailedError
from .errors import ApiError, engine_gone, error_response
from .journal import fetch_routes
from .metrics import dashboard
from .metrics.request_log import RequestLog
from .middleware.auth import Auth
from .middleware.head_requests import HeadRequests
from .middleware.root_path import RootPath
from .middleware.trusted_hosts import TrustedHosts
from .openapi import DescribedApp
from .unsupported_routes import route_not_found, unsupported_route


def make_app(service: Service) -> FastAPI:
    """Return the application with its routes, without middleware."""
    root = service.config.root_path
    servers = [{"url": root}] if root else None
    app = DescribedApp(
        service.config,
        title="Lamina",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        servers=servers,
        redirect_slashes=False,
    )
    app.state.service = service
    for router in _routers(service):
        app.include_router(router)
    app.add_exception_handler(HTTPException, _http_error)
    known: list[type[Exception]] = [ApiError, *_ERRORS, Exception]
    for kind in known:
        app.add_exception_handler(kind, _api_error)  # RequestLog logs unknown ones
    return app


def with_middleware(app: FastAPI, service: Service) -> ASGIApp:
    """Wrap ``app`` in its middleware. From outside to inside: log and metrics, trusted hosts, CORS, API keys, HEAD
    requests. Routes read their bodies themselves.
    """
    config = service.config
    inner: ASGIApp = Auth(HeadRequests(app), config.api_keys, config.admin_key)
    if config.origins:
        inner = CORSMiddleware(
            inner, allow_origins=config.origins, allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )  # fmt: skip
    if not config.api_keys and not config.uds:  # no browser has the key, or can open a Unix socket
        inner = TrustedHosts(inner, config)
    heads = config.enable_request_id_headers
    seen = RequestLog(inner, service.metrics, _routes(service), log_requests=config.enable_log_requests, heads=heads)
    return RootPath(seen, config.root_path) if config.root_path else seen


def _routers(service: Service) -> list[APIRouter]:
    config = service.config
    optional = [
        (fetch_routes.router, service.journal is not None),
        (optional_routes.tokenizer_info, config.enable_tokenizer_info_endpoint),
        (optional_routes.development, config.server_dev_mode),
        (operator_routes.router, bool(config.admin_key)),
        (dashboard.router, config.dashboard),
        (session_routes.router, service.client.ready.caches_prefixes),
    ]
    return [completion_routes.router, info_routes.router, *(router for router, wanted in optional if wanted)]


def _routes(service: Service) -> list[Route]:
    return [route for router in _routers(service) for route in router.routes if isinstance(route, Route)]


# Errors that routes do not handle themselves -> the reply.
_ERRORS: dict[type[Exception], Callable[[Exception], ApiError]] = {
    EngineBusyError: lambda error: ApiError(409, str(error), code="busy"),
    EngineGoneError: engine_gone,
    PlanFailedError: lambda error: ApiError(409, f"nothing has changed: {error}", code="scaling_failed"),
    QueryFailedError: lambda error: ApiError(500, str(error), code="engine_failed"),
}


async def _api_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        make = next((make for kind, make in _ERRORS.items() if isinstance(error, kind)), None)
        error = ApiError(500, "the server failed; see its log") if make is None else make(error)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException) or error.status_code not in (404, 405):
        return error_response(ApiError(getattr(error, "status_code", 500), "the request failed"))
    path, served = request.scope["path"], [route.path for route in _routes(request.app.state.service)]
    if error.status_code == 404 or unsupported_route(path, served):
        return error_response(route_not_found(path, served))
    allowed = "GET, HEAD" if "GET" in (known := (error.headers or {}).get("Allow", "")) else known
    text = f"this route takes {allowed}, not {request.method}"
    return error_response(ApiError(405, text, code="method_not_allowed"), {"Allow": allowed})
