"""docs/families.md is what tests/model_table/make_table.py makes; the weekly run holds a sample of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from model_table import make_table
from model_table.make_table import NOT_BUILT, REFUSED, SAME, WRONG, Result, page, read_page, read_results, reason
from model_table.tiny_models import all_kinds

PAGE = make_table.PAGE.read_text()
# The same tokens, and refusals of several kinds.
SAMPLE = (
    "llama", "gemma2", "mpt", "gemma4_text:shared KV", "qwen3_5_text", "nemotron_h", "mamba", "deepseek_v32",
    "diffllama", "bart",
)  # fmt: skip
HEADINGS = {SAME: "The same tokens", WRONG: "Wrong", NOT_BUILT: "Not built"}


def test_each_family_of_this_transformers_is_on_the_page_once() -> None:
    if f"transformers {transformers.__version__} " not in PAGE:
        pytest.skip("the page is of another version of transformers")
    listed = re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)
    assert sorted(name for names in listed for name in " ".join(names.split()).split(", ")) == sorted(all_kinds())


def test_the_counts_are_those_of_the_lists() -> None:
    counts = {words: int(number) for number, words in re.findall(r"(\d+) (same|refused|wrong|not built|not run)", PAGE)}
    found = list(read_page(PAGE).values())
    assert counts[SAME] == found.count(HEADINGS[SAME])
    assert counts[REFUSED] == sum(title in (*make_table.REASONS, make_table.OTHER) for title in found)
    assert sum(counts.values()) == len(found)
    assert counts[WRONG] == 0


def test_a_page_has_every_result_below_its_heading() -> None:
    results = [
        Result("b", SAME),
        Result("a", SAME),
        Result("c", REFUSED, "tokens depend on each other outside of attention"),
        Result("d", REFUSED, "anything else"),
        Result("e", WRONG, "token 0"),
        Result("f", NOT_BUILT),
    ]
    text = page(results, ["a", "b", "c", "d", "e", "f", "g"])
    assert "2 same, 2 refused, 1 wrong, 1 not built, 1 not run." in text
    assert "```\na, b\n```" in text
    assert read_page(text) == {
        "a": "The same tokens", "b": "The same tokens", "c": next(iter(make_table.REASONS)), "d": make_table.OTHER,
        "e": "Wrong", "f": "Not built", "g": "Not run",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_sample_is_as_the_page_says(tmp_path: Path) -> None:
    file, stated = tmp_path / "results.jsonl", read_page(PAGE)
    names = [name for name in SAMPLE if stated[name] != "Not run"]
    subprocess.run([sys.executable, make_table.__file__, "--results", str(file), *names], check=True, timeout=1800)
    found = {
        r.name: reason(r.why) if r.verdict == REFUSED else HEADINGS[r.verdict] for r in read_results(file).values()
    }
    assert found == {name: stated[name] for name in names}
