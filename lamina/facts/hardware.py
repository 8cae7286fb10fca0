"""Devices that a plan can name, with where their numbers come from."""

from __future__ import annotations

from dataclasses import dataclass

_PAPER = "arXiv 2405.01814, table 1"
_AICONFIGURATOR = "systems/{}.yaml of ai-dynamo/aiconfigurator"


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator: peak rates of its data sheet, which no program reaches.

    tflops: dense bf16, in 10^12 FLOP/s. memory_gb, bandwidth_gbs, network_gbs: 10^9 bytes (per second); ``network_gbs``
    is one direction of its own network card, None where none was stated. price_per_hour: US dollars, None if unknown.
    """

    name: str
    title: str
    tflops: float
    memory_gb: float
    bandwidth_gbs: float
    network_gbs: float | None
    price_per_hour: float | None
    source: str


_DEVICES = (
    Device(
        name="h100", title="NVIDIA H100 SXM 80 GB", tflops=989, memory_gb=80, bandwidth_gbs=3350, network_gbs=50,
        price_per_hour=11.06, source=_PAPER,
    ),
    Device(
        name="h20", title="NVIDIA H20 96 GB", tflops=148, memory_gb=96, bandwidth_gbs=4000, network_gbs=50,
        price_per_hour=4.63, source=f"{_PAPER} (price estimated there from the system's)",
    ),
    Device(
        name="tpu-v6e", title="Google TPU v6e", tflops=918, memory_gb=32, bandwidth_gbs=1640, network_gbs=25,
        price_per_hour=2.70, source=_PAPER,
    ),
    Device(
        name="a100", title="NVIDIA A100 SXM 80 GB", tflops=312, memory_gb=80, bandwidth_gbs=2039, network_gbs=25,
        price_per_hour=None, source=_AICONFIGURATOR.format("a100_sxm"),
    ),
    Device(
        name="h200", title="NVIDIA H200 SXM 141 GB", tflops=989, memory_gb=141, bandwidth_gbs=4800, network_gbs=50,
        price_per_hour=None, source=_AICONFIGURATOR.format("h200_sxm"),
    ),
    Device(
        name="b200", title="NVIDIA B200 SXM 180 GiB", tflops=2250, memory_gb=193.3, bandwidth_gbs=7700, network_gbs=100,
        price_per_hour=None, source=_AICONFIGURATOR.format("b200_sxm"),
    ),
    Device(
        name="l40s", title="NVIDIA L40S 48 GB", tflops=362, memory_gb=48.3, bandwidth_gbs=864, network_gbs=None,
        price_per_hour=None, source=_AICONFIGURATOR.format("l40s"),
    ),
    Device(
        name="l4", title="NVIDIA L4 24 GB", tflops=121, memory_gb=24, bandwidth_gbs=300, network_gbs=None,
        price_per_hour=None, source="NVIDIA L4 data sheet; half of its 242 TFLOPS, which are with sparsity",
    ),
)  # fmt: skip

DEVICES = {d.name: d for d in _DEVICES}


def device(name: str, flag: str) -> Device:
    """The device of that name, in any case. Raises ValueError that names ``flag`` and what there is."""
    found = DEVICES.get(name.lower())
    if found is None:
        raise ValueError(f"{flag} {name} is not one of {', '.join(DEVICES)}")
    return found
