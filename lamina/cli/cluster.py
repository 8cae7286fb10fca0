"""``lamina-launch cluster up|status|down TARGET``: a Ray cluster for Lamina, from a YAML of hosts."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from lamina.executor.hosts.cluster_file import Cluster, HostEntry, is_file, is_local, read_cluster
from lamina.executor.hosts.ray_token import TOKEN, TOKEN_PATH, make_token, read_token, state_folder
from lamina.facts.report import count_text
from lamina.netstack.own_python import other_python, own_python, safe_environment

ACTIONS = {
    "up": "start Ray on the hosts, the head first",
    "status": "say which hosts are up, and what is free there",
    "down": "end what `up` started",
}
START_S = 120.0
ORDER_S = 60.0  # beyond the start itself: a login, imports
OBJECT_STORE = 80 << 20  # bytes, the least that Ray takes: no data goes through it
MOST_AT_ONCE = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this sub-command."""
    parser.add_argument("action", choices=ACTIONS, help="; ".join(f"{k}: {v}" for k, v in ACTIONS.items()))
    parser.add_argument(
        "target", help="a YAML file of hosts (examples/h100_h20.yaml), or auto or HOST:PORT for a running Ray cluster"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be started where, and exit")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 1 if a host is not up, else 0. Raises ValueError for bad input."""
    if not is_file(args.target):
        return _existing(args)
    cluster = read_cluster(args.target)
    if args.dry_run:
        return _dry_run(cluster, args.action)
    cluster = cluster.looked_up()
    if args.action == "up":
        return _up(cluster, args.target)
    return _status(cluster) if args.action == "status" else _down(cluster)


def _existing(args: argparse.Namespace) -> int:
    """Shows a cluster that was started elsewhere, so that this command neither starts nor ends it."""
    from lamina.executor.hosts.ray_cluster import deployments_of, hosts_of, joined

    if args.action == "down":
        raise ValueError(f"{args.target} was not started from a file: end that Ray where it was started")
    with joined(args.target) as ray:
        for host in hosts_of(ray):
            print(f"{host.address}  up  {_free(host.resources)}")
        _print_deployments(deployments_of(ray))
    return 0


def _print_deployments(serves: Mapping[str, Sequence[str]]) -> None:
    """Print which processes have workers here."""
    for driver, workers in serves.items():
        print(f"the process {driver} runs {', '.join(workers)}")
    if not serves:
        print("no process runs workers here")


def _dry_run(cluster: Cluster, action: str) -> int:
    compute, memory = sum(h.compute for h in cluster.hosts), sum(h.memory for h in cluster.hosts)
    print(
        f"{count_text(len(cluster.hosts), 'host')} with room for {count_text(compute, 'compute worker')} and "
        f"{count_text(memory, 'memory worker')}: --cluster {cluster.head}"
    )
    for host in cluster.hosts:
        order = f"ray start {shlex.join(ray_arguments(cluster, host))}" if action == "up" else f"{action}"
        print(f"{host.address} ({'here' if is_local(host.ip_or_name) else shlex.join(cluster.ssh)}): {order}")
    return 0


def _up(cluster: Cluster, target: str) -> int:
    token, call = make_token(), secrets.token_hex(8)
    orders = [
        {
            "order": "up", "address": h.address, "arguments": ray_arguments(cluster, h), "token": token,
            "timeout_s": START_S, "call": call,
        }
        for h in cluster.hosts
    ]  # fmt: skip
    tried = 1
    try:
        answers = _all(cluster, cluster.hosts[:1], orders[:1])
        tried = len(cluster.hosts)
        answers += _all(cluster, cluster.hosts[1:], orders[1:])
    except BaseException:
        _take_back(cluster, cluster.hosts[:tried], call)
        raise
    kept = False
    for host, order, answer in zip(cluster.hosts, orders, answers, strict=True):
        same = answer["arguments"] == order["arguments"]
        kept = kept or not same
        state = "started" if answer["fresh"] else "was up already"
        print(f"{host.address}  {state}  {_free(_resources(answer['arguments']))}{'' if same else _keeps(host)}")
    if kept:
        print(f"to change that: lamina-launch cluster down {target}, then up; it ends what runs there")
    print(f"use it with: lamina-launch serve MODEL --cluster {target}")
    if not os.environ.keys() & {TOKEN, TOKEN_PATH}:
        print(f"its token, which other machines need too, is in {state_folder() / 'ray_token'}")
    return 0


def _take_back(cluster: Cluster, hosts: Sequence[HostEntry], call: str) -> None:
    """End what ``call`` has started on ``hosts``, and nothing else. The head last: the others leave it in order."""
    ended, orders = list[str](), {h: {"order": "down", "address": h.address, "call": call} for h in hosts}
    for group in (hosts[1:], hosts[:1]):
        for host, answer in zip(group, _try_all(cluster, group, [orders[h] for h in group]), strict=True):
            if isinstance(answer, dict) and answer["ended"]:
                ended.append(host.address)
    if ended:
        print(f"ended what this call has started: {', '.join(ended)}", file=sys.stderr)


def _keeps(host: HostEntry) -> str:
    """Return a warning where Ray runs with other arguments than the file asks for now."""
    entries = {name: getattr(host, name) for name in ("compute", "memory", "device", "rack", "cores")}
    asked = ", ".join(f"{name} {value}" for name, value in entries.items() if value) or "nothing for Lamina"
    return f": Ray keeps what it was started with, not {asked}"


def _resources(arguments: Sequence[str]) -> dict[str, float]:
    """The ``--resources`` of ``ray start``."""
    resources: dict[str, float] = json.loads(dict(pairwise(arguments)).get("--resources", "{}"))
    return resources


def _status(cluster: Cluster) -> int:
    token = read_token() or ""
    orders = [
        {"order": "status", "address": h.address, "token": token, "head": "" if number else cluster.head}
        for number, h in enumerate(cluster.hosts)
    ]
    answers = _try_all(cluster, cluster.hosts, orders)
    free = answers[0].get("hosts", {}) if isinstance(answers[0], dict) else {}
    for host, answer in zip(cluster.hosts, answers, strict=True):
        if isinstance(answer, OSError):
            print(answer, file=sys.stderr)
            state = "does not answer"
        else:
            state = "up" if answer["pid"] else "down"
        joined = _free(free[host.ip_or_name]) if host.ip_or_name in free else "not in the cluster"
        print(f"{host.address}  {state}  {joined}")
    if isinstance(answers[0], dict) and "serves" in answers[0]:
        _print_deployments(answers[0]["serves"])
    up = all(isinstance(answer, dict) and answer["pid"] for answer in answers)
    return 0 if up and len(free) >= len(cluster.hosts) else 1


def _down(cluster: Cluster) -> int:
    """The head last: the others leave it in order."""
    hosts = cluster.hosts[1:] + cluster.hosts[:1]
    failed = 0
    for host in hosts:
        try:
            answer = _order(cluster, host, {"order": "down", "address": host.address})
            print(f"{host.address}  {'ended' if answer['ended'] else 'was not up'}")
        except OSError as error:  # the others are to be ended all the same
            print(error, file=sys.stderr)
            failed = 1
    return failed


def ray_arguments(cluster: Cluster, host: HostEntry) -> list[str]:
    """Return the arguments of ``ray start``. The dashboard stays on loopback; the environment has tokens."""
    head = host is cluster.hosts[0]
    where = ["--head", "--port", str(cluster.port), "--dashboard-host", "127.0.0.1"]
    arguments = [*(where if head else ["--address", cluster.head]), "--node-ip-address", host.ip_or_name]
    arguments += ["--object-store-memory", str(OBJECT_STORE), "--disable-usage-stats"]
    if host.cores:
        arguments += ["--num-cpus", str(host.cores)]
    if resources := host.resources():
        arguments += ["--resources", json.dumps(resources)]
    if labels := host.labels():
        arguments += ["--labels", ",".join(f"{k}={v}" for k, v in labels.items())]
    return arguments


def _all(cluster: Cluster, hosts: Sequence[HostEntry], orders: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Their answers. Raises OSError with all that failed, once all have answered."""
    answers = _try_all(cluster, hosts, orders)
    if failed := [str(answer) for answer in answers if isinstance(answer, OSError)]:
        raise OSError("; ".join(failed))
    return [answer for answer in answers if isinstance(answer, dict)]


def _try_all(
    cluster: Cluster, hosts: Sequence[HostEntry], orders: Sequence[dict[str, Any]]
) -> list[dict[str, Any] | OSError]:
    def tried(host: HostEntry, order: dict[str, Any]) -> dict[str, Any] | OSError:
        try:
            return _order(cluster, host, order)
        except OSError as error:
            return error

    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        return list(pool.map(tried, hosts, orders))


def _order(cluster: Cluster, host: HostEntry, order: dict[str, Any]) -> dict[str, Any]:
    """Run a command on a host. Its order goes by stdin, so that no list of processes shows it."""
    command, environment = _node(cluster, host)
    try:
        done = subprocess.run(
            command, env=environment, input=json.dumps(order), capture_output=True, text=True,
            timeout=START_S + ORDER_S, check=False,
        )  # fmt: skip
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise OSError(f"{host.address} did not answer in {START_S + ORDER_S:g} s") from None
    except (ValueError, IndexError):
        stderr = " ".join(done.stderr.split()) or "nothing"
        raise OSError(f"{host.address} cannot be reached: {shlex.join(command)} prints {stderr}") from None
    if "error" in answer:
        raise OSError(f"{host.address}: {answer['error']}")
    return answer


def _node(cluster: Cluster, host: HostEntry) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of an order's process: on this host, or of a login to another one."""
    module, here = ("-m", "lamina.executor.hosts.ray_node"), is_local(host.ip_or_name)
    if here and not cluster.python:
        return own_python(*module)
    command = other_python(cluster.python, *module)
    return (command if here else [*cluster.ssh, host.address, shlex.join(command)]), safe_environment()


def _free(resources: dict[str, float]) -> str:
    named = ("lamina_compute", "lamina_memory", "GPU", "CPU")
    return ", ".join(f"{n} {resources[n]:g}" for n in named if resources.get(n)) or "nothing for Lamina"
