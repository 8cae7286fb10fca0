"""A run during which memory workers join and leave."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from lamina.api.llm import LLM
from lamina.engine.scheduler_factory import check_kv_capacity
from lamina.request import RequestOutput, SamplingParams

from .matrix import Resize


class ResizeFailedError(Exception):
    """A change that had begun failed; the text says why."""


class ResizeRunner:
    """Runs the prompts of one engine while its memory workers change. ``moved_bytes``: bytes of KV moved so far."""

    had_kv: frozenset[int] = frozenset()

    def __init__(self, llm: LLM, changes: Sequence[Resize]) -> None:
        self._llm, self._left = llm, list(changes)
        self._elastic = llm.pools.resizer
        self._under_way = False
        self.moved_bytes = 0

    def generate(self, prompts: Any, params: SamplingParams) -> list[RequestOutput]:
        """Run the prompts as ``LLM.generate``. A change begins once as many prompts as run at once have a token, the
        next one after it. Raises ValueError if a change is impossible, ResizeFailedError if one failed, and as
        ``LLM.stream``.
        """
        outputs = dict[str, RequestOutput]()
        at_once = min(len(prompts), self._llm.engine.config.batching.max_num_seqs)
        with closing(self._llm.stream(prompts, params)) as stream:
            for output in stream:
                outputs[output.request_id] = output
                self._take_outcome()
                if self._left and not self._under_way and len(outputs) >= at_once:
                    self._begin(self._left.pop(0))
        self._take_outcome()
        if self._left or self._under_way:
            raise ValueError("sequences ended before memory workers had come and gone: raise --max-tokens")
        return [outputs[i] for i in stream.request_ids]

    def _begin(self, change: Resize) -> None:
        """Begin a change and wait until the new workers are ready: sequences must not end before."""
        wanted = self._elastic.plan(change.workers)
        check_kv_capacity(self._llm.engine.scheduler, self._llm.engine.worker_info, wanted.capacity)
        self._elastic.begin(wanted, change.leaving)
        self._under_way = True
        while self._elastic.is_preparing:
            self._llm.stats()

    def _take_outcome(self) -> None:
        outcome = self._elastic.take_outcome()
        if outcome is None:
            return
        if outcome.error:
            raise ResizeFailedError(outcome.error)
        self._under_way = False
        self.moved_bytes += outcome.moved_bytes
