"""What the planner's tests share: the paper's models, and traces made by hand."""

from __future__ import annotations

from lamina.facts.hardware import DEVICES
from lamina.planner.cost import CostModel
from lamina.planner.deployment import DeviceMemory, Stock
from lamina.planner.model_facts import paper_models
from lamina.planner.rank import Planner
from lamina.planner.tables import baseline, constants, link, price_book
from lamina.planner.traces import RequestTrace, TracedRequest

STOCK = {"h100": Stock(DEVICES["h100"], 4), "h20": Stock(DEVICES["h20"], 8)}


def even(count: int, prompt: int, answer: int) -> RequestTrace:
    """Requests that are all alike."""
    return RequestTrace("even", tuple(TracedRequest(float(i), prompt, answer) for i in range(count)))


def planner(model: str = "llama3-70b", *, rate: str = "400Gbps", base: str = "ideal", slo_s: float = 0.0) -> Planner:
    costs = CostModel(paper_models()[model], constants(), link(rate), baseline(base))
    return Planner(costs, DeviceMemory(costs.constants), price_book("paper"), slo_s)
