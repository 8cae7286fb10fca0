"""The paper's figures of whole runs, which need its traces: figure 10 replayed, figure 11 by the closed form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from paper_figures import (
    GAINS,
    H20,
    H100,
    NO_H20,
    FigureValue,
    PaperFigure,
    best_round_seconds,
    capacities,
    costs_of,
    table5_pair,
)  # fmt: skip

from lamina.tools.plan.cost_model import BatchLoad
from lamina.tools.plan.deployment import Deployment, DeviceMemory
from lamina.tools.plan.model_facts import paper_models
from lamina.tools.plan.replay import ReplayResult, replay
from lamina.tools.plan.tables import constants, dollars_of, price_book
from lamina.tools.request_traces import RequestTrace

# the paper's names of its traces -> the files of those that were published
TRACES = {
    "Azure-Conv": ("azure_llm_2023_conv.csv", "AzureLLMInferenceTrace_conv.csv"),
    "Azure-Code": ("azure_llm_2023_code.csv", "AzureLLMInferenceTrace_code.csv"),
    "Kimi-Conv": ("mooncake_fast25_conversation.jsonl", "conversation_trace.jsonl"),
    "Kimi-TA": ("toolagent_trace.jsonl", "kimi_ta_SURROGATE.jsonl"),
}
TABLE4 = {
    "Azure-Conv": (19366, 1154.7, 211.1), "Azure-Code": (8819, 2047.8, 27.9), "Kimi-Conv": (12031, 12035.1, 342.6),
    "Kimi-TA": (23608, 8560.0, 182.1),
}  # fmt: skip
_BARS = "single bars, which are drawn without numbers"
_BATCHES = 4  # times the sequences that fit: so many requests a replay takes at least


def table4(traces: Mapping[str, RequestTrace]) -> PaperFigure:
    """Return the number of requests, and mean lengths."""
    lines = []
    for name, trace in traces.items():
        label = f"{name} (SURROGATE)" if trace.is_surrogate else name
        numbers = len(trace.requests), trace.mean_prompt, trace.mean_answer
        for what, paper, here in zip(("requests", "mean prompt", "mean answer"), TABLE4[name], numbers, strict=True):
            lines.append(FigureValue(f"{label}: {what}", "", paper, here))
    cannot = "Kimi-TA, unless you have its real file: a surrogate is made up in its likeness"
    return PaperFigure("traces", lines, cannot, measured="all of it: these are the files' own numbers")


def figure10(traces: Mapping[str, RequestTrace], base: str, requests: int, models: Sequence[str]) -> PaperFigure:
    """Return throughput and batch of both deployments of table 5, replayed; the same requests on both."""
    lines, gains, batches = [], list[float](), list[float]()
    for model in models:
        for name, trace in traces.items():
            kept = trace.within(min(capacities(model)))
            split, alone = (
                _replayed(model, d, kept, base, requests) for d in (table5_pair(model, 2)[0], table5_pair(model)[1])
            )
            single = _replayed(model, table5_pair(model, 1)[0], kept, base, requests)
            best = max(split, single, key=lambda r: r.tokens_s)
            gains.append(best.tokens_s / alone.tokens_s - 1)
            batches.append(best.batch / alone.batch)
            label = f"{model}, {name}{' (SURROGATE)' if trace.is_surrogate else ''}"
            n, dropped = 2 if best is split else 1, len(trace.requests) - len(kept.requests)
            note = f"n = {n}; {dropped} too long for one of both, left out"
            lines += [
                FigureValue(f"{label}: vLLM", "tokens/s", None, alone.tokens_s, f"{alone.batch:.1f} sequences"),
                FigureValue(f"{label}: Lamina", "tokens/s", None, best.tokens_s, f"{best.batch:.1f} sequences; {note}"),
                FigureValue(f"{label}: gain", "%", None, 100 * gains[-1]),
            ]
    lines += [
        FigureValue("least gain", "%", 100 * (GAINS[0] - 1), 100 * min(gains)),
        FigureValue("greatest gain", "%", 100 * (GAINS[1] - 1), 100 * max(gains)),
        FigureValue("sequences relative to vLLM, mean", "times", 2.39, mean(batches)),
    ]
    cannot = (
        "single bars, which are drawn without numbers; vLLM's version and flags, and what became of long requests; "
    )
    cannot += NO_H20
    return PaperFigure(f"deployments of equal price, replayed; vLLM taken for {base}", lines, cannot)


def figure11(traces: Mapping[str, RequestTrace], base: str) -> PaperFigure:
    """Return throughput by the number of memory devices, closed form, on Azure-Conv."""
    trace, prices, lines = traces["Azure-Conv"], price_book("paper"), []
    memory = DeviceMemory(constants())
    for model, ranks, counts in (
        ("llama-33b", 1, (1, 2, 4)),
        ("llama-65b", 2, (2, 4, 8)),
        ("llama3-70b", 2, (2, 4, 8)),
    ):
        costs = costs_of(paper_models()[model], base)
        for count in counts:
            where = Deployment(H100, ranks, H20, count)
            batch = memory.kv_bytes(costs.model, where) / costs.model.kv_bytes_per_token / trace.stored()
            rate = batch / best_round_seconds(costs, where, BatchLoad(batch, {0: batch * trace.stored()}))
            stated = 800.0 if (model, count) == ("llama3-70b", 4) else None
            dollars = dollars_of(where.price(prices), rate)
            label = f"{model}, ({ranks},{count})"
            lines.append(FigureValue(f"{label}: sequences", "", stated, batch))
            lines.append(FigureValue(f"{label}: throughput", "tokens/s", None, rate, f"${dollars:.2f} for 10^6 tokens"))
    return PaperFigure(
        "throughput by memory devices, Azure-Conv, closed form",
        lines,
        f"{_BARS}; {NO_H20}",
    )


def _replayed(model: str, where: Deployment, trace: RequestTrace, base: str, requests: int) -> ReplayResult:
    costs, memory = costs_of(paper_models()[model], base), DeviceMemory(constants())
    fit = memory.kv_bytes(costs.model, where) / costs.model.kv_bytes_per_token / trace.stored()
    some = trace.first(max(requests, int(_BATCHES * fit)))
    return replay(costs, memory, where, some, 0 if where.is_split else costs.baseline.max_sequences)
