"""Places for workers on hosts of a Ray cluster that have free resources and respond."""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Mapping
from typing import Any

from lamina.config.engine_config import EngineConfig

from .ray_cluster import hosts_of, is_reachable
from .worker_placement import HostAssignment, assign_hosts, on_gpu, worker_requirements

FREED_S = 5.0  # for Ray to report the resources of ended workers as free


def find_places(
    ray: Any,
    config: EngineConfig,
    wanted: Mapping[str, int],
    without: Container[str] = (),
    freed_s: float | None = None,
) -> dict[str, list[HostAssignment]]:
    """Return the workers' places, on hosts whose names are not in ``without``. Raises ValueError.

    The resources of a service that has just ended become free a moment later. If the cluster has space at all, they are
    waited for, ``freed_s`` or by default FREED_S.
    """
    asked = worker_requirements(config, wanted), config.launch.placement, on_gpu(config)
    deadline, silent = time.monotonic() + (FREED_S if freed_s is None else freed_s), set[str]()
    while True:
        try:
            places = assign_hosts([h for h in hosts_of(ray) if h.name not in without and h.name not in silent], *asked)
            chosen = {p.host.name: p.host for each in places.values() for p in each}
            if not (dark := {name for name, host in chosen.items() if not is_reachable(host)}):
                return places
            silent |= dark  # Ray has not noticed yet
            continue
        except ValueError:
            if time.monotonic() > deadline or not _has_room(ray, without, *asked):
                raise
        threading.Event().wait(0.1)  # Ray sends no notice, so look again


def _has_room(ray: Any, without: Container[str], *asked: Any) -> bool:
    try:
        return bool(assign_hosts([h for h in hosts_of(ray, whole=True) if h.name not in without], *asked))
    except ValueError:
        return False
