"""Ranks whose devices meet by themselves, as with NCCL: a CPU stands in for devices, graphs and what joins them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from stand_in_device import stand_in_for_cpu
from torch import Tensor

from lamina import LLM, SamplingParams
from lamina.ops.collective import COLLECTIVES, RankLocation
from lamina.ops.collective.mesh import MeshCollective
from lamina.ops.collective.nccl import NcclCollective, Opened

pytestmark = [pytest.mark.usefixtures("no_child_left"), pytest.mark.timeout(300)]
SCORED = SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=12, logprobs=2, ignore_eos=True)
CPU = torch.device("cpu")


class Joined:
    """A process group whose operation is one of torch's, so that stand-ins for graphs record it."""

    made: list[Joined] = []  # noqa: RUF012 - by number, which is what an operator can be given

    def __init__(self) -> None:
        self.number = len(self.made)
        self.made.append(self)
        self.group: NcclCollective | None = None
        self.asked = self.done = 0

    def _allgather_base(self, found: Tensor, mine: Tensor, options: Any) -> None:
        self.asked += 1
        gather(found, mine, self.number)

    def abort(self) -> None: ...


@torch.library.custom_op("lamina_tests::gather", mutates_args={"found"})
def gather(found: Tensor, mine: Tensor, number: int) -> None:
    joined = Joined.made[number]
    joined.done += 1
    assert joined.group is not None
    with joined.group.guard.mesh() as mesh:
        found.copy_(mesh.all_gather(mine, mesh.size))


def open_stand_in(mesh: MeshCollective, at: RankLocation) -> NcclCollective:
    joined = Joined()
    joined.group = NcclCollective(mesh, Opened(joined, None), CPU, at.step_timeout_s, lambda: lambda: True)
    return joined.group


def outputs(path: Path, prompts: list[list[int]], **options: Any) -> list[Any]:
    common = {"transport": "loopback", "memory_workers": 2, "tensor_parallel_size": 2, "prefill_chunk": 32}
    with LLM(str(path), **common, deterministic=True, gemm="torch", **options) as llm:
        assert llm.engine.worker_info.summary["collective"] == f"{options['collective']}: as asked"
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(prompts, SCORED)]


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"pipeline": 3}, {"cuda_graphs": False}], ids=str)
def test_meetings_of_devices_are_part_of_graphs_and_change_no_bit(
    options: dict[str, Any], llama_path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = ModuleType("lamina.ops.collective.stand_in")
    module.why_unavailable, module.why_unusable_together, module.open_collective = (
        lambda device: "",
        lambda ranks: "",
        open_stand_in,
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(COLLECTIVES, "nccl", "stand_in")  # in place of the real one
    monkeypatch.setattr(Joined, "made", [])
    wanted = outputs(llama_path, prompts, collective="mesh", **options)
    with stand_in_for_cpu(monkeypatch, graphs=True):
        found = outputs(llama_path, prompts, collective="nccl", compute_device="auto", **options)
    assert found == wanted
    assert len(Joined.made) == 2 * max(1, options.get("pipeline", 1) - 1)
    for joined in Joined.made:
        replayed = joined.done - joined.asked
        assert replayed > 0 if options.get("cuda_graphs", True) else replayed == 0
