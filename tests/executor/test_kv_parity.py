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


def parity(*lost: str, wanted: int = 1) -> KvParity:
    members: Any = SimpleNamespace(memory=[ONE, OTHER, GUARD], lost_workers=dict.fromkeys(lost))
    config = make_config({"kv_parity": wanted, "transport": "shm"})
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
