"""Protects a server without keys from web pages. It trusts every client that can connect, except pages of other sites
in a browser. Such a page has its site's name in Origin. If its name resolves to this server (DNS rebinding), it has
that name in Host.
"""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from lamina.server.errors import ApiError, error_response
from lamina.server.server_config import ServerConfig

from .auth import PUBLIC_PATHS

ANY = "*"


class TrustedHosts:
    """Refuses requests with a Host that is not this server's, or an Origin that is neither its own nor allowed."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._origins = set(config.origins)
        self._names = {"localhost", config.host.lower(), socket.gethostname().lower(), *config.hosts}
        # A literal address cannot be another site's name that resolves to this server.
        self._addresses = _is_address(config.host) and ipaddress.ip_address(config.host).is_unspecified

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PUBLIC_PATHS:
            try:
                self._check([(k, v.decode("latin-1")) for k, v in scope["headers"]])
            except ApiError as e:
                await error_response(e)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, headers: list[tuple[bytes, str]]) -> None:
        hosts = [v for k, v in headers if k == b"host"]
        for host in hosts:
            if not self._is_ours(_name(host)):
                start = f"start it with --allowed-hosts {_name(host[:128]) or 'NAME'}, or with an API key"
                text = f"this server does not answer to the host name {host[:128]!r}: {start}, which allows all names"
                raise ApiError(403, text, code="foreign_host")
        for origin in (v for k, v in headers if k == b"origin"):
            if ANY not in self._origins and origin not in self._origins and not _same(origin, hosts):
                text = f"pages of {origin[:128]!r} may not use this server: --allowed-origins adds it"
                raise ApiError(403, text, code="foreign_origin")

    def _is_ours(self, name: str) -> bool:
        if name in self._names or ANY in self._names or name.endswith(".localhost"):
            return True
        return _is_address(name) and (self._addresses or ipaddress.ip_address(name).is_loopback)


def _name(host: str) -> str:
    """Return a Host without its port."""
    name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
    return name.lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _same(origin: str, hosts: list[str]) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and [parts.netloc.lower()] == [h.lower() for h in hosts]
