"""Flags that set several options, and old names of flags, as a user of ``serve`` meets them.

Covers: lamina/cli/common/parser.py.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from lamina.cli.common.parser import Parser
from lamina.cli.launch import main
from lamina.cli.serve import add_arguments
from lamina.config.flag_groups import OLD_FLAGS, OLD_NAMES_GO, flag_text
from lamina.config.flat_options import make_config

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "docs" / "flags.md"
SERVE = ["serve", "some/model", "--print-config"]
# Option that had a flag of its own -> the text after the old flag.
OLD_VALUES = {
    "max_body": "9MiB", "max_nesting": "9", "max_prompts": "9", "max_n": "9", "max_stop": "9", "max_stop_chars": "9",
    "max_logit_bias": "9", "max_num_queued_tokens": "9",
    "header_timeout_s": "9", "body_timeout_s": "9", "slow_reader_timeout_s": "9",
    "sse_keep_alive_s": "9", "health_timeout_s": "9", "slo_ttft": "9s", "slo_tbt": "9ms", "overload": "early",
    "kvcache_balancing_threshold": "9", "journal_size": "9MiB", "kv_budget": "999", "kv_full_layers": "9",
    "kv_sink": "9", "kv_recent": "9", "kv_observation_window": "9", "kv_error_budget": "top1=0.9",
    "kv_store_dir": "/nine",
    "kv_store_size": "9GiB", "kv_store_ttl": "9d", "kv_key_file": "/nine", "kv_eviction_policy": "lfu",
    "kv_load_failure_policy": "fail", "truncate_ratio": "0.25", "keep_first": "256", "plan": "auto:9",
    "driver_address": "h:9", "driver_name": "nine", "ray_address": "nine:9", "hosts": "nine.yaml",
    "placement": "spread", "compute_on": "nine", "memory_on": "nine", "ledger": "nine:9", "borrow": "9GiB",
    "borrow_wait_s": "9", "lend": "0.9", "lend_address": "nine:9", "lend_gbps": "9",
    "attention": "native", "kv_memory": "9GiB", "dashboard": "", "enable_log_requests": "",
}  # fmt: skip
# What an old flag's option goes with.
SPARSE, STORED, LONG = ["--kv-sparsity", "evict"], ["--kv-offload", "dir=/nine"], ["--context-overflow", "truncate"]
BESIDE = {
    "kv_budget": SPARSE, "kv_full_layers": SPARSE, "kv_sink": SPARSE, "kv_recent": SPARSE,
    "kv_observation_window": SPARSE,
    "kv_error_budget": ["--kv-sparsity", "select"], "kv_store_size": STORED, "kv_store_ttl": STORED,
    "kv_key_file": STORED, "truncate_ratio": LONG, "keep_first": LONG, "journal_size": ["--journal", "/nine"],
    "driver_address": ["--launcher", "static"], "driver_name": ["--launcher", "static", "--driver", "h:1"],
    "kvcache_balancing_threshold": ["--prefill-workers", "1", "--prefill-policy", "mooncake"],
}  # fmt: skip


def config(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[dict[str, Any], list[str]]:
    """The settings that would be served, and the lines on stderr."""
    assert main([*SERVE, *flags]) == 0, capsys.readouterr().err
    out, err = capsys.readouterr()
    return json.loads(out), err.splitlines()


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line with which ``flags`` are refused."""
    status: object = None
    try:
        status = main([*SERVE, *flags])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lamina-launch serve: ")
    return line.removeprefix("lamina-launch serve: ").removesuffix("; see lamina-launch serve --help")


