"""The native module, or an ImportError that names the fix."""

from __future__ import annotations

try:
    from ._netstack import (
        ABORTED,
        BULK_CREDIT_AT,
        CREDIT_AT,
        FAILED,
        FAULT,
        LINE,
        OK,
        PENDING,
        SIGNAL_AT,
        SLOTS_AT,
        TIMEOUT,
        Channel,
        Ringer,
        bounce,
        channel_layout,
        check,
        crypto_fault,
        flood,
        gin_layout,
        inbox_bytes,
        mlx5_fault,
        mlx5_layout,
        open_kernel_pair,
        open_link,
        open_rdma_end,
        open_stream,
        rdma_gids,
        ring_bytes,
        rings_bytes,
        seal,
        slot_stride,
        unseal,
        verbs_fault,
    )  # fmt: skip
except ImportError as error:
    raise ImportError(
        f"transports between processes need the native module lamina.netstack.host._netstack, which did not load "
        f"({error}); install a C++17 compiler, then run `python setup.py build_ext --inplace` or install again; or use "
        "the transport 'loopback'"
    ) from error

__all__ = [
    "ABORTED",
    "BULK_CREDIT_AT",
    "CREDIT_AT",
    "FAILED",
    "FAULT",
    "LINE",
    "OK",
    "PENDING",
    "SIGNAL_AT",
    "SLOTS_AT",
    "TIMEOUT",
    "Channel",
    "Ringer",
    "bounce",
    "channel_layout",
    "check",
    "crypto_fault",
    "flood",
    "gin_layout",
    "inbox_bytes",
    "mlx5_fault",
    "mlx5_layout",
    "open_kernel_pair",
    "open_link",
    "open_rdma_end",
    "open_stream",
    "rdma_gids",
    "ring_bytes",
    "rings_bytes",
    "seal",
    "slot_stride",
    "unseal",
    "verbs_fault",
]
