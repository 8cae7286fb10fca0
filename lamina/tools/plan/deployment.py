"""Possible deployments: devices of one or two kinds, the division of a model among them, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lamina.facts.hardware import Device
from lamina.scheduler.rotation.pipeline import num_replicas

from .model_facts import AttentionGroup, ModelFacts
from .tables import Constants, PriceBook

GIB = 1 << 30
MAX_BATCHES = 4
MAX_RANKS = 8  # of a host, within which all-reduces were measured
UNITS = {"GiB": float(GIB), "GB": 1e9}


class Inventory(NamedTuple):
    """Available devices of one kind, and their number."""

    device: Device
    number: int


@dataclass(frozen=True)
class Deployment:
    """``ranks`` compute devices share each replica of the weights; n batches rotate over max(1, n - 1) replicas.
    ``memory``: the memory devices, of which there are ``memory_workers``. None = a homogeneous engine, which computes
    attention on the devices with the weights.
    """

    compute: Device
    ranks: int
    memory: Device | None = None
    memory_workers: int = 0
    batches: int = 1

    @property
    def replicas(self) -> int:
        """Copies of the weights."""
        return num_replicas(self.batches)

    @property
    def num_compute(self) -> int:
        """Number of compute devices."""
        return self.ranks * self.replicas

    @property
    def is_split(self) -> bool:
        """True if attention has devices of its own."""
        return self.memory is not None

    @property
    def devices(self) -> tuple[Device, ...]:
        """Each kind of device."""
        return (self.compute,) if self.memory is None else (self.compute, self.memory)

    @property
    def label(self) -> str:
        """The deployment in words: 2 h100 + 4 h20, n = 2."""
        alone = f"{self.num_compute} {self.compute.name}"
        return (
            alone if self.memory is None else f"{alone} + {self.memory_workers} {self.memory.name}, n = {self.batches}"
        )

    def price(self, prices: PriceBook) -> float:
        """Return US dollars an hour. Raises ValueError for a device without a price."""
        memory = self.memory_workers * prices.hour(self.memory) if self.memory else 0.0
        return self.num_compute * prices.hour(self.compute) + memory


@dataclass(frozen=True)
class DeviceMemory:
    """Computes usable memory of devices. ``unit``: the meaning of GB on a data sheet, GiB (stacks are powers of two) or
    GB.
    """

    constants: Constants
    unit: str = "GiB"

    def bytes_of(self, device: Device) -> float:
        """Return a device's bytes: a sheet's GB as ``unit``; sizes in GiB or MiB stay."""
        stated_in_gb = device.memory.upper().replace(" ", "").endswith("GB")
        return device.memory_gb * (UNITS[self.unit] if stated_in_gb else 1e9)

    def missing_weight_bytes(self, model: ModelFacts, deployment: Deployment) -> float:
        """Return the bytes that each compute device lacks for its part; not above 0: it fits."""
        return model.weight_bytes / deployment.ranks - self._left(deployment.compute, deployment.is_split)

    def kv_bytes(self, model: ModelFacts, deployment: Deployment) -> float:
        """Return the bytes of distinct K and V that the deployment can hold; not above 0: weights do not fit."""
        if deployment.memory is not None:
            return deployment.memory_workers * self._left(deployment.memory, True)
        left = deployment.ranks * self._left(deployment.compute, False) - model.weight_bytes
        return left / max(a.copies(deployment.ranks) for a in model.attentions)

    def _left(self, device: Device, split: bool) -> float:
        overhead = self.constants["overhead_split" if split else "overhead_homogeneous"]
        return self.bytes_of(device) * self.constants["memory_in_use"] - overhead * GIB


def deployments(
    stock: Mapping[str, Inventory], model: ModelFacts, most_batches: int = MAX_BATCHES
) -> Iterator[Deployment]:
    """Yield all deployments that the stock allows, homogeneous ones first, even if the model does not fit."""
    for each in stock.values():
        yield from (Deployment(each.device, ranks) for ranks in _ranks(each, model, split=False))
    for compute in stock.values():
        for memory in stock.values():
            yield from _splits(compute, memory, model, most_batches)


def _splits(compute: Inventory, memory: Inventory, model: ModelFacts, most_batches: int) -> Iterator[Deployment]:
    same = compute.device == memory.device
    for batches in range(1, most_batches + 1):
        for ranks in _ranks(compute._replace(number=compute.number // num_replicas(batches)), model, split=True):
            left = memory.number - (ranks * num_replicas(batches) if same else 0)
            for workers in range(ranks, left + 1, ranks):  # ranks have memory workers of their own
                yield Deployment(compute.device, ranks, memory.device, workers, batches)


def _ranks(stock: Inventory, model: ModelFacts, *, split: bool) -> list[int]:
    """Return the numbers of ranks that divide the heads of every layer evenly. In a homogeneous engine several ranks
    may have the same KV head. Only 1 if devices state no interconnect.
    """
    most = min(stock.number, MAX_RANKS) if stock.device.interconnect_gbs else 1
    powers = (1 << i for i in range(MAX_RANKS.bit_length()))

    def share(a: AttentionGroup, ranks: int) -> bool:
        return a.kv_heads % ranks == 0 or (not split and a.heads % ranks == 0 and ranks % a.kv_heads == 0)

    return [r for r in powers if r <= most and all(share(a, r) for a in model.attentions)]