def test_several_options_are_set_by_one_flag(capsys: pytest.CaptureFixture[str]) -> None:
    found, lines = config(
        capsys, "--kv-sparsity=evict:budget=512,recent=96", "--limits", "n=3,body=16MiB,body-total=2GiB",
        "--timeouts", "body=60,health=500ms", "--slo", "ttft=2s,overload=early", "--journal", "/j,size=1GiB",
        "--kv-offload", "dir=/a\\,b,ttl=7d", "--context-overflow", "refuse", "--pipeline", "3",
    )  # fmt: skip
    wanted = {
        "kv_sparsity": "evict", "kv_budget": 512, "kv_recent": 96, "kv_sink": 4, "max_n": 3, "max_body": "16MiB",
        "body_total": "2GiB", "answer_total": "", "body_timeout_s": 60.0, "health_timeout_s": 0.5,
        "header_timeout_s": 10.0, "slo_ttft": "2s", "slo_tbt": "", "overload": "early", "journal": "/j",
        "journal_size": "1GiB", "kv_store_dir": "/a,b", "kv_store_ttl": "7d", "kv_store_size": "10GiB",
        "context_overflow": "refuse", "pipeline": 3, "plan": "",
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted
    assert lines == []


def test_a_flag_may_come_twice_with_other_keys(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = config(
        capsys, "--limits", "n=3", "--limits=stop=4", "--kv-sparsity", "evict", "--kv-sparsity=evict:sink=8"
    )
    assert [found[name] for name in ("max_n", "max_stop", "kv_sparsity", "kv_sink")] == [3, 4, "evict", 8]
    assert refusal(capsys, "--limits", "n=3", "--limits", "n=4") == (
        "--limits n=4: --limits n=3 is there, too: leave one out"
    )
    assert refusal(capsys, "--kv-sparsity", "evict", "--kv-sparsity", "select:sink=8") == (
        "--kv-sparsity select:sink=8: --kv-sparsity evict is there, too: leave one out"
    )


# Old names of options that are in a file now: what they go with, and what the line says to write.
IN_FILES = {
    "placement": ([], "--cluster FILE with placement: {policy: spread}"),
    "compute_on": ([], "--cluster FILE with placement: {compute_on: nine}"),
    "memory_on": ([], "--cluster FILE with placement: {memory_on: nine}"),
    "hosts": (["--launcher", "static"], "--cluster nine.yaml"),
    "ledger": (["--borrow", "1GiB"], "--lending FILE with ledger: nine:9"),
    "borrow": (["--ledger", "h:1"], "--lending FILE with borrow: {max: 9GiB}"),
    "borrow_wait_s": ([], "--lending FILE with borrow: {wait_s: 9}"),
    "lend": (["--ledger", "h:1"], "--lending FILE with lend: {share: 0.9}"),
    "lend_address": (["--lend", "0.5", "--ledger", "h:1"], "--lending FILE with lend: {address: nine:9}"),
    "lend_gbps": (["--lend", "0.5", "--ledger", "h:1"], "--lending FILE with lend: {max_gbps: 9}"),
}
SPILL = ["--partition", "spill", "--kv-cache-memory-bytes", "1GiB"]


@pytest.mark.parametrize("name", IN_FILES)
def test_an_old_name_of_what_is_in_a_file_sets_it_too(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    beside, new = IN_FILES[name]
    (old,) = (flag for flag, option in OLD_FLAGS.items() if option == name)
    beside = [*SPILL, *beside] if new.startswith("--lending") else beside
    found, lines = config(capsys, *beside, old, OLD_VALUES[name])
    assert str(found[name]) in (OLD_VALUES[name], f"{OLD_VALUES[name]}.0")
    assert f"{old} {OLD_VALUES[name]} is {new} now: the old name goes in version {OLD_NAMES_GO}" in lines


@pytest.mark.parametrize(("old", "name"), [(old, name) for old, name in OLD_FLAGS.items() if name not in IN_FILES])
def test_an_old_name_sets_its_option_and_tells_the_new_one(
    old: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    is_switch = name in ("dashboard", "enable_log_requests")
    written = [old.replace("--", "--no-", 1)] if is_switch else [old, OLD_VALUES[name]]
    beside = BESIDE.get(name, [])
    found, (line,) = config(capsys, *beside, *written)
    before, _ = config(capsys, *beside)
    assert found[name] != before[name]
    words, _, new = line.removesuffix(f" now: the old name goes in version {OLD_NAMES_GO}").partition(" is ")
    assert words == " ".join(written)
    again, lines = config(capsys, *beside, *new.split(" ", 1))
    assert (again, lines) == (found, []), "what the line says to write is the same"
    assert old not in new.split()


def test_the_window_of_sparsity_has_its_old_names_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert OLD_FLAGS["--kv-window"] == "kv_observation_window"
    assert make_config({"kv_sparsity": "evict", "kv_window": 9}).kv.kv_observation_window == 9
    with pytest.raises(ValueError, match="kv_window is an old name of kv_observation_window: leave it out"):
        make_config({"kv_sparsity": "evict", "kv_window": 9, "kv_observation_window": 9})
    file = tmp_path / "settings.json"
    file.write_text('{"kv_sparsity": "evict", "kv_window": 9}')
    found, _ = config(capsys, "--config", str(file))
    assert found["kv_observation_window"] == 9


def test_the_table_of_old_names_is_whole() -> None:
    assert {*OLD_FLAGS.values()} == OLD_VALUES.keys()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-n", "2", "--limits", "n=3"], "--max-n and --limits n= set the same: leave out --max-n"),
        (["--limits", "n=3", "--max-n", "2"], "--max-n and --limits n= set the same: leave out --max-n"),
        (["--plan", "auto", "--pipeline", "auto:3"], "--plan and --pipeline set the same: leave out --plan"),
        (
            ["--kv-memory", "1GiB", "--kv-cache-memory-bytes", "2GiB"],
            "--kv-memory and --kv-cache-memory-bytes set the same: leave out --kv-memory",
        ),
        (["--no-page", "--dashboard"], "--no-page and --dashboard set the same: leave out --no-page"),
        (
            ["--kv-error-budget", "default", "--kv-sparsity", "evict:max-kl=0.5"],
            "--kv-error-budget and --kv-sparsity evict:max-top1= set the same: leave out --kv-error-budget",
        ),
    ],
)
def test_an_old_name_beside_the_new_one_is_refused(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, *flags) == f"{words}, which is an old name"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--limits", "n=many"], "--limits n= must be a whole number, not 'many'"),
        (["--timeouts", "body=x"], "--timeouts body= must be a number of seconds, or a time such as 500ms, not 'x'"),
        (["--context-overflow", "truncate:ratio=x"], "--context-overflow truncate:ratio= must be a number, not 'x'"),
        (["--kv-sparsity", "evict:budget=64"], "--kv-sparsity evict:budget=64 has no room after sink=4 and recent=64"),
        (
            ["--prefill-policy", "mooncake:threshold=0.5"],
            "--prefill-policy mooncake:threshold= must be at least 1",
        ),
        (["--slo", "ttft=2"], "--slo ttft=2 is not a time above 0 with its unit, such as 100ms"),
        (
            ["--limits", "bodi=3"],
            "--limits bodi: there is no such key; did you mean body? its keys are body, ",
        ),
    ],
)
def test_what_cannot_be_is_one_line_that_names_flag_and_key(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, *flags).startswith(words)


