"""Flags that set several options, as a user of ``serve`` meets them.

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

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "docs" / "flags.md"
SERVE = ["serve", "some/model", "--print-config"]


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
        "--timeouts", "body=60,health=500ms", "--slo", "ttft=2s,overload=predictive", "--journal", "/j,size=1GiB",
        "--kv-offload", "dir=/a\\,b,ttl=7d", "--context-overflow", "refuse", "--pipeline", "3",
    )  # fmt: skip
    wanted = {
        "kv_sparsity": "evict", "kv_budget": 512, "kv_recent": 96, "kv_sink": 4, "max_n": 3, "max_body": "16MiB",
        "body_total": "2GiB", "answer_total": "", "body_timeout_s": 60.0, "health_timeout_s": 0.5,
        "header_timeout_s": 10.0, "slo_ttft": "2s", "slo_tbt": "", "overload": "predictive", "journal": "/j",
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
        (
            ["--slo", "overload=baseline"],
            "--slo overload= needs --slo ttft= or --slo tbt=, because it says when the load ",
        ),
        (
            ["--kv-offload", "eviction=lfu"],
            "--kv-offload eviction= needs --kv-offloading-size or --kv-offload dir=, because ",
        ),
        (["--kv-offload", "on-load-failure=fail"], "--kv-offload on-load-failure= needs --kv-offloading-size or "),
        (
            ["--collective", "mesh"],
            "--collective needs --tensor-parallel-size 2 or more, because it says how ranks add ",
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


# Flags of later issues, which docs/flags.md justifies one by one, as all others.
LATER = ("--quantization", "--quantization-compute")


def test_serve_has_95_flags_at_most_and_those_of_later_issues() -> None:
    """A new flag takes the place of another, or becomes a key."""
    assert 80 < len(serve_flags()) <= 95 + len(LATER)
    assert {*LATER} <= {*serve_flags()}


def test_other_commands_take_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("generate", "bench decode"):
        assert main([*command.split(), "m", "--print-config", "--kv-offload", "dir=/x", "--pipeline", "auto"]) == 0
        assert json.loads(capsys.readouterr().out)["kv_store_dir"] == "/x"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kv-store-dir", "/x"], "--kv-store-dir is not a flag: write --kv-offload dir="),
        (["--max-n=3"], "--max-n is not a flag: write --limits n="),
        (["--plan", "auto"], "--plan is not a flag: write --pipeline"),
    ],
)
def test_an_option_as_a_flag_of_its_own_is_refused_with_its_flag(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, *flags) == words
