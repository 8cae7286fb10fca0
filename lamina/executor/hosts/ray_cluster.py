"""Ray in this process: loading it with its token, joining a cluster, listing the cluster's hosts."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from lamina.utils.install_command import install_command

from .cluster_file import head_address
from .ray_token import offer_token
from .worker_placement import Host

MIN_RAY_VERSION = (2, 52)  # the first with tokens
AGENT = "lamina"  # names of node agents: AGENT/DRIVER/WORKER/NUMBER
REACH_S = 10.0
ANSWER_S = 2.0  # suffices for a live host, however busy, since its kernel accepts
UV_RUN = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"  # whether Ray copies the current directory of `uv run` to all hosts


@contextmanager
def joined(address: str) -> Iterator[Any]:
    """Join the Ray cluster of a ``ray_address``, and leave it at the end unless this process had joined before."""
    ray = load()
    owned = not ray.is_initialized()
    if owned:
        join(ray, address)
    try:
        yield ray
    finally:
        if owned:
            ray.shutdown()


def load() -> Any:
    """Load Ray so that it uses its token. Raises ImportError, ValueError."""
    if find_spec("ray") is None:
        raise ImportError(f"--cluster needs Ray 2.52 or newer: {install_command('ray')}")
    offer_token()
    os.environ.setdefault(UV_RUN, "0")  # hosts have Lamina; Ray reads this when it is loaded
    ray = import_module("ray")
    if not ray.is_initialized():
        import_module("ray._raylet").Config.initialize("")  # it may have been loaded, and have read it, before
    import_module("ray.exceptions")
    if tuple(int(n) for n in ray.__version__.split(".")[:2]) < MIN_RAY_VERSION:
        raise ImportError(f"--cluster needs Ray 2.52 or newer, not {ray.__version__}: {install_command('ray')}")
    return ray


def join(ray: Any, asked: str) -> None:
    """Join the Ray cluster of a ``ray_address``. Raises ValueError."""
    address = head_address(asked)
    host, _, port = address.rpartition(":")
    try:
        if host:
            socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()  # Ray itself tries for minutes
        with _own_signals():
            ray.init(
                address=address, job_config=_job(), log_to_driver=False, logging_level="ERROR", configure_logging=False
            )  # fmt: skip
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ValueError(f"--cluster {asked}: {error_text(error)}") from error


def hosts_of(ray: Any, *, whole: bool = False) -> list[Host]:
    """Return the living hosts of this process's cluster, with their free resources; ``whole``: with all of them."""
    free = import_module("ray._private.state").available_resources_per_node()  # Ray has no public call for it
    return [
        Host(
            name=node["NodeID"],
            address=node["NodeManagerAddress"],
            resources={k: float(v) for k, v in (node["Resources"] if whole else free.get(node["NodeID"], {})).items()},
            labels=node["Labels"],
            cores=int(node["Resources"].get("CPU", 1)),
            port=node["NodeManagerPort"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def deployments_of(ray: Any) -> dict[str, list[str]]:
    """Return the workers of each deployment in this process's cluster, by the process that drives it."""
    workers = dict[str, list[str]]()
    for actor in import_module("ray.util").list_named_actors(all_namespaces=True):
        prefix, _, rest = actor["name"].partition("/")
        if prefix == AGENT:
            driver, worker, _ = rest.split("/")
            workers.setdefault(driver, []).append(worker)
    return {driver: sorted(names) for driver, names in sorted(workers.items())}


def is_reachable(host: Host) -> bool:
    """Return whether a host's Ray accepts connections."""
    try:
        socket.create_connection((host.address, host.port), ANSWER_S).close()
    except OSError:
        return False
    return True


def _job() -> Any:
    """Return the configuration of a Ray job whose workers import what their hosts have installed.

    By default Ray has them import from the directories of this process and of its script first. The field is part of
    Ray's protocol.
    """

    class OwnPathJob(import_module("ray.job_config").JobConfig):  # type: ignore[misc]
        def _get_proto_job_config(self) -> Any:
            job = super()._get_proto_job_config()
            del job.py_driver_sys_path[:]
            return job

    return OwnPathJob()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the program's SIGTERM handler, which Ray replaces."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with suppress(ValueError):  # not the main thread: Ray replaced nothing
            signal.signal(signal.SIGTERM, before)


def error_text(error: BaseException) -> str:
    """Return an error's whole text as one line."""
    return " ".join(str(error).split()) or type(error).__name__
