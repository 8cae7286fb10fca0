"""The KV that is left after a loss, when one more memory worker keeps the parity of all others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lamina.config.flat_options import make_config
from lamina.executor.kv_parity import KvParity
from lamina.protocol.step_plan import SurvivingKv

ONE, OTHER, GUARD = "one", "other", "guard"  # members, of whom the last keeps the parity
KEPT = {ONE: {4: 20, 9: 3}, OTHER: {4: 21, 9: 3}, GUARD: {4: 19, 9: 5}}


def parity(*lost: str, wanted: int = 1, members_of: tuple[str, ...] = (ONE, OTHER, GUARD), ranks: int = 1) -> KvParity:
    members: Any = SimpleNamespace(memory=[*members_of], lost_workers=dict.fromkeys(lost))
    workers = len(members_of) - ranks * wanted
    chosen = {"tensor_parallel_size": ranks, "memory_workers": max(2, workers)}
    config = make_config({"kv_parity": wanted, "transport": "shm", **chosen})
    return KvParity(config, members, worker_group=None, clock=lambda: 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lost", "left"),
    [
        ([], [{4: 19, 9: 3}, {4: 19, 9: 3}]),  # what the guard lacks could not come back after the next loss
        ([ONE], [{4: 19, 9: 3}, {4: 19, 9: 3}]),
        ([GUARD], [{4: 20, 9: 3}, {4: 20, 9: 3}]),
        ([ONE, OTHER], [{}, {}]),
        ([OTHER, GUARD], [{4: 0, 9: 0}, {}]),
    ],
    ids=str,
)
def test_what_all_but_one_have_is_left(lost: list[str], left: list[dict[int, int]]) -> None:
    of = parity(*lost)
    assert of.surviving_after_rebuild([{} if name in lost else dict(kept) for name, kept in KEPT.items()]) == left
    assert of.needs_rebuild == (len(lost) == 1)


def test_without_it_all_is_as_it_was() -> None:
    kept: list[dict[int, int]] = [{4: 20}, {}]
    of = parity(OTHER, wanted=0)
    assert of.surviving_after_rebuild(kept) is kept
    assert not of.needs_rebuild
    assert of.rebuild([SurvivingKv(4, 20)])


def test_where_nothing_is_kept_nobody_is_asked() -> None:
    of = parity(ONE)
    of.surviving_after_rebuild([{}, {}, {}])
    assert of.rebuild([])
    assert not of.needs_rebuild


# Two ranks with two memory workers each, and the two that keep their parity.
OF_RANKS = {"a0": 20, "b0": 21, "a1": 22, "b1": 23, "a-guard": 19, "b-guard": 30}


@pytest.mark.parametrize(
    ("lost", "left", "comes_back"),
    [
        ([], [19, 21, 19, 23], False),
        (["a1"], [19, 21, 19, 23], True),
        (["b-guard"], [19, 21, 19, 21], True),
        (["a0", "b1"], [19, 21, 19, 21], True),  # one of each rank
        (["a0", "a-guard"], [0, 21, 0, 23], False),  # two of one rank
        (["a0", "a1", "b0"], [0, 0, 0, 23], False),
    ],
    ids=str,
)
def test_each_rank_can_lose_one(lost: list[str], left: list[int], comes_back: bool) -> None:
    of = parity(*lost, members_of=tuple(OF_RANKS), ranks=2)
    kept = [{} if name in lost else {7: tokens} for name, tokens in OF_RANKS.items()]
    assert [report.get(7, 0) for report in of.surviving_after_rebuild(kept)] == left
    assert of.needs_rebuild == comes_back
