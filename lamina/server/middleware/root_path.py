"""The path prefix that a proxy adds to the server's own paths."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Removes the prefix, so that inner layers see their own paths. Other paths pass unchanged."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        """``root``: such as /llm."""
        self._app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(f"{self._root}/"):
            raw = scope.get("raw_path") or b""
            scope.setdefault("state", {})["raw_path"] = raw  # for the log
            scope = {**scope, "path": scope["path"][len(self._root) :]}
            if raw.startswith(self._root.encode()):
                scope["raw_path"] = raw[len(self._root.encode()) :]
        await self._app(scope, receive, send)
