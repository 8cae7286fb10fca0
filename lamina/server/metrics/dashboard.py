"""A page at /: chat, and a live view of both pools. It is one file without external assets."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

router = APIRouter()
_PAGE = Path(__file__).with_name("dashboard.html").read_text()
_SCRIPT = _PAGE.split("<script>", 1)[1].split("</script>", 1)[0]
_DIGEST = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
# The page runs its own script and no other, and connects to this server only.
_POLICY = (
    f"default-src 'none'; script-src 'sha256-{_DIGEST}'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none';"
)


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The dashboard."""
    return HTMLResponse(_PAGE, headers={"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"})
