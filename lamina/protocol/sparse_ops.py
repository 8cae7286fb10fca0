"""Plan ops for sequences that keep or attend only some of their blocks, and the replies of memory workers.

A *dropped* block is freed and never seen again. The other tokens keep their positions, by which K was rotated. A sparse
layer's attention sees the kept tokens side by side, as if there were no others.
"""

from __future__ import annotations

import msgspec

SCORE_BITS = 24  # after the binary point: a row's attention weights add up to about 1 << SCORE_BITS


class DropBlocks(msgspec.Struct, frozen=True, array_like=True, tag="prune"):
    """Drop whole blocks of a sequence in all sparse layers, for good. ``blocks``: ascending, counted from token 0; the
    sequence still has them there. Afterwards the sequence may only be freed, have later rows, and lose more blocks.
    """

    sequence: int
    blocks: list[int]


class ScoreBlocks(msgspec.Struct, frozen=True, array_like=True, tag="score"):
    """After this step, score how much the last ``rows`` rows of a sequence in it attend each of its blocks. Every
    memory worker replies with one BlockScoresReport.
    """

    sequence: int
    rows: int


class SelectBlocks(msgspec.Struct, frozen=True, array_like=True, tag="attend"):
    """Let the sequence's only row in this step attend its best blocks of ``tokens`` tokens, not the engine's budget; 0:
    all blocks.
    """

    sequence: int
    tokens: int = 0


RowOp = ScoreBlocks | SelectBlocks  # about rows of the step; it holds no blocks


class BlockScoresReport(msgspec.Struct, frozen=True, kw_only=True, tag="scored"):
    """Memory worker -> driver: the weight that softmax gives to each block of a sequence, the step's blocks included.

    ``scores``: summed over the rows, and over the worker's query heads of all sparse layers, as fixed-point numbers
    with SCORE_BITS bits; 0 for dropped blocks. Each (row, head, layer) is rounded separately, so sums do not depend on
    how heads are divided.
    """

    epoch: int
    step: int
    sequence: int
    scores: list[int]
