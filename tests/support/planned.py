"""Data of the planner's tests: the paper's models, and traces made by hand."""

from __future__ import annotations

from lamina.facts.hardware import DEVICES
from lamina.tools.plan.cost_model import CostModel
from lamina.tools.plan.deployment import DeviceMemory, Inventory
from lamina.tools.plan.model_facts import paper_models
from lamina.tools.plan.ranking import Planner
from lamina.tools.plan.tables import baseline, constants, network_link, price_book
from lamina.tools.request_traces import RequestTrace, TracedRequest

STOCK = {"h100": Inventory(DEVICES["h100"], 4), "h20": Inventory(DEVICES["h20"], 8)}


def even(count: int, prompt: int, answer: int) -> RequestTrace:
    """Requests that are all alike."""
    return RequestTrace("even", tuple(TracedRequest(float(i), prompt, answer) for i in range(count)))


def planner(model: str = "llama3-70b", *, rate: str = "400Gbps", base: str = "ideal", slo_s: float = 0.0) -> Planner:
    costs = CostModel(paper_models()[model], constants(), network_link(rate), baseline(base))
    return Planner(costs, DeviceMemory(costs.constants), price_book("paper"), slo_s)
