"""The paper's figures and tables next to the same numbers by the cost model: paper, modelled, and the gap between them.
Nothing here was fitted to the paper's numbers. Figures that the paper only draws have no number to compare, which is
noted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lamina.facts.hardware import DEVICES
from lamina.tools.plan.cost_model import BatchLoad, CostModel, min_bandwidth, split_load
from lamina.tools.plan.deployment import GIB, Deployment, DeviceMemory
from lamina.tools.plan.model_facts import ModelFacts, paper_models
from lamina.tools.plan.tables import baseline, constants, network_link, price_book

H100, H20 = DEVICES["h100"], DEVICES["h20"]
SPLITS = {  # table 5: model -> compute and memory devices; homogeneous H100
    "llama-33b": (1, 2, 2),
    "llama-65b": (2, 4, 4),
    "llama3-70b": (2, 4, 4),
}
NO_H20 = "the efficiency of an H20, of which no table is known: its roofline is taken at the shares of an H100"
GAINS = 1.161, 1.901  # figure 10, by the text: throughput relative to vLLM


class FigureValue(NamedTuple):
    """One number: ``paper`` is None if the paper only draws it, or gives a bound in ``note``."""

    what: str
    unit: str
    paper: float | None
    modelled: float
    note: str = ""
    emulated: float | None = None  # measured over emulated devices and links

    @property
    def gap(self) -> float | None:
        """The difference to the paper's number, as a share of it."""
        return self.modelled / self.paper - 1 if self.paper else None


@dataclass(frozen=True)
class PaperFigure:
    """``not_reproduced``: what cannot be reproduced, and why. ``measured``: which of the numbers were measured, on the
    devices of the figure.
    """

    title: str
    lines: Sequence[FigureValue]
    not_reproduced: str = ""
    measured: str = "nothing of it: no H100, no H20 and no card of 400 Gbps was here"


def costs_of(model: ModelFacts, base: str = "ideal") -> CostModel:
    """Return the cost model with the paper's devices and network."""
    return CostModel(model, constants(), network_link("400Gbps"), baseline(base))


def table5_pair(name: str, batches: int = 2) -> tuple[Deployment, Deployment]:
    """Return the deployments of equal price of table 5: split, homogeneous."""
    a, b, alone = SPLITS[name]
    return Deployment(H100, a, H20, b, batches), Deployment(H100, alone)


def batch_load(batch: float, length: float) -> BatchLoad:
    """Return the load of so many sequences with so many stored tokens each."""
    return BatchLoad(batch, {0: batch * length})


def figure2() -> PaperFigure:
    """Return the share of peak FLOP/s of everything except attention."""
    costs, lines = costs_of(paper_models()["llama3-70b"]), []
    for ranks in (2, 4, 8):
        for batch in (16, 100, 256, 512):
            step = costs.step(Deployment(H100, ranks), batch_load(batch, 1))
            flops = sum(p.work(batch)[1] for p in costs.model.products)
            share = flops / (step.model_s * ranks * H100.tflops * 1e12)
            note = "the paper: below 20 % for batches below 100" if batch == 100 else ""
            lines.append(FigureValue(f"MFU, {ranks} H100, batch {batch}", "%", None, 100 * share, note))
    cannot = "curves are drawn, without numbers"
    return PaperFigure("LLaMA3-70B, all but attention: share of peak FLOP/s", lines, cannot)


def figure3() -> PaperFigure:
    """Return the share of peak bandwidth of attention, and how many requests fill an H100."""
    costs, lines = costs_of(paper_models()["llama3-70b"]), []
    for device in (H100, H20):
        where = Deployment(H100, 1, device, 1)
        for length in (4096, 8192):
            seconds = costs.step(where, batch_load(20, length)).attention_s
            share = costs.model.kv_bytes_per_token * 20 * length / (seconds * device.bandwidth_gbs * 1e9)
            note = "the paper: above 70 % at 20 requests; of H20 no table is known"
            lines.append(FigureValue(f"MBU, {device.name}, 20 requests of {length}", "%", None, 100 * share, note))
    each = 8192 * costs.model.kv_bytes_per_token
    lines.append(
        FigureValue("requests of 8192 in an H100 of 80 x 10^9 bytes", "", 30, 80e9 / each, 'the paper: "about 30"')
    )
    lines.append(
        FigureValue("requests of 8192 in an H100 of 80 GiB", "", 30, 80 * GIB / each, "the other reading of GB")
    )
    cannot = f"curves are drawn, without numbers; {NO_H20}"
    return PaperFigure("LLaMA3-70B, attention: share of peak bandwidth", lines, cannot)


