"""The versions of sequences' states on a memory worker. Ids and counts only, no tensors.

A version is named by the number of tokens in it. A row reads the version of its first position. The version after the
last row of a step goes to another slot, so a step that ends half way leaves what it has read. Version 0 is all zeros
and takes no slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lamina.ops.recurrence.segments import ZEROS, Segment
from lamina.protocol.blocks.extents import NoBlocksError, PlanError
from lamina.protocol.step_plan import Fork, Free, New, RowRange, StateRows, StepPlan, SurvivingKv, Truncate


class StateVersions:
    """The slots of all sequences' versions. Slots are never written twice while a sequence holds them."""

    def __init__(self, num_slots: int, is_here: Callable[[RowRange], bool]) -> None:
        """``is_here``: whether the sequence of a row has its state on this worker."""
        self._num_slots, self._is_here = num_slots, is_here
        self._free = list(range(num_slots))[::-1]
        self._holders = [0] * num_slots  # of each slot: a fork shares it with its source
        self._slots: dict[int, dict[int, int]] = {}  # sequence -> tokens -> slot
        self._written: dict[int, set[int]] = {}  # sequence -> versions that are complete

    @property
    def num_free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    def check(self, plan: StepPlan, *, is_replay: bool = False) -> None:
        """Raise PlanError if a row or a fork would read a version that is not here, and NoBlocksError without room."""
        ops = [] if is_replay else plan.ops
        after = {number: set(versions) for number, versions in self._slots.items()}
        for op in ops:
            if isinstance(op, Fork) and op.sequence not in after:
                if op.length not in self._written.get(op.source, ()):
                    raise PlanError(f"cannot fork {op.length} tokens of sequence {op.source}: no such state is here")
                after[op.sequence] = {op.length}
            elif isinstance(op, New | Free):
                after[op.sequence] = set()
            elif isinstance(op, Truncate):
                after[op.sequence] = {v for v in after.get(op.sequence, ()) if v <= op.length}
            elif isinstance(op, StateRows):
                after[op.sequence] = {v for v in after.get(op.sequence, ()) if v >= op.oldest}
        for row in filter(self._is_here, plan.rows):
            held = after.setdefault(row.sequence, set())
            if row.first and row.first not in held:
                raise PlanError(
                    f"sequence {row.sequence}: rows from position {row.first} on, and its state is here after "
                    f"{sorted(held) or 'no'} tokens"
                )
            held.add(row.first + row.count)
        if (needed := sum(map(len, after.values()))) > self._num_slots:
            raise NoBlocksError(f"step {plan.step} needs {needed} states, and there are {self._num_slots}")

    def begin(self, plan: StepPlan, *, is_replay: bool = False) -> list[Segment]:
        """Apply a plan that was checked. Returns the segments of its rows here."""
        for op in [] if is_replay else plan.ops:
            if isinstance(op, New | Free):
                self._drop(op.sequence, lambda _: True)
            elif isinstance(op, Fork):
                self._share(op)
            elif isinstance(op, Truncate):
                self._drop(op.sequence, lambda tokens, op=op: tokens > op.length)  # type: ignore[misc]
            elif isinstance(op, StateRows):
                self._drop(op.sequence, lambda tokens, op=op: tokens < op.oldest)  # type: ignore[misc]
        prompts = {op.sequence: op.prompt for op in plan.ops if isinstance(op, StateRows)}
        segments, at = list[Segment](), 0
        for row in filter(self._is_here, plan.rows):
            slots, after = self._slots.setdefault(row.sequence, {}), row.first + row.count
            self._drop(row.sequence, lambda tokens, after=after: tokens >= after)  # type: ignore[misc]
            slots = self._slots.setdefault(row.sequence, {})
            slots[after] = self._free.pop()
            self._holders[slots[after]] = 1
            read = slots[row.first] if row.first else ZEROS
            segments.append(Segment(at, row.count, prompts.get(row.sequence, 0), read, slots[after]))
            at += row.count
        return segments

    def commit(self, rows: Iterable[RowRange]) -> None:
        """Note that the versions after ``rows`` are complete in all layers."""
        for row in rows:
            if row.first + row.count in self._slots.get(row.sequence, ()):
                self._written.setdefault(row.sequence, set()).add(row.first + row.count)

    def report(self) -> dict[int, list[int]]:
        """Return the complete versions by sequence."""
        return {number: sorted(versions) for number, versions in self._written.items()}

    def reconcile(self, keep: Sequence[SurvivingKv]) -> None:
        """Keep one version of each sequence of ``keep``, and nothing else. Raises PlanError for one that is not
        here.
        """
        lengths = {k.sequence: k.length for k in keep if self._is_here(RowRange(k.sequence, 0, 1, k.location))}
        for sequence, length in lengths.items():
            if length not in self._written.get(sequence, ()):
                raise PlanError(f"sequence {sequence}: its state after {length} tokens is not here")
        for sequence in list(self._slots):
            self._drop(sequence, lambda tokens, of=sequence: tokens != lengths.get(of))  # type: ignore[misc]

    def _share(self, op: Fork) -> None:
        slot = self._slots[op.source][op.length]
        self._holders[slot] += 1
        self._slots[op.sequence], self._written[op.sequence] = {op.length: slot}, {op.length}

    def _drop(self, sequence: int, is_unwanted: Callable[[int], bool]) -> None:
        slots = self._slots.get(sequence, {})
        for tokens in [tokens for tokens in slots if is_unwanted(tokens)]:
            slot = slots.pop(tokens)
            self._holders[slot] -= 1
            if not self._holders[slot]:
                self._free.append(slot)
            self._written.get(sequence, set()).discard(tokens)
        if not slots:
            self._slots.pop(sequence, None)
            self._written.pop(sequence, None)
