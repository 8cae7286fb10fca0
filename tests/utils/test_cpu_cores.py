"""The cores that workers get, and that they run there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import LLM
from lamina.config.flat_options import make_config
from lamina.executor.launchers.local import core_topology, cores_by_role
from lamina.utils.cpu_cores import assign_cores, core_list_text, parse_cores

MODEL = Path(__file__).resolve().parents[2] / "examples/tiny_lm/model"


def test_lists_are_read_and_written() -> None:
    assert parse_cores("0-3,8/4-7") == [(0, 1, 2, 3, 8), (4, 5, 6, 7)]
    assert parse_cores("5") == [(5,)]
    assert core_list_text((0, 1, 2, 3, 8)) == "0-3,8"


@given(st.sets(st.integers(0, 300), min_size=1))
def test_what_is_written_is_read(cores: set[int]) -> None:
    assert parse_cores(core_list_text(sorted(cores))) == [tuple(sorted(cores))]


@pytest.mark.parametrize("text", ["", "a", "0-", "-1", "3-1", "0//1", "0/", "0,,1", "1-2-3", " 1", "9999999", "\u0661"])
def test_other_lists_are_refused_by_the_flag(text: str) -> None:
    with pytest.raises(ValueError, match="--cores"):
        parse_cores(text)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(1, 64))
def test_pools_that_work_at_once_share_no_core_and_leave_none(
    compute: int, memory: int, prefill: int, cores: int
) -> None:
    wanted = [compute, memory, prefill]
    pools = assign_cores("auto", wanted, range(cores), at_once=True)
    assert [len(pool) for pool in pools] == wanted
    each = [x for pool in pools for x in pool]
    if cores < sum(wanted):
        assert not any(each)
    else:
        assert sorted(c for x in each for c in x) == list(range(cores))
        assert max(map(len, each)) - min(map(len, each)) <= 1


def test_pools_that_take_turns_share_the_cores() -> None:
    compute, memory, prefill = assign_cores("auto", [2, 3, 0], range(6), at_once=False)
    assert (compute, memory, prefill) == ([(0, 1, 2), (3, 4, 5)], [(0, 1), (2, 3), (4, 5)], [])


def test_lists_must_fit_workers_and_machine() -> None:
    with pytest.raises(ValueError, match=r"--cores lists cores for 2 workers, there are 1 compute \+ 2 memory workers"):
        assign_cores(parse_cores("0/1"), [1, 2, 0], range(4), at_once=False)
    with pytest.raises(ValueError, match="--cores: core 9 is not there; this process may use 0-3"):
        assign_cores(parse_cores("0/9"), [1, 1, 0], range(4), at_once=False)
    with pytest.raises(ValueError, match="--cores"):
        make_config({"cores": "none"})
    with pytest.raises(ValueError, match="--transport loopback"):
        cores_by_role(make_config({"cores": "auto"}), {"compute": 0, "memory": 0, "prefill": 0})
    with pytest.raises(ValueError, match=r"^--cores does not go with a torch\.nn\.Module as the model"):
        cores_by_role(make_config({"cores": "auto"}), {"compute": 0, "memory": 1, "prefill": 0})
    with pytest.raises(ValueError, match="--launcher ray does not go with --cores"):
        make_config({"cores": "auto", "ray_address": "auto"})


@pytest.mark.long
def test_workers_run_where_they_are_told() -> None:
    cores = core_topology()
    first, last = cores[0], cores[-1]
    options = {"memory_workers": 1, "max_model_len": 64, "kv_memory": "8MiB", "attention": "reference"}
    with LLM(str(MODEL), cores=f"{first}/{last}", **options) as llm:
        pids = llm.engine.executor.pids
        assert os.sched_getaffinity(pids["compute-0"]) == {first}
        assert os.sched_getaffinity(pids["memory-0"]) == {last}
        assert all(os.sched_getaffinity(int(t)) == {last} for t in os.listdir(f"/proc/{pids['memory-0']}/task"))
