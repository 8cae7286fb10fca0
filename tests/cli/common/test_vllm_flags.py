"""Flags that people paste from commands for vLLM."""

from __future__ import annotations

import json

import pytest

from lamina.api.frontend import our_option_names
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
    more = ("--max-num-batched-tokens=64", "--memory-workers", "2")
    found = config(capsys, "--enforce-eager", "--disable-log-requests", *more, *dtype, *size)
    assert found["prefill_chunk"] == 64
    names = ("cuda_graphs", "enable_log_requests", "dtype", "tensor_parallel_size")
    assert [found[name] for name in names] == [False, False, "float16", 2]
    found = config(capsys, "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    assert (found["tool_call_parser"], found["reasoning_parser"]) == ("hermes", "qwen3")
    own = config(capsys, "--memory-workers", "2", "--served-model-name", "half")
    assert [own[name] for name in names] == [True, True, "auto", 1]
    assert own["served_model_name"] == "half", "a value of another flag"


def test_names_may_stand_one_behind_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    found = config(capsys, "--served-model-name", "a", "b", "c", "--dtype", "half")
    assert (found["served_model_name"], found["dtype"]) == ("a,b,c", "float16")
    assert main(["serve", "--served-model-name", "a", "some/model", "--print-config"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["served_model_name"], found["model"]) == ("a", "some/model")
    assert main([*SERVE, "--memory-workers", "2", "--served-model-name=a"]) == 0
    with pytest.raises(SystemExit):
        main([*SERVE, "--dtype", "half", "b"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--gpu-memory-utilization=0.9", "--memory-device", "cuda"],
            "--gpu-memory-utilization is not supported: --kv-cache-memory-bytes",
        ),
        (["--pipeline-parallel-size=2"], "--pipeline-parallel-size is not supported: --pipeline n rotates n batches"),
        (["--revision", "v1"], "--revision is not supported: give the directory"),
        (["--enable-lora"], "--enable-lora is not supported: merge the adapter"),
        (["--enable-expert-parallel"], "--enable-expert-parallel is not supported: --tensor-parallel-size"),
    ],
)
def test_others_are_refused_with_what_to_use(capsys: pytest.CaptureFixture[str], flags: list[str], words: str) -> None:
    assert main([*SERVE, *flags]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


def test_a_command_without_an_engine_says_so_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", "some/model", "--revision", "v1"])
    assert ended.value.code == 2
    assert "--revision is not supported: give the directory" in capsys.readouterr().err


def test_a_field_of_a_configuration_is_refused_as_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*SERVE, "--structured-outputs-config.backend", "xgrammar"])
    said = capsys.readouterr().err
    assert (
        "--structured-outputs-config.backend is not supported: llguidance compiles structured outputs, without settings"
        in said
    )


def test_some_mean_nothing_here_and_are_taken_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--enable-server-load-tracking", "--enable-force-include-usage", "--swap-space", "4", "--revision=main",
             "--gpu-memory-utilization", "0.9", "--no-enable-chunked-prefill", "--load-format", "auto"]  # fmt: skip
    assert main([*SERVE, *flags, "--served-model-name", "x"]) == 0
    out, said = capsys.readouterr()
    assert json.loads(out)["enable_force_include_usage"] is True, "there is that flag"
    assert said.splitlines() == [
        "--enable-server-load-tracking is ignored: GET /load always counts",
        "--enable-chunked-prefill is ignored: prompts are always computed in chunks, of --prefill-chunk tokens",
        "--swap-space is ignored: preempted sequences are computed again, or saved by --preemption-mode swap",
        "--gpu-memory-utilization is ignored: --kv-cache-memory-bytes SIZE sets what each memory worker keeps for KV",
    ]


def test_as_arguments_of_llm(caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "enforce_eager": True, "max_num_batched_tokens": 64, "gpu_memory_utilization": 0.9, "dtype": "half",
        "max_model_len": None, "quantization": None, "tokenizer_mode": "auto", "enable_lora": False,
    }  # fmt: skip
    assert our_option_names(given) == {"cuda_graphs": False, "prefill_chunk": 64, "dtype": "float16"}
    assert [r.getMessage() for r in caplog.records] == [
        "gpu_memory_utilization is ignored: kv_cache_memory_bytes SIZE sets what each memory worker keeps for KV"
    ]
    with pytest.raises(ValueError, match="--pipeline-parallel-size is not supported: --pipeline n"):
        our_option_names({"pipeline_parallel_size": 2})
    with pytest.raises(ValueError, match="max_num_batched_tokens and prefill_chunk say the same"):
        our_option_names({"max_num_batched_tokens": 64, "prefill_chunk": 32})
