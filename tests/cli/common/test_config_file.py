"""``--config FILE``, and the pages of ``--help``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lamina.cli.launch import main


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--print-config"]) == 0
    config: dict[str, Any] = json.loads(capsys.readouterr().out)
    return config


FLAGS = {
    "generate": ["--memory-workers", "4", "--no-overlap", "--memory-weights", "1,2,3,4", "--kv-sparsity", "evict"],
    "serve": ["--port", "1234", "--timeouts", "header=3", "--pipeline", "auto:3", "--kv-cache-memory-bytes", "2GiB"],
    "bench decode": ["--transport", "tcp", "--kv-offload", "dir=/tmp/kv", "--dtype", "bfloat16"],
}


@pytest.mark.parametrize("command", FLAGS)
def test_a_file_that_was_printed_sets_the_same_options(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    first = printed(capsys, *command.split(), "some/model", *FLAGS[command])
    file.write_text(json.dumps(first))
    assert printed(capsys, *command.split(), "--config", str(file)) == first
    other = printed(capsys, *command.split(), "other", f"--config={file}", "--seed", "7")
    assert other == first | {"model": "other", "seed": 7}, "the command line wins"


def test_a_file_may_be_yaml_with_flags_as_they_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("memory-workers: 3\nkv-cache-memory-bytes: 1GiB\nserved-model-name: 7\n")
    config = printed(capsys, "serve", "m", "--config", str(file))
    assert (config["memory_workers"], config["kv_cache_memory_bytes"], config["served_model_name"]) == (3, "1GiB", "7")


def test_options_have_one_spelling_which_is_the_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, file = printed(capsys, "serve", "m", "--attention-backend", "reference"), tmp_path / "config"
    assert first["attention_backend"] == "reference"
    assert not {"attention", "kv_memory"} & first.keys()
    for key in ("attention", "attention_backend", "attention-backend"):
        file.write_text(f"{key}: reference")
        assert printed(capsys, "serve", "m", "--config", str(file)) == first, "also as earlier versions spelled it"


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("limits: 'n=3,body=1MiB'", ["--limits", "n=3,body=1MiB"]),
        ("kv-offload: dir=/x", ["--kv-offload", "dir=/x"]),
        ("pipeline: 'auto:3'", ["--pipeline", "auto:3"]),
        ("pipeline: auto", ["--pipeline", "auto"]),
        ("max_n: 3\ntimeouts: header=2s", ["--limits", "n=3", "--timeouts", "header=2s"]),
    ],
)
def test_a_flag_with_keys_is_read_as_on_the_command_line(
    text: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config"
    file.write_text(text)
    assert printed(capsys, "serve", "m", "--config", str(file)) == printed(capsys, "serve", "m", *flags)


def test_a_hidden_key_is_not_taken_for_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(printed(capsys, "serve", "m", "--api-key", "secret")))
    assert "secret" not in file.read_text()
    assert printed(capsys, "serve", "--config", str(file))["api_key"] == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"memory_worker": 3}', "there is no option memory_worker (did you mean memory_workers?)"),
        ("[1, 2]", "has no table of options: see --print-config"),
        ("{", "cannot be read"),
        ("port: [1]", "port must be one value, not [1]"),
        ("port:", "port must be one value, not None"),
        ("port: 80.5", "port must be a whole number, not 80.5"),
        ("limits: x", "--limits x"),
        ("limits: 3", "limits must be text, as after --limits, not 3"),
        ("limits: n=3\nmax_n: 4", "limits and max_n set the same: leave one out"),
        ("attention: native\nattention_backend: auto", "attention and attention_backend set the same"),
        ("dashboard: 'no'", "dashboard must be true or false, not 'no'"),
    ],
)
def test_a_bad_file_is_one_line(text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config"
    file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "m", "--config", str(file)])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [("stop: x", "stop must be a list, not 'x'"), ("model: [m]", "model must be one value, not ['m']")],
)
def test_a_list_is_not_taken_for_a_text_nor_a_text_for_a_list(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config"
    file.write_text(text)
    with pytest.raises(SystemExit):
        main(["generate", "m", "--config", str(file), "--print-config"])
    assert words in capsys.readouterr().err


def test_a_missing_name_of_the_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "m", "--config"])
    err = capsys.readouterr().err
    assert err == "lamina-launch serve: argument --config: expected one argument; see lamina-launch serve --help\n"


def page(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*argv])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_of_serve_is_a_page_by_subject_and_tells_how_to_see_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    short, whole = page(capsys, "serve", "--help"), page(capsys, "serve", "--help=all")
    assert len(short.splitlines()) < len(whole.splitlines()) / 3
    assert "--help=all" in short
    assert "--max-model-len" in short
    assert "--kv-parity" in whole
    assert "--kv-parity" not in short
    for title in ("KV cache:", "workers:", "load and limits:"):
        assert f"\n{title}\n" in short


@pytest.mark.parametrize("command", ["generate", "chat", "check", "bench decode"])
def test_help_of_a_command_has_all_flags_of_its_own_and_few_of_the_engine(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    short, whole = (page(capsys, *command.split(), flag) for flag in ("--help", "--help=all"))
    own = {"generate": "--structured-outputs", "chat": "--system", "check": "--axis", "bench decode": "--num-warmups"}
    assert own[command] in short
    assert "--compute-device" in short
    assert "--step-timeout-s" in whole
    assert "--step-timeout-s" not in short


def test_help_has_the_flags_of_a_group_or_those_that_mention_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    group = page(capsys, "serve", "m", "--help=Workers")
    assert "--kv-parity" in group
    assert "--port" not in group
    assert "--max-logprobs" in page(capsys, "serve", "--help=logprobs")
    assert "--max-num-seqs" in page(capsys, "generate", "--help=max_num_seqs")
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help=quokka"])
    assert ended.value.code == 2
    assert "no flag mentions it" in capsys.readouterr().err
