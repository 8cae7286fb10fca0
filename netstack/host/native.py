"""The native module, or an ImportError that names the fix."""

from __future__ import annotations

try:
    from ._native import Channel, bounce, check, crypto_fault, open_link, open_stream, ring_bytes, seal, unseal
except ImportError as error:
    raise ImportError(
        f"transports between processes need the native module lamina.netstack.host._native, which did not load "
        f"({error}); install a C++17 compiler, then run `python setup.py build_ext --inplace` or install again; or use "
        "the transport 'loopback'"
    ) from error

__all__ = [
    "Channel",
    "bounce",
    "check",
    "crypto_fault",
    "open_link",
    "open_stream",
    "ring_bytes",
    "seal",
    "unseal",
]
