"""perf/bench_attention.py: what it records, what it refuses, which turns it counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[3]
SIZES = {
    "batch": 2,
    "context": 200,
    "heads": 4,
    "kv-heads": 2,
    "head-dim": 32,
    "rounds": 3,
    "patience": 0,
    "threads": 1,
}
SMALL = [f"--{name}={value}" for name, value in SIZES.items()]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "perf"))
    module = pytest.importorskip("bench_attention")
    monkeypatch.setattr(module, "COLD_BYTES", 1 << 18)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)  # the other tests' threads stay as they are
    return module


@pytest.mark.long
def test_a_line_has_the_rate_the_limit_and_their_ratio(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lamina.ops.attention._attention")
    bench.main([*SMALL, "--json"])
    line = json.loads(capsys.readouterr().out)
    assert line["backend"] == "native"
    assert line["ratio"] == line["gb_s"] / line["read_limit_gb_s"] > 0
    assert line["settings"]["context"] == 200
    assert {"commit", "host", "date", "gb_s_spread", "quiet_turns", "cpu_pressure_avg10"} <= line.keys()
    assert set(line["peers"]) == {"sdpa", "sdpa_folded"}
    assert "vllm" in line["missing_peers"]  # this environment has none
    assert max(line["errors"].values()) < 1e-2
    assert 0 < line["append_share"] < 1
    assert line["ratio_on_core"] > 0


def test_several_backends_take_turns_in_one_run(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main([*SMALL, "--json", "--no-peers", "--backend", "reference,emulate"])
    lines = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [x["backend"] for x in lines] == ["reference", "emulate"]
    assert lines[0]["read_limit_gb_s"] == lines[1]["read_limit_gb_s"]


def test_people_get_a_table(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main([*SMALL, "--no-peers", "--backend", "reference"])
    assert "ratio to the limit" in capsys.readouterr().out


@pytest.mark.long
def test_a_competitor_that_computes_something_else_is_refused(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = bench.torch_sdpa

    def wrong(problem: object, *, folded: bool) -> object:
        found = right(problem, folded=folded)
        return found._replace(result=lambda: found.result() * 1.5) if folded else found

    monkeypatch.setattr(bench, "torch_sdpa", wrong)
    with pytest.raises(ValueError, match="sdpa_folded computes something else"):
        bench.main([*SMALL, "--backend", "reference"])


def test_turns_in_which_somebody_waited_do_not_count(bench: ModuleType) -> None:
    busy, free = {"attention": 9.0, "stalled": 0.5}, {"attention": 1.0, "stalled": 0.0}
    assert bench.quiet([busy, free, free, busy, free]) == [free] * 3
    assert bench.quiet([busy, free, busy]) == [busy, free, busy]  # too few of the quiet ones


@pytest.mark.long
def test_a_peer_whose_process_fails_is_named_with_its_cause(bench: ModuleType, tmp_path: Path) -> None:
    peer = sys.modules["peers.attention"]
    settings = {"threads": 1, "batch": 1, "heads": 1, "kv_heads": 1, "context": 8, "head_dim": 8, "dtype": "fp32"}
    q, k = torch.zeros(1, 1, 8), torch.zeros(1, 1, 8, 8)
    with pytest.raises(RuntimeError, match="KeyError: 'abacus'"):
        peer.AttentionPeer(sys.executable, "abacus", settings, q, k, k)
    with pytest.raises(OSError):
        peer.AttentionPeer(str(tmp_path / "no-python"), "vllm", settings, q, k, k)
