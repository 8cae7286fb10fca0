"""A real run, its trace and the report on it; and files that are no traces.

Covers: lamina/observe/perfetto.py.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import Counter
from pathlib import Path

import pytest

from lamina.cli.launch import main
from lamina.observe.perfetto import device_order, read, write
from lamina.observe.trace import ClockOffset, Event, Recording, Span
from lamina.observe.trace_collection import span_cost_s
from lamina.tools.timeline.analysis import analyse
from lamina.tools.timeline.device_states import BUSY, STATES

pytestmark = pytest.mark.timeout(400)  # a whole run comes first, on a busy machine
MODEL = Path(__file__).resolve().parents[3] / "examples" / "tiny_lm" / "model"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two batches that take turns over two memory workers, each in its own process."""
    path = tmp_path_factory.mktemp("trace") / "run.json"
    record(path, "--pipeline", "2", "--attention-backend", "reference")  # slow enough to be waited for
    return path


def record(path: Path, *flags: str) -> None:
    """Writes the trace of a run whose workers are processes."""
    prompts = [x for i in range(4) for x in ("--prompt", f"def f{i}(x):\n    ")]
    usual = ["--max-tokens", "10", "--ignore-eos", "--threads", "compute=1,memory=1", "--trace", str(path)]
    assert main(["generate", str(MODEL), *prompts, *usual, *flags]) == 0


