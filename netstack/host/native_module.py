"""The native module, or an ImportError that names the fix."""

from __future__ import annotations

try:
    from ._netstack import *  # noqa: F403 - other modules import its names from here
except ImportError as error:
    raise ImportError(
        f"transports between processes need the native module lamina.netstack.host._netstack, which did not load "
        f"({error}): install a C++17 compiler, then run `python setup.py build_ext --inplace` or install again. "
        "Without it there is the transport 'loopback'"
    ) from error
