"""The machine instructions of attention on GPUs for a tile, and how they are counted (perf/gpu/sass.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lamina.ops.attention.cuda_geometry import choose

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "perf"))
from gpu import sass

LOOP = """
.L_x_0:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R6, R4 ;
        /*0020*/              @!P0 BRA `(.L_x_2) ;
        /*0030*/                   SHFL.IDX PT, R5, R7, R3, 0x1f ;
        /*0040*/                   LDGSTS.E.BYPASS.128 [R41], desc[UR6][R32.64], !P1 ;
        /*0050*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*0060*/                   LDGSTS.E.BYPASS.128 [R41], desc[UR6][R32.64] ;
.L_x_3:
        /*0070*/                   HMMA.16816.F32.BF16 R4, R8, R6, R4 ;
        /*0080*/               @P2 BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
"""


def test_the_shortest_way_around_is_counted_and_predicates_are_no_instructions() -> None:
    code = sass.machine(LOOP)
    assert code.names[:3] == ["MOV", "HMMA", "BRA"]
    assert code.nexts[2] == [6, 3]
    assert code.nexts[5] == [6 + 1], "a branch of all lanes"
    assert code.nexts[-1] == []
    assert sass.way(code, 1, 7) == [1, 2, 6, 7]
    assert sass.way(code, 9, 1) == []


def test_a_loop_without_its_copies_is_no_loop_over_tiles() -> None:
    with pytest.raises(ValueError, match="no loop over tiles with 2 copies"):
        sass.of_tile(sass.machine(LOOP), 2)


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_a_tile_of_a_block_takes_few_instructions(architecture: int) -> None:
    """502 before its tokens were copied from one address, of sm_90."""
    try:
        sass.tools()
    except ImportError as missing:
        pytest.skip(str(missing))
    count = sass.of_tile(sass.attend(choose("BFloat16", 128, 128, 4), architecture), 16)
    assert count.total() <= 245
    assert (count["LDGSTS"], count["HMMA"], count["LDSM"]) == (16, 24, 16)
    assert count["SHFL"] <= 6, "those of the highest score"
