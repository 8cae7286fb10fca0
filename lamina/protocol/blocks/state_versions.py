"""The versions of sequences' recurrent states as plans change them: ids and counts only, no tensors.

A memory worker keeps these of its states. The scheduler keeps the same class as a ledger, so that it knows before it
sends a plan whether every worker will accept it.

A version is named by the number of tokens in it. A row reads the version of its first position. The version after the
last row of a step goes to another slot, so a step that ends half way leaves what it has read. Version 0 is all zeros
and takes no slot. A *snapshot* is a version that stays for later prompts, which fork the sequence there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from lamina.protocol.step_plan import (
    Fork,
    Free,
    LoadKv,
    New,
    PrefillGrant,
    RowRange,
    StateRows,
    StepPlan,
    SurvivingKv,
    Truncate,
)

from .extents import NoBlocksError, PlanError

ZEROS = -1  # read by a sequence's first segment, in place of a slot
UNWRITTEN = -1  # a slot that is yet to be taken
Slots = dict[int, int]  # tokens -> slot


class Segment(NamedTuple):
    """Rows ``first .. first + rows`` of a step, one sequence's next tokens. The first ``prompt`` of them belong to the
    request's prompt. They continue the version in slot ``read``, and the version after them goes to slot ``write``.
    """

    first: int
    rows: int
    prompt: int
    read: int
    write: int


class StateVersions:
    """The slots of all sequences' versions. Slots are never written twice while a sequence holds them."""

    def __init__(self, num_slots: int, is_here: Callable[[RowRange], bool]) -> None:
        """``is_here``: whether the sequence of a row has its state on this worker."""
        self._num_slots, self._is_here = num_slots, is_here
        self._free = list(range(num_slots))[::-1]
        self._holders = [0] * num_slots  # of each slot: a fork shares it with its source
        self._complete = [False] * num_slots  # by slot: all layers have written it
        self._slots: dict[int, Slots] = {}  # by sequence

    @property
    def num_free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    def has(self, sequence: int, tokens: int) -> bool:
        """Return whether a version is here and complete."""
        slot = self._slots.get(sequence, {}).get(tokens)
        return slot is not None and self._complete[slot]

    def check(self, plan: StepPlan, *, is_replay: bool = False) -> None:
        """Raise PlanError if a row or a fork would read a version that is not here, and NoBlocksError without room."""
        change, new = Counter[int](), 0
        for sequence, slots in self._after(plan, is_replay=is_replay).items():
            change.subtract(self._slots.get(sequence, {}).values())
            taken = [slot for slot in slots.values() if slot != UNWRITTEN]
            change.update(taken)
            new += len(slots) - len(taken)
        freed = sum(self._holders[slot] + more == 0 for slot, more in change.items())
        if new > len(self._free) + freed:
            needed = self._num_slots - len(self._free) - freed + new
            raise NoBlocksError(f"step {plan.step} needs {needed} states, and there are {self._num_slots}")

    def begin(self, plan: StepPlan, *, is_replay: bool = False) -> list[Segment]:
        """Apply a plan that was checked. Returns the segments of its rows here."""
        self._set(self._after(plan, is_replay=is_replay))
        for rows in [] if is_replay else filter(self._is_here, states_that_come(plan)):
            self._take_slot(rows)
        prompts = {op.sequence: op.prompt for op in plan.ops if isinstance(op, StateRows)}
        segments, at = list[Segment](), 0
        for row in filter(self._is_here, plan.rows):
            slots = self._slots[row.sequence]
            read = slots[row.first] if row.first else ZEROS
            slot = self._take_slot(row)
            segments.append(Segment(at, row.count, prompts.get(row.sequence, 0), read, slot))
            at += row.count
        return segments

    def _take_slot(self, row: RowRange) -> int:
        """Take a free slot for the version after a row."""
        self._slots[row.sequence][row.first + row.count] = slot = self._free.pop()
        self._holders[slot], self._complete[slot] = 1, False
        return slot

    def commit(self, rows: Iterable[RowRange]) -> None:
        """Note that the versions after ``rows`` are complete in all layers."""
        for row in rows:
            if (slot := self._slots.get(row.sequence, {}).get(row.first + row.count)) is not None:
                self._complete[slot] = True

    def report(self) -> dict[int, list[int]]:
        """Return the complete versions by sequence."""
        written = {n: sorted(t for t, slot in own.items() if self._complete[slot]) for n, own in self._slots.items()}
        return {sequence: versions for sequence, versions in written.items() if versions}

    def reconcile(self, keep: Sequence[SurvivingKv]) -> None:
        """Keep the last version and the snapshots of each sequence of ``keep``, and nothing else. Raises PlanError for
        one that is not here.
        """
        kept = {k.sequence: {k.length, *k.snapshots} for k in keep if self._is_kept_here(k)}
        for sequence, versions in kept.items():
            self.slots_of(sequence, sorted(versions))
        left = {s: {t: slot for t, slot in own.items() if t in kept.get(s, ())} for s, own in self._slots.items()}
        self._set(left)

    def has_room(self, keep: SurvivingKv) -> bool:
        """Return whether ``adopt`` has room for one more sequence."""
        return not self._is_kept_here(keep) or len({keep.length, *keep.snapshots}) <= len(self._free)

    def adopt(self, keep: Iterable[SurvivingKv]) -> None:
        """Hold the last version and the snapshots of more sequences, each in a slot of its own, as complete: they come
        from other workers. Raises NoBlocksError.
        """
        for each in filter(self._is_kept_here, keep):
            if not self.has_room(each):
                raise NoBlocksError(f"the states of sequence {each.sequence} have no room: {self.num_free} are free")
            own = self._slots[each.sequence] = {t: self._free.pop() for t in sorted({each.length, *each.snapshots})}
            for slot in own.values():
                self._holders[slot], self._complete[slot] = 1, True

    def slots_of(self, sequence: int, versions: Iterable[int]) -> list[int]:
        """Return the slots of complete versions. Raises PlanError for one that is not here."""
        if missing := [tokens for tokens in versions if not self.has(sequence, tokens)]:
            raise PlanError(f"sequence {sequence}: its state after {missing[0]} tokens is not here")
        return [self._slots[sequence][tokens] for tokens in versions]

    def slot_of(self, sequence: int, tokens: int) -> int | None:
        """Return the slot of a complete version; None if it is not here."""
        return self._slots[sequence][tokens] if self.has(sequence, tokens) else None

    def slot_to_fill(self, rows: RowRange) -> int | None:
        """Return the slot for the version after ``rows``, which comes from elsewhere: one of ``states_that_come`` of an
        applied plan. None if other workers have these states.
        """
        return self._slots[rows.sequence][rows.first + rows.count] if self._is_here(rows) else None

    def is_here(self, row: RowRange) -> bool:
        """Return whether the sequence of a row has its state on this worker."""
        return self._is_here(row)

    def _is_kept_here(self, keep: SurvivingKv) -> bool:
        return self._is_here(RowRange(keep.sequence, 0, 1, keep.location))

    def _after(self, plan: StepPlan, *, is_replay: bool) -> dict[int, Slots]:
        """Return the slots of all sequences that a plan changes, new ones as UNWRITTEN. Raises PlanError."""
        after = dict[int, Slots]()
        for op in [] if is_replay else plan.ops:
            if not isinstance(op, New | Free | Fork | Truncate | StateRows | LoadKv | PrefillGrant):
                continue
            if isinstance(op, LoadKv | PrefillGrant) and not (_brings_states(op) and self._is_here(op.rows)):
                continue
            own = after[op.sequence] if op.sequence in after else self._slots.get(op.sequence, {})
            if isinstance(op, New | Free):
                after[op.sequence] = {}
            elif isinstance(op, Fork):
                after[op.sequence] = self._forked(op)
            elif isinstance(op, Truncate):
                after[op.sequence] = {t: slot for t, slot in own.items() if t <= op.length}
            elif isinstance(op, LoadKv | PrefillGrant):
                if own.get(end := op.rows.first + op.rows.count) == UNWRITTEN:
                    raise PlanError(f"sequence {op.sequence}: its state after {end} tokens comes twice")
                after[op.sequence] = {**own, end: UNWRITTEN}
            else:
                kept = {*op.snapshots}
                after[op.sequence] = {t: slot for t, slot in own.items() if t >= op.oldest or t in kept}
        for row in filter(self._is_here, plan.rows):
            own = after[row.sequence] if row.sequence in after else self._slots.get(row.sequence, {})
            if row.first and row.first not in own:
                raise PlanError(
                    f"sequence {row.sequence}: rows from position {row.first} on, and its state is here after "
                    f"{sorted(own) or 'no'} tokens"
                )
            end = row.first + row.count
            # Versions after its first position are of tokens that are computed again, such as after a load that failed.
            after[row.sequence] = {**{t: slot for t, slot in own.items() if t <= row.first}, end: UNWRITTEN}
        return after

    def _forked(self, op: Fork) -> Slots:
        """Return the versions that a fork shares: all complete ones up to its length. Raises PlanError."""
        source = self._slots.get(op.source, {})
        shared = {t: slot for t, slot in source.items() if t <= op.length and self._complete[slot]}
        if source and op.length not in shared:  # without any, the source may lie on other workers
            raise PlanError(f"cannot fork {op.length} tokens of sequence {op.source}: no such state is here")
        return shared

    def _set(self, after: dict[int, Slots]) -> None:
        """Give sequences these slots, without those that are UNWRITTEN, and free all others of theirs."""
        had = [slot for sequence in after for slot in self._slots.get(sequence, {}).values()]
        for sequence, slots in after.items():
            self._slots[sequence] = own = {t: slot for t, slot in slots.items() if slot != UNWRITTEN}
            for slot in own.values():
                self._holders[slot] += 1
            if not slots:
                del self._slots[sequence]
        for slot in had:
            self._holders[slot] -= 1
            if not self._holders[slot]:
                self._free.append(slot)


def loads_of_states(plan: StepPlan) -> list[LoadKv]:
    """Return the ops of a plan that load states."""
    return [op for op in plan.ops if isinstance(op, LoadKv) and op.is_of_states]


def states_that_come(plan: StepPlan) -> list[RowRange]:
    """Return the rows of a plan's ops after which states come from storage, or from prefill workers."""
    return [op.rows for op in plan.ops if isinstance(op, LoadKv | PrefillGrant) and _brings_states(op)]


def _brings_states(op: LoadKv | PrefillGrant) -> bool:
    return op.is_of_states if isinstance(op, LoadKv) else op.has_states