def serve_flags() -> list[str]:
    """The flags of ``serve`` that --help shows, apart from --help."""
    parser = Parser(prog="serve")
    add_arguments(parser)
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    return [action.option_strings[0] for action in shown if action.option_strings]


def test_each_flag_of_serve_is_in_the_table_with_its_reason() -> None:
    rows = re.findall(r"^\| `(--[a-z-]+)` \| (?:same)? ?\| (.+) \|$", TABLE.read_text(), re.MULTILINE)
    assert sorted(flag for flag, _ in rows) == sorted(serve_flags())
    assert all(len(reason.split()) >= 2 for _, reason in rows)


def test_serve_has_95_flags_at_most() -> None:
    """A new flag takes the place of another, or becomes a key."""
    assert 80 < len(serve_flags()) <= 95


OLD_USES = re.compile("|".join(f"{re.escape(old)}(?![-\\w])" for old in sorted(OLD_FLAGS, key=len, reverse=True)))


def test_nothing_that_people_read_has_an_old_name() -> None:
    """Texts of the product, documents and examples. Commands with flags of their own are left out, and what tells of
    them.
    """
    own = ("lamina/tools/plan", "lamina/cli/lending", "lamina/cli/worker.py", "lamina/cli/operate/kv.py")
    tables = ("lamina/config/flag_groups.py", "lamina/tools/drill/__init__.py", "docs/lending.md", "docs/planner.md")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {use[0]}"
        for pattern in (
            "lamina/**/*.py",
            "docs/*.md",
            "*.md",
            "examples/*.yaml",
            "examples/*/*.yaml",
            "examples/*/*.sbatch",
        )
        for path in sorted(ROOT.glob(pattern))
        if not str(path.relative_to(ROOT)).startswith((*own, *tables))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for use in OLD_USES.finditer(line)
    ]
    assert found == []
    assert OLD_USES.search("use --kv-budget 3")
    assert OLD_USES.search("`--plan`")
    assert not OLD_USES.search("--kv-budgets")


def test_decode_only_leaves_serve(capsys: pytest.CaptureFixture[str]) -> None:
    found, lines = config(capsys, "--decode-only")
    assert found["decode_only"] is True
    assert lines == [
        "--decode-only is a flag of `bench decode` and `generate`, and an option of LLM: serve takes it until version "
        + OLD_NAMES_GO
    ]
    assert main(["bench", "decode", "m", "--decode-only", "--print-config"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out)["decode_only"], err) == (True, "")


def test_other_commands_take_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("generate", "bench decode"):
        assert main([*command.split(), "m", "--print-config", "--kv-offload", "dir=/x", "--kv-recent", "96"]) == 2
        assert main([*command.split(), "m", "--print-config", "--kv-offload", "dir=/x", "--plan", "auto"]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["kv_store_dir"] == "/x"
        assert f"--plan auto is {flag_text('plan', 'auto')} now" in err
