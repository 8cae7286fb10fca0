"""The token that authenticates peers of Ray: made once for this user, passed to Ray by Ray's own variables."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def state_folder(environ: MutableMapping[str, str] = os.environ) -> Path:
    """Return the folder of this user in which Lamina keeps what outlives a command."""
    base = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "lamina"


def make_token(environ: MutableMapping[str, str] = os.environ) -> str:
    """Return the token of the environment, else Lamina's own, which is made if it does not exist yet."""
    if given := read_token(environ):
        return given
    folder = state_folder(environ)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = folder / f"ray_token.{secrets.token_hex(8)}"
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    with suppress(FileExistsError):  # another call was first
        os.link(draft, folder / "ray_token")  # complete, or not there
    draft.unlink()
    return read_token(environ) or ""


def read_token(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """Return the token of RAY_AUTH_TOKEN, of the file RAY_AUTH_TOKEN_PATH, or Lamina's own; None if there is none.

    Raises ValueError if a file cannot be read, or other users may access it.
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
    """Set Ray's variables before Ray is loaded, so that it sends and requires the token. Raises ValueError."""
    if environ.get(MODE, "token") != "token":
        raise ValueError(f"{MODE}={environ[MODE]}: Lamina joins Ray with a token only: unset it")
    environ[MODE] = "token"
    if read_token(environ) is not None:
        if TOKEN not in environ:
            environ.setdefault(TOKEN_PATH, str(state_folder(environ) / "ray_token"))
    elif not Path("~/.ray/auth_token").expanduser().exists():  # Ray's default path
        raise ValueError(
            f"no token for Ray: set {TOKEN_PATH} to the file that the cluster was started with, or start one by "
            f"`lamina-launch cluster up`"
        )
