"""The launcher ``ray``: node agents on the hosts of a Ray cluster, each with one worker. Ray watches them.

All workers of an engine are one placement group, which Ray grants whole or not at all. So engines that start at the
same time share no slot, and an autoscaler sees what an engine waits for. Lamina chooses the hosts
(``hosts/worker_placement.py``), as long as the cluster has space.

Ray carries only strings of JSON. Each worker has its own control link to this process, and layer messages go over
netstack, between the workers. A call of Ray's carries the cluster's key to the node agents; only holders of Ray's token
can make it. A reader of the network can read the key, unless Ray's TLS is on.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lamina import __version__
from lamina.config.engine_config import EngineConfig
from lamina.executor.hosts.ray_cluster import AGENT, error_text, hosts_of, is_reachable, join, load
from lamina.executor.hosts.ray_placement import FREED_S, find_places
from lamina.executor.hosts.ray_token import MODE
from lamina.executor.hosts.worker_placement import (
    HostAssignment,
    check_kv_memory,
    is_gpu_type,
    on_gpu,
    resource_request,
    worker_requirements,
)
from lamina.netstack import ChannelError
from lamina.observe.log_lines import is_json
from lamina.protocol.encrypted_socket import EncryptedSocket

from . import HostLostError, WorkerHandle
from .ray_agent import NodeAgent
from .remote_links import any_port, connect

log = logging.getLogger(__name__)
CALL_S = 60.0  # for a node agent to start and reply
REACH_S = 10.0
END_S = 1.0
LOOK_S = 1.0  # during a wait for a spare, between looks whether its host responds
NODE_ID = "ray.io/node-id"  # a label that Ray gives each host


class RayWorker:
    """A worker on another host, and its node agent."""

    def __init__(
        self, ray: Any, warden: Any, role: str, index: int, assignment: HostAssignment, pid: int, sock: EncryptedSocket
    ) -> None:
        self.role, self.index, self.pid = role, index, pid
        self.sock = sock
        self.host = any_port(assignment.host.address)
        self._ray, self._agent, self._where = ray, warden, assignment.host.address
        self._end = warden.exit_reason.remote()  # replies at its end
        self._is_stopped, self._other = (
            False,
            warden.wait_stopped_change.remote(False),
        )  # the latter replies once the state changes

    @property
    def is_stopped(self) -> bool:
        """Return whether it is stopped, as its node agent has reported."""
        if self.sock.timed_out or not self._ray.is_initialized():
            return False
        done, _ = self._ray.wait([self._other], timeout=0)
        if done:
            try:
                self._is_stopped = json.loads(self._ray.get(done[0]))
            except self._ray.exceptions.RayError:  # the node agent is gone, and its worker with it
                return False
            self._other = self._agent.wait_stopped_change.remote(self._is_stopped)
        return self._is_stopped

    def exit_reason(self) -> str | None:
        if self.sock.timed_out:
            return f"on {self._where} is lost: its host does not answer"
        return self._fate(0.0)

    def join(self, timeout_s: float) -> None:
        if not self._ray.is_initialized():
            return  # the interpreter ends: Ray has ended the node agents, and they the workers
        if not self.sock.timed_out and self._fate(timeout_s) is None:
            self._agent.kill.remote()
            self._fate(END_S)
        self._ray.kill(self._agent)

    def _fate(self, timeout_s: float) -> str | None:
        if not self._ray.is_initialized():
            return f"on {self._where} was left by Ray"
        done, _ = self._ray.wait([self._end], timeout=timeout_s)
        if not done:
            return None
        try:
            return f"on {self._where} {self._ray.get(done[0])}"
        except self._ray.exceptions.RayError:
            return f"on {self._where} is lost: its host's Ray, or the actor that watched it, is gone"


@dataclass(eq=False)
class BundleSlot:
    """The resources for one worker in the cluster, a member or a spare."""

    assignment: HostAssignment
    group: Any
    bundle: int  # its number in the group
    worker: str  # for `lamina-launch cluster status`
    agent: Any = None
    used: bool = False  # whether that node agent has had a worker
    avoided: bool = False  # whether no worker may be started on that host any more
    pending_call: Any = None  # its reply to ``listen``, once it has come
    called_at: float = 0.0
    names: tuple[str, str] = "", ""  # of the two ends of the control link


class RayLauncher:
    """Starts a node agent for each worker, all at once when it is made; ``start`` waits for one.

    A worker in the place of a lost one gets a node agent of its own in the same bundle, and so on the same host. If
    that host is lost, it gets a bundle on another one. Spares have bundles of their own, after those of the places, by
    the same rules.
    """

    key = b""  # workers get it from their node agents

    def __init__(
        self,
        ray: Any,
        owned: bool,
        config: EngineConfig,
        key: bytes,
        wanted: Mapping[str, int],
        without: Collection[str] = (),
    ) -> None:
        self._ray, self._owned, self._config, self._key = ray, owned, config, key
        self._limit_s = min(CALL_S, config.deadlines.start_timeout_s)
        self._incarnation = secrets.token_hex(8)  # part of the names on control links
        self._slots: dict[str, list[BundleSlot]] = {}  # by role
        self.spares: dict[str, list[BundleSlot]] = {}
        self._groups: list[Any] = []
        self._lost = set(without)  # hosts, by name
        try:
            spares = {role: count for role, count in config.launch.num_spares.items() if wanted.get(role)}
            counts = {role: count + spares.get(role, 0) for role, count in wanted.items()}
            group, places = reserve_placement_group(ray, config, counts, self._limit_s, self._lost)
            self._groups += [group] if group is not None else []
            check_kv_memory(places, config.devices.kv_bytes())
            for bundle, (role, index, at) in enumerate(_each(places)):
                kind = self._slots if index < wanted[role] else self.spares
                kind.setdefault(role, []).append(BundleSlot(at, group, bundle, f"{role}-{index}"))
            for seat in self._all_slots():
                self.start_agent(seat)
        except BaseException:
            self.close()
            raise

    @property
    def assignments(self) -> dict[str, list[HostAssignment]]:
        """The hosts of all workers that have a place, by role."""
        return {role: [seat.assignment for seat in seats] for role, seats in self._slots.items()}

    def thread_count(self, role: str, index: int) -> int:
        return self._share(role, self._slots[role][index])

    def _share(self, role: str, seat: BundleSlot) -> int:
        at = seat.assignment.host
        return max(1, at.cores // max(1, sum(other.assignment.host == at for other in self._slots[role])))

    def start(self, role: str, index: int, threads: int = 0) -> RayWorker:
        seat, what = self._slots[role][index], f"{role} worker {index}"
        self._call(seat, role, what, threads, patient=True)
        return self._finish(seat, role, index, what)

    def start_spare(self, role: str, number: int, threads: int = 0, wait_s: float = 0.0) -> RayWorker | None:
        seat, what = self.spares[role][number], f"the spare {role} worker {number}"
        if seat.pending_call is None:
            self._call(seat, role, what, threads, patient=bool(wait_s))
        if self._is_up(seat, wait_s):
            return self._finish(seat, role, number, what)
        late = time.monotonic() - seat.called_at >= self._limit_s
        if late or (wait_s and self._is_lost(seat)):
            seat.pending_call = None
            why = f"did not start within {self._limit_s:g} s" if late else "starts on a host that does not respond"
            raise OSError(f"{what} {why}")
        return None

    def _is_up(self, seat: BundleSlot, wait_s: float) -> bool:
        """Return whether its node agent replies within ``wait_s``. Stops waiting if its host is lost."""
        until = min(time.monotonic() + wait_s, seat.called_at + self._limit_s)
        while True:
            left = max(0.0, until - time.monotonic())
            done, _ = self._ray.wait([seat.pending_call], timeout=min(left, LOOK_S))
            if done or left <= LOOK_S or self._is_lost(seat):
                return bool(done)

    def promote_spare(self, role: str, number: int, index: int) -> None:
        seats, spares = self._slots[role], self.spares[role]
        seats[index], spares[number] = spares[number], seats[index]

    def avoid_host(self, role: str, index: int) -> None:
        self._slots[role][index].avoided = True

    def _call(self, seat: BundleSlot, role: str, what: str, threads: int, *, patient: bool) -> None:
        """Order its node agent to listen. ``patient``: wait for space on another host, if its own is lost."""
        if seat.used:
            if seat.avoided or self._is_lost(seat):
                self._move(seat, role, what, patient=patient)
            self.start_agent(seat)
        seat.used, seat.called_at = True, time.monotonic()
        own = f"{what.replace(' ', '-')}-{self._incarnation}"
        seat.names = own, f"driver-{self._incarnation}"
        order = {
            "role": role, "threads": threads or self._share(role, seat), "key": self._key.hex(),
            "host": seat.assignment.host.address, "name": own, "driver": seat.names[1],
            "log_json": is_json(),
        }  # fmt: skip
        seat.pending_call = seat.agent.listen.remote(json.dumps(order))

    def _is_lost(self, seat: BundleSlot) -> bool:
        """Return whether its host does not respond; this notices a lost host long before Ray does."""
        there = {host.name: host for host in hosts_of(self._ray, whole=True)}.get(seat.assignment.host.name)
        return there is None or not is_reachable(there)

    def _finish(self, seat: BundleSlot, role: str, index: int, what: str) -> RayWorker:
        """Return the worker of a called node agent, once it has started. Raises OSError, ValueError."""
        asked, seat.pending_call = seat.pending_call, None
        host, (name, driver) = seat.assignment.host.address, seat.names
        who, warden = f"the node agent of {what} on {host}", seat.agent
        answer = self._ask(who, asked)
        if answer["version"] != __version__:
            raise ValueError(f"{host} has Lamina {answer['version']}, this host has {__version__}: install the same")
        if answer["auth"] != "token":
            raise ValueError(f"{host}: its Ray runs without tokens: start it with {MODE}=token")
        try:
            sock = connect(host, answer["port"], self._key, REACH_S, name=driver, peer=name)
        except (ChannelError, OSError) as error:
            raise OSError(f"{who} cannot be reached at port {answer['port']}: {error}") from error
        started = self._ask(who, warden.wait_started.remote())
        if "error" in started:
            raise OSError(f"{who}: {started['error']}")
        return RayWorker(self._ray, warden, role, index, seat.assignment, started["pid"], sock)

    def set_capacity(self, role: str, count: int) -> bool:
        """Allow only fewer workers: places are reserved at the start."""
        return count <= len(self._slots[role])

    def keep_workers(self, role: str, numbers: Sequence[int]) -> None:
        """Keep these workers. The places of all other ones return to the cluster when all end."""
        self._slots[role] = [self._slots[role][n] for n in numbers]

    def can_replace(self, lost: WorkerHandle) -> bool:
        """Return whether it is a worker of this launcher: any can be replaced, on its host or another one. A silent
        host keeps its old worker, whose link is closed.
        """
        return isinstance(lost, RayWorker)

    def close(self) -> None:
        seats, self._slots, self.spares = self._all_slots(), {}, {}
        if not self._ray.is_initialized():
            return
        for seat in seats:
            if seat.agent is not None:
                self._ray.kill(seat.agent)
        while self._groups:
            give_back(self._groups.pop())
        if self._owned:
            self._ray.shutdown()

    def _all_slots(self) -> list[BundleSlot]:
        return [seat for kind in (self._slots, self.spares) for seats in kind.values() for seat in seats]

    def _move(self, seat: BundleSlot, role: str, what: str, *, patient: bool) -> None:
        """Move a slot to another host, as its own is lost. Raises OSError, HostLostError."""
        lost, how = seat.assignment.host, "is out of the others' reach" if seat.avoided else "is lost"
        self._lost.add(lost.name)
        freed_s = FREED_S if patient else 0.0
        try:
            group, places = reserve_placement_group(
                self._ray, self._config, {role: 1}, self._limit_s, self._lost, freed_s
            )
        except ValueError as error:
            raise HostLostError(f"{lost.address} {how}, and {what} was there: {error}", self._lost) from None
        self._groups.append(group)
        seat.assignment, seat.group, seat.bundle, seat.avoided = places[role][0], group, 0, False
        log.warning("%s %s: %s goes to %s", lost.address, how, what, seat.assignment.host.address)

    def start_agent(self, seat: BundleSlot) -> None:
        """Start a node agent in the slot's bundle, in place of the one that was there."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if seat.agent is not None:
            self._ray.kill(seat.agent)  # Ray does not reuse its bundle before
        takes = dict(seat.assignment.resources)
        seat.agent = (
            self._ray.remote(NodeAgent)
            .options(
                name=f"{AGENT}/{socket.gethostname()}:{os.getpid()}/{seat.worker}/{secrets.token_hex(4)}",
                num_cpus=takes.pop("CPU", 0.0),
                num_gpus=takes.pop("GPU", 0.0),
                resources=takes,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    seat.group, placement_group_bundle_index=seat.bundle
                ),
                max_concurrency=4,  # wait_started, wait_stopped_change and exit_reason wait; kill comes meanwhile
                max_restarts=0,
            )
            .remote()
        )

    def _ask(self, who: str, reference: Any) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(self._ray.get(reference, timeout=self._limit_s))
        except self._ray.exceptions.GetTimeoutError:
            raise OSError(
                f"{who} did not start within {self._limit_s:g} s: is what it needs of the host still free?"
            ) from None
        except self._ray.exceptions.RayError as error:
            raise OSError(f"{who} is lost: {error_text(error)}") from error
        return answer


