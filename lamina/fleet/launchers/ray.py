"""The launcher ``ray``: wardens on the hosts of a Ray cluster, each with one worker. Ray watches them.

All workers of an engine are one placement group: Ray gives it whole or not at all, so that engines which start at the
same time share no slot, and an autoscaler sees what one waits for. Which hosts it is to be on is ours to choose
(``hosts/placement.py``), as long as the cluster has room.

Ray carries strings of JSON, nothing else. Each worker has a control link of its own to this process; layer messages go
over netstack, between the workers. The cluster's key goes to the wardens in a call of Ray's, which only the holders of
its token can make; who can read the network reads it, unless Ray's TLS is on.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import threading
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from lamina import __version__
from lamina.fleet.hosts.placement import HostPlace, check_kv_memory, demand, names_type, on_gpu, place, wishes
from lamina.fleet.hosts.ray_cluster import answers, first_line, hosts_of, join, load
from lamina.fleet.hosts.ray_token import MODE
from lamina.netstack import ChannelError
from lamina.protocol.options.engine import EngineConfig
from lamina.protocol.sealed import SealedSocket

from . import WorkerHandle
from .ray_warden import Warden
from .remote_worker import any_port, connect

log = logging.getLogger(__name__)
CALL_S = 60.0  # for a warden to come up and answer
REACH_S = 10.0
END_S = 1.0
NODE_ID = "ray.io/node-id"  # a label that Ray gives each host
FREED_S = 5.0  # for Ray to tell that workers which have ended hold nothing any more


class RayWorker:
    """A worker on another host, and its warden."""

    def __init__(
        self, ray: Any, warden: Any, role: str, index: int, place: HostPlace, pid: int, sock: SealedSocket
    ) -> None:
        self.role, self.index, self.pid = role, index, pid
        self.sock = sock
        self.place = any_port(place.host.address)
        self._ray, self._warden, self._where = ray, warden, place.host.address
        self._end = warden.fate.remote()  # answered at its end
        self._still, self._other = False, warden.stands_still.remote(False)  # the latter once it is otherwise

    @property
    def stopped(self) -> bool:
        """As its warden has said."""
        if self.sock.silent or not self._ray.is_initialized():
            return False
        done, _ = self._ray.wait([self._other], timeout=0)
        if done:
            try:
                self._still = json.loads(self._ray.get(done[0]))
            except self._ray.exceptions.RayError:  # the warden is gone, and its worker with it
                return False
            self._other = self._warden.stands_still.remote(self._still)
        return self._still

    def fate(self) -> str | None:
        if self.sock.silent:
            return f"on {self._where} is lost: its host does not answer"
        return self._fate(0.0)

    def join(self, timeout_s: float) -> None:
        if not self._ray.is_initialized():
            return  # the interpreter ends: Ray has ended the wardens, and they the workers
        if not self.sock.silent and self._fate(timeout_s) is None:
            self._warden.end.remote()
            self._fate(END_S)
        self._ray.kill(self._warden)

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


class RayLauncher:
    """Wardens come up all at once, when it is made; ``start`` waits for one. A worker in the place of a lost one gets a
    warden of its own, in the same bundle, and so on the same host; where that is lost, in a bundle on another one.
    """

    key = b""  # workers have it from their wardens

    def __init__(self, ray: Any, owned: bool, config: EngineConfig, key: bytes, wanted: Mapping[str, int]) -> None:
        self._ray, self._owned, self._config, self._key = ray, owned, config, key
        self._limit_s = min(CALL_S, config.deadlines.start_timeout_s)
        self._incarnation = secrets.token_hex(8)  # part of the names on control links
        self._wardens: dict[tuple[str, int], Any] = {}
        self._used: set[tuple[str, int]] = set()  # places whose wardens have had a worker
        self._groups: list[Any] = []
        self._lost: set[str] = set()  # hosts, by name
        try:
            group, self.places = reserve(ray, config, wanted, self._limit_s)
            self._groups += [group] if group is not None else []
            check_kv_memory(self.places, config.devices.kv_bytes())
            self._bundles = {(role, index): (group, n) for n, (role, index, _) in enumerate(_each(self.places))}
            for role, index, _ in _each(self.places):
                self._call_warden(role, index)
        except BaseException:
            self.close()
            raise

    def share(self, role: str, index: int) -> int:
        at = self.places[role][index].host
        return max(1, at.cores // sum(p.host == at for p in self.places[role]))

    def start(self, role: str, index: int, threads: int = 0) -> RayWorker:
        if (role, index) in self._used:
            hosts = {host.name: host for host in hosts_of(self._ray, whole=True)}
            there = hosts.get(self.places[role][index].host.name)
            if there is None or not answers(there):  # which tells of a lost one long before Ray does
                self._move(role, index)
            self._call_warden(role, index)
        self._used.add((role, index))
        at, warden = self.places[role][index], self._wardens[role, index]
        host, who = at.host.address, f"the warden of {role} worker {index} on {at.host.address}"
        name, driver = (f"{end}-{self._incarnation}" for end in (f"{role}-{index}", "driver"))
        order = {
            "role": role, "threads": threads or self.share(role, index), "key": self._key.hex(), "host": host,
            "name": name, "driver": driver,
        }  # fmt: skip
        answer = self._ask(who, warden.listen.remote(json.dumps(order)))
        if answer["version"] != __version__:
            raise ValueError(f"{host} has Lamina {answer['version']}, this host has {__version__}: install the same")
        if answer["auth"] != "token":
            raise ValueError(f"{host}: its Ray runs without tokens: start it with {MODE}=token")
        try:
            sock = connect(host, answer["port"], self._key, REACH_S, name=driver, peer=name)
        except (ChannelError, OSError) as error:
            raise OSError(f"{who} cannot be reached at port {answer['port']}: {error}") from error
        started = self._ask(who, warden.started.remote())
        if "error" in started:
            raise OSError(f"{who}: {started['error']}")
        return RayWorker(self._ray, warden, role, index, at, started["pid"], sock)

    def grow(self, role: str, count: int) -> bool:
        """Fewer alone: its places are taken from the cluster at the start."""
        return count <= len(self.places[role])

    def keep(self, role: str, numbers: Sequence[int]) -> None:
        """The cluster has the places of the others back with the end of all."""
        stay = {old: new for new, old in enumerate(numbers)}

        def renumbered(who: tuple[str, int]) -> tuple[str, int] | None:
            return (role, stay[who[1]]) if who[0] == role and who[1] in stay else None if who[0] == role else who

        self.places[role] = [self.places[role][n] for n in numbers]
        self._bundles = {new: n for who, n in self._bundles.items() if (new := renumbered(who))}
        self._wardens = {new: w for who, w in self._wardens.items() if (new := renumbered(who))}
        self._used = {new for who in self._used if (new := renumbered(who))}

    def may_replace(self, lost: WorkerHandle) -> bool:
        """Any, on the lost one's host or on another one. A host that has fallen silent keeps its worker, which nobody
        talks to any more.
        """
        return isinstance(lost, RayWorker)

    def close(self) -> None:
        wardens, self._wardens = list(self._wardens.values()), {}
        if not self._ray.is_initialized():
            return
        for warden in wardens:
            self._ray.kill(warden)
        while self._groups:
            _give_back(self._groups.pop())
        if self._owned:
            self._ray.shutdown()

    def _move(self, role: str, index: int) -> None:
        """To another host, as the one of that place is lost. Raises OSError."""
        lost = self.places[role][index].host
        self._lost.add(lost.name)
        try:
            group, places = reserve(self._ray, self._config, {role: 1}, self._limit_s, self._lost)
        except ValueError as error:
            text = f"{lost.address} is lost, and {role} worker {index} was there: {error}"
            raise OSError(text) from None
        self._groups.append(group)
        self.places[role][index], self._bundles[role, index] = places[role][0], (group, 0)
        log.warning("%s is lost: %s worker %d goes to %s", lost.address, role, index, places[role][0].host.address)

    def _call_warden(self, role: str, index: int) -> None:
        """In the bundle of that place, in the stead of the one that was there."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if (role, index) in self._wardens:
            self._ray.kill(self._wardens[role, index])  # Ray gives its bundle to nobody else before
        takes, (group, number) = dict(self.places[role][index].takes), self._bundles[role, index]
        self._wardens[role, index] = (
            self._ray.remote(Warden)
            .options(
                num_cpus=takes.pop("CPU", 0.0),
                num_gpus=takes.pop("GPU", 0.0),
                resources=takes,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
                max_concurrency=4,  # started, stands_still and fate wait, end comes meanwhile
                max_restarts=0,
            )
            .remote()
        )

    def _ask(self, who: str, reference: Any) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(self._ray.get(reference, timeout=self._limit_s))
        except self._ray.exceptions.GetTimeoutError:
            raise OSError(
                f"{who} did not come up in {self._limit_s:g} s: is what it needs of the host still free?"
            ) from None
        except self._ray.exceptions.RayError as error:
            raise OSError(f"{who} is lost: {first_line(error)}") from error
        return answer


