"""The shell commands by which people start the workers of the launcher ``static``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import NamedTuple

from lamina.config.engine_config import EngineConfig
from lamina.executor.hosts.cluster_file import read_cluster
from lamina.executor.hosts.worker_placement import (
    HostAssignment,
    assign_hosts,
    check_kv_memory,
    on_gpu,
    worker_requirements,
)
from lamina.netstack.contract.cluster_key import KEY, KEY_FILE
from lamina.netstack.own_python import other_python

WorkerId = tuple[str, int]  # role and index


class Command(NamedTuple):
    """A command to be run by hand on a host; "": any host."""

    host: str
    text: str


def planned_places(config: EngineConfig, wanted: Mapping[str, int]) -> dict[str, list[HostAssignment]]:
    """Return the places by the hosts of --cluster; empty without them. Raises ValueError."""
    launching = config.launch
    if not launching.hosts:
        return {}
    hosts = read_cluster(launching.hosts).looked_up().planned()
    places = assign_hosts(hosts, worker_requirements(config, dict(wanted)), launching.placement, on_gpu(config))
    check_kv_memory(places, config.devices.kv_bytes())
    return places


def commands(
    config: EngineConfig, planned: Mapping[str, list[HostAssignment]], wanted: Mapping[str, int], driver: str, name: str
) -> dict[WorkerId, Command]:
    """Return the command of each worker, grouped by host. ``driver``, ``name``: the driver's address and name."""
    launching = config.launch
    python = read_cluster(launching.hosts).python if launching.hosts else ""
    program = other_python(python, "-m", "lamina.cli.launch") if python else ["lamina-launch"]
    file = [f"{KEY_FILE}={path}"] if (path := os.environ.get(KEY_FILE)) else []
    made, gpus = dict[WorkerId, Command](), dict[str, int]()
    for role in sorted(wanted):
        for index in range(wanted[role]):
            words, host = [*program, "worker", f"{role}-{index}", "--driver", f"{name}@{driver}"], ""
            variables = list(file)
            if planned:
                host = planned[role][index].host.address
                words += ["--host", host]
                if role in on_gpu(config):  # each worker has one GPU, by its number on the host
                    variables.append(f"CUDA_VISIBLE_DEVICES={gpus.setdefault(host, 0)}")
                    gpus[host] += 1
            made[role, index] = Command(host, shlex.join(["env", *variables, *words] if variables else words))
    return made


def instructions(commands: Mapping[WorkerId, Command], limit_s: float) -> str:
    """Return the commands as text for people, which a shell accepts unchanged."""
    file = os.environ.get(KEY_FILE)
    key = f"the file {file}" if file else f"{KEY} in their environment"
    lines = [f"# start {len(commands)} workers by hand within {limit_s:g} s (--start-timeout-s); they need {key}"]
    for host in sorted({c.host for c in commands.values()}):
        lines.append(f"# on {host}" if host else "# on any host that reaches this one")
        lines += [c.text for c in commands.values() if c.host == host]
    return "\n".join(lines)
