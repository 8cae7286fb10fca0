"""Spellings of options on the command line: one grammar, which loses nothing, and one table."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lamina.config.flag_groups import (
    ERROR_BUDGET,
    GROUP_OF,
    GROUPS,
    FileFlag,
    FlagGroup,
    ModeFlag,
    escape,
    flag_name,
    flag_text,
    flag_words,
    split_pairs,
    split_parts,
    unescape,
)
from lamina.config.flat_options import OPTIONS
from lamina.config.option import options_of
from lamina.config.sparsity import ErrorBudget, parse_error_budget

KEYS = ("a", "b-c", "d")
VALUES = st.text(min_size=1).filter(lambda text: text.strip())
TRICKY = st.text("a,\\=: ", min_size=1).filter(lambda text: text.strip())
PAIRS = st.dictionaries(st.sampled_from(KEYS), VALUES | TRICKY, min_size=1)


def joined(pairs: dict[str, str], write: Callable[[str], str]) -> str:
    return ",".join(f"{key}={write(value)}" for key, value in pairs.items())


@given(PAIRS)
def test_text_made_of_any_values_parses_back_to_them(pairs: dict[str, str]) -> None:
    assert split_pairs(joined(pairs, escape), "--x ", KEYS) == pairs


@pytest.mark.parametrize(
    "write", [lambda value: value, lambda value: value.replace(",", "\\,"), lambda value: value.replace("\\", "\\\\")]
)
def test_the_property_sees_an_escape_that_forgets_something(write: Callable[[str], str]) -> None:
    """A control: each of these loses a comma or a backslash."""
    lost = []
    for value in ("a,b", "a\\,b", "a\\"):
        try:
            lost.append(split_pairs(joined({"a": value, "d": "x"}, write), "--x ", KEYS) != {"a": value, "d": "x"})
        except ValueError:
            lost.append(True)
    assert any(lost)


@given(st.lists(st.text()))
def test_parts_are_as_many_as_were_joined(values: list[str]) -> None:
    assert [unescape(part) for part in split_parts(",".join(map(escape, values)))] == (values or [""])


@given(st.text())
def test_whatever_is_written_is_taken_or_refused_in_one_line(text: str) -> None:
    for group in GROUPS:
        try:
            values, line = group.parse(text), ""
        except ValueError as error:
            values, line = {}, str(error)
        assert values.keys() <= {*group.options}
        assert line == "" or line.startswith(group.flag)


@given(st.data())
def test_what_a_group_writes_it_reads(data: st.DataObject) -> None:
    group = data.draw(st.sampled_from([each for each in GROUPS if each.keys and not isinstance(each, FileFlag)]))
    plain = [name for name in group.options if name not in (group.option, "kv_error_budget")]
    values = data.draw(st.dictionaries(st.sampled_from(plain), VALUES | TRICKY, min_size=1))
    if isinstance(group, ModeFlag):
        values = {group.option: data.draw(st.sampled_from([*group.modes])), **values}
        if values[group.option] == "select":
            values.pop("kv_observation_window", None)
    elif group.option:
        values = {group.option: data.draw(VALUES | TRICKY), **values}
    assert group.parse(group.write(values)) == values


@pytest.mark.parametrize("name", [name for name, group in GROUP_OF.items() if not isinstance(group, FileFlag)])
def test_an_option_is_spelt_as_its_flag_reads_it(name: str) -> None:
    value = {"pipeline": "3", "plan": "auto:3", "kv_error_budget": ERROR_BUDGET}.get(name, "x")
    flag, text = flag_words({name: value})
    assert GROUP_OF[name].parse(text)[name] == value
    assert flag_text(name, value) == f"{flag} {text}"
    assert flag_name(name).split()[0] == flag


def test_options_of_one_flag_are_written_behind_it_once() -> None:
    options = {"kv_sparsity": "select", "memory_workers": 3, "kv_budget": 64, "kv_recent": 8, "overlap": False}
    words = ["--kv-sparsity", "select:budget=64,recent=8", "--memory-workers", "3", "--no-overlap"]
    assert flag_words(options) == words
    assert flag_words({"journal": "/a,b", "journal_size": "1GiB"}) == ["--journal", "/a\\,b,size=1GiB"]
    assert flag_words({"plan": "auto:3"}) == ["--pipeline", "auto:3"]
    assert flag_words({"cores": ("0-1", "2")}) == ["--cores", "0-1,2"]


def test_keys_may_have_lower_lines_and_spaces_before_them() -> None:
    assert GROUP_OF["max_n"].parse("n=3, stop_chars=4") == {"max_n": "3", "max_stop_chars": "4"}
    assert GROUP_OF["max_n"].parse("") == {}, "as if the flag were left out"


def test_parts_of_an_error_budget_are_keys() -> None:
    group = GROUP_OF["kv_error_budget"]
    values = group.parse("evict:max-top1=0.2,reference-share=0.5")
    assert values == {"kv_sparsity": "evict", "kv_error_budget": "top1=0.2,shadow=0.5"}
    assert parse_error_budget(values["kv_error_budget"]) == ErrorBudget(top1=0.2, shadow=0.5)
    assert parse_error_budget(ERROR_BUDGET) == parse_error_budget("default") == ErrorBudget()
    assert flag_name("kv_error_budget.kl") == "--kv-sparsity evict:max-kl="


def test_each_option_is_set_by_one_flag() -> None:
    assert len(GROUP_OF) == sum(len(group.options) for group in GROUPS)
    flags = [group.flag for group in GROUPS]
    assert len({*flags}) == len(flags)
    keys = [key for group in GROUPS if not isinstance(group, FileFlag) for key in group.keys]
    assert all(re.fullmatch("[a-z][a-z0-9-]*", key) for key in keys)


def test_groups_set_options_that_there_are() -> None:
    from lamina.server.server_config import ServerConfig

    known = {*OPTIONS, *options_of(ServerConfig)}
    assert {name for group in GROUPS for name in group.options} <= known


SCALARS = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text("ab:, {}'").filter(str.strip)


@given(st.data())
def test_a_file_sets_the_options_of_its_entries(data: st.DataObject) -> None:
    group = GROUP_OF["borrow"]
    values = data.draw(st.dictionaries(st.sampled_from([*group.keys]), SCALARS, min_size=1))
    tables: dict[str, Any] = {}
    for key, value in values.items():
        head, dot, name = key.partition(".")
        if dot:
            tables.setdefault(head, {})[name] = value
        else:
            tables[head] = value
    with NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(tables, file)
        file.flush()
        assert group.parse(file.name) == {group.keys[key]: str(value) for key, value in values.items()}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ledgers: h:1", ": unknown entry ledgers; known: borrow, ledger, lend"),
        ("borrow: 8GiB", ": borrow: must be a table with max, wait_s"),
        ("lend: {part: 0.5}", ": lend: unknown entry part; known: address, max_gbps, share"),
        ("lend: {share: yes}", ": lend.share must be a text or a number, not True"),
        ("ledger: ''", ": ledger must be a text or a number, not ''"),
        ("8GiB", ": must be a table with borrow, ledger, lend"),
        ("{", " cannot be read: while parsing a flow node"),
    ],
)
def test_a_file_that_says_something_else_is_refused(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "lending.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"--lending {file}{words}")) as error:
        GROUP_OF["ledger"].parse(str(file))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"^--lending .*no\.yaml cannot be read: No such file or directory$"):
        GROUP_OF["ledger"].parse(str(tmp_path / "no.yaml"))


def test_entries_of_a_file_are_spelt_as_yaml() -> None:
    assert flag_name("borrow_wait_s") == "--lending borrow.wait_s"
    assert flag_text("ledger", "h:1") == "--lending FILE with ledger: h:1"
    assert flag_text("lend", 0.5) == "--lending FILE with lend: {share: 0.5}"
    assert flag_text("memory_on", "H20") == "--cluster FILE with placement: {memory_on: H20}"
    assert flag_text("hosts", "h.yaml") == "--cluster h.yaml"
    assert flag_text("ray_address", "auto") == "--cluster auto"
    assert flag_text("driver_name", "a") == "--driver a@HOST:PORT"


def test_a_name_of_a_driver_is_what_precedes_the_last_at() -> None:
    group = GROUP_OF["driver_name"]
    assert group.parse("a@b@h:1") == {"driver_address": "h:1", "driver_name": "a@b"}
    assert group.parse("h:1") == {"driver_address": "h:1"}


def test_a_group_without_a_mode_says_nothing_of_modes() -> None:
    plain = FlagGroup(flag="--x", form="KEY=VALUE", help="", keys={"a": "max_n"})
    assert plain.parse("a=b:c=d") == {"max_n": "b:c=d"}
