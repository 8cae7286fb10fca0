"""Workers get places where they fit, near each other or evenly."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.config.flag_groups import flag_name
from lamina.config.flat_options import make_config
from lamina.executor.hosts import worker_placement as placement
from lamina.executor.hosts.worker_placement import (
    RACK,
    Host,
    HostAssignment,
    assign_hosts,
    is_gpu_type,
    on_gpu,
    resource_request,
)

COMPUTE_ON, MEMORY_ON = map(flag_name, ("compute_on", "memory_on"))

HOSTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from(["", "a", "b"])), min_size=1, max_size=6
)


def host(number: int, compute: int = 0, memory: int = 0, rack: str = "", **more: float) -> Host:
    resources = {"lamina_compute": float(compute), "lamina_memory": float(memory), **more}
    return Host(
        name=f"h{number}", address=f"10.0.0.{number}", resources={k: v for k, v in resources.items() if v},
        labels={RACK: rack} if rack else {},
    )  # fmt: skip


def wishes(compute: int, memory: int) -> dict[str, tuple[int, str, str]]:
    return {
        "compute": (compute, "lamina_compute", COMPUTE_ON),
        "memory": (memory, "lamina_memory", MEMORY_ON),
    }


@settings(max_examples=150, deadline=None)
@given(HOSTS, st.integers(1, 6), st.integers(1, 6), st.sampled_from(["pack", "spread"]))
def test_all_get_a_place_or_a_reason(
    entries: list[tuple[int, int, str]], compute: int, memory: int, placement: str
) -> None:
    hosts = [host(number, *entry) for number, entry in enumerate(entries)]
    fits = sum(e[0] for e in entries) >= compute and sum(e[1] for e in entries) >= memory
    if not fits:
        with pytest.raises(ValueError, match=r"--cluster placement.(compute|memory)_on"):
            assign_hosts(hosts, wishes(compute, memory), placement)
        return
    places = assign_hosts(hosts, wishes(compute, memory), placement)
    for role, count in (("compute", compute), ("memory", memory)):
        used = Counter(p.host.name for p in places[role])
        room = {h.name: int(h.resources.get(f"lamina_{role}", 0)) for h in hosts}
        assert sum(used.values()) == count
        assert all(used[name] <= room[name] for name in used)
        if placement == "spread":  # who has two more than another is so because the other is full
            assert all(used[a] <= used[b] + 1 or used[b] == room[b] for a in room for b in room)
        if placement == "pack" and role == "compute":
            assert sum(0 < used[name] < room[name] for name in room) <= 1
    assert places == assign_hosts(list(reversed(hosts)), wishes(compute, memory), placement)


def names(hosts: list[Host], compute: int, memory: int, placement: str) -> tuple[list[str], list[str]]:
    found = assign_hosts(hosts, wishes(compute, memory), placement)
    return [p.host.name for p in found["compute"]], [p.host.name for p in found["memory"]]


def test_memory_workers_go_near_the_compute_workers() -> None:
    hosts = [host(0, memory=4, rack="a"), host(1, compute=2, rack="b"), host(2, memory=1, rack="b"), host(3, memory=9)]
    assert names(hosts, 2, 3, "pack") == (["h1", "h1"], ["h2", "h3", "h3"])
    assert names(hosts, 1, 3, "spread") == (["h1"], ["h2", "h3", "h0"])
    both = [*hosts, host(4, compute=2, memory=2, rack="c")]
    assert names(both, 2, 2, "pack")[0] in (["h1", "h1"], ["h4", "h4"])


def test_racks_are_kept_together() -> None:
    hosts = [host(n, compute=1, rack="ab"[n % 2]) for n in range(6)] + [host(6, compute=1, memory=1, rack="b")]
    assert names(hosts, 4, 1, "pack")[0] == ["h1", "h3", "h5", "h6"]


def test_workers_on_gpus_take_one_each() -> None:
    hosts = [host(0, compute=4, GPU=1.0), host(1, compute=2, memory=2, GPU=2.0), host(2, compute=9, memory=1)]
    found = assign_hosts(hosts, wishes(3, 3), "pack", {"compute"})
    assert sorted(p.host.name for p in found["compute"]) == ["h0", "h1", "h1"]
    assert all(p.resources == {"lamina_compute": 1.0, "GPU": 1.0} for p in found["compute"])
    assert all(p.resources == {"lamina_memory": 1.0} for p in found["memory"])
    words = "4 compute workers with a GPU each do not fit: .* room for 3 .* --compute-device cpu"
    with pytest.raises(ValueError, match=words):
        assign_hosts(hosts, wishes(4, 1), "spread", {"compute"})
    with pytest.raises(ValueError, match="2 memory workers with a GPU each do not fit: .* --memory-device cpu"):
        assign_hosts(hosts, wishes(2, 2), "pack", {"compute", "memory"})
    labelled = [Host(name="a", address="10.0.0.9", resources={"CPU": 2.0}, labels={"tier": "x"})]
    with pytest.raises(ValueError, match="with a GPU each"):
        assign_hosts(labelled, {"compute": (1, "tier=x", COMPUTE_ON)}, "pack", {"compute"})


@pytest.mark.parametrize(
    ("options", "roles"),
    [
        ({}, set()),
        ({"compute_device": "cuda"}, {"compute", "prefill"}),
        ({"compute_device": "cuda:1", "memory_device": "cuda"}, {"compute", "prefill", "memory"}),
        ({"compute_device": "auto"}, set()),
    ],
)
def test_who_needs_a_gpu(options: dict[str, Any], roles: set[str]) -> None:
    assert on_gpu(make_config(options)) == roles


def test_types_of_gpu_and_labels() -> None:
    hosts = [
        host(0, GPU=2.0, **{"accelerator_type:H100": 1.0}),
        host(1, GPU=4.0, **{"accelerator_type:H20": 1.0}),
        Host(name="h2", address="10.0.0.2", resources={"CPU": 2.0}, labels={"tier": "memory"}),
    ]
    found = assign_hosts(
        hosts, {"compute": (2, "H100", COMPUTE_ON), "memory": (4, "accelerator_type:H20", MEMORY_ON)}, "pack"
    )
    assert [p.host.name for p in found["compute"]] == ["h0", "h0"]
    assert found["compute"][0].resources == {"GPU": 1.0, "accelerator_type:H100": 0.001}
    with pytest.raises(ValueError, match="3 compute workers do not fit: the cluster has room for 2 on hosts with H100"):
        assign_hosts(hosts, {"compute": (3, "H100", COMPUTE_ON)}, "spread")
    assert assign_hosts(hosts, {"memory": (2, "tier=memory", MEMORY_ON)}, "pack")["memory"][1].resources == {"CPU": 1.0}
    with pytest.raises(ValueError, match=f"no host of the cluster has tier=other free, which {MEMORY_ON}"):
        assign_hosts(hosts, {"memory": (1, "tier=other", MEMORY_ON)}, "pack")


@pytest.mark.parametrize(
    ("trait", "gpu", "takes", "labels"),
    [
        ("lamina_memory", False, {"lamina_memory": 1.0}, {}),
        ("lamina_memory", True, {"lamina_memory": 1.0, "GPU": 1.0}, {}),
        ("H20", False, {"GPU": 1.0, "accelerator_type:H20": 0.001}, {}),
        ("accelerator_type:New", True, {"GPU": 1.0, "accelerator_type:New": 0.001}, {}),
        ("tier=memory", False, {"CPU": 1.0}, {"tier": "memory"}),
        ("tier=memory", True, {"GPU": 1.0}, {"tier": "memory"}),
    ],
)
def test_what_is_asked_of_hosts_that_are_not_there_yet(
    trait: str, gpu: bool, takes: dict[str, float], labels: dict[str, str]
) -> None:
    """The same as of a host that is there."""
    wanted = resource_request(trait, gpu=gpu, typed=is_gpu_type(trait, {"H20", "H100"}))
    assert (wanted.resources, wanted.host.labels) == (takes, labels)
    there = Host(name="h", address="10.0.0.1", resources=dict.fromkeys(takes, 1.0), labels=labels)
    (place_there,) = assign_hosts([there], {"memory": (1, trait, MEMORY_ON)}, "pack", {"memory"} if gpu else ())[
        "memory"
    ]
    assert place_there.resources == takes


def test_wishes_are_those_of_the_roles_that_are_wanted_compute_first() -> None:
    config = make_config({"compute_on": "rack=a", "memory_on": "H20"})
    assert list(placement.worker_requirements(config, {"memory": 2, "prefill": 1, "compute": 3}).items()) == [
        ("compute", (3, "rack=a", COMPUTE_ON)),
        ("prefill", (1, "rack=a", COMPUTE_ON)),
        ("memory", (2, "H20", MEMORY_ON)),
    ]
    assert placement.worker_requirements(config, {"memory": 0, "compute": 1}) == {"compute": (1, "rack=a", COMPUTE_ON)}


def test_a_host_that_is_not_there_yet_has_what_is_asked_of_it_and_no_more() -> None:
    typed = {"GPU": 1.0, "accelerator_type:H20": 1.0}
    assert resource_request("H20", gpu=False, typed=True).host == Host(name="", address="", resources=typed)
    labelled = resource_request("rack=a=b", gpu=True, typed=False)
    assert labelled == HostAssignment(
        Host(name="", address="", resources={"GPU": 1.0}, labels={"rack": "a=b"}), {"GPU": 1.0}
    )
