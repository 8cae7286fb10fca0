"""The extent of a sequence after an op. No blocks, no I/O."""

from __future__ import annotations

from collections.abc import Callable

from lamina.protocol.step_plan import (
    BlockOp,
    CommitMigration,
    ContextShift,
    CopyStripes,
    DropBlocks,
    FetchPrefix,
    Fork,
    Free,
    LoadKv,
    New,
    PrefetchHint,
    PrefillGrant,
    SaveKv,
    SequenceOp,
    Truncate,
)

from .extents import Extent, Extents, PlanError


def extent_after(
    op: BlockOp,
    extents: Extents,
    known: Callable[[int], Extent | None],
    forked: Callable[[Fork], Extent],
    shifted: Callable[[ContextShift], Extent],
) -> Extent | None:
    """Return the extent of a sequence after ``op``; None if the sequence ends. Raises PlanError.

    ``known``: returns the extent of a sequence before ``op``. ``forked``, ``shifted``: return the extent with which a
    fork begins, or which a context shift leaves.
    """
    match op:
        case New():
            if known(op.sequence) is not None:
                raise PlanError(f"new sequence {op.sequence} exists already")
            return extents.empty
        case Fork():
            if known(op.sequence) is not None:
                raise PlanError(f"new sequence {op.sequence} exists already")
            source = check_exists(known(op.source), op.source)
            extents.check_whole(source, op)
            if source.length < op.length:
                raise PlanError(f"cannot fork {op.length} tokens of sequence {op.source}: it has fewer")
            return forked(op)
        case Free():
            check_exists(known(op.sequence), op.sequence)
            return None
        case Truncate():
            extent = check_exists(known(op.sequence), op.sequence)
            extents.check_whole(extent, op)
            if not 0 <= op.length <= extent.length:
                raise PlanError(f"cannot truncate sequence {op.sequence} of {extent.length} tokens to {op.length}")
            return extent._replace(length=op.length) if op.length else extents.empty
        case ContextShift():
            return shifted(op)
        case DropBlocks():
            return extents.after_prune(check_exists(known(op.sequence), op.sequence), op)
        case CopyStripes():
            if known(op.sequence) is not None:
                raise PlanError(f"new sequence {op.sequence} exists already")
            return extents.after_copy(check_exists(known(op.source), op.source), op)
        case CommitMigration():
            copy = check_exists(known(op.copy), op.copy)
            return extents.after_migration(check_exists(known(op.sequence), op.sequence), copy, op)
        case PrefillGrant() | FetchPrefix() | LoadKv():
            return extents.advance(check_exists(known(op.sequence), op.sequence), op.rows)
        case SaveKv():
            extent = check_exists(known(op.sequence), op.sequence)
            extents.check_whole(extent, op)
            if not 0 <= op.first < op.first + op.count <= extent.length:
                raise PlanError(
                    f"cannot save tokens {op.first}..{op.first + op.count} of sequence {op.sequence} of "
                    f"{extent.length} tokens"
                )
            return extent


def check_exists(extent: Extent | None, sequence: int) -> Extent:
    """Return ``extent``. Raises PlanError if it is None."""
    if extent is None:
        raise PlanError(f"sequence {sequence} does not exist")
    return extent


def sequences_of_op(op: SequenceOp) -> tuple[int, ...]:
    """Return the ids of the sequences that an op concerns."""
    if isinstance(op, PrefetchHint):
        return ()
    if isinstance(op, CommitMigration):
        return op.sequence, op.copy
    return (op.sequence, op.source) if isinstance(op, Fork | CopyStripes) else (op.sequence,)