def hidden_share(path: Path, capsys: pytest.CaptureFixture[str]) -> float:
    """The hidden share of the attention over stored tokens, as the command reports it."""
    capsys.readouterr()
    assert main(["timeline", str(path), "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["hidden"]
    return float(sum(x["hidden_s"] for x in layers) / sum(x["stored_s"] for x in layers))


@pytest.mark.long
def test_every_message_of_every_layer_is_there(trace: Path) -> None:
    spans = read(str(trace)).spans
    devices = {s.device for s in spans}
    assert devices == {"engine", "compute-0", "memory-0", "memory-1"}
    count = Counter((s.device, s.event) for s in spans)
    plans = count["memory-0", Event.PLAN]
    stored = count["memory-0", Event.STORED]
    assert plans >= 10
    assert {s.batch for s in spans} == {0, 1}
    for memory in ("memory-0", "memory-1"):
        for event in (Event.WAIT_Q, Event.STORED, Event.WAIT_KV, Event.WRITE, Event.NEW, Event.SEND_O, Event.RESERVE):
            assert count[memory, event] == stored, event
    for event in (Event.SEND_Q, Event.SEND_KV, Event.WAIT_O, Event.RECEIVE_O):
        assert count["compute-0", event] == 2 * stored, event
    layers = 1 + max(s.layer for s in spans if s.event == Event.STORED)
    assert stored % layers == 0
    assert count["compute-0", Event.SLICE] - count["compute-0", Event.SAMPLE] == stored
    steps = count["engine", Event.WAIT_DONE]
    assert steps == count["engine", Event.POSTPROCESS]
    # The last plan of a batch may only free blocks: it has no rows, so no worker waits until it has arrived.
    assert plans <= steps <= plans + 2
    assert all(s.end >= s.start for s in spans)


def test_one_clock(trace: Path) -> None:
    """On one host nothing is corrected, and effects come after their causes."""
    recording = read(str(trace))
    assert set(recording.clocks) == {"compute-0", "memory-0", "memory-1"}
    assert all(c.correction_s == 0.0 and 0 < c.uncertainty_s < 0.1 for c in recording.clocks.values())
    at = {(s.device, s.event, s.batch, s.step, s.layer, s.peer): s for s in recording.spans}
    pairs = 0
    for s in recording.spans:
        if s.event == Event.SEND_Q:
            memory = f"memory-{s.peer}"
            stored = at[memory, Event.STORED, s.batch, s.step, s.layer, -1]
            o = at[s.device, Event.RECEIVE_O, s.batch, s.step, s.layer, s.peer]
            assert s.start < stored.start < stored.end < o.start
            pairs += 1
    assert pairs > 50


def test_arrows_lead_from_q_to_o(trace: Path) -> None:
    events = json.loads(trace.read_text())["traceEvents"]
    boxes = [e for e in events if e["ph"] == "X"]
    arrows: dict[str, list[dict[str, object]]] = {}
    for e in events:
        if e["ph"] in "stf":
            arrows.setdefault(e["id"], []).append(e)
            assert any(
                (b["pid"], b["tid"]) == (e["pid"], e["tid"]) and b["ts"] <= e["ts"] <= b["ts"] + b["dur"] for b in boxes
            ), "an arrow end lies in a span"
        if len(arrows) > 40:
            break
    whole = [a for a in arrows.values() if len(a) == 4]
    assert len(whole) > 20
    for a in whole:
        assert "".join(str(e["ph"]) for e in sorted(a, key=lambda e: e["ts"])) == "sttf"  # type: ignore[arg-type,return-value]


def test_recording_costs_little(trace: Path) -> None:
    """Spans of a step times the price of a span: at most 3 % of the step."""
    recording = read(str(trace))
    report = analyse(recording)
    per_step = Counter((s.device, s.batch, s.step) for s in recording.spans)
    most = dict.fromkeys(("engine", "compute", "memory"), 0.0)
    for device in {s.device for s in recording.spans}:
        role = device.partition("-")[0]
        most[role] = max(most[role], statistics.median(n for (d, *_), n in per_step.items() if d == device))
    assert sum(most.values()) * span_cost_s() <= 0.03 * report.step_median_s
    assert 0 < report.recording_share <= 0.03


def test_report_of_the_run(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(trace), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["pools"]) == {"compute", "memory"}
    for shares in [*report["pools"].values(), *report["devices"].values()]:
        assert set(shares) == set(STATES)
        assert math.isclose(sum(shares.values()), 1.0)
        assert shares[BUSY] > 0.005
    assert [h["layer"] for h in report["hidden"]] == list(range(len(report["hidden"])))
    assert all(0 <= h["share"] <= 1 for h in report["hidden"])
    assert main(["timeline", str(trace)]) == 0
    text = capsys.readouterr().out
    for words in ("compute pool", "memory-1", "busy", "waiting for Q", "waiting for O", "network", "last to send O",
                  "before K, V began to be sent", "recording took at most", "clocks"):  # fmt: skip
        assert words in text
    assert len([line for line in text.splitlines() if "layer" in line and "before K, V" in line]) == 1
    assert not any(line.strip().startswith("layer") for line in text.splitlines()), "the layers are for --json"


@pytest.mark.long
def test_commands_say_that_nothing_is_hidden_without_overlap(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report had 25 to 86 % once, as what ran before the end of K and V counted as hidden."""
    record(tmp_path / "apart.json", "--no-overlap")
    assert hidden_share(tmp_path / "apart.json", capsys) == 0.0
    assert hidden_share(trace, capsys) > 0.0


def test_without_overlap_nothing_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable works too, and so do workers that share a process."""
    from lamina import LLM, SamplingParams

    path = tmp_path / "env.json"
    monkeypatch.setenv("LAMINA_TRACE", str(path))
    with LLM(str(MODEL), transport="loopback", overlap=False) as llm:
        llm.generate("x = 1", SamplingParams(max_tokens=4, temperature=0.0))
        assert not path.exists()
    report = analyse(read(str(path)))
    assert report.steps >= 4
    assert sum(h.hidden_s for h in report.hidden) == 0.0 < sum(h.stored_s for h in report.hidden)


def test_early_q_hides_attention_that_the_captured_order_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated: K and V take 10 ms of a slice after Q, attention 6 ms. Both orders give the same tokens."""
    from lamina import LLM, SamplingParams

    shares, texts = [], []
    for early_q in (True, False):
        path = tmp_path / f"{early_q}.json"
        times = {"slice_s": [0.08], "attention_s": 0.006, "early_q": early_q}
        monkeypatch.setenv("LAMINA_EMULATE", json.dumps(times))
        with LLM(str(MODEL), transport="loopback", attention="emulate", trace=str(path)) as llm:
            texts += llm.generate("x = 1", SamplingParams(max_tokens=4, temperature=0.0))
        hidden = analyse(read(str(path))).hidden
        shares.append(sum(h.hidden_s for h in hidden) / sum(h.stored_s for h in hidden))
    assert texts[0].outputs[0].token_ids == texts[1].outputs[0].token_ids
    assert shares[0] > 0.5
    assert shares[1] < 0.2


@pytest.mark.slow
def test_a_run_that_fails_leaves_its_trace(tmp_path: Path) -> None:
    from lamina import LLM, SamplingParams
    from lamina.protocol.executor import WorkerError

    path = tmp_path / "lost.json"
    with LLM(str(MODEL), trace=str(path), max_recoveries=0) as llm:
        stream = llm.stream("x = 1", SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True))
        next(stream)
        os.kill(llm.pools.pids["memory-1"], 9)
        with pytest.raises(WorkerError):
            list(stream)
    assert {"engine", "compute-0", "memory-0"} <= {s.device for s in read(str(path)).spans}


def test_a_file_reads_back_as_it_was_written(tmp_path: Path) -> None:
    spans = [
        Span("memory-10", Event.STORED, 3, 1 << 40, 79, -1, 0, 5000.000000001, 5000.25),
        Span("compute-0", Event.SLICE, 0, 0, 0, -1, 12, 5001.0, 5001.5),
        Span("compute-0", Event.SEND_Q, 0, 0, 0, 10, 4096, 5001.25, 5001.5),
        Span("engine", Event.SCHEDULE, 0, 0, -1, -1, 0, 5002.0, 5003.0),
    ]
    recording = Recording(spans, {"memory-10": 3}, {"memory-10": ClockOffset(2.0, 0.1)}, 5e-7)
    path = str(tmp_path / "t.json")
    write(path, recording)
    back = read(path)
    assert (back.dropped, back.clocks, back.span_cost_s) == (recording.dropped, recording.clocks, recording.span_cost_s)
    for a, b in zip(back.spans, spans, strict=True):
        assert a[:-2] == b[:-2]
        assert abs(a.start - b.start) < 2e-9
        assert abs(a.end - b.end) < 2e-9
    assert sorted(["memory-10", "memory-9", "compute-0", "engine"], key=device_order)[-2:] == ["memory-9", "memory-10"]


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "not a trace"), ("[]", "not a trace"), ('{"traceEvents": []}', "not a trace"), ("\x00", "not a trace"),
     ('{"otherData": {"lamina_trace": 99}}', "99"), (None, "No such file")],
)  # fmt: skip
def test_other_files_are_refused(
    text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    assert main(["timeline", str(path)]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
