"""A real run, its trace, the report on it and the page; and files that are no traces."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import statistics
import struct
import subprocess
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lamina.cli.launch import main
from lamina.observe.perfetto import device_order, read, write
from lamina.observe.trace import ClockOffset, Event, Recording, Span
from lamina.observe.trace_collection import span_cost_s
from lamina.tools.timeline.analysis import analyse
from lamina.tools.timeline.device_states import BUSY, STATES
from lamina.tools.timeline.timeline_page import page

pytestmark = pytest.mark.timeout(400)  # a whole run comes first, on a busy machine
MODEL = Path(__file__).resolve().parents[3] / "examples" / "tiny_lm" / "model"
SLICE_BLUE, STORED_GREEN = (0x2F, 0x6F, 0xB5), (0x0F, 0x8B, 0x6D)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two batches that take turns over two memory workers, each in its own process."""
    path = tmp_path_factory.mktemp("trace") / "run.json"
    prompts = [x for i in range(4) for x in ("--prompt", f"def f{i}(x):\n    ")]
    flags = ["--max-tokens", "10", "--ignore-eos", "--compute-threads", "1", "--memory-threads", "1"]
    flags += [
        "--pipeline",
        "2",
        "--attention-backend",
        "reference",
        "--trace",
        str(path),
    ]  # slow enough to be waited for
    assert main(["generate", str(MODEL), *prompts, *flags]) == 0
    return path


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
    # The last plan of a batch may only free blocks: it has no rows, so nobody waits until it has arrived.
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


def test_report_of_the_run(trace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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
                  "before K, V had been sent", "recording took at most", "clocks"):  # fmt: skip
        assert words in text
    target = tmp_path / "page.html"
    assert main(["timeline", str(trace), "--html", str(target), "--dry-run"]) == 0
    assert "would write" in capsys.readouterr().out
    assert not target.exists()
    assert main(["timeline", str(trace), "--html", str(target)]) == 0
    assert target.exists()


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


def test_the_page_needs_nothing_else(trace: Path) -> None:
    recording = read(str(trace))
    text = page(recording, analyse(recording), "</script><script>alert(1)</script>.json")
    assert "alert(1)" in text
    assert "</script><script>alert" not in text
    assert text.count("</script>") == 1
    assert not re.search(r"""(src|href)=|url\(|@import|https?://""", text)


@pytest.mark.slow
def test_the_page_in_a_browser(trace: Path, tmp_path: Path) -> None:
    """No error, all lanes drawn, and the picture has slices and attention in it."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium: apt-get install chromium")
    recording, html, shot = read(str(trace)), tmp_path / "page.html", tmp_path / "shot.png"
    html.write_text(page(recording, analyse(recording), "run.json"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,900", "--force-device-scale-factor=1"]
    for action in ("--dump-dom", f"--screenshot={shot}"):
        command = [browser, *flags, action, f"file://{html}"]
        run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=50)
        if action == "--dump-dom":
            assert "data-error" not in run.stdout
            assert 'data-ready="11"' in run.stdout, "2 lanes of the engine, 3 of each worker"
    pixels = png(shot.read_bytes())
    assert pixels.shape == (900, 1200, 3)
    lanes = pixels[300:]  # below the bars, whose colours are the same
    for colour in (SLICE_BLUE, STORED_GREEN):
        assert (lanes == colour).all(axis=2).sum() > 200


def png(data: bytes) -> np.ndarray:
    """The picture [height, width, 3] of an 8-bit RGB or RGBA file without interlace (RFC 2083)."""
    at, parts, width, height, channels = 8, b"", 0, 0, 3
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        chunk, at = data[at + 8 : at + 8 + length], at + 12 + length
        if kind == b"IHDR":
            width, height, depth, colour, _, _, interlace = struct.unpack(">IIBBBBB", chunk)
            assert (depth, interlace) == (8, 0)
            channels = {2: 3, 6: 4}[colour]
        elif kind == b"IDAT":
            parts += chunk
    rows = np.frombuffer(zlib.decompress(parts), np.uint8).reshape(height, 1 + width * channels)
    out = np.zeros((height, width, channels), np.int64)
    above = np.zeros((width, channels), np.int64)
    for y, row in enumerate(rows):
        line = row[1:].reshape(width, channels).astype(np.int64)
        out[y] = above = unfilter(int(row[0]), line, above)
    return out[:, :, :3]


def unfilter(kind: int, line: np.ndarray, above: np.ndarray) -> np.ndarray:
    if kind == 0:
        return line
    if kind == 1:
        return np.cumsum(line, axis=0) % 256
    if kind == 2:
        return (line + above) % 256
    out, left, corner = np.empty_like(line), [0] * line.shape[1], [0] * line.shape[1]
    for x, (values, ups) in enumerate(zip(line.tolist(), above.tolist(), strict=True)):
        left = [
            (v + ((a + b) // 2 if kind == 3 else paeth(a, b, c))) % 256
            for v, a, b, c in zip(values, left, ups, corner, strict=True)
        ]
        corner, out[x] = ups, left
    return out


def paeth(a: int, b: int, c: int) -> int:
    return min((abs(b - c), 0, a), (abs(a - c), 1, b), (abs(a + b - 2 * c), 2, c))[2]
