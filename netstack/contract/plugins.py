"""Entries that an environment variable adds to a table of modules: tests add transports and storage backends.

The variable has NAME=MODULE, several separated by commas. Child processes inherit it. A module comes from PYTHONPATH or
from an installed package, never from the current directory.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


def plugins(variable: str) -> dict[str, str]:
    """Return the entries of ``variable``: name -> module. Raises ValueError for anything but NAME=MODULE, several
    separated by commas.
    """
    entries = {}
    for entry in filter(None, os.environ.get(variable, "").split(",")):
        name, _, module = entry.partition("=")
        if not name or not all(part.isidentifier() for part in module.split(".")):
            raise ValueError(f"{variable} must have NAME=MODULE, several separated by commas, not {entry!r}")
        entries[name] = module
    return entries


def load_plugin(variable: str, module: str) -> ModuleType:
    """Import ``module``. Raises ImportError if it is not found, or only in the current directory."""
    package = module.partition(".")[0]
    spec = find_spec(package)
    if spec is None:
        raise ImportError(f"{variable} names {module}, and there is no {package}: put its folder into PYTHONPATH")
    places = spec.submodule_search_locations or [spec.origin or ""]
    if any(Path(place).resolve().parent == Path.cwd() for place in places):
        raise ImportError(f"{variable} names {module}, which lies in the current directory: start in another one")
    return import_module(module)
