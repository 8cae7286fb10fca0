"""Python processes that this process starts.

A child imports the package that this process runs, in whichever folder, and nothing from the current directory. This
module is in netstack since its benchmarks start processes too, and netstack imports no other package of lamina.
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
BEGUN_IN = ""  # this process's directory when it imported this module; relative entries of PYTHONPATH start there
with suppress(OSError):  # the directory is gone
    BEGUN_IN = os.getcwd()


def own_python(*words: str, environ: Mapping[str, str] = os.environ) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a child that runs this interpreter and this package.

    ``words``: the arguments of the interpreter: ``-m``, a module, its arguments. ``environ``: see ``own_environment``.
    """
    return other_python("", *words), own_environment(environ)


def other_python(python: str, *words: str) -> list[str]:
    """Return a command that runs the interpreter ``python``, with the package that is installed for it; "" = the
    interpreter at this one's path, which another host may have too.
    """
    return [python or sys.executable, "-P", *words]


def own_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``safe_environment``, changed so that a child finds this package before any other one. Idempotent: a child
    of this process gives its own children the same.
    """
    safe = safe_environment(environ)
    entries = list(filter(None, safe.get(PATH, "").split(os.pathsep)))
    # Site folders come after Python's own modules. In front, they would hide these: pip has an old argparse, say.
    if next(filter(_has_package, [*entries, *_site_folders()]), None) != FOLDER:
        safe[PATH] = os.pathsep.join(dict.fromkeys([FOLDER, *entries]))
    return safe


def safe_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``environ`` for a child that imports nothing from the current directory, nor do its own children.

    PYTHONPATH keeps absolute entries only: an empty one means the current directory and is dropped. Entries that this
    process ignores (``python -E``, ``-s``) are dropped for the child, too.
    """
    given = "" if sys.flags.ignore_environment else environ.get(PATH, "")
    entries = [os.path.normpath(os.path.join(BEGUN_IN, entry)) for entry in given.split(os.pathsep) if entry]
    entries = list(dict.fromkeys(filter(os.path.isabs, entries)))
    path = {PATH: os.pathsep.join(entries)} if entries else {}
    user = {"PYTHONNOUSERSITE": "1"} if sys.flags.no_user_site else {}
    others = {name: value for name, value in environ.items() if name != PATH}
    return {**others, **path, **user, "PYTHONSAFEPATH": "1"}


def _site_folders() -> list[str]:
    """Return folders of installed packages, in Python's search order."""
    return [*([site.getusersitepackages()] if site.ENABLE_USER_SITE else []), *site.getsitepackages()]


def _has_package(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, "lamina", "__init__.py"))
