"""The token that keeps strangers out of Ray: made once for this user, handed to Ray by its own variables."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def state_folder(environ: MutableMapping[str, str] = os.environ) -> Path:
    """Where Lamina keeps what outlives a command; nobody else's."""
    base = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "lamina"


def make_token(environ: MutableMapping[str, str] = os.environ) -> str:
    """The token of the environment, else Lamina's own, made if it is not there yet."""
    if given := read_token(environ):
        return given
    folder = state_folder(environ)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = folder / f"ray_token.{secrets.token_hex(8)}"
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    with suppress(FileExistsError):  # another call was first
        os.link(draft, folder / "ray_token")  # whole, or not there
    draft.unlink()
    return read_token(environ) or ""


def read_token(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """From RAY_AUTH_TOKEN, the file of RAY_AUTH_TOKEN_PATH, or Lamina's own. Raises ValueError for a file that cannot
    be read, or that others than its owner may touch.
    """
    if token := environ.get(TOKEN):
        return token
    path = Path(environ.get(TOKEN_PATH) or state_folder(environ) / "ray_token")
    if not path.exists() and not environ.get(TOKEN_PATH):
        return None
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ValueError(f"{path} is open to others: chmod 600 {path}")
        return path.read_text().strip()
    except OSError as error:
        raise ValueError(f"{TOKEN_PATH} {path}: {error.strerror}") from error


def offer_token(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set Ray's variables, before Ray is loaded, so that it shows the token and asks for it. Raises ValueError."""
    if environ.get(MODE, "token") != "token":
        raise ValueError(f"{MODE}={environ[MODE]}: Lamina joins Ray with a token only: unset it")
    environ[MODE] = "token"
    if read_token(environ) is not None:
        if TOKEN not in environ:
            environ.setdefault(TOKEN_PATH, str(state_folder(environ) / "ray_token"))
    elif not Path("~/.ray/auth_token").expanduser().exists():  # Ray's own place
        raise ValueError(
            f"no token for Ray: set {TOKEN_PATH} to the file that the cluster was started with, or start one by "
            f"`lamina-launch cluster up`"
        )
