"""The parity of memory workers' KV: one more worker stores the exclusive or of the others' equal runs of heads, bit by
bit. So the KV of each worker, this one included, is the exclusive or of the KV of all others.

Compute and prefill workers send K and V to it as to the others. It attends nothing, so no step waits for it. A
step that it has not written when a worker is lost does not count as done. A load from storage ends once it has the
loaded pages, too. Imports no torch: the driver needs it too.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from lamina.config.partition import by_head
from lamina.config.resolve import check_equal_heads
from lamina.ops.attention.spec import AttentionSpec
from lamina.protocol.step_plan import BindRequest, LayerShape


def parity_layers(layers: Sequence[LayerShape], workers: int) -> list[LayerShape]:
    """Return a memory worker's part of each layer as mere bits, without how they are attended. Raises ValueError if
    ``workers`` do not divide the KV heads.
    """
    for layer in layers:
        check_equal_heads(layer.kv_heads, workers)
    return [
        structs.replace(
            layer,
            q_heads=layer.q_heads // workers,
            kv_heads=layer.kv_heads // workers,
            spec=AttentionSpec(scale=1.0, window=AttentionSpec.decode(layer.spec).window).encode(),
            sinks=b"",
            slopes=b"",
            rotary=None,
        )
        for layer in layers
    ]


def parity_bind(bind: BindRequest, backend: str, kv_bytes: int) -> BindRequest:
    """Return the parity worker's Bind. ``bind``: the first memory worker's. ``backend``, ``kv_bytes``: as of the
    others.
    """
    layers = parity_layers(bind.layers, bind.partition.num_workers)
    whole, kv = by_head([x.kv_heads for x in layers], [1.0], 0), structs.replace(bind.kv, attention=backend)
    return structs.replace(
        bind, partition=whole, layers=layers, kv=kv, kv_bytes=kv_bytes, device_path=False, parity=True
    )
