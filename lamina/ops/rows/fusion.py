"""Fewer passes over memory: neighbouring instructions are joined, and values that are never read are not written."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .instructions import ROUND, Instruction, Operation, UnsupportedError, View, operands, registers_of


def merged(instructions: Sequence[Instruction], results: Collection[int]) -> list[Instruction]:
    """Return instructions with the same effect on the slots ``results``. Every slot is written before it is read. No
    instruction writes a slot that another one has written.
    """
    kept = _sunk(_live(instructions, results))
    done: list[Instruction] = []
    for each in kept:
        if done and (both := _joined(done[-1], each) or _summed(done[-1], each)) is not None:
            done[-1] = both
        else:
            done.append(each)
    needed = set(results)
    for each in reversed(done):
        _trim(each, needed)
        needed |= each.reads
    return [each for each in done if each.kind != "elements" or each.steps]


def _live(instructions: Sequence[Instruction], results: Collection[int]) -> list[Instruction]:
    needed, kept = set(results), list[Instruction]()
    for each in reversed(instructions):
        if each.writes & needed:
            kept.append(each)
            needed |= each.reads
    return kept[::-1]


def _sunk(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Move each "elements" to just before its first reader, if that is another "elements"."""
    moved = list(instructions)
    for i in reversed(range(len(moved))):
        each = moved[i]
        if each.kind != "elements":
            continue
        reader = next((n for n in range(i + 1, len(moved)) if moved[n].reads & each.writes), None)
        if reader is not None and reader > i + 1 and moved[reader].kind == "elements":
            moved.insert(reader, each)
            del moved[i]
    return moved


def _joined(a: Instruction, b: Instruction) -> Instruction | None:
    """Join two instructions over the same elements, if b reads of a only what it has just computed; else None."""
    if a.kind != "elements" or b.kind != "elements" or a.shape != b.shape:
        return None
    steps, known = list(a.steps), dict[View, int]()
    written = a.writes
    for i, step in enumerate(a.steps):
        if step.view is not None:
            known[step.view] = step.a if step.op == "store" else i
    places: list[int] = []
    for step in b.steps:
        if step.op == "load" and step.view is not None:
            if step.view in known:
                places.append(known[step.view])
                continue
            if step.view.slot in written:
                return None
        places.append(len(steps))
        steps.append(step._replace(a=places[step.a] if step.op != "load" else 0, b=places[step.b] if step.b else 0))
        if step.op == "load" and step.view is not None:
            known[step.view] = len(steps) - 1
    try:
        registers_of(steps)
    except UnsupportedError:
        return None
    return Instruction("elements", a.shape, steps)


def _summed(a: Instruction, b: Instruction) -> Instruction | None:
    """Join a mean with the steps that compute its elements."""
    if a.kind != "elements" or b.kind != "mean" or b.steps or a.shape != b.shape:
        return None
    made = next((s.a for s in a.steps if s.op == "store" and s.view == b.views[0]), None)
    if made is None:
        return None
    try:
        registers_of(a.steps, made)
    except UnsupportedError:
        return None
    return Instruction("mean", b.shape, list(a.steps), [b.views[1]] * 2, n=made)


def _trim(each: Instruction, needed: Collection[int]) -> None:
    """Remove stores that are never read, and the steps that only they need."""
    if not each.steps:
        return
    steps = [_unrounded(s, each.steps) for s in each.steps]
    keep = {each.n} if each.kind == "mean" else set[int]()
    for i in reversed(range(len(steps))):
        step = steps[i]
        if i in keep or (step.op == "store" and step.view is not None and step.view.slot in needed):
            keep.add(i)
            keep.update(operands(step))
    places = {old: new for new, old in enumerate(sorted(keep))}
    each.steps = [steps[i]._replace(a=places.get(steps[i].a, 0), b=places.get(steps[i].b, 0)) for i in sorted(keep)]
    if each.kind == "mean":
        each.n = places[each.n]


def _unrounded(step: Operation, steps: Sequence[Operation]) -> Operation:
    """Remove a rounding before a store, which rounds by itself."""
    if step.op == "store" and step.view is not None and steps[step.a].op == ROUND.get(step.view.dtype):
        return step._replace(a=steps[step.a].a)
    return step
