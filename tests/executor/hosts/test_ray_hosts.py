"""The launcher ``ray`` without a cluster, by scripted wardens: what it refuses of a host; its seats.

Covers: lamina/executor/launchers/ray.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from lamina import __version__
from lamina.config.flat_options import make_config
from lamina.executor.hosts.worker_placement import Host, HostAssignment
from lamina.executor.launchers import HostLostError
from lamina.executor.launchers import ray as over_ray
from lamina.executor.launchers.ray import RayLauncher, RayWorker

WELL = {"port": 1, "version": __version__, "auth": "token"}


class ScriptedWarden:
    """A fake of one bundle of a placement group. Also what Ray says of its calls: each is answered once it is up."""

    def __init__(self, at: tuple[str, int], answer: Mapping[str, Any]) -> None:
        self.at, self.killed, self.orders = at, False, list[dict[str, Any]]()
        self.listen = SimpleNamespace(remote=lambda order: self._answers(order, answer))
        self.wait_started = SimpleNamespace(remote=lambda: (self, {"pid": 7}))
        self.exit_reason = SimpleNamespace(remote=lambda: (self, None))
        self.wait_stopped_change = SimpleNamespace(remote=lambda known: (self, None))

    def _answers(self, order: str, answer: Mapping[str, Any]) -> tuple[Any, Any]:
        self.orders.append(json.loads(order))
        return self, dict(answer)


class ScriptedRay:
    """A cluster with three hosts, each with room for one memory worker, and what is asked of it."""

    exceptions = SimpleNamespace(RayError=OSError, GetTimeoutError=TimeoutError)

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Mapping[str, Any] = WELL) -> None:
        self.hosts = [Host(name=f"n{i}", address=f"10.0.0.{i}", resources={}, cores=4) for i in range(3)]
        self.wardens, self.up, self.dark = list[ScriptedWarden](), True, set[str]()
        self.reserved: list[tuple[dict[str, int], float]] = []
        monkeypatch.setattr(over_ray, "reserve_placement_group", self._reserve)
        monkeypatch.setattr(over_ray, "hosts_of", lambda ray, whole: self.hosts)
        monkeypatch.setattr(over_ray, "is_reachable", lambda host: host.name not in self.dark)
        monkeypatch.setattr(over_ray, "give_back", lambda group: None)
        monkeypatch.setattr(over_ray, "connect", lambda *asked, **names: SimpleNamespace(timed_out=False, names=names))
        monkeypatch.setattr(RayLauncher, "start_agent", self._call)
        self._answer = answer

    def launcher(self, wanted: dict[str, int], **options: Any) -> RayLauncher:
        config = make_config({"ray_address": "auto", "transport": "tcp", "kv_memory": "8MiB", **options})
        return RayLauncher(self, False, config, b"key", wanted)

    def is_initialized(self) -> bool:
        return True

    def kill(self, warden: ScriptedWarden) -> None:
        warden.killed = True

    def wait(self, references: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        done = [r for r in references if self.up and r[1] is not None]
        return done, [r for r in references if r not in done]

    def get(self, reference: Any, timeout: float) -> str:
        return json.dumps(reference[1])

    def _reserve(
        self, ray: Any, config: Any, wanted: dict[str, int], limit_s: float, without: Any = (), freed_s: float = 5.0
    ) -> tuple[str, dict[str, list[HostAssignment]]]:
        self.reserved.append((dict(wanted), freed_s))
        hosts = [h for h in self.hosts if h.name not in without]
        if sum(wanted.values()) > len(hosts):
            raise ValueError("they do not fit")
        places = {role: [HostAssignment(hosts.pop(0), {}) for _ in range(n)] for role, n in wanted.items()}
        return f"group {len(self.reserved)}", places

    def _call(self, seat: Any) -> None:
        if seat.agent is not None:
            self.kill(seat.agent)
        seat.agent = ScriptedWarden((seat.group, seat.bundle), self._answer)
        self.wardens.append(seat.agent)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({**WELL, "version": "0.0.0"}, f"10.0.0.0 has Lamina 0.0.0, this host has {__version__}: install the"),
        ({**WELL, "auth": ""}, "10.0.0.0: its Ray runs without tokens"),
    ],
)
def test_a_host_of_another_version_or_without_tokens_is_refused_by_name(
    answer: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = ScriptedRay(monkeypatch, answer).launcher({"memory": 1})
    with pytest.raises(ValueError, match=words):
        launcher.start("memory", 0)


def test_a_spare_is_placed_as_its_kind_and_changes_seats_with_the_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = ScriptedRay(monkeypatch)
    launcher = ray.launcher({"memory": 2}, memory_workers=2, spare_memory=1)
    assert ray.reserved[0][0] == {"memory": 3}, "one group has them all: whole, or not at all"
    assert [p.host.name for p in launcher.assignments["memory"]] == ["n0", "n1"], "a spare has no place"
    assert launcher.set_capacity("memory", 2)
    assert not launcher.set_capacity("memory", 3), "nor is its room anybody's"
    workers = [launcher.start("memory", i) for i in range(2)]
    spare = launcher.start_spare("memory", 0, wait_s=1.0)
    assert isinstance(spare, RayWorker)
    assert spare.host == "10.0.0.2:0"
    names = [warden.orders[0]["name"] for warden in ray.wardens]
    assert len({*names}) == 3
    launcher.promote_spare("memory", 0, 1)
    assert [p.host.name for p in launcher.assignments["memory"]] == ["n0", "n2"]
    again = launcher.start_spare("memory", 0)
    assert again is not None
    assert again.host == workers[1].host, "the next spare has the room that the lost one had"
    assert [w.killed for w in ray.wardens] == [False, True, False, False]
    assert ray.wardens[3].at == ray.wardens[1].at
    launcher.promote_spare("memory", 0, 1)  # so it goes on
    assert [p.host.name for p in launcher.assignments["memory"]] == ["n0", "n1"]
    launcher.close()
    assert all(warden.killed for warden in ray.wardens)


def test_nobody_waits_for_a_spare_that_comes_up_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = ScriptedRay(monkeypatch)
    launcher, now = ray.launcher({"memory": 1}, spare_memory=1, start_timeout_s=20.0), [100.0]
    monkeypatch.setattr(over_ray.time, "monotonic", lambda: now[0])
    ray.up = False
    assert launcher.start_spare("memory", 0) is None
    assert launcher.start_spare("memory", 0) is None
    assert len(ray.wardens[1].orders) == 1, "it is asked once"
    ray.up = True
    assert launcher.start_spare("memory", 0) is not None
    launcher.promote_spare("memory", 0, 0)
    ray.up, now[0] = False, 200.0
    assert launcher.start_spare("memory", 0) is None
    now[0] = 221.0
    with pytest.raises(OSError, match="the spare memory worker 0 did not start within 20 s"):
        launcher.start_spare("memory", 0)
    ray.up = True
    assert launcher.start_spare("memory", 0) is not None, "another one may"


def test_one_that_comes_up_is_waited_for_as_long_as_its_host_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = ScriptedRay(monkeypatch)
    launcher, now, answered = ray.launcher({"memory": 1}, spare_memory=1, start_timeout_s=60.0), [100.0], ray.wait

    def wait(references: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        now[0] += timeout
        ray.up = ray.up or now[0] >= 140.0
        return answered(references, timeout)

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(over_ray.time, "monotonic", lambda: now[0])
    ray.up = False
    assert launcher.start_spare("memory", 0) is None
    assert launcher.start_spare("memory", 0, wait_s=30.0) is None
    assert now == [130.0]
    ray.dark = {"n1"}
    with pytest.raises(OSError, match="the spare memory worker 0 starts on a host that does not respond"):
        launcher.start_spare("memory", 0, wait_s=30.0)
    assert now == [131.0], "Ray itself would know of that much later"
    moved = launcher.start_spare("memory", 0, wait_s=30.0)
    assert moved is not None
    assert (moved.host, now) == ("10.0.0.0:0", [140.0]), "another host"


def test_a_spare_goes_to_another_host_where_there_is_room_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that waits for nothing but a spare's successor is none that a spare has helped."""
    ray = ScriptedRay(monkeypatch)
    launcher = ray.launcher({"memory": 1}, spare_memory=1)
    launcher.start("memory", 0)
    assert launcher.start_spare("memory", 0) is not None
    launcher.promote_spare("memory", 0, 0)
    ray.dark = {"n0"}
    moved = launcher.start_spare("memory", 0)
    assert moved is not None
    assert moved.host == "10.0.0.1:0"
    assert ray.reserved[-1] == ({"memory": 1}, 0.0)
    ray.hosts = []
    with pytest.raises(OSError, match=r"10.0.0.1 is lost, and the spare memory worker 0 was there: they do not fit"):
        launcher.start_spare("memory", 0)


def test_where_others_do_not_reach_a_host_nobody_is_started_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it answers here: neither in the place, nor as the next spare."""
    ray = ScriptedRay(monkeypatch)
    launcher = ray.launcher({"memory": 1}, spare_memory=1)
    launcher.start("memory", 0)
    assert launcher.start_spare("memory", 0) is not None
    launcher.avoid_host("memory", 0)
    assert launcher.start("memory", 0).host == "10.0.0.1:0"  # as if no spare were on another host
    launcher.avoid_host("memory", 0)
    launcher.promote_spare("memory", 0, 0)
    spare = launcher.start_spare("memory", 0)
    assert spare is not None
    assert spare.host == "10.0.0.2:0"
    launcher.avoid_host("memory", 0)
    ray.hosts = []
    with pytest.raises(
        HostLostError, match=r"10.0.0.1 is out of the others' reach, and memory worker 0 was there: they"
    ):
        launcher.start("memory", 0)
