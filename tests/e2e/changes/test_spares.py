"""A spare memory worker has the memory of its pool before it takes a place, and only that one afterwards."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from running import eventually
from tiny import llama

from lamina import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("no_child_left")
MIB = 1 << 20
POOL = 512 * MIB
MORE = 448 * MIB  # what a worker takes besides: channels, what it imports; less than another pool
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9] * 40]
SOON_S = 60.0


def memory(pid: int, name: str) -> int:
    """Bytes: VmRSS, as they are now, of them RssAnon, which no file has, or VmHWM, the most that there were."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def told(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


def spare_of(llm: LLM) -> int:
    (spare,) = llm.pools.workers.spare_workers
    return spare.handle.pid


def has_its_pages(llm: LLM, spare: int) -> bool:
    """An idle engine gives spares their places as it looks, which a server does each second."""
    return llm.engine.check_workers() == [] and memory(spare, "RssAnon") > POOL


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{}, {"partition": "request", "transport": "tcp"}, {"partition": "token", "kv_checks": 1.0, "deterministic": True}],
    ids=["by head", "by request", "by token, checked"],
)
def test_its_pages_are_there_before_it_takes_a_place_and_there_is_no_second_store(
    options: dict[str, object], tmp_path: Path
) -> None:
    llama().save_pretrained(tmp_path)
    given = {"dtype": "float32", "memory_workers": 2, "transport": "shm", "spare_memory": 1, **options}
    with LLM(str(tmp_path), kv_memory=f"{POOL // MIB}MiB", **given) as llm:  # type: ignore[arg-type]
        wanted = told(llm)
        for place in ("memory-1", "memory-0"):
            spare = spare_of(llm)
            ready = partial(has_its_pages, llm, spare)
            assert eventually(ready, SOON_S), "its pages are not there"
            os.kill(llm.pools.pids[place], signal.SIGKILL)
            assert told(llm) == wanted
            assert llm.pools.pids[place] == spare
            assert POOL < memory(spare, "RssAnon") < POOL + MORE
            assert memory(spare, "VmHWM") < memory(spare, "VmRSS") + MORE, "nor has there been another one"
            stats = llm.stats()[place]
            assert stats["stores"] == 1


def descriptors() -> Counter[str]:
    """Counts the descriptors of this process, which is the driver's, by kind."""
    kinds = Counter[str]()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            kinds[os.readlink(f"/proc/self/fd/{fd}").partition(":")[0]] += 1
    return kinds


@pytest.mark.no_retry
@pytest.mark.long
@pytest.mark.parametrize("what", ["spares die", "workers die", "workers come and go"])
def test_no_descriptor_is_left_of_who_has_gone(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    llama().save_pretrained(tmp_path)
    given = {"dtype": "float32", "memory_workers": 1, "transport": "shm", "partition": "request", "spare_memory": 1}
    with LLM(str(tmp_path), kv_memory="16MiB", max_recoveries=100, **given) as llm:  # type: ignore[arg-type]
        wanted, counts, elastic = told(llm), list[Counter[str]](), llm.pools.resizer
        for turn in range(6):
            if what == "workers come and go":
                elastic.begin(elastic.plan(1 + (turn + 1) % 2))
                while elastic.in_progress:
                    assert told(llm) == wanted
                assert eventually(lambda: elastic.reap() is None and not elastic.dismissed, SOON_S)
            else:
                dead = spare_of(llm) if what == "spares die" else llm.pools.pids["memory-0"]
                os.kill(dead, signal.SIGKILL)
                assert eventually(
                    lambda pid=dead: llm.engine.check_workers() == [] and dead_is_replaced(llm, pid), SOON_S
                )
                assert told(llm) == wanted
            caplog.clear()  # what was logged may name who has gone
            gc.collect()
            counts.append(descriptors())
        more = counts[5] - counts[1]  # as many workers are there, and the first turns may open what stays
        assert not more, more


def dead_is_replaced(llm: LLM, pid: int) -> bool:
    spares = [m.handle.pid for m in llm.pools.workers.spare_workers]
    return len(spares) == 1 and pid not in [*spares, *llm.pools.pids.values()]
