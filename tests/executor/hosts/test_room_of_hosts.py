"""The share of a host that a worker takes: how many fit, who is near, and each refusal word for word."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.config.flag_groups import flag_name
from lamina.config.flat_options import make_config
from lamina.executor.hosts.worker_placement import RACK, Host, HostAssignment, assign_hosts, check_kv_memory
from lamina.executor.launchers import open_launcher

COMPUTE_ON, MEMORY_ON = map(flag_name, ("compute_on", "memory_on"))

H20 = "accelerator_type:H20"


def host(name: str, labels: dict[str, str] | None = None, **resources: float) -> Host:
    return Host(name=name, address=f"10.0.0.{name[1:]}", resources=resources, labels=labels or {})


def hosts_of(
    hosts: list[Host], count: int, trait: str, placement: str = "pack", on_gpu: tuple[str, ...] = ()
) -> list[HostAssignment]:
    return assign_hosts(hosts, {"memory": (count, trait, MEMORY_ON)}, placement, on_gpu)["memory"]


def refusal(*arguments: Any) -> str:
    with pytest.raises(ValueError) as refused:
        hosts_of(*arguments)
    return str(refused.value)


@pytest.mark.parametrize(
    ("resources", "trait", "gpu", "takes"),
    [
        ({"m": 2.0}, "m", False, {"m": 1.0}),
        ({"m": 2.0, "GPU": 1.0}, "m", False, {"m": 1.0}),
        ({"m": 2.0, "GPU": 1.0}, "m", True, {"m": 1.0, "GPU": 1.0}),
        ({"GPU": 1.0, "CPU": 3.0, H20: 1.0}, "H20", False, {"GPU": 1.0, H20: 0.001}),
        ({"CPU": 3.0, H20: 1.0}, "H20", False, {"CPU": 1.0, H20: 0.001}),
        ({"GPU": 0.0, "CPU": 3.0}, "tier=a", False, {"CPU": 1.0}),
        ({"GPU": 2.0, "CPU": 3.0}, "tier=a", False, {"GPU": 1.0}),
        ({"GPU": 2.0, "CPU": 3.0}, "tier=a", True, {"GPU": 1.0}),
    ],
)  # fmt: skip
def test_what_a_worker_takes(resources: dict[str, float], trait: str, gpu: bool, takes: dict[str, float]) -> None:
    one = host("h1", {"tier": "a"}, **resources)
    assert hosts_of([one], 1, trait, "pack", ("memory",) if gpu else ()) == [HostAssignment(one, takes)]


@pytest.mark.parametrize(
    ("there", "fit"), [(1.0, 1), (1.999, 1), (2.0, 2), (0.3 + 0.3 + 0.4 + 1.0, 2), (2.9999999999, 3)]
)
def test_how_many_fit_though_sums_of_floats_are_not_exact(there: float, fit: int) -> None:
    assert len(hosts_of([host("h1", m=there)], fit, "m")) == fit
    assert refusal([host("h1", m=there)], fit + 1, "m") == (
        f"{fit + 1} memory workers do not fit: the cluster has room for {fit} on hosts with m ({MEMORY_ON})"
    )


def test_the_scarcest_resource_decides() -> None:
    both = [host("h1", m=5.0, GPU=2.0), host("h2", m=1.0, GPU=4.0)]
    assert [p.host.name for p in hosts_of(both, 3, "m", "pack", ("memory",))] == ["h1", "h1", "h2"]
    assert refusal(both, 4, "m", "pack", ("memory",)) == (
        f"4 memory workers with a GPU each do not fit: the cluster has room for 3 on hosts with m ({MEMORY_ON}). "
        "Use --memory-device cpu, add GPUs, or name them in the YAML (device)"
    )
    assert refusal([host("h1", m=2.0, GPU=2.0)], 3, "m", "pack", ("memory",)) == (
        f"3 memory workers do not fit: the cluster has room for 2 on hosts with m ({MEMORY_ON})"
    ), "without GPUs there were no more room"


def test_what_nobody_has_is_told_with_the_way_to_have_it() -> None:
    assert refusal([host("h1", CPU=2.0)], 1, "m") == (
        f"no host of the cluster has m free, which {MEMORY_ON} asks for memory workers. Start Ray there with "
        "--resources '{\"m\": 1}', or name a resource, a type of GPU or LABEL=VALUE that hosts have"
    )


def test_a_label_is_compared_as_a_whole() -> None:
    one = host("h1", {"tier": "a=b"}, CPU=1.0)
    assert len(hosts_of([one], 1, "tier=a=b")) == 1
    for other in ("tier=a", "tier=", "tie=a=b"):
        assert "no host of the cluster has" in refusal([one], 1, other)


def test_roles_take_from_the_same_host_one_after_another() -> None:
    hosts = [host("h1", CPU=3.0), host("h2", CPU=3.0)]
    wanted = dict.fromkeys(("compute", "memory"), (2, "zone=a", "--on"))
    labelled = [Host(name=h.name, address=h.address, resources=h.resources, labels={"zone": "a"}) for h in hosts]
    found = assign_hosts(labelled, wanted, "pack")
    assert [[p.host.name for p in places] for places in found.values()] == [["h1", "h1"], ["h1", "h2"]]
    found = assign_hosts(labelled, wanted, "spread")
    assert [[p.host.name for p in places] for places in found.values()] == [["h1", "h2"], ["h1", "h2"]]


def order(hosts: list[Host], first: str = "c") -> list[str]:
    """In which memory workers fill hosts, with a compute worker on each that has ``first``."""
    count = sum(int(h.resources.get(first, 0)) for h in hosts)
    room = sum(int(h.resources.get("m", 0)) for h in hosts)
    wanted = {"compute": (count, first, COMPUTE_ON), "memory": (room, "m", MEMORY_ON)}
    found = [p.host.name for p in assign_hosts(hosts, wanted, "pack")["memory"]]
    return list(dict.fromkeys(found))


def test_near_is_the_same_host_then_the_same_rack_then_where_most_fit() -> None:
    hosts = [
        host("h1", {RACK: "a"}, m=1.0),
        host("h2", {RACK: "b"}, m=1.0, c=1.0),
        host("h3", {RACK: "b"}, m=3.0),
        host("h4", {RACK: "b"}, m=2.0),
        host("h5", {RACK: "c"}, m=3.0),
        host("h6", {RACK: "c"}, m=1.0),
        host("h7", m=3.0),
        host("h8", m=9.0),
    ]
    expected = ["h2", "h3", "h4", "h8", "h5", "h6", "h7", "h1"]
    assert order(hosts) == order(hosts[::-1]) == expected


def test_hosts_without_a_rack_are_not_near_each_other() -> None:
    hosts = [host("h1", m=1.0), host("h2", m=1.0, c=1.0), host("h3", {RACK: "a"}, m=2.0)]
    assert order(hosts) == ["h2", "h3", "h1"]


def test_room_for_kv_is_measured_where_the_first_compute_worker_is() -> None:
    here, there = (HostAssignment(host(name), {}) for name in ("h1", "h2"))
    check_kv_memory({"compute": [here, there], "memory": [here]}, 0)
    check_kv_memory({"memory": [there]}, 0)
    check_kv_memory({"compute": [here]}, 0)
    check_kv_memory({"compute": [here], "memory": [here, there]}, 1)
    for compute in ([here], [here, there]):
        with pytest.raises(ValueError) as refused:
            check_kv_memory({"compute": compute, "memory": [here, there]}, 0)
        assert str(refused.value) == (
            "--kv-cache-memory-bytes auto is for one host: say what a worker takes on 10.0.0.2, such as 4GiB"
        )


def test_hosts_are_filled_by_their_room_for_workers_with_a_gpu() -> None:
    hosts = [host("h1", m=5.0, GPU=1.0), host("h2", m=3.0, GPU=3.0)]
    assert [p.host.name for p in hosts_of(hosts, 1, "m")] == ["h1"]
    assert [p.host.name for p in hosts_of(hosts, 1, "m", "pack", ("memory",))] == ["h2"]


def test_a_launcher_is_opened_by_its_name_with_all_that_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.executor.launchers.local.open_launcher", lambda *given: given)
    config = make_config({})
    assert open_launcher(config, b"key", {"memory": 2}, ["n"]) == (config, b"key", {"memory": 2}, ["n"])