def open_launcher(config: EngineConfig, key: bytes, wanted: Mapping[str, int]) -> RayLauncher:
    """Joins the Ray cluster of ``config`` unless this process is in one already."""
    ray = load()
    owned = not ray.is_initialized()
    if owned:
        join(ray, config.launching.ray_address)
    return RayLauncher(ray, owned, config, key, wanted)


def reserve(
    ray: Any, config: EngineConfig, wanted: Mapping[str, int], limit_s: float, without: Container[str] = ()
) -> tuple[Any, dict[str, list[HostPlace]]]:
    """A placement group for all workers, and their places as Ray says them. Where a look at what is free has shown
    more than there is, since another engine starts, there is another look. ``without``: names of hosts where none is
    to be. Raises ValueError, OSError.
    """
    deadline, patience = time.monotonic() + limit_s, 1
    while True:
        try:
            places, pinned = find_places(ray, config, wanted, without), True
        except ValueError as error:
            if not config.launching.ray_wait_s:
                raise
            places, pinned, missing = _hoped_for(config, wanted), False, error
        if not any(places.values()):
            return None, places
        group = _group(places, config.launching.placement, pinned=pinned)
        try:
            if group.wait(patience if pinned else math.ceil(config.launching.ray_wait_s)):
                return group, _read_back(ray, group, places)
        except BaseException:
            _give_back(group)
            raise
        _give_back(group)
        if not pinned:
            raise ValueError(f"{missing}; no host has come in {config.launching.ray_wait_s:g} s (--ray-wait-s)")
        if time.monotonic() > deadline:
            raise OSError(f"Ray has reserved no places for the workers in {limit_s:g} s, though they are free")
        patience *= 2


