"""Workers are placed once what a service that has just ended took shows as free, and not long after they cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from lamina.config.flat_options import make_config
from lamina.executor.hosts import ray_placement

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="no ray")
NODE = {"NodeID": "n", "NodeManagerAddress": "10.0.0.1", "NodeManagerPort": 1, "Labels": {}, "Alive": True}
RAY = SimpleNamespace(nodes=lambda: [NODE | {"Resources": {"lamina_memory": 2.0, "CPU": 4.0}}])
CONFIG = make_config({"memory_workers": 2, "ray_address": "10.0.0.1:6379", "transport": "tcp"})


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A fake of the free resources, one value for each look; the last value stays."""
    looks: list[float] = []

    def look() -> dict[str, Any]:
        return {"n": {"lamina_memory": looks.pop(0) if len(looks) > 1 else looks[0], "CPU": 4.0}}

    monkeypatch.setattr("ray._private.state.available_resources_per_node", look)
    monkeypatch.setattr(ray_placement, "is_reachable", lambda host: True)
    return looks


def test_what_becomes_free_is_waited_for(free: list[float]) -> None:
    free += [0.0, 1.0, 2.0]
    found = ray_placement.find_places(RAY, CONFIG, {"memory": 2})
    assert [p.host.name for p in found["memory"]] == ["n", "n"]


def test_what_others_keep_is_given_up(free: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_placement, "FREED_S", 0.2)
    free += [1.0]
    with pytest.raises(ValueError, match="2 memory workers do not fit: the cluster has room for 1"):
        ray_placement.find_places(RAY, CONFIG, {"memory": 2})


def test_what_never_fits_is_told_at_the_first_look(free: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_placement, "FREED_S", 1e9)
    free += [2.0, 1e9]
    with pytest.raises(ValueError, match="3 memory workers do not fit: the cluster has room for 2"):
        ray_placement.find_places(RAY, CONFIG, {"memory": 3})


def test_a_host_that_does_not_answer_is_as_one_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray tells of it much later, and would give its room away until then."""
    nodes = [
        NODE | {"NodeID": name, "Resources": {"lamina_memory": n, "CPU": 4.0}} for name, n in (("a", 2.0), ("b", 1.0))
    ]
    ray = SimpleNamespace(nodes=lambda: nodes)
    free = lambda: {node["NodeID"]: node["Resources"] for node in nodes}  # noqa: E731
    monkeypatch.setattr("ray._private.state.available_resources_per_node", free)
    asked = list[str]()
    monkeypatch.setattr(ray_placement, "is_reachable", lambda host: (asked.append(host.name), host.name == "b")[1])
    assert [p.host.name for p in ray_placement.find_places(ray, CONFIG, {"memory": 1}, (), 0.0)["memory"]] == ["b"]
    with pytest.raises(ValueError, match="2 memory workers do not fit: the cluster has room for 1"):
        ray_placement.find_places(ray, CONFIG, {"memory": 2}, (), 0.0)
    asked.clear()
    assert ray_placement.find_places(ray, CONFIG, {"memory": 1}, ["a"], 0.0)
    assert asked == ["b"], "only those that are chosen"