def open_launcher(
    config: EngineConfig, key: bytes, wanted: Mapping[str, int], without: Collection[str] = ()
) -> RayLauncher:
    """Join the Ray cluster of ``config``, unless this process is in one already."""
    ray = load()
    owned = not ray.is_initialized()
    if owned:
        join(ray, config.launch.ray_address)
    return RayLauncher(ray, owned, config, key, wanted, without)


def reserve_placement_group(
    ray: Any,
    config: EngineConfig,
    wanted: Mapping[str, int],
    limit_s: float,
    without: Container[str] = (),
    freed_s: float = FREED_S,
) -> tuple[Any, dict[str, list[HostAssignment]]]:
    """Reserve a placement group for all workers. Returns it and their places, as Ray has assigned them.

    If less is free than it seemed, since another engine starts, it looks again. ``without``: names of hosts to leave
    out; ``freed_s``: see find_places. Raises ValueError, OSError.
    """
    deadline, patience = time.monotonic() + limit_s, 1
    while True:
        try:
            places, pinned = find_places(ray, config, wanted, without, freed_s), True
        except ValueError as error:
            if not config.launch.ray_wait_s:
                raise
            places, pinned, missing = _hoped_for(config, wanted), False, error
        if not any(places.values()):
            return None, places
        group = _group(places, config.launch.placement, pinned=pinned)
        try:
            if group.wait(patience if pinned else math.ceil(config.launch.ray_wait_s)):
                return group, _read_back(ray, group, places)
        except BaseException:
            give_back(group)
            raise
        give_back(group)
        if not pinned:
            raise ValueError(f"{missing}; no host has come in {config.launch.ray_wait_s:g} s (--ray-wait-s)")
        if time.monotonic() > deadline:
            raise OSError(f"Ray has reserved no places for the workers in {limit_s:g} s, though they are free")
        patience *= 2