def figure4() -> PaperFigure:
    """Return the least bandwidth between one H100 and one H20, at peak rates."""
    notes = {4096: "30 does not hold up to 4096 at peak", 8192: "within the paper's 30", 16384: "within the paper's 30"}
    lines = [
        FigureValue(f"300 requests of {n}", "GB/s", None, peak_bandwidth(n) / 1e9, notes.get(n, "above the paper's 30"))
        for n in (1024, 2048, 4096, 8192, 16384)
    ]
    return PaperFigure(
        "LLaMA3-70B on one H100 + one H20: least bandwidth for messages to take 20 % of a step", lines,
        'the paper says "at most 30 GB/s at 300 requests" and states neither lengths nor the devices\' efficiency',
    )  # fmt: skip


def peak_bandwidth(length: int, batch: int = 300) -> float:
    """Return bytes per second, by figure 4's formula at peak rates, with N = 68.75 x 10^9."""
    model = paper_models()["llama3-70b"]
    flops, weights = sum(p.work(batch)[1] for p in model.products), sum(p.work(batch)[0] for p in model.products)
    model_s = max(flops / (H100.tflops * 1e12), weights / (H100.bandwidth_gbs * 1e9))
    attention_s = model.kv_bytes_per_token * batch * length / (H20.bandwidth_gbs * 1e9)
    return min_bandwidth(model.message_bytes * batch, model_s, attention_s)


def table3() -> PaperFigure:
    """Return the bytes of KV of a token: 2 e d L / G."""
    stated = {"llama-33b": 1_597_440, "llama-65b": 2_621_440, "llama3-70b": 327_680}
    lines = [
        FigureValue(f"{name}: KV of a token", "bytes", stated[name], m.kv_bytes_per_token, "the paper's: 2 e d L / G")
        for name, m in paper_models().items()
    ]
    return PaperFigure("models: bytes that a token stores", lines)


def table5() -> PaperFigure:
    """Return the deployments of about equal price."""
    prices, lines = price_book("paper"), []
    stated = {"llama-33b": (20.32, 22.12), "llama-65b": (40.64, 44.24), "llama3-70b": (40.64, 44.24)}
    for name in SPLITS:
        split, alone = table5_pair(name)
        lines.append(
            FigureValue(
                f"{name} on {split.num_compute} H100 + {split.memory_workers} H20",
                "$/h",
                stated[name][0],
                split.price(prices),
            )
        )
        lines.append(FigureValue(f"{name} on {alone.num_compute} H100", "$/h", stated[name][1], alone.price(prices)))
    cheaper = stated["llama-65b"][1] / stated["llama-65b"][0]
    for gain, stated_gain in zip(GAINS, (26.4, 106.9), strict=True):
        lines.append(
            FigureValue(f"{gain - 1:+.1%} of throughput, per dollar", "%", stated_gain, 100 * (gain * cheaper - 1))
        )
    return PaperFigure("deployments of about equal price", lines)


def capacities(name: str, gigabyte: str = "GiB") -> tuple[float, float]:
    """Return the tokens of KV that the pair of table 5 holds: split, homogeneous."""
    model, memory = paper_models()[name], DeviceMemory(constants(), gigabyte)
    split, alone = (memory.kv_bytes(model, d) / model.kv_bytes_per_token for d in table5_pair(name))
    return split, alone


