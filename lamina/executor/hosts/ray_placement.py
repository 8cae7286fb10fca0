"""Places for workers on the hosts of a Ray cluster, as far as they are free and answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Mapping
from typing import Any

from lamina.config.engine_config import EngineConfig

from .ray_cluster import hosts_of, is_reachable
from .worker_placement import HostAssignment, assign_hosts, on_gpu, worker_requirements

FREED_S = 5.0  # for Ray to tell that workers which have ended hold nothing any more


def find_places(
    ray: Any,
    config: EngineConfig,
    wanted: Mapping[str, int],
    without: Container[str] = (),
    freed_s: float | None = None,
) -> dict[str, list[HostAssignment]]:
    """The places of the workers, on hosts of other names than ``without``. The resources of a service that has just
    ended are free a moment later: where the cluster has room at all, they are waited for, by default FREED_S. Raises
    ValueError.
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
        threading.Event().wait(0.1)  # Ray tells nobody of it: asked again


def _has_room(ray: Any, without: Container[str], *asked: Any) -> bool:
    try:
        return bool(assign_hosts([h for h in hosts_of(ray, whole=True) if h.name not in without], *asked))
    except ValueError:
        return False
