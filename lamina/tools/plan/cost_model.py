"""The time of a round of steps. Operators have measured tables, or else the roofline at the share of peak that programs
reach; each part names its origin.

A round is one step of every batch. Sequential parts of a batch add up; the pools work in parallel if there are several
batches (scheduler.rotation.pipeline.lower_bound has the same rule for given times).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lamina.facts.hardware import Device

from .deployment import Deployment
from .message_sizes import MessageBytes, message_bytes_of, network_card_seconds
from .model_facts import AttentionGroup, ModelFacts
from .operators import OperatorTables
from .tables import Baseline, Constants, NetworkLink

ALPHA = 0.2  # part of the step's time that the paper allows for the network


class PhaseTime(NamedTuple):
    """Seconds of a part of a step, and their origin."""

    seconds: float
    origin: str


class BatchLoad(NamedTuple):
    """The load of a batch. rows: tokens that the slices compute. By window: tokens that attention reads for them, and
    pairs of a row and such a token. None: as many pairs as tokens, as each row has a sequence of its own.
    """

    rows: float
    stored: Mapping[int, float]
    pairs: Mapping[int, float] | None = None


@dataclass(frozen=True)
class StepTimes:
    """Times of a batch's step: seconds of its slices, of its attention, and of the network that nothing hides.
    ``hidden_s``: of the network, while the memory workers attend by Q.
    """

    phases: Mapping[str, PhaseTime]
    hidden_s: float

    @property
    def model_s(self) -> float:
        """Seconds of slices: everything on the compute devices."""
        return sum(self.phases[p].seconds for p in ("linear", "elementwise", "collective"))

    @property
    def attention_s(self) -> float:
        """Seconds of the attention of all layers."""
        return self.phases["attention"].seconds

    @property
    def network_s(self) -> float:
        """Seconds of the network that nothing hides."""
        return self.phases["network"].seconds


class RoundTime(NamedTuple):
    """The time of a round. ``limit``: the part that bounds it. ``compute_busy``, ``memory_busy``: shares of the round
    in which that pool is busy. In a homogeneous engine, they are shares in which its one pool computes slices, and
    attention.
    """

    seconds: float
    limit: str
    compute_busy: float
    memory_busy: float


class _RowTimes(NamedTuple):
    """Times of a step with so many rows, whatever they attend, in seconds: of its slices and of its messages.
    ``hidden_s``: the part of the messages that long enough attention would hide.
    """

    slices: dict[str, PhaseTime]
    model_s: float
    sent: MessageBytes
    moving_s: float
    hidden_s: float


class _LayersRead(NamedTuple):
    """The attention of some layers on so many ``devices``. flops: per second, of all devices. reading_s: bytes on each
    device -> seconds of a layer; ``origin``: of these.
    """

    layers: AttentionGroup
    copies: float
    devices: int
    flops: float
    reading_s: Callable[[float], float]
    origin: str


@dataclass
class CostModel:
    """The costs of one model over one kind of network. ``baseline``: the model of homogeneous deployments."""

    model: ModelFacts
    constants: Constants
    link: NetworkLink
    baseline: Baseline
    tables: OperatorTables = field(default_factory=OperatorTables)
    _rows: dict[tuple[Deployment, float], _RowTimes] = field(default_factory=dict, init=False, repr=False)
    _readers: dict[Deployment, list[_LayersRead]] = field(default_factory=dict, init=False, repr=False)

    def round(self, deployment: Deployment, loads: Sequence[BatchLoad]) -> RoundTime:
        """Return the time of a round: one step of each batch with rows; ``loads`` has at least one."""
        each = {id(load): self._seconds(deployment, load) for load in loads}  # a replay needs it again and again
        steps = [each[id(load)] for load in loads]
        model, attention = sum(s[0] for s in steps), sum(s[1] for s in steps)
        if not deployment.is_split:
            seconds = model + attention + self.baseline.driver_s
            limit = "compute" if model > attention else "memory"
            return RoundTime(seconds, limit, model / seconds, attention / seconds)
        bounds = {
            "memory": attention,
            "compute": model / deployment.replicas,
            "network": network_card_seconds(
                self.link, deployment, [self._of_rows(deployment, load.rows).sent for load in loads]
            ),
            "latency": max(map(sum, steps)),
            "driver": self.driver_s(sum(load.rows for load in loads)),
        }
        limit = max(bounds, key=lambda name: bounds[name])
        seconds = bounds[limit]
        return RoundTime(seconds, limit, bounds["compute"] / seconds, attention / seconds)

    def step(self, deployment: Deployment, load: BatchLoad) -> StepTimes:
        """Return the parts of one batch's step. K and V are computed and sent while the memory workers attend by Q.
        That can be more than the messages take. Then the seconds of the network are below 0, and a step is shorter than
        slices and attention one after the other. With n > 2 the cut moves to the next replica, too.
        """
        of_rows, origins = self._of_rows(deployment, load.rows), [x.origin for x in self._readers_of(deployment)]
        _, attention, network = self._seconds(deployment, load)
        link = f"link: {self.link.name}, {self._cards(deployment)} cards on each side"
        parts = {
            **of_rows.slices,
            "attention": PhaseTime(attention, "; ".join(dict.fromkeys(origins))),
            "network": PhaseTime(network, link if deployment.is_split else "none: one pool"),
        }
        return StepTimes(parts, of_rows.moving_s - network)

    def _seconds(self, deployment: Deployment, load: BatchLoad) -> tuple[float, float, float]:
        """Return the seconds of one batch's step: of its slices, its attention, and the network that nothing hides."""
        of_rows, attention = self._of_rows(deployment, load.rows), self._attention_s(deployment, load)
        return of_rows.model_s, attention, of_rows.moving_s - min(attention, of_rows.hidden_s)

    def _of_rows(self, deployment: Deployment, rows: float) -> _RowTimes:
        known = self._rows.get((deployment, rows))
        if known is None:
            slices = {
                "linear": self.linear(deployment, rows),
                "elementwise": self.elementwise(deployment, rows),
                "collective": self.collective(deployment, rows),
            }
            model_s = sum(part.seconds for part in slices.values())
            moved, times = MessageBytes(0.0, 0.0, 0.0, 0.0), (0.0, 0.0)
            if deployment.is_split:
                moved = message_bytes_of(self.model, deployment, rows)
                times = self._messages(deployment, moved, model_s)
            known = self._rows[deployment, rows] = _RowTimes(slices, model_s, moved, *times)
        return known

    def _messages(self, deployment: Deployment, moved: MessageBytes, model_s: float) -> tuple[float, float]:
        """Return the seconds of the messages of all layers, and how many of these long enough attention would hide."""
        assert deployment.memory is not None
        bandwidth = self._cards(deployment) * self.link.bandwidth(deployment.compute, deployment.memory)
        moving = self.model.num_layers * self.link.round_trip_s + (moved.both_ways + moved.cut) / bandwidth
        return moving, self.model.between * model_s + moved.kv / bandwidth

    @staticmethod
    def _cards(deployment: Deployment) -> int:
        return min(deployment.ranks, deployment.memory_workers)

    def driver_s(self, rows: float) -> float:
        """Return the seconds of Lamina's own driver, which schedules a round while the one before runs."""
        return self.constants["driver_round"] + rows * self.constants["driver_row"]

    def linear(self, deployment: Deployment, rows: float) -> PhaseTime:
        """Return the time of products with weights, shared by the ranks."""
        device, ranks = deployment.compute, deployment.ranks
        if self.tables.has("linear", device.name, ranks):
            took, weights = self.tables.seconds("linear", device.name, ranks, rows)
            share = max(_peaks(weights, weights * rows, device, ranks)) / took
            seconds = sum(max(_peaks(*p.work(rows), device, ranks)) for p in self.model.products) / share
            return PhaseTime(seconds, f"table: {device.name}, {ranks} ranks, {share:.0%} of peak at these rows")
        bend, seconds = self.constants["linear_bend"], 0.0
        for products in self.model.products:
            reading, computing = _peaks(*products.work(rows), device, ranks)
            reading /= self.constants["linear_bandwidth_share"]
            computing /= self.constants["linear_flops_share"]
            seconds += (reading**bend + computing**bend) ** (1 / bend)
        return PhaseTime(seconds, "roofline: linear_bandwidth_share, linear_flops_share, linear_bend")

    def elementwise(self, deployment: Deployment, rows: float) -> PhaseTime:
        """Return the time of norms, rope, activations, residual additions."""
        device, ranks, layers = deployment.compute, deployment.ranks, self.model.num_layers
        row_bytes = self.model.hidden_bytes
        if self.tables.has("elementwise", device.name, ranks):
            _, width = self.tables.seconds("elementwise", device.name, ranks, 1)
            as_many = max(1.0, rows * row_bytes / (2 * width))
            took, _ = self.tables.seconds("elementwise", device.name, ranks, as_many)
            return PhaseTime(layers * took, f"table: {device.name}, {ranks} ranks, by the elements of a row")
        passes = self.constants["elementwise_passes"] * rows * row_bytes / ranks / (device.bandwidth_gbs * 1e9)
        seconds = layers * (self.constants["elementwise_floor"] + passes)
        return PhaseTime(seconds, "roofline: elementwise_floor, elementwise_passes")

    def collective(self, deployment: Deployment, rows: float) -> PhaseTime:
        """Return the time of two all-reduces a layer between the ranks of a replica."""
        ranks, device = deployment.ranks, deployment.compute
        if ranks == 1:
            return PhaseTime(0.0, "none: one rank")
        each = 2 * self.model.num_layers
        if self.tables.has("all_reduce", device.name, ranks):
            took, _ = self.tables.seconds("all_reduce", device.name, ranks, rows * self.model.hidden_bytes)
            return PhaseTime(each * took, f"table: {device.name}, {ranks} ranks")
        if not device.interconnect_gbs:
            raise ValueError(f"{device.name} states no interconnect, over which {ranks} ranks would add up")
        ring = 2 * (ranks - 1) / ranks * rows * self.model.hidden_bytes
        moving = ring / (device.interconnect_gbs * 1e9 * self.constants["collective_share"])
        return PhaseTime(
            each * (self.constants["collective_floor"] + moving), "roofline: collective_floor, collective_share"
        )

    def _attention_s(self, deployment: Deployment, load: BatchLoad) -> float:
        """Return the attention's seconds in all layers, spread evenly over the devices that hold K and V."""
        pairs, seconds = load.pairs or load.stored, 0.0
        for layers, copies, devices, flops, reading_s, _ in self._readers_of(deployment):
            reading = reading_s(layers.kv_bytes * load.stored[layers.window] * copies / devices)
            seconds += layers.count * max(reading, layers.flops * pairs[layers.window] / flops)
        return seconds

    def _readers_of(self, deployment: Deployment) -> list[_LayersRead]:
        known = self._readers.get(deployment)
        if known is None:
            device = deployment.memory or deployment.compute
            count = deployment.memory_workers or deployment.ranks
            flops = device.tflops * 1e12 * self.constants["attention_flops_share"] * count
            known = self._readers[deployment] = [
                _LayersRead(
                    layers,
                    1.0 if deployment.is_split else layers.copies(deployment.ranks),
                    count,
                    flops,
                    *self._reading(device, layers),
                )
                for layers in self.model.attentions
            ]
        return known

    def _reading(self, device: Device, layers: AttentionGroup) -> tuple[Callable[[float], float], str]:
        """Return a function from the bytes of K and V that each device reads to the seconds of a layer, and
        its origin.
        """
        group = self.tables.nearest("attention", device.name, layers.heads // layers.kv_heads)
        if group:
            origin = f"table: {device.name}, {group} query heads of a KV head"
            return lambda read: self.tables.seconds("attention", device.name, group, read)[0], origin
        bandwidth = device.bandwidth_gbs * 1e9 * self.constants["attention_bandwidth_share"]
        floor = self.constants["attention_floor"]
        origin = "roofline: attention_floor, attention_bandwidth_share, attention_flops_share"
        return lambda read: floor + read / bandwidth, origin

    def message_bandwidth(self, deployment: Deployment, load: BatchLoad) -> float:
        """Return the bytes per second between the pools with which messages take the share of a step that the paper
        allows.
        """
        step = self.step(deployment, load)
        return min_bandwidth(self.model.message_bytes * load.rows, step.model_s, step.attention_s)


def _peaks(weight_bytes: float, flops: float, device: Device, ranks: int) -> tuple[float, float]:
    """Return the seconds at peak rates: to read the weights, to compute."""
    return weight_bytes / (device.bandwidth_gbs * 1e9 * ranks), flops / (device.tflops * 1e12 * ranks)


def split_load(load: BatchLoad, batches: int) -> list[BatchLoad]:
    """Return a load divided evenly among so many batches, but no more than it has rows."""
    count = max(1, min(batches, math.floor(load.rows)))

    def part(of: Mapping[int, float]) -> dict[int, float]:
        return {window: tokens / count for window, tokens in of.items()}

    return [BatchLoad(load.rows / count, part(load.stored), load.pairs and part(load.pairs))] * count


def min_bandwidth(message_bytes: float, model_s: float, attention_s: float) -> float:
    """Return (2 + 2/G) e d B L / (ALPHA (MTIME + ATIME)) in bytes per second; ``message_bytes`` is the numerator."""
    return message_bytes / (ALPHA * (model_s + attention_s))
