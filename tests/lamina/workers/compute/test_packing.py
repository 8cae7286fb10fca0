"""When a worker has its weights a second time, in an order by which linear layers are faster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lamina.gemm.packing import bytes_to_pack
from lamina.protocol.options.engine import DeviceOptions
from lamina.protocol.options.topology import TopologyOptions

GB = 1 << 30


class TwoSlices:
    """Of two slices whose packed weights take ``bytes`` each, or (0) are not packed."""

    def __init__(self, bytes: int = 5 * GB) -> None:
        self._bytes = bytes

    def packed_bytes(self, dtype: torch.dtype, cols: int, k_size: int) -> int:
        return self._bytes


def program() -> Any:
    layer = torch.nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    module = torch.export.export(layer, (torch.ones(1, 2, dtype=torch.bfloat16),)).module()
    return SimpleNamespace(slices=[SimpleNamespace(module=module)] * 2)  # one derived from the other


@pytest.mark.parametrize(
    ("backend", "free", "topology", "kv_memory", "packs"),
    [
        (TwoSlices(), 20, {}, "auto", True),
        (TwoSlices(), 19, {}, "auto", False),  # KV has the other half
        (TwoSlices(), 24, {"memory_workers": 1}, "14GiB", True),
        (TwoSlices(), 23, {"memory_workers": 1}, "14GiB", False),  # which was asked for
        (TwoSlices(), 30, {"memory_workers": 2}, "11GiB", False),
        (TwoSlices(), 39, {"pipeline": 3}, "auto", False),  # two replicas
        (TwoSlices(), 40, {"pipeline": 3}, "auto", True),
        (TwoSlices(), 39, {"prefill_workers": 1}, "auto", False),
        (TwoSlices(0), 100, {}, "auto", False),
    ],
)
def test_packs_where_the_host_has_room(
    backend: Any, free: int, topology: dict[str, Any], kv_memory: str, packs: bool
) -> None:
    devices = DeviceOptions(kv_memory=kv_memory)
    needed = bytes_to_pack(program(), backend, free * GB, TopologyOptions(**topology), devices)
    assert needed == (10 * GB if packs else 0)
