"""``lamina-launch worker ROLE[-INDEX] --driver NAME@HOST:PORT``: one worker of a driver on another host."""

from __future__ import annotations

import argparse
import re

from lamina.executor.hosts.cluster_file import is_local, look_up
from lamina.executor.launchers.static_agent import ANY, ROLES, StaticWorkerSpec, run_agent
from lamina.netstack.contract.channel_terms import check_name
from lamina.netstack.contract.cluster_key import KEY_FILE, cluster_key

WAIT_S = 600.0
_WORKER = re.compile(rf"({'|'.join(ROLES)})(?:-(\d{{1,4}}))?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this sub-command."""
    parser.add_argument("worker", help=f"{', '.join(ROLES)}: any of these; or one of them by its number, as memory-0")
    parser.add_argument(
        "--driver",
        required=True,
        metavar="NAME@HOST:PORT",
        help="the driver, as in the command that it prints",
    )
    parser.add_argument(
        "--host",
        default="",
        help="IP address of this host at which the worker listens; default: the one from which it reaches the driver",
    )
    parser.add_argument(
        "--wait-s", type=float, default=WAIT_S, help=f"seconds for the driver to come up (default: {WAIT_S:g})"
    )
    parser.add_argument("--dry-run", action="store_true", help="check the flags, say who would come where, and exit")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 1 if the worker or the driver was lost, else 0. Raises ValueError for bad input."""
    match = _WORKER.fullmatch(args.worker)
    if match is None:
        raise ValueError(f"{args.worker} is no worker: name one of {', '.join(ROLES)}, or memory-0")
    name, _, place = args.driver.rpartition("@")
    host, _, port = place.rpartition(":")
    if not (name and host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ValueError(f"--driver must be NAME@HOST:PORT, such as team-a@10.0.0.1:7000, not {args.driver!r}")
    at = args.host and look_up(args.host, "--host", alone=True)
    if at and not is_local(at):
        raise ValueError(f"--host {args.host} is no address of this host: run this on the host that has it")
    if not args.wait_s > 0.0:
        raise ValueError(f"--wait-s must be a positive number of seconds, not {args.wait_s}")
    key = cluster_key()
    if key is None:
        raise ValueError(f"the driver asks for the cluster's key: name its file by {KEY_FILE}")
    index = ANY if match[2] is None else int(match[2])
    driver = host.removeprefix("[").removesuffix("]"), int(port)
    check_name(name)
    if args.dry_run:
        print(f"would come to the driver at {place} for {args.worker}")
        return 0
    worker = StaticWorkerSpec(role=match[1], index=index, driver=driver, driver_name=name, host=at)
    return run_agent(worker, key, args.wait_s)
