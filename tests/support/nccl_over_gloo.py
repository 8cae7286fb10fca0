"""The collective ``nccl`` on CPUs: gloo's process group takes the place of NCCL's, and its device is done at once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from lamina.ops.collective import RankLocation
from lamina.ops.collective.mesh import MeshCollective
from lamina.ops.collective.nccl import NcclCollective, open_group


def open_over_gloo(mesh: MeshCollective, at: RankLocation) -> NcclCollective:
    """One rank's end; all ranks of ``mesh`` open theirs together."""

    def make(store: Any) -> Any:
        kind: Any = torch._C._distributed_c10d.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname="127.0.0.1")]
        options._threads = 1
        options._timeout = timedelta(seconds=at.start_timeout_s)
        return kind(store, mesh.rank, mesh.size, options)

    opened = open_group(mesh, at, make)
    opened.group._set_default_timeout(timedelta(seconds=at.step_timeout_s))  # else its threads outlive the test
    return NcclCollective(mesh, opened, torch.device("cpu"), at.step_timeout_s, lambda: lambda: True)
