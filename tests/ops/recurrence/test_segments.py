"""The segments of a step: in which order they are computed, and which lists are refused."""

from __future__ import annotations

import pytest

from lamina.ops.recurrence.segments import ZEROS, Segment, Segments


def test_segments_that_continue_each_other_come_in_waves() -> None:
    segments = Segments.of(
        [Segment(0, 2, 2, ZEROS, 5), Segment(2, 3, 3, 5, 6), Segment(5, 1, 0, 6, 7), Segment(6, 1, 0, 1, 2)]
    )
    assert segments.continues.tolist() == [False, True, True, False]
    assert [wave.tolist() for wave in segments.waves] == [[0, 3], [1], [2]]
    assert (len(segments), segments.rows_end, segments.slots_end) == (4, 7, 8)


def test_no_segments() -> None:
    segments = Segments.of([])
    assert (len(segments), segments.rows_end, segments.slots_end, segments.waves) == (0, 0, 0, [])


@pytest.mark.parametrize(
    "wrong",
    [
        [Segment(-1, 1, 0, 0, 1)],
        [Segment(0, 0, 0, 0, 1)],
        [Segment(0, 1, 2, 0, 1)],
        [Segment(0, 1, -1, 0, 1)],
        [Segment(0, 1, 0, -2, 1)],
        [Segment(0, 1, 0, 0, -1)],
        [Segment(0, 1, 0, 1, 1)],  # the version that it reads would be lost
        [Segment(0, 1, 0, 0, 2), Segment(1, 1, 0, 1, 2)],  # written twice
        [Segment(0, 1, 0, 0, 1), Segment(1, 1, 0, 2, 0)],  # written after it was read
        [Segment(0, 1, 0, 0, 1), Segment(1, 1, 0, 5, 6), Segment(2, 1, 0, 1, 2)],  # not that of the one before it
    ],
)
def test_segments_that_do_not_fit(wrong: list[Segment]) -> None:
    with pytest.raises(ValueError, match="segments of a step do not fit together"):
        Segments.of(wrong)
