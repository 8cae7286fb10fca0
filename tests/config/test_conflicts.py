"""Settings that exclude or need each other: one table, by which options are refused and documents are written.

Covers: lamina/config/offload.py, lamina/config/resolve.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lamina.config import conflicts
from lamina.config.conflicts import COMMAND_FLAGS, CONFLICTS, NEEDS, RESIZE, SETTINGS, conflict_text, need_text
from lamina.config.engine_config import OVERRIDES_EXAMPLE
from lamina.config.flat_options import make_config
from lamina.config.offload import STORE_SIZE
from lamina.config.option import MEASURED
from lamina.config.resolve import ModelLimits, check_model
from lamina.executor.memory_worker_slots import ResizeNeedsRestartError, check_resizable
from lamina.ops.attention import KINDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "conflicts.md"  # which this file writes, if it is run
HEAD = """# Settings that exclude or need each other

Look up why Lamina refuses two settings together, or one setting without another. All other pairs of settings work
together. `lamina-launch serve MODEL --dry-run` checks your settings, and that numbers agree with each other, the model
and the host. An error quotes the reason from these tables, where "it" is the setting in the first column.

A *hybrid model* has recurrent layers. If a row excludes a change *while serving*, `lamina-launch scale` restarts the
engine, or refuses the change ([faults.md](faults.md)). `python tests/config/test_conflicts.py` writes this page from
`lamina/config/conflicts.py`.
"""
LINES = {conflict_text(*pair) for pair in CONFLICTS} | {need_text(*need) for need in NEEDS}


def refusal(*names: str) -> str:
    """Return the error of a start with these settings; "" if it takes them."""
    try:
        make_config({option: value for name in names for option, value in SETTINGS[name].example.items()})
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_goes_by_itself_and_its_example_turns_it_on(name: str) -> None:
    assert refusal(name) == ""
    assert SETTINGS[name].is_on(make_config(SETTINGS[name].example))


def test_the_default_has_no_setting_of_the_table() -> None:
    default = make_config({})
    assert [name for name, setting in SETTINGS.items() if setting.is_on(default)] == []


def alike(name: str, other: str) -> bool:
    """Return True if the examples give one option two values."""
    a, b = SETTINGS[name].example, SETTINGS[other].example
    return any(a[option] != b[option] for option in a.keys() & b.keys())


@pytest.mark.parametrize("name", SETTINGS)
def test_each_pair_is_resolved_or_refused_with_a_line_of_the_table(name: str) -> None:
    pairs = [other for other in SETTINGS if other != name and not alike(name, other)]
    assert len(pairs) > 20
    refused = {other: said for other in pairs if (said := refusal(name, other))}
    assert {said for said in refused.values() if said not in LINES} == set()
    stated = {other for other in pairs if (name, other) in CONFLICTS or (other, name) in CONFLICTS}
    assert stated <= set(refused)
    for other in set(refused) - stated:  # what an example brings along excludes it
        on = make_config(SETTINGS[name].example), make_config(SETTINGS[other].example)
        sides = [[s for s in SETTINGS if SETTINGS[s].is_on(config)] for config in on]
        assert any((a, b) in CONFLICTS or (b, a) in CONFLICTS for a in sides[0] for b in sides[1]), (name, other)


def test_a_pair_stands_in_the_table_once_and_by_names_that_it_has() -> None:
    late = {value for name, value in vars(conflicts).items() if name.isupper() and isinstance(value, str)}
    late = {*late, *COMMAND_FLAGS} - {STORE_SIZE, MEASURED, OVERRIDES_EXAMPLE}
    assert [pair for pair in CONFLICTS if pair[::-1] in CONFLICTS] == []
    assert {name for pair in CONFLICTS for name in pair} <= {*SETTINGS, *late}
    needs = {name for name, others in NEEDS for name in (name, *others)}
    assert needs <= {*SETTINGS, *late}
    assert late <= {name for pair in CONFLICTS for name in pair} | needs


def test_what_the_model_excludes_is_refused_by_the_table_before_a_start() -> None:
    config = make_config({"decode_only": True})
    assert check_model(config, ModelLimits(64, 4, 64, window=0)) == 64
    with pytest.raises(ValueError) as refused:
        check_model(config, ModelLimits(64, 4, 64, window=16))
    assert str(refused.value) in LINES


@pytest.mark.parametrize("name", ["--transport gin", "--kv-sparsity evict", "--memory-addresses", "--pipeline auto"])
def test_a_change_while_serving_is_refused_by_the_table(name: str) -> None:
    config = make_config(SETTINGS[name].example)
    with pytest.raises(ResizeNeedsRestartError) as refused:
        check_resizable(config)
    assert str(refused.value) == conflict_text(RESIZE, name)
    check_resizable(make_config({}))


def test_a_memory_worker_with_a_weight_by_number_is_replaced_in_place() -> None:
    """Its replacement has the same weight. Weights that were measured are those of the workers that were there."""
    check_resizable(make_config({"memory_workers": 2, "memory_weights": "0.7,0.3"}))
    with pytest.raises(ResizeNeedsRestartError) as refused:
        check_resizable(make_config({"memory_workers": 2, "memory_weights": "measured"}))
    assert str(refused.value) == conflict_text(RESIZE, "--memory-weights measured")


def test_the_table_names_the_attention_backends_of_one_kind_of_device() -> None:
    for kind, names in (("cpu", "native or numba"), ("cuda", "cuda or flashinfer")):
        assert f"--attention-backend {names}" in SETTINGS
        assert {name for name, own in KINDS.items() if own == kind} == {*names.split(" or ")}


def test_a_flag_of_a_sub_command_is_named_as_it_is_typed() -> None:
    assert conflict_text("drain --host", "drain --memory-worker").startswith(
        "--host does not go with --memory-worker, because"
    )
    assert need_text("kv --tenant", ["kv purge"]).startswith("--tenant needs kv purge, because ")


def page() -> str:
    """Return the text of the page."""
    refused = [f"| {name} | {other} | {why} |" for (name, other), why in CONFLICTS.items()]
    needed = [f"| {name} | {' or '.join(others)} | {why} |" for (name, others), why in NEEDS.items()]
    parts = [
        HEAD,
        "## One excludes another\n\n| setting | excludes | because |\n|---|---|---|\n" + "\n".join(refused) + "\n",
        "## One needs another\n\n| setting | needs | because |\n|---|---|---|\n" + "\n".join(needed) + "\n",
    ]
    return "\n".join(parts)


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text() == page()


if __name__ == "__main__":
    PAGE.write_text(page())
