"""docs/together.md is what tests/together/pair_table.py makes; each run of the tests starts some of its pairs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from together import pair_table
from together.pair_table import (
    DIFFERS,
    FAILED,
    IDLE,
    MISLEADING,
    REFUSED,
    SAME,
    Result,
    in_other_processes,
    judged,
    page,
    pairs_of,
    run_pairs,
)  # fmt: skip
from together.paired_features import BY_NAME, ELSEWHERE, FAST, LONG, ROWS, Row

from lamina.config.flat_options import OPTIONS

PAGE = pair_table.PAGE.read_text()
NOT_SAME = {
    (one, another): verdict.lower()
    for verdict, table in re.findall(r"^## (\w+)\n\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    for one, another in re.findall(r"^\| `(.+?)` \| `(.+?)` \|", table, re.MULTILINE)
}


def test_each_option_is_in_a_row_or_has_a_reason_not_to_be() -> None:
    rows = {name for row in ROWS for name in (*row.options, *row.covers)}
    assert sorted({*OPTIONS} - rows - {*ELSEWHERE}) == []
    assert {*ELSEWHERE} <= {*OPTIONS}
    assert not rows & {*ELSEWHERE}


def test_the_page_has_no_pair_that_differs_fails_or_misleads() -> None:
    assert {*NOT_SAME.values()} <= {REFUSED, IDLE}
    assert {*NOT_SAME} <= {*pairs_of([*BY_NAME])}
    assert all(f"`{row.name}`" in PAGE for row in ROWS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "pair", [*FAST, *(pytest.param(pair, marks=pytest.mark.long) for pair in LONG)], ids=" with ".join
)
def test_a_pair_is_as_the_page_says(pair: tuple[str, str]) -> None:
    (found,) = run_pairs([pair])
    assert found.verdict == NOT_SAME.get(pair, SAME), found.why


@pytest.mark.long
def test_a_feature_without_effect_and_other_tokens_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: a counter that stays at 0, and a lossy feature that is called lossless."""
    monkeypatch.setitem(BY_NAME, "idle", Row("idle", {"spare_memory": 0}, lambda facts: facts["num_preemptions"] > 99))
    monkeypatch.setitem(BY_NAME, "lossy", Row("lossy", {"kv_cache_dtype": "int8"}))
    idle, differs = run_pairs([("idle", "--no-overlap"), ("lossy", "--no-overlap")])
    assert (idle.verdict, differs.verdict) == (IDLE, DIFFERS)


def test_a_refusal_must_name_both_features() -> None:
    rows = [BY_NAME["--prefill-workers 1"], BY_NAME["--kv-offload dir="]]
    assert judged(rows, "--kv-offload dir= does not go with --prefill-workers")[0] == REFUSED
    assert judged(rows, "--prefill-workers does not go with --kv-sparsity")[0] == MISLEADING


def test_a_pair_that_never_ends_is_ended_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text(
        "import json, sys, time\n"
        "for word in sys.argv[3:]:\n"
        "    time.sleep(100 * word.startswith('x'))\n"
        "    print(json.dumps({'first': word, 'second': '', 'verdict': 'same', 'why': ''}), flush=True)\n"
    )
    monkeypatch.setattr(pair_table, "__file__", str(child))
    monkeypatch.setattr(pair_table, "LIMIT_S", 5.0)
    found = [*in_other_processes([("a", "1"), ("x", "2"), ("b", "3")])]
    assert [result.verdict for result in found] == [SAME, FAILED, SAME]


def test_a_page_lists_what_is_not_the_same() -> None:
    text = page([Result("a", "b", SAME), Result("a", "c", REFUSED, "a|c"), Result("b", "c", IDLE, "c did not act")])
    assert "1 same, 1 refused, 1 idle." in text
    assert "| `a` | `c` | a\\|c |" in text


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_all_pairs_are_as_the_page_says() -> None:
    pairs = pairs_of([*BY_NAME])
    found = {(r.first, r.second): r for r in in_other_processes(pairs)}
    unlike = {pair: found[pair] for pair in pairs if found[pair].verdict != NOT_SAME.get(pair, SAME)}
    assert unlike == {}
