"""Ops of plans for sequences that keep or attend only some of their blocks, and the answers of memory workers.

A block is *dropped*: its memory is free, and nobody sees it again. Other tokens keep their positions, by which K was
rotated; a sparse layer's attention sees the kept tokens side by side, as if there were no others.
"""

from __future__ import annotations

import msgspec

SCORE_BITS = 24  # behind the binary point: a row's attention over all that it sees adds up to 1 << SCORE_BITS, about


class DropBlocks(msgspec.Struct, frozen=True, array_like=True, tag="prune"):
    """Drop whole blocks of a sequence in all sparse layers, for good. ``blocks``: counted from its token 0, which it
    has there, in ascending order. From now on it can be freed, have rows behind them and lose more, and nothing else.
    """

    sequence: int
    blocks: list[int]


class ScoreBlocks(msgspec.Struct, frozen=True, array_like=True, tag="score"):
    """Tell, once this step is done, how much the last ``rows`` rows that it has of a sequence attend each of its
    blocks. Answered by Scored, once by every memory worker.
    """

    sequence: int
    rows: int


class SelectBlocks(msgspec.Struct, frozen=True, array_like=True, tag="attend"):
    """The only row that this step has of a sequence attends the best blocks of so many tokens, in place of the
    engine's budget; 0: all.
    """

    sequence: int
    tokens: int = 0


RowOp = ScoreBlocks | SelectBlocks  # about rows of the step; it holds no blocks


class BlockScoresReport(msgspec.Struct, frozen=True, kw_only=True, tag="scored"):
    """Memory worker -> driver. ``scores``: for each block of the sequence, the step's included, the weight that the
    rows' softmax gives its tokens, summed over the worker's query heads of all sparse layers, with SCORE_BITS bits; 0
    for dropped blocks. Each (row, head, layer) is rounded by itself, so sums do not depend on how heads are dealt out.
    """

    epoch: int
    step: int
    sequence: int
    scores: list[int]
