"""AsyncLLM on real workers: callers that share batches get the tokens of transformers; a worker's death reaches all."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina import AsyncLLM, RequestOutput, SamplingParams
from lamina.protocol.executor import WorkerError

pytestmark = pytest.mark.usefixtures("no_child_left")
Reference = Callable[[list[int], int], list[int]]


@pytest.fixture(scope="module")
def llm(tiny_lm: Path) -> Iterator[AsyncLLM]:
    with AsyncLLM(tiny_lm, transport="loopback") as llm:
        yield llm


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


async def last(llm: AsyncLLM, prompt: Any, count: int) -> RequestOutput:
    return [o async for o in llm.generate(prompt, greedy(count))][-1]


@pytest.mark.long
def test_callers_share_batches_and_get_their_own_texts(llm: AsyncLLM) -> None:
    texts = ["def main():\n", "import os\n", "class Stack:\n" * 60, "x"]

    async def together() -> list[RequestOutput]:
        return list(await asyncio.gather(*(last(llm, t, 12) for t in texts)))

    found = run(together())
    alone = [run(last(llm, t, 12)) for t in texts]
    assert [o.outputs[0].text for o in found] == [o.outputs[0].text for o in alone]
    assert [o.prompt for o in found] == texts
    assert all(o.outputs[0].text for o in found)


def test_breaking_off_gives_the_blocks_back(llm: AsyncLLM) -> None:
    engine = llm.front.engine
    full = engine.free_blocks

    async def go() -> None:
        async for _ in llm.generate("import os\n", greedy(200)):
            break
        await last(llm, "x", 2)  # its order comes after the other's cancel
        while engine.free_blocks != full:  # until it is idle
            await asyncio.sleep(0)

    run(go())


def test_the_tokens_are_those_of_transformers_and_a_killed_worker_wakes_all(
    llama_path: Path, prompts: list[list[int]], reference: Reference
) -> None:
    llm = AsyncLLM(llama_path, memory_workers=2, max_recoveries=0)
    pids = llm.front.pools.pids

    async def go() -> list[Any]:
        found = await asyncio.gather(*(last(llm, p, 12) for p in prompts))
        assert [o.outputs[0].token_ids for o in found] == [reference(p, 12) for p in prompts]
        waiting = [asyncio.create_task(last(llm, p, 400)) for p in prompts]
        await anext(llm.generate([5], greedy(400)))
        os.kill(pids["memory-1"], signal.SIGKILL)
        return await asyncio.gather(*waiting, return_exceptions=True)

    found = run(go())
    assert all(isinstance(e, WorkerError) and "memory worker 1" in str(e) for e in found), found
    with pytest.raises(WorkerError, match="memory worker 1"):
        llm.generate([3])
    llm.shutdown()
