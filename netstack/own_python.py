"""Python processes that this process starts.

A child imports the package that this process runs, whichever folder holds it, and nothing from the current directory.
It is a room of netstack because netstack's benchmarks start processes too, and netstack imports none of lamina's rooms.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Mapping
from contextlib import suppress

PATH = "PYTHONPATH"
# The folder that holds the package ``lamina``. Links are not followed: a checkout has this file by a link.
FOLDER = os.path.abspath(__file__).rsplit(os.sep, 3)[0]
BEGUN_IN = ""  # this process's directory when it imported this module; relative entries of PYTHONPATH begin there
with suppress(OSError):  # the directory is gone
    BEGUN_IN = os.getcwd()


def own_python(*words: str, environ: Mapping[str, str] = os.environ) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a child that runs this interpreter and this package.

    ``words``: what follows the interpreter: ``-m``, a module, its arguments. ``environ``: see ``own_environment``.
    """
    return other_python("", *words), own_environment(environ)


def other_python(python: str, *words: str) -> list[str]:
    """A command that runs the interpreter ``python``, with the package that is installed for it; "" = the interpreter
    at this one's path, which another host may have too.
    """
    return [python or sys.executable, "-P", *words]


def own_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """``safe_environment``, by which a child finds this package before any other one. Idempotent: a child of this
    process gives its own children the same.
    """
    safe = safe_environment(environ)
    entries = list(filter(None, safe.get(PATH, "").split(os.pathsep)))
    # Site folders come after Python's own modules. In front, they would hide these: pip has an old argparse, say.
    if next(filter(_has_package, [*entries, *_site_folders()]), None) != FOLDER:
        safe[PATH] = os.pathsep.join(dict.fromkeys([FOLDER, *entries]))
    return safe


def safe_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """``environ`` for a child that imports nothing from the current directory, nor does what it starts in turn.

    PYTHONPATH has absolute entries alone: an empty one means the current directory and is dropped. Entries that this
    process ignores (``python -E``, ``-s``) are not the child's either.
    """
    given = "" if sys.flags.ignore_environment else environ.get(PATH, "")
    entries = [os.path.normpath(os.path.join(BEGUN_IN, entry)) for entry in given.split(os.pathsep) if entry]
    entries = list(dict.fromkeys(filter(os.path.isabs, entries)))
    path = {PATH: os.pathsep.join(entries)} if entries else {}
    user = {"PYTHONNOUSERSITE": "1"} if sys.flags.no_user_site else {}
    others = {name: value for name, value in environ.items() if name != PATH}
    return {**others, **path, **user, "PYTHONSAFEPATH": "1"}


def _site_folders() -> list[str]:
    """Folders of installed packages, in the order in which Python searches them."""
    return [*([site.getusersitepackages()] if site.ENABLE_USER_SITE else []), *site.getsitepackages()]


def _has_package(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, "lamina", "__init__.py"))