def best_round_seconds(costs: CostModel, deployment: Deployment, of: BatchLoad) -> float:
    """Return the seconds of a round, with one batch or two, whichever gives more tokens."""
    if not deployment.is_split:
        return costs.round(deployment, [of]).seconds
    both = (Deployment(H100, deployment.ranks, H20, deployment.memory_workers, n) for n in (1, 2))
    return min(costs.round(d, split_load(of, d.batches)).seconds for d in both)


def figure12() -> PaperFigure:
    """Return the time of a token without rotation, on 2 H100 + 4 H20."""
    lines = []
    for name in ("llama-65b", "llama3-70b"):
        costs, where = costs_of(paper_models()[name]), table5_pair(name, 1)[0]
        for batch in (4, 64, 256):
            if 4096 * batch > capacities(name)[0]:
                continue
            step = costs.step(where, batch_load(batch, 4096))
            more = -min(0.0, step.network_s)  # K and V are computed during attention, too
            for part, seconds, note in (
                ("model", step.model_s - more, "but what attention hides of it" if more else ""),
                ("attention", step.attention_s, ""),
                ("network", step.network_s + more, "all of it is hidden" if more else ""),
            ):
                lines.append(FigureValue(f"{name}, {batch} requests of 4096: {part}", "ms", None, 1e3 * seconds, note))
    cannot = f"bars are drawn, without numbers: only their shape can be compared; {NO_H20}"
    return PaperFigure("time of a token, n = 1", lines, cannot)


def figure13() -> PaperFigure:
    """Return the paper's two network stacks from data/links.toml: copied from the paper, not modelled."""
    fast, slow = network_link("400Gbps"), network_link("400Gbps:nccl")
    lines = [
        FigureValue("FHBN relative to NCCL, round trip", "%", -50.5, 100 * (fast.round_trip_s / slow.round_trip_s - 1)),
        FigureValue("FHBN, share of 400 Gbps", "%", 91.4, 100 * fast.bandwidth() / 50e9),
        FigureValue("NCCL, bandwidth", "GB/s", 35.5, slow.bandwidth() / 1e9),
    ]
    cannot = "both stacks: these are ratios of numbers that the paper states, and no such NIC was measured here"
    return PaperFigure("ping-pong over 400 Gbps", lines, cannot)


def emulated_savings() -> dict[tuple[str, int], float]:
    """Return the newest committed results of perf/bench_early_q.py: model and batch -> percent of a token's time."""
    path = Path(__file__).parent / "results" / "bench_early_q.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {(row["settings"]["model"], row["settings"]["batch"]): 100 * row["saved"]["apart"] for row in rows}


def figure14() -> PaperFigure:
    """Return the time that sending Q early hides, at 4096 tokens and n = 1."""
    most, lines = {"llama-65b": 13.2, "llama3-70b": 3.5}, []
    for name, stated in most.items():
        costs, where = costs_of(paper_models()[name]), table5_pair(name, 1)[0]
        savings = {}
        for batch in (4, 16, 32, 64):
            if 4096 * batch <= capacities(name)[0]:
                of = batch_load(batch, 4096)
                with_it = costs.step(where, of)
                total = with_it.model_s + with_it.attention_s + with_it.network_s
                savings[batch] = 100 * (1 - total / (total + with_it.hidden_s))
        lines += [
            FigureValue(f"{name}, {b} requests", "%", None, share, emulated=emulated_savings().get((name, b)))
            for b, share in savings.items()
        ]
        lines.append(FigureValue(f"{name}, the most", "%", stated, max(savings.values())))
    return PaperFigure(
        "time of a token that overlap saves", lines,
        f"the trend: in the paper the gain grows with the batch, by this model it falls for 65B; {NO_H20}",
        "on CPUs alone, with emulated devices and links: perf/bench_early_q.py",
    )  # fmt: skip


FIGURES: Mapping[str, Callable[[], PaperFigure]] = {
    "fig2": figure2, "fig3": figure3, "fig4": figure4, "table3": table3, "table5": table5, "fig12": figure12,
    "fig13": figure13, "fig14": figure14,
}  # fmt: skip
