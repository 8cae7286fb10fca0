"""Sequences that outgrow their deployment: borrow for what does not fit, or build anew on twice as many memory workers
(arXiv 2401.02669, figure 9). Modelled, not measured.

A batch of Llama 3 70B on two H100 grows from a short prompt to so many tokens each. One H20 holds 8,192 of each, over a
link of 400 Gb/s. A deployment that borrows has the rest with creditors of the same kind over a slower link, and goes on
where it is. A deployment that builds anew stops whenever memory is full, and computes K and V of all tokens so far on
twice as many H20. Starting processes and loading weights takes no time here, which favours it. Times are those of the
planner's cost model; messages of a step are Q and partial results of every worker that has some. Prints a line for each
length; --write appends them to perf/results/model_growth.jsonl.

    python perf/model_growth.py --write        # a second
"""

from __future__ import annotations

from itertools import product

from common import parser_of, record

from lamina.facts.hardware import DEVICES
from lamina.tools.plan.cost_model import CostModel
from lamina.tools.plan.deployment import Deployment
from lamina.tools.plan.model_facts import paper_models
from lamina.tools.plan.tables import baseline, constants, network_link

PROMPT, HOLDS, CHUNK, STRIDE = 512, 8192, 512, 64
FLOAT, NODES = 4, 2  # of the merge tree, of a run that begins where home ends


class Growth:
    """The growth of ``batch`` sequences. ``near``, ``far``: links of a deployment's own workers, and of creditors."""

    def __init__(self, batch: int, near: str, far: str) -> None:
        model, given, rate = paper_models()["llama3-70b"], constants(), baseline("ideal")
        self._costs, self._far = CostModel(model, given, network_link(near), rate), network_link(far)
        self._where, self._batch = Deployment(DEVICES["h100"], 2, DEVICES["h20"], 1), batch

    def borrows(self, tokens: int) -> float:
        """Seconds to grow to ``tokens``."""
        return sum(self._step(at, min(at, HOLDS), far=at > HOLDS) * STRIDE for at in range(PROMPT, tokens, STRIDE))

    def builds(self, tokens: int) -> tuple[float, float]:
        """The same, and of it the seconds in which all is computed anew."""
        seconds, anew, workers = 0.0, 0.0, 1
        for at in range(PROMPT, tokens, STRIDE):
            if at >= workers * HOLDS:
                workers *= 2
                anew += self._batch * at / CHUNK * self._slices(CHUNK)
            seconds += self._step(at, -(-at // workers), far=False) * STRIDE
        return seconds + anew, anew

    def _slices(self, rows: int) -> float:
        parts = (self._costs.linear, self._costs.elementwise, self._costs.collective)
        return sum(part(self._where, rows).seconds for part in parts)

    def _step(self, stored: int, at_one: int, *, far: bool) -> float:
        """Returns the time of a step of sequences with ``stored`` tokens, of which the worker with the most has
        ``at_one``; others have the rest, each as much at most.
        """
        costs, (attention,) = self._costs, self._costs.model.attentions
        memory, layers, rows = DEVICES["h20"], costs.model.num_layers, self._batch
        reading = costs._reading(memory, attention)[0](attention.kv_bytes * rows * min(at_one, stored))
        near, slow = costs.link, self._far
        there = rows * (attention.q_bytes + attention.kv_message_bytes)
        back = rows * attention.heads * FLOAT * (attention.o_bytes // attention.heads // 2 + 1)
        wire = near.round_trip_s + (there + back) / near.bandwidth(memory)
        if far:  # in addition to home's: several nodes come back
            wire = max(wire, slow.round_trip_s + (rows * attention.q_bytes + NODES * back) / slow.bandwidth(memory))
        return self._slices(rows) + layers * (reading + wire)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", default="5000,10000,20000,30000", help="that sequences grow to, by comma")
    parser.add_argument("--batches", default="1,16", help="sequences that grow so at once, by comma")
    parser.add_argument("--near", default="400Gbps")
    parser.add_argument("--far", default="25Gbps,100Gbps,400Gbps", help="links of creditors, by comma")
    args = parser.parse_args()
    for far in args.far.split(","):
        for batch, tokens in product(map(int, args.batches.split(",")), map(int, args.tokens.split(","))):
            growth = Growth(batch, args.near, far)
            borrows, (builds, anew) = growth.borrows(tokens), growth.builds(tokens)
            settings = {"tokens": tokens, "batch": batch, "near": args.near, "far": far}
            result = {
                "modelled": True, "borrows_s": round(borrows, 2), "builds_s": round(builds, 2),
                "anew_s": round(anew, 2), "gain": round(builds / borrows, 3),
            }  # fmt: skip
            print(record("model_growth", settings, result, write=args.write), flush=True)


if __name__ == "__main__":
    main()