def _group(assignments: dict[str, list[HostAssignment]], placement: str, *, pinned: bool) -> Any:
    """Return a placement group with a bundle for each worker, in the order of ``_each``. ``pinned``: to the exact host
    of its place, else to any host with its labels.
    """
    each = [at for _, _, at in _each(assignments)]
    labels = [{NODE_ID: at.host.name} if pinned else at.host.labels for at in each]
    strategy = "PACK" if pinned or placement == "pack" else "SPREAD"
    return import_module("ray.util").placement_group(
        [at.resources for at in each], strategy, bundle_label_selector=labels
    )


def _read_back(ray: Any, group: Any, assignments: dict[str, list[HostAssignment]]) -> dict[str, list[HostAssignment]]:
    """Return ``assignments`` with the hosts that Ray gave to the bundles. Raises OSError if a host was lost since."""
    nodes = import_module("ray.util").placement_group_table(group)["bundles_to_node_id"]
    hosts = {host.name: host for host in hosts_of(ray, whole=True)}
    by_role: dict[str, list[HostAssignment]] = {role: [] for role in assignments}
    for number, (role, _, at) in enumerate(_each(assignments)):
        if nodes[number] not in hosts:
            raise OSError(f"a host was lost that Ray had reserved for {role} workers: start again")
        by_role[role].append(HostAssignment(hosts[nodes[number]], at.resources))
    return by_role


def give_back(group: Any) -> None:
    """Return a placement group to the cluster."""
    import_module("ray.util").remove_placement_group(group)


def _hoped_for(config: EngineConfig, wanted: Mapping[str, int]) -> dict[str, list[HostAssignment]]:
    """Return places on hosts that the cluster does not have yet."""
    types = vars(import_module("ray.util.accelerators.accelerators")).values()
    gpus = on_gpu(config)
    return {
        role: [resource_request(trait, gpu=role in gpus, typed=is_gpu_type(trait, types))] * count
        for role, (count, trait, _) in worker_requirements(config, wanted).items()
    }


def _each(assignments: Mapping[str, list[HostAssignment]]) -> Iterator[tuple[str, int, HostAssignment]]:
    for role, each in assignments.items():
        yield from ((role, index, at) for index, at in enumerate(each))
