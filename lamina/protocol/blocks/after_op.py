"""The extent of a sequence behind an op. No blocks, no I/O."""

from __future__ import annotations

from collections.abc import Callable

from lamina.protocol.plan import (
    Adopt,
    BlockOp,
    Expect,
    Export,
    Fetch,
    Fork,
    Free,
    Grant,
    Import,
    MoveStripes,
    New,
    Prune,
    SequenceOp,
    Shift,
    Truncate,
)

from .extents import Extent, Extents, PlanError


def after_op(
    op: BlockOp,
    extents: Extents,
    known: Callable[[int], Extent | None],
    forked: Callable[[Fork], Extent],
    shifted: Callable[[Shift], Extent],
) -> Extent | None:
    """The extent of a sequence behind ``op``; None where the sequence is gone. ``known``: gives the extent of a
    sequence before ``op``; ``forked``, ``shifted``: the extent that a fork begins with, or that a shift leaves. Raises
    PlanError.
    """
    match op:
        case New():
            if known(op.sequence) is not None:
                raise PlanError(f"new sequence {op.sequence} exists already")
            return extents.empty
        case Fork():
            if known(op.sequence) is not None:
                raise PlanError(f"new sequence {op.sequence} exists already")
            source = existing(known(op.source), op.source)
            extents.check_whole(source, op)
            if source.length < op.length:
                raise PlanError(f"cannot fork {op.length} tokens of sequence {op.source}: it has fewer")
            return forked(op)
        case Free():
            existing(known(op.sequence), op.sequence)
            return None
        case Truncate():
            extent = existing(known(op.sequence), op.sequence)
            extents.check_whole(extent, op)
            if not 0 <= op.length <= extent.length:
                raise PlanError(f"cannot truncate sequence {op.sequence} of {extent.length} tokens to {op.length}")
            return extent._replace(length=op.length) if op.length else extents.empty
        case Shift():
            return shifted(op)
        case Prune():
            return extents.pruned(existing(known(op.sequence), op.sequence), op)
        case MoveStripes():
            if known(op.sequence) is not None:
                raise PlanError(f"new sequence {op.sequence} exists already")
            return extents.copied(existing(known(op.source), op.source), op)
        case Adopt():
            copy = existing(known(op.copy), op.copy)
            return extents.adopted(existing(known(op.sequence), op.sequence), copy, op)
        case Grant() | Fetch() | Import():
            return extents.advance(existing(known(op.sequence), op.sequence), op.rows)
        case Export():
            extent = existing(known(op.sequence), op.sequence)
            extents.check_whole(extent, op)
            if not 0 <= op.first < op.first + op.count <= extent.length:
                raise PlanError(
                    f"cannot save tokens {op.first}..{op.first + op.count} of sequence {op.sequence} of "
                    f"{extent.length} tokens"
                )
            return extent


def existing(extent: Extent | None, sequence: int) -> Extent:
    """Raises PlanError where there is no such sequence."""
    if extent is None:
        raise PlanError(f"sequence {sequence} does not exist")
    return extent


def touched(op: SequenceOp) -> tuple[int, ...]:
    """The sequences that an op is about."""
    if isinstance(op, Expect):
        return ()
    if isinstance(op, Adopt):
        return op.sequence, op.copy
    return (op.sequence, op.source) if isinstance(op, Fork | MoveStripes) else (op.sequence,)
