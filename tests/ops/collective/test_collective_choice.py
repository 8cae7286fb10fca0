"""The collective that ranks take for --collective, and what is refused, in one line."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from meshes import WAIT_S, on_all
from nccl_over_gloo import open_over_gloo

from lamina.config import topology as options
from lamina.config.conflicts import need_text
from lamina.config.flat_options import make_config
from lamina.ops.collective import AUTO, COLLECTIVES, RankFacts, RankLocation, why_unavailable
from lamina.ops.collective.collective_choice import choose_and_open, choose_collective, gather, rank_facts
from lamina.ops.collective.expected_collective import expected_collective
from lamina.ops.collective.mesh import MeshCollective
from lamina.workers import device_selection

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def ranks(hosts: str, gpus: str, usable: str = "1111") -> list[RankFacts]:
    """One for each letter; a dash is no GPU."""
    return [
        RankFacts(h.encode(), b"" if g == "-" else g.encode(), u == "1")
        for h, g, u in zip(hosts, gpus, usable[: len(hosts)], strict=True)
    ]


@pytest.mark.parametrize(
    ("found", "name", "why"),
    [
        (ranks("aa", "01"), "nccl", "every rank has a GPU of this host to itself"),
        (ranks("aaaa", "0123"), "nccl", "every rank"),
        (ranks("aa", "--"), "mesh", "not every rank computes on a GPU"),
        (ranks("aa", "0-"), "mesh", "not every rank computes on a GPU"),
        (ranks("aaa", "010"), "mesh", "ranks 0 and 2 have one GPU, and NCCL takes one for each"),
        (ranks("aa", "01", "10"), "mesh", "not every rank's torch has NCCL"),
        (ranks("ab", "01"), "mesh", "ranks are on several hosts, and NCCL does not authenticate them"),
    ],
)
def test_auto_is_nccl_where_it_can_be_and_is_within_a_host(found: list[RankFacts], name: str, why: str) -> None:
    choice = choose_collective(AUTO, found)
    assert choice.name == name
    assert choice.why.startswith(why)
    assert choice.together == (len({r.host for r in found}) == 1)


def test_what_is_asked_for_is_taken_or_refused() -> None:
    assert choose_collective("mesh", ranks("aa", "01")).name == "mesh"
    assert choose_collective("nccl", ranks("ab", "01")) == ("nccl", "as asked", False)
    for found, words in (
        (ranks("aa", "00"), "ranks 0 and 1 have one GPU, and NCCL takes one for each: use --collective mesh, or a GPU"),
        (ranks("aa", "0-"), "not every rank computes on a GPU: use --collective mesh"),
        (ranks("aa", "01", "01"), "not every rank's torch has NCCL: use"),
    ):
        with pytest.raises(ValueError, match="^--collective nccl: " + words) as error:
            choose_collective("nccl", found)
        assert "\n" not in str(error.value)


def test_ranks_of_this_host_know_each_other_and_meet(caplog: pytest.LogCaptureFixture) -> None:
    def work(mesh: MeshCollective) -> tuple[list[RankFacts], str, str, bool]:
        found = gather(mesh, rank_facts(CPU))
        group, choice = choose_and_open(AUTO, mesh, RankLocation(CPU, WAIT_S, WAIT_S))
        return found, type(group).__name__, *choice[1:]

    with caplog.at_level(logging.WARNING):
        for found, *chosen in on_all(2, work):
            assert chosen == ["MeshCollective", "not every rank computes on a GPU", True]
            assert found[0] == found[1]
            assert found[0].gpu == b""
    assert not caplog.records


def test_ranks_of_several_hosts_are_told_what_that_means(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that knows no boot takes itself to be alone on its host."""
    monkeypatch.setattr("lamina.ops.collective.collective_choice.BOOT", GONE)
    monkeypatch.setattr("lamina.ops.collective.nccl.why_unusable_together", lambda ranks: "")
    monkeypatch.setattr("lamina.ops.collective.nccl.open_collective", open_over_gloo)

    def work(mesh: MeshCollective) -> str:
        group, choice = choose_and_open("nccl", mesh, RankLocation(CPU, WAIT_S, WAIT_S))
        assert not choice.together
        try:
            return str(group.all_reduce(torch.ones(1)).tolist())
        finally:
            group.close()

    assert on_all(2, work) == ["[2.0]"] * 2
    assert "neither authenticated nor encrypted" in caplog.text


