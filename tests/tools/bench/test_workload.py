"""The requests that a benchmark will send: traces as they were recorded, arrivals and tokens that follow from the seed.

Covers: lamina/tools/bench/bench_report.py, lamina/tools/bench/bench_serve.py.
"""

from __future__ import annotations

import gzip
import itertools
import json
import statistics
from argparse import ArgumentParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.cli.launch import main
from lamina.tools.bench import bench_serve
from lamina.tools.bench.bench_report import percentile
from lamina.tools.bench.workload import at_rate, file_requests, random_requests, tokens_of, trace_requests
from lamina.tools.request_traces import read_trace

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n2023-11-16 18:16:00.0000000,4000,9"
)
MOONCAKE = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 7]},
    {"timestamp": 3000, "input_length": 513, "output_length": 6, "hash_ids": [0, 8]},
    {"timestamp": 3000, "input_length": 512, "output_length": 7, "hash_ids": [0]},
]


def mooncake(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return str(path)


def test_azure_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(AZURE.encode())
    trace = read_trace(str(tmp_path / "a.csv"))
    assert [(r.prompt, r.answer) for r in trace.requests] == [(374, 44), (396, 109), (4000, 9)]
    assert [r.at_s for r in trace.requests] == pytest.approx([0, 4.314579, 13.31941], abs=1e-5)
    kept = trace.within(505)
    assert (len(kept.requests), kept.dropped) == (2, 1)
    assert [a.arrival_s for a in trace_requests(kept, 10)] == pytest.approx([0, 0.4314579], abs=1e-6)


def test_mooncake_rows_share_prefixes(tmp_path: Path) -> None:
    trace = read_trace(mooncake(tmp_path / "m.jsonl.gz", MOONCAKE))
    assert [r.at_s for r in trace.requests] == [0, 3, 3]
    a, b, c = (tokens_of(x, i, list(range(100)), 0) for i, x in enumerate(trace_requests(trace, 1.0)))
    assert (len(a), len(b), len(c)) == (1000, 513, 512)
    assert a[:512] == b[:512] == c
    assert a[512] != b[512] or a[513:] != b[513:]


def test_dry_run_says_what_would_be_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = mooncake(tmp_path / "m.jsonl.gz", MOONCAKE)
    assert main(["bench", "serve", "--dry-run", "--trace", path, "--max-model-len", "600"]) == 0
    out = capsys.readouterr().out
    assert "2 requests" in out
    assert "13 output tokens; 1 request of the trace dropped" in out


def test_dry_run_without_a_trace_speaks_of_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--dry-run", "--num-prompts", "1"]) == 0
    out = capsys.readouterr().out
    assert "would send 1 request to" in out
    assert out.endswith("for 64 output tokens\n")


def test_every_option_has_help() -> None:
    parser = ArgumentParser()
    bench_serve.add_arguments(parser)
    assert [a.dest for a in parser._actions if not a.help] == []


@pytest.mark.parametrize(
    "flags",
    [
        ["serve", "--request-rate", "0"],
        ["serve", "--random-range-ratio", "1"],
        ["serve", "--random-input-len", "0"],
        ["serve", "--dataset-name", "custom"],
        ["serve", "--dataset-name", "sharegpt", "--dataset-path", "README.md"],
        ["decode", "m", "--batch-size", "0"],
    ],
)
def test_bad_flags(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *flags, "--dry-run"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.floats(0.5, 100))
def test_arrivals_are_poisson(seed: int, rate: float) -> None:
    asks = at_rate(random_requests(2000, 8, 8, range_ratio=0.5, seed=seed), rate, seed)
    gaps = [b.arrival_s - a.arrival_s for a, b in itertools.pairwise(asks)]
    assert asks[0].arrival_s == 0
    assert statistics.fmean(gaps) * rate == pytest.approx(1, abs=0.15), "mean of 1999 gaps: deviation 0.022"
    assert statistics.stdev(gaps) * rate == pytest.approx(1, abs=0.25)
    assert {a.input_len for a in asks} == set(range(4, 13))
    assert asks == at_rate(random_requests(2000, 8, 8, range_ratio=0.5, seed=seed), rate, seed)


def test_files_of_prompts(tmp_path: Path) -> None:
    custom, talks = tmp_path / "c.jsonl", tmp_path / "s.json"
    custom.write_text('{"prompt": "a", "output_tokens": 5}\n{"prompt": "b"}\n')
    talk = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "w"}]
    talks.write_text(json.dumps([{"conversations": talk}, {"conversations": talk[:1]}]))
    asks = file_requests("custom", str(custom), 4, 0, seed=0)
    assert sorted((a.text, a.output_len) for a in asks) == [("a", 5), ("a", 5), ("b", 256), ("b", 256)]
    assert [(a.text, a.answer, a.output_len) for a in file_requests("sharegpt", str(talks), 2, 0, seed=0)] == [
        ("q", "w", 0)
    ] * 2
    assert {a.output_len for a in file_requests("custom", str(custom), 3, 7, seed=0)} == {7}


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert [percentile(values, p) for p in (50, 90, 99)] == pytest.approx([cuts[49], cuts[89], cuts[98]])


def test_pingpong_is_netstacks_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pingpong", "--transport", "shm", "--sizes", "8", "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["transports"] == ["shm"]
    assert main(["bench", "pingpong", "--transport", "pigeon", "--dry-run"]) == 2
    with pytest.raises(SystemExit):
        main(["bench", "pingpong", "--help"])
    assert capsys.readouterr().out.startswith("usage: lamina-launch bench pingpong ")


def test_a_trace_whose_kind_is_named_too_gets_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", "--trace", "mooncake", "x.jsonl", "--dry-run"])
    assert ended.value.code == 2
    assert "the kind is read from the file itself: give --trace x.jsonl" in capsys.readouterr().err
    assert main(["bench", "serve", "--trace", "example", "--dry-run"]) == 0
    assert "would send 200 requests" in capsys.readouterr().out
