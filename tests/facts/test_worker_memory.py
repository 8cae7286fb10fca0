"""The memory that workers take of a host: sums worked out by hand, and one line where they do not fit.

Covers: lamina/cli/common/memory_table.py, lamina/facts/host_memory.py, lamina/workers/prefill/stage_worker.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lamina.cli.common import memory_table
from lamina.cli.launch import main
from lamina.config.flat_options import make_config
from lamina.facts.host_memory import check_kv_memory_fits
from lamina.facts.worker_memory import WorkerMemory, check_fits, host_bytes, memory_text
from lamina.workers.compute.kv_capacity import channel_bytes, store_bytes
from lamina.workers.prefill.prefix_fetch import prefix_inboxes
from lamina.workers.prefill.stage_worker import stage_cuts, stage_inboxes

MODEL = str(Path(__file__).resolve().parents[2] / "examples" / "tiny_lm" / "model")
GB = 10**9
COMPUTE = WorkerMemory(
    name="compute-0", mapped=6 * GB, copied=GB, slots=2 * GB, workspace=3 * GB, private=4 * GB, libraries=5 * GB
)
MEMORY = WorkerMemory(name="memory-0", kv=30 * GB, slots=2 * GB, workspace=GB, private=2 * GB, libraries=3 * GB)


def again(worker: WorkerMemory, name: str, part: int = 0) -> WorkerMemory:
    return WorkerMemory(**{**vars(worker), "name": name, "memory_share": part})


def test_a_process_has_all_that_it_has_mapped() -> None:
    assert COMPUTE.resident_bytes == 21 * GB
    assert MEMORY.resident_bytes == 38 * GB


def test_a_host_has_pages_of_files_once() -> None:
    own = 1 + 2 + 3 + 4
    assert host_bytes([COMPUTE]) == (own + 6 + 5) * GB
    assert host_bytes([COMPUTE, again(COMPUTE, "compute-1")]) == (2 * own + 6 + 5) * GB, "replicas share weights"
    assert host_bytes([COMPUTE, again(COMPUTE, "compute-1", 1)]) == (2 * own + 12 + 5) * GB, "ranks have their own"
    assert host_bytes([COMPUTE, MEMORY]) == (own + 6 + 30 + 2 + 1 + 2 + 5) * GB, "libraries are shared by all"


def test_what_is_on_a_device_is_not_on_the_host() -> None:
    there = WorkerMemory(**{**vars(MEMORY), "device": "cuda:0"})
    assert host_bytes([there]) == (2 + 2 + 3) * GB


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        (
            MEMORY,
            (
                "the workers take 38.0 GB of memory, 37.9 GB are free here; 30.0 GB are KV blocks: lower "
                "--kv-cache-memory-bytes"
            ),
        ),
        (WorkerMemory(name="x", mapped=38 * GB), "38.0 GB are weights: use --dtype bfloat16, or fewer copies"),
        (WorkerMemory(name="x", slots=38 * GB), "38.0 GB are slots: lower --prefill-chunk or --max-num-seqs"),
        (WorkerMemory(name="x", workspace=38 * GB), "38.0 GB are workspace: lower --prefill-chunk"),
        (WorkerMemory(name="x", private=38 * GB), "38.0 GB are runtime: use fewer --memory-workers"),
    ],
)
def test_what_does_not_fit_is_told_with_the_fix(worker: WorkerMemory, words: str) -> None:
    check_fits([worker], 38 * GB)
    with pytest.raises(ValueError) as caught:
        check_fits([worker], 38 * GB - 10**8)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_table() -> None:
    head, *rows, last = memory_text([COMPUTE, MEMORY], 100 * GB).splitlines()
    assert [line.split() for line in rows] == [
        ["compute-0", "cpu", "7.0", "GB", "-", "2.0", "GB", "3.0", "GB", "9.0", "GB", "21.0", "GB"],
        ["memory-0", "cpu", "-", "30.0", "GB", "2.0", "GB", "1.0", "GB", "5.0", "GB", "38.0", "GB"],
    ]
    assert head.split() == ["memory", "device", "weights", "KV", "blocks", "slots", "workspace", "runtime", "total"]
    assert last == "  of 100.0 GB that are free here, 56.0 GB would be taken"


def test_prefill_workers_have_channels_to_each_other_where_something_can_be_fetched() -> None:
    """Two to each, for asks of either side. A store of one prompt keeps none for others."""
    facts = memory_table.rank_facts(MODEL, make_config({}), 100 * GB)
    one_prompt = store_bytes(facts.layers, facts.kv_dtype, facts.max_len, 16)

    def slots(workers: int, **options: object) -> int:
        config = make_config({"prefill_workers": workers, "block_size": 16, **options})
        return memory_table.prefill_memory(facts, config, 0, 100 * GB).slots

    assert slots(3) - slots(1) == 4 * channel_bytes(*prefix_inboxes(0))
    assert slots(3, enable_prefix_caching=False) == slots(3, prefill_kv_memory=str(one_prompt)) == slots(1)


def test_a_stage_has_a_channel_for_what_crosses_to_each_of_those_beside_it() -> None:
    staged = make_config({"prefill_workers": 3, "prefill_pipeline": 3})
    facts = memory_table.rank_facts(MODEL, staged, 100 * GB)
    first, second, last = (memory_table.prefill_memory(facts, staged, i, 100 * GB).slots for i in range(3))
    crosses = channel_bytes(*stage_inboxes(stage_cuts(facts.program), staged.batching.max_rows))
    assert second - first == second - last == crosses


STARTERS = [["generate", MODEL, "--prompt", "x"], ["serve", MODEL, "--port", "0"], ["bench", "decode", MODEL]]


@pytest.mark.long(but=["generate"])
@pytest.mark.parametrize("command", STARTERS, ids=lambda c: c[0])
def test_every_dry_run_has_it(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--dry-run", "--kv-cache-memory-bytes", "8MiB", "--prefill-workers", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "would start 1 compute worker, 1 prefill worker and 2 memory workers over shm" in lines[0]
    assert [line.split()[0] for line in lines[1:6]] == ["memory", "compute-0", "prefill-0", "memory-0", "memory-1"]
    assert "  8.4 MB  " in lines[4], "KV blocks are as many as --kv-cache-memory-bytes holds"


def test_spares_have_weights_and_pools_and_no_slots(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--kv-cache-memory-bytes", "8MiB", "--spare-memory", "1", "--spare-compute", "2"]
    assert main([*STARTERS[0], "--dry-run", *flags]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert [name for name in rows if "spare" in name] == ["compute-spare-0", "compute-spare-1", "memory-spare-0"]
    assert rows["compute-spare-1"][:3] == rows["compute-0"][:3], "weights"
    assert rows["memory-spare-0"][2:4] == ["8.4", "MB"]
    assert "-" in rows["memory-spare-0"][4:6]


def test_the_parity_worker_of_each_rank_has_a_pool_as_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--kv-cache-memory-bytes", "8MiB", "--tensor-parallel-size", "2", "--kv-parity", "1"]
    assert main([*STARTERS[0], "--dry-run", *flags]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert "2 compute workers (1 replica x 2 ranks) and 4 memory workers" in first
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.strip()}
    assert [rows[f"memory-{i}"] for i in range(4)] == [rows["memory-0"]] * 4
    assert rows["memory-3"][2:4] == ["8.4", "MB"]


def test_a_start_has_room_for_the_pools_of_spares() -> None:
    config = make_config({"memory_workers": 2, "spare_memory": 1, "kv_memory": "1GiB"})
    check_kv_memory_fits(config, 3 << 30)
    words = (
        r"^--kv-cache-memory-bytes 1GiB on 3 memory workers, 1 of them spare: KV blocks take 3\.2 GB, .* "
        "lower --kv-cache-memory-bytes below"
    )
    with pytest.raises(ValueError, match=words):
        check_kv_memory_fits(config, (3 << 30) - 1)


def test_a_dry_run_refuses_what_the_host_has_no_room_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    free: Callable[[], int] = lambda: 100_000_000  # noqa: E731
    monkeypatch.setattr("lamina.workers.memory.kv_store.available_bytes", free)
    assert main([*STARTERS[1], "--dry-run", "--kv-cache-memory-bytes", "16MiB"]) == 2
    printed = capsys.readouterr()
    assert "100.0 MB are free here" in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out
