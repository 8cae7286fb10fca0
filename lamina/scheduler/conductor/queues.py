"""The prompts that each prefill worker has ahead, and when it will be done with them. Pure policy: no torch, no I/O, no
clock.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field


@dataclass
class QueuedPrompt:
    """``ready_s``: when its transfer will have come, and the last stage could begin; ``due_s``: when it will be
    computed, by all that is known.
    """

    request: Hashable
    tokens: int
    prefill_s: float
    ready_s: float
    priority: int = 0
    due_s: float = 0.0


@dataclass
class PrefillQueue:
    """The prompts that wait for one worker, which computes them one after the other: those with the lowest number for a
    priority first, in the order of their arrival.
    """

    prompts: list[QueuedPrompt] = field(default_factory=list)
    _begun_s: float | None = None  # of the first

    def queue_s(self, now_s: float, priority: float = math.inf) -> float:
        """Seconds until all prompts are computed that come before a new one with such a priority. A first prompt that
        takes longer than foreseen counts as done at any moment.
        """
        if not self.prompts:
            return 0.0
        if self.prompts[0].due_s < now_s:
            self._update_times(now_s)
        if self.prompts[-1].priority <= priority:
            return self.prompts[-1].due_s - now_s
        ahead = self._ahead(priority)
        return self.prompts[ahead - 1].due_s - now_s if ahead else 0.0

    def add(self, prompt: QueuedPrompt, now_s: float) -> None:
        """Put ``prompt`` into the line, after those with its priority."""
        begin, ahead = now_s + self.queue_s(now_s, prompt.priority), self._ahead(prompt.priority)
        prompt.due_s = max(begin, prompt.ready_s) + prompt.prefill_s
        self.prompts.insert(ahead, prompt)
        if ahead < len(self.prompts) - 1:
            self._update_times(now_s)

    def _ahead(self, priority: float) -> int:
        """Count the prompts that come before a new one with such a priority."""
        ahead, begun = len(self.prompts), int(self._begun_s is not None)
        while ahead > begun and self.prompts[ahead - 1].priority > priority:
            ahead -= 1
        return ahead

    def on_started(self, request: Hashable, now_s: float) -> None:
        """This one is being computed from now on, and is the first. Raises KeyError for a request that is not here."""
        self.prompts.insert(0, self.prompts.pop(self._at(request)))
        self._begun_s = now_s
        self._update_times(now_s)

    def remove(self, request: Hashable, now_s: float) -> QueuedPrompt:
        """Take out a prompt that is computed, or will not be. Raises KeyError for a request that is not here."""
        at = self._at(request)
        if at == 0:
            self._begun_s = None
        booking = self.prompts.pop(at)
        self._update_times(now_s)
        return booking

    def _at(self, request: Hashable) -> int:
        for at, prompt in enumerate(self.prompts):
            if prompt.request == request:
                return at
        raise KeyError(request)

    def completions(self) -> Iterator[tuple[float, int]]:
        """When each will be computed, and its tokens."""
        return ((prompt.due_s, prompt.tokens) for prompt in self.prompts)

    def _update_times(self, now_s: float) -> None:
        at = now_s
        for number, prompt in enumerate(self.prompts):
            if number == 0 and self._begun_s is not None:
                at = max(now_s, max(self._begun_s, prompt.ready_s) + prompt.prefill_s)
            else:
                at = max(at, prompt.ready_s) + prompt.prefill_s
            prompt.due_s = at
