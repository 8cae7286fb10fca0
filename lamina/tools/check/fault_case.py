"""A run in which a worker is killed at one of its events, and another one replaces it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from lamina.observe.failpoints import FAILPOINT, Failpoint
from lamina.protocol.blocks.block_counts import num_kv_shards
from lamina.protocol.control import ComputeReady
from lamina.protocol.kv_placement import KvPlacement, ShardCounter
from lamina.request import RequestOutput, SamplingParams

from .fault_promises import Death
from .matrix import Setting
from .recorded_llm import InterruptedSequence, RecordedLLM

LOOK_S = 0.01  # between two looks for a replacement


class FaultVisibleError(Exception):
    """A stream got a wrong result, or no worker replaced the one that died."""


@contextmanager
def failpoint_for(settings: Sequence[Setting], folder: Path) -> Iterator[Failpoint | None]:
    """Yield a failpoint that ends workers which start in this block, if one of the settings needs it; else None."""
    if not any(s.fault and s.fault.event is not None for s in settings):
        yield None
        return
    before, path = os.environ.get(FAILPOINT), folder / "tripwire"
    tripwire, os.environ[FAILPOINT] = Failpoint(path), str(path)
    try:
        yield tripwire
    finally:
        del os.environ[FAILPOINT]
        os.environ |= {} if before is None else {FAILPOINT: before}


class FaultRunner:
    """Runs the prompts of one engine while ``fault`` happens. ``had_kv``: the prompts of whose KV the dead worker had a
    part.
    """

    moved_bytes = 0

    def __init__(self, llm: RecordedLLM, tripwire: Failpoint, fault: Death) -> None:
        self._llm, self._tripwire, self._fault = llm, tripwire, fault
        self._role, _, number = fault.victim.partition("-")
        self._number = int(number)
        self.had_kv: frozenset[int] = frozenset()

    def generate(self, prompts: Any, params: SamplingParams) -> list[RequestOutput]:
        """Run the prompts as ``LLM.generate``. Raises ValueError if no process died before the last token, or if it had
        no KV of the prompts. Raises FaultVisibleError if no process replaced it, and as ``LLM.stream``.
        """
        engine, outputs = self._llm.engine, dict[str, RequestOutput]()
        before, is_set = self._llm.pools.pids, self._fault.before_prompt_end
        at_once = min(len(prompts), engine.config.batching.max_num_seqs)
        engine.interruptions.clear()
        if is_set:
            self._set(before)
        with self._or_harmed(), closing(self._llm.stream(prompts, params)) as stream:
            ids = stream.request_ids
            for output in stream:
                outputs[output.request_id] = output
                if not is_set and len(outputs) >= at_once:
                    self._set(before)
                    is_set = True
            engine.check_workers()  # it may have died after the last step
            self._await_replacement()
        is_in_time = self._note([int(i) for i in ids])
        if not (self._tripwire.disarm() and is_in_time):
            raise ValueError(f"sequences ended before {self._fault.victim} died: raise --max-tokens")
        if self._llm.pools.pids.get(self._fault.victim) in (None, before[self._fault.victim]):
            raise FaultVisibleError(f"{self._fault.victim} died, and no process replaced it")
        if self._role == "memory" and not self.had_kv:
            raise ValueError(f"{self._fault.victim} had no KV of these prompts: give more of them")
        return [outputs[i] for i in ids]

    def _await_replacement(self) -> None:
        """Wait for the worker that replaces the victim. Without a lost replica decoding continues while it loads."""
        engine, pools = self._llm.engine, self._llm.pools
        deadline = time.monotonic() + engine.config.deadlines.start_timeout_s
        while self._fault.victim not in pools.pids and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            engine.check_workers()  # it joins once it has loaded

    @contextmanager
    def _or_harmed(self) -> Iterator[None]:
        """Report failures after the death as FaultVisibleError: they are not the user's error."""
        try:
            yield
        except ValueError as e:
            if not self._tripwire.has_fired:
                raise
            raise FaultVisibleError(f"after the death of {self._fault.victim}: {e}") from e

    def _set(self, pids: dict[str, int]) -> None:
        assert self._fault.event is not None
        self._tripwire.arm(pids[self._fault.victim], self._fault.event, self._fault.times)

    def _note(self, ids: Sequence[int]) -> bool:
        """Note which prompts ran when the epoch changed, since their KV was on the dead worker. Returns whether prompts
        ran or waited then.
        """
        in_time = False
        for change in self._llm.engine.interruptions:
            running = [s for s in change.running if s.request_id in ids]
            in_time = in_time or bool(running or change.num_waiting)
            if self._role == "memory":
                had = (ids.index(s.request_id) for s in running if holds(change.workers, self._number, s))
                self.had_kv |= frozenset(had)
        return in_time


def holds(info: ComputeReady, worker: int, sequence: InterruptedSequence) -> bool:
    """Return True if memory worker ``worker`` has, or is about to get, a part of the KV of ``sequence``. The rule of
    placement decides, not the worker's report.
    """
    placement = KvPlacement(num_kv_shards(info.kv_shards), info.stripe_blocks, info.single_shard)
    blocks = -(-sequence.num_computed_tokens // info.block_size)
    groups = (g for g, holders in enumerate(info.holders) if worker in holders)
    return any(ShardCounter(info.kv_shards[g], placement).num_owned(sequence.location, blocks) for g in groups)