def _group(places: dict[str, list[HostPlace]], placement: str, *, pinned: bool) -> Any:
    """A bundle for each worker, in the order of ``_each``. ``pinned``: to the very host of its place, else to any that
    has its labels.
    """
    each = [at for _, _, at in _each(places)]
    labels = [{NODE_ID: at.host.name} if pinned else at.host.labels for at in each]
    strategy = "PACK" if pinned or placement == "pack" else "SPREAD"
    return import_module("ray.util").placement_group([at.takes for at in each], strategy, bundle_label_selector=labels)


def _read_back(ray: Any, group: Any, places: dict[str, list[HostPlace]]) -> dict[str, list[HostPlace]]:
    """``places`` with the hosts that Ray has given their bundles. Raises OSError where a host was lost meanwhile."""
    nodes = import_module("ray.util").placement_group_table(group)["bundles_to_node_id"]
    hosts = {host.name: host for host in hosts_of(ray, whole=True)}
    by_role: dict[str, list[HostPlace]] = {role: [] for role in places}
    for number, (role, _, at) in enumerate(_each(places)):
        if nodes[number] not in hosts:
            raise OSError(f"a host was lost that Ray had reserved for {role} workers: start again")
        by_role[role].append(HostPlace(hosts[nodes[number]], at.takes))
    return by_role


def _give_back(group: Any) -> None:
    import_module("ray.util").remove_placement_group(group)


def _hoped_for(config: EngineConfig, wanted: Mapping[str, int]) -> dict[str, list[HostPlace]]:
    """Places on hosts that the cluster has not yet."""
    types = vars(import_module("ray.util.accelerators.accelerators")).values()
    gpus = on_gpu(config)
    return {
        role: [demand(trait, gpu=role in gpus, typed=names_type(trait, types))] * count
        for role, (count, trait, _) in wishes(config, wanted).items()
    }


def _each(places: Mapping[str, list[HostPlace]]) -> Iterator[tuple[str, int, HostPlace]]:
    for role, each in places.items():
        yield from ((role, index, at) for index, at in enumerate(each))


def find_places(
    ray: Any, config: EngineConfig, wanted: Mapping[str, int], without: Container[str] = ()
) -> dict[str, list[HostPlace]]:
    """The places of the workers, on hosts of other names than ``without``. The resources of a service that has just
    ended are free a moment later: where the cluster has room at all, they are waited for. Raises ValueError.
    """
    asked = wishes(config, wanted), config.launching.placement, on_gpu(config)
    deadline = time.monotonic() + FREED_S
    while True:
        try:
            return place([h for h in hosts_of(ray) if h.name not in without], *asked)
        except ValueError:
            if time.monotonic() > deadline or not _has_room(ray, without, *asked):
                raise
        threading.Event().wait(0.1)  # Ray tells nobody of it: asked again


def _has_room(ray: Any, without: Container[str], *asked: Any) -> bool:
    try:
        return bool(place([h for h in hosts_of(ray, whole=True) if h.name not in without], *asked))
    except ValueError:
        return False