def test_containers_of_one_host_have_no_loopback_interface_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over which ranks of one host find each other."""

    def facts(network: str) -> RankFacts:
        monkeypatch.setattr("lamina.ops.collective.collective_choice.NETWORK", _Network(network))
        return rank_facts(CPU)

    assert facts("net:[1]") == facts("net:[1]")
    apart = [facts(f"net:[{n}]")._replace(gpu=bytes([n]), usable=True) for n in (1, 2)]
    assert choose_collective(AUTO, apart).name == "mesh"
    assert choose_collective(AUTO, [apart[0], apart[1]._replace(host=apart[0].host)]).name == "nccl", "the control"


class _Network:
    def __init__(self, name: str) -> None:
        self._name = name

    def readlink(self) -> Path:
        return Path(self._name)


class _Gone:
    def read_bytes(self) -> bytes:
        raise FileNotFoundError


GONE = _Gone()


def test_every_entry_says_what_it_lacks_and_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [why_unavailable(name, CPU) for name in (AUTO, "mesh")] == ["", ""]
    needs = need_text("--collective nccl", ["--compute-device cuda", "--compute-device auto"])
    assert why_unavailable("nccl", CPU) == needs
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    said = why_unavailable("nccl", GPU)
    assert said.startswith("--collective nccl: torch ")
    assert "use --collective mesh" in said


def test_names_are_checked_where_they_are_given() -> None:
    assert (AUTO, *COLLECTIVES) == options.COLLECTIVES
    for name in options.COLLECTIVES:
        make_config({"collective": name, "tensor_parallel_size": 2, "compute_device": "cuda"})
    with pytest.raises(ValueError, match="^--collective must be one of auto, mesh, nccl, not 'ring'$"):
        make_config({"collective": "ring"})


@pytest.mark.parametrize(
    ("found", "device", "asked"),
    [
        (ranks("aa", "--"), "cpu", AUTO),
        (ranks("ab", "--"), "cpu", AUTO),
        (ranks("ab", "01"), "cuda", AUTO),
        (ranks("aa", "01"), "cuda", "nccl"),
        (ranks("aa", "01"), "cuda", "mesh"),
        (ranks("ab", "01"), "cuda", "mesh"),
        (ranks("aa", "--"), "cpu", "mesh"),
    ],
)
def test_what_is_expected_is_what_ranks_say_once_they_have_met(found: list[RankFacts], device: str, asked: str) -> None:
    choice = choose_collective(asked, found)
    assert expected_collective(asked, device, together=choice.together) == f"{choice.name}: {choice.why}"


def test_what_is_expected_where_only_ranks_can_know() -> None:
    assert expected_collective(AUTO, "cuda", together=True).startswith(
        "nccl where torch has it, else mesh: every rank has a GPU"
    )
    assert expected_collective(AUTO, "auto", together=True).startswith(
        "nccl where every rank finds a GPU of its own and its"
    )
    assert expected_collective(AUTO, "auto", together=False) == "mesh: ranks are on several hosts"
    assert expected_collective("nccl", "cuda", together=False).startswith(
        "nccl: as asked; what it sends between hosts is neither"
    )


def test_expecting_imports_no_torch() -> None:
    code = "import sys; from lamina.ops.collective.expected_collective import expected_collective; "
    code += "print(expected_collective('auto', 'cuda', together=True), file=sys.stderr); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.split() == ["False"]


def test_a_dry_run_refuses_what_a_start_would() -> None:
    two = {"tensor_parallel_size": 2, "memory_workers": 2}
    with pytest.raises(ValueError, match="^--collective nccl needs --compute-device cuda"):  # auto finds no GPU
        device_selection.check(make_config({**two, "collective": "nccl", "compute_device": "auto"}))
    device_selection.check(make_config({**two, "collective": "mesh"}))
