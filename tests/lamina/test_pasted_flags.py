"""Flags that people paste from commands for vLLM."""

from __future__ import annotations

import json

import pytest

from lamina.cli.launch import main

SERVE = ["serve", "some/model", "--print-config"]


def config(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, object]:
    assert main([*SERVE, *flags]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("dtype", [["--dtype", "half"], ["--dtype=half"]])
@pytest.mark.parametrize("size", [["-tp", "2"], ["-tp=2"], ["--tensor-parallel-size", "2"]])
def test_they_do_the_same_thing_where_it_exists(
    capsys: pytest.CaptureFixture[str], dtype: list[str], size: list[str]
) -> None:
    found = config(capsys, "--enforce-eager", "--disable-log-requests", "--memory-workers", "2", *dtype, *size)
    names = ("cuda_graphs", "log_requests", "dtype", "tensor_parallel_size")
    assert [found[name] for name in names] == [False, False, "float16", 2]
    own = config(capsys, "--memory-workers", "2", "--served-model-name", "half")
    assert [own[name] for name in names] == [True, True, "auto", 1]
    assert own["served_model_name"] == "half", "a value of another flag"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu-memory-utilization", "0.9"], "--gpu-memory-utilization is not here: --kv-memory SIZE says"),
        (["--gpu-memory-utilization=0.9"], "--gpu-memory-utilization is not here: --kv-memory SIZE says"),
        (["--max-num-batched-tokens", "8192"], "--max-num-batched-tokens is not here: --prefill-chunk says"),
        (["--revision", "main"], "--revision is not here: give the directory"),
    ],
)
def test_others_are_refused_with_what_to_use(capsys: pytest.CaptureFixture[str], flags: list[str], words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*SERVE, *flags])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert words in said
    assert len(said.splitlines()) == 1


def test_some_mean_nothing_here_and_are_taken_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--enable-server-load-tracking", "--enable-force-include-usage"]
    assert main([*SERVE, *flags, "--served-model-name", "x"]) == 0
    out, said = capsys.readouterr()
    assert json.loads(out)["enable_force_include_usage"] is True, "there is that flag"
    assert said.splitlines() == [
        "--enable-server-load-tracking is left out: GET /load always counts",
    ]
