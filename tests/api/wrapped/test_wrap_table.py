"""Every feature of ``generate`` that docs/wrap-features.md lists is tried on a wrapped model."""

from __future__ import annotations

import pytest
import torch
from desk import ACCEPTED, ALONE, BOTH, DIFFERENT, DRAWS, SAME, Shares, Tried, classify
from table import BEGIN, PAGE, all_tried, written


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_table_is_true() -> None:
    found = all_tried()
    each = {f"{group}: {name}": outcome for group, calls in found.items() for name, outcome in calls.items()}
    assert [(name, here) for name, (outcome, here) in each.items() if outcome in (ACCEPTED, DIFFERENT)] == []
    for name, (outcome, here) in each.items():
        if outcome == ALONE:
            assert isinstance(here.error, ValueError | AttributeError), name
            assert "\n" not in str(here.error), name
    page = PAGE.read_text()
    assert written(found) == page[page.index(BEGIN) :], (
        "run python tests/support/wrapped/table.py, and read what has changed"
    )


def test_a_difference_would_show() -> None:
    here, there = Tried(torch.tensor([[1, 2]])), Tried(torch.tensor([[1, 3]]))
    error = Tried(error=ValueError("no"))
    assert classify(here, here) == SAME
    assert classify(here, there) == DIFFERENT
    assert classify(error, here) == ACCEPTED
    assert classify(here, error) == ALONE
    assert classify(error, error) == BOTH
    assert classify(Tried(None), here) == DIFFERENT
    assert classify(Tried(torch.ones(2)), Tried(torch.ones(2) + 1e-2)) == DIFFERENT
    assert classify(Tried(torch.ones(2)), Tried(torch.ones(2) + 1e-5)) == SAME


def test_a_filter_that_is_not_obeyed_would_show() -> None:
    """The filter is min_p of the table, which drops 0.16 of the samples."""
    torch.manual_seed(0)
    whole = torch.zeros(2048)
    whole[:83] = torch.cat([torch.tensor([0.5, 0.2, 0.14]), torch.full((80,), 0.002)])
    kept = torch.where(whole > 0.1, whole, 0)
    drawn, filtered = (Tried(Shares.of(p.multinomial(DRAWS, replacement=True))) for p in (whole, kept))
    assert classify(Tried(Shares(whole)), drawn) == SAME
    assert classify(Tried(Shares(whole)), filtered) == DIFFERENT
    assert classify(Tried(Shares(kept / kept.sum())), drawn) == DIFFERENT
