"""Tables from a recorded run: laws that a run followed are found again, and predict runs of other shapes.

Covers: lamina/tools/plan/calibrate/fit.py, lamina/tools/plan/calibrate/load_driver.py,
lamina/tools/plan/calibrate/prediction.py, lamina/tools/plan/model_facts.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lamina.cli.launch import main
from lamina.observe.perfetto import write
from lamina.observe.trace import Event, Recording, Span
from lamina.tools.plan.calibrate.delays import Delays, StepDelay
from lamina.tools.plan.calibrate.fit import Calibration, calibrate, growing
from lamina.tools.plan.calibrate.load_driver import RunShape, shapes_of
from lamina.tools.plan.calibrate.prediction import predict_shape
from lamina.tools.plan.calibrate.recorded_run import steps_of
from lamina.tools.plan.model_facts import AttentionGroup, GemmGroup, ModelFacts
from lamina.tools.plan.tables import constants

LAYERS = 4
MODEL = ModelFacts(
    name="made", source="by hand", weight_bytes=8_000_000, hidden_bytes=512, between=0.1,
    products=[GemmGroup(LAYERS, 2_000_000, 2, 2_000_000)],
    attentions=[
        AttentionGroup(
            count=LAYERS, heads=8, kv_heads=4, kv_bytes=1024, q_bytes=1024, kv_message_bytes=1024, o_bytes=1024,
            flops=2048, window=0,
        )
    ],
)  # fmt: skip


def slices_s(rows: int) -> float:
    return 4e-3 + 1e-4 * rows


def attention_s(pairs: int) -> float:
    """Returns the seconds of a layer."""
    return 20e-6 + pairs * 1024 * 50e-12


BETWEEN_S = 2e-3  # of a step, in which both wait
TURNS_S = 1e-3  # of a step, in which the compute worker does what is no slice


def spans(shapes: list[tuple[int, int, int]], layers: int = LAYERS, row_s: float = 0.0) -> Iterator[Span]:
    """Makes spans of steps one after the other: rows, rows that are drawn, pairs.

    ``row_s``: of a drawn row, by layer.
    """
    at = 1.0
    for step, (rows, draws, pairs) in enumerate(shapes):

        def span(device: str, event: Event, layer: int, value: int, seconds: float, step: int = step) -> Span:
            nonlocal at
            begin, at = at, at + seconds
            return Span(device, event, 0, step, layer, -1, value, begin, at)

        yield Span("engine", Event.SCHEDULE, 0, step, -1, -1, pairs, at - 3e-3, at - 2e-3)
        yield Span("compute-0", Event.WAIT_STEP, 0, step, -1, -1, 0, at - BETWEEN_S, at)
        for layer in range(layers):
            yield span("compute-0", Event.SLICE, layer, rows, slices_s(rows) / (layers + 1))
            attended = span("memory-0", Event.STORED, layer, 0, attention_s(pairs))
            yield attended
            new = span("memory-0", Event.NEW, layer, 0, draws * row_s)
            yield new
            yield attended._replace(device="compute-0", event=Event.WAIT_O, end=new.end)
        if draws:  # else there is no last slice
            yield span("compute-0", Event.SLICE, layers, draws, slices_s(rows) / (layers + 1))
            yield span("compute-0", Event.SAMPLE, -1, 0, 1e-9)
        yield Span("engine", Event.POSTPROCESS, 0, step, -1, -1, 0, at, at + 1e-4)
        at += TURNS_S + BETWEEN_S


def recording(shapes: list[tuple[int, int, int]], layers: int = LAYERS, row_s: float = 0.0) -> Recording:
    return Recording(sorted(spans(shapes, layers, row_s), key=lambda s: s.start), {}, {}, 0.0)


def run_of(count: int, prompt: int) -> list[tuple[int, int, int]]:
    """A run of ``count`` prompts; sequences end one after the other."""
    chunks = [(32, 0, 32 * i * 32 + 528) for i in range(prompt // 32)]
    return chunks + [(n, n, n * (prompt + 20 * (count - n) + i)) for n in range(count, 0, -1) for i in range(20)]


def fitted() -> Calibration:
    return calibrate(steps_of(recording(run_of(8, 512)), "run"), MODEL, constants(), "run")


def test_the_laws_of_a_run_are_found_again() -> None:
    found = fitted()
    assert found.by_rows[8][0] == pytest.approx(slices_s(8) + TURNS_S, rel=1e-3)
    assert found.floor_s == pytest.approx(20e-6, rel=1e-3)
    assert found.byte_s == pytest.approx(50e-12, rel=1e-3)
    assert found.between_s == pytest.approx(BETWEEN_S, rel=1e-3)
    assert found.chunk == 32
    assert found.decode.seconds(8, 5000) == pytest.approx(
        slices_s(8) + TURNS_S + LAYERS * attention_s(5000) + BETWEEN_S, rel=1e-2
    ), "as the Conductor has it, for simulate"
    assert found.prefill is not None
    chunk_s = slices_s(32) * LAYERS / (LAYERS + 1) + TURNS_S + BETWEEN_S
    whole = sum(chunk_s + LAYERS * attention_s(32 * i * 32 + 528) for i in range(16))
    assert found.prefill.seconds(512) == pytest.approx(whole, rel=3e-2)
    assert [d.beyond_s for d in found.delays.recorded] == pytest.approx([0.0] * len(found.delays.recorded), abs=4e-4)


def test_a_chunk_behind_which_nothing_is_drawn_does_not_decode() -> None:
    steps = steps_of(recording(run_of(8, 512)), "run").steps
    assert [s.rows for s in steps if not s.is_decode_only] == [32] * 16
    assert all(s.draws == 0 for s in steps if not s.is_decode_only)


def test_two_batches_wait_for_all_that_one_compute_worker_does() -> None:
    """Turns and messages between slices keep it from the other batch: no attention hides them."""
    wanted = 2 * (slices_s(4) + TURNS_S)
    assert wanted > 2 * LAYERS * attention_s(4 * 560)
    found = predict_shape(fitted(), RunShape(8, 512, 2), 40)
    assert found.tbt_p50_s == pytest.approx(max(wanted, chain_s(4, 4 * 560)), rel=0.05)


def chain_s(rows: int, pairs: int) -> float:
    """Returns the seconds of a step that no other batch overlaps."""
    return slices_s(rows) + TURNS_S + LAYERS * attention_s(pairs) + BETWEEN_S


@pytest.mark.long(but=["shape0"])
@pytest.mark.parametrize("shape", [RunShape(8, 512), RunShape(8, 2048), RunShape(4, 1024)])
def test_other_shapes_are_predicted(shape: RunShape) -> None:
    answer = 40
    rounds = shape.sequences * shape.prompt // 32
    middle = shape.prompt + rounds + answer // 2 - (shape.sequences - 1) * shape.prompt // 32 // 2
    wanted = chain_s(shape.sequences, shape.sequences * middle)
    found = predict_shape(fitted(), shape, answer)
    assert found.tbt_p50_s == pytest.approx(wanted, rel=0.05)
    assert found.tokens_s == pytest.approx(shape.sequences / wanted, rel=0.05)
    assert found == predict_shape(fitted(), shape, answer), "the same run gives the same numbers"


def test_what_goes_by_rows_does_not_grow_with_the_length() -> None:
    """All sequences are about as long, so bytes grow with rows: so a law of all that memory workers do would have
    the work of new rows grow with bytes.
    """
    row_s, answer, shape = 20e-6, 40, RunShape(8, 2048)
    run = steps_of(recording(run_of(8, 512), row_s=row_s), "run")
    law = calibrate(run, MODEL, constants(), "run")
    assert law.byte_s == pytest.approx(50e-12, rel=1e-3)
    middle = shape.prompt + 8 * 64 + answer // 2 - 7 * 32
    wanted = chain_s(8, 8 * middle) + LAYERS * 8 * row_s
    assert predict_shape(law, shape, answer).tbt_p50_s == pytest.approx(wanted, rel=0.05)


def test_a_step_that_nothing_followed_says_nothing_of_its_length() -> None:
    """Between two runs the engine has nothing to do: that is no part of a step."""
    first, second = run_of(2, 64), run_of(2, 64)
    late = [s._replace(step=s.step + len(first), start=s.start + 60, end=s.end + 60) for s in spans(second)]
    both = [*spans(first), *late]
    assert max(s.total_s for s in steps_of(Recording(both, {}, {}, 0.0), "run").steps) < 1.0
    last = len(first) - 1  # whose tokens are only looked at when the next round has been asked for
    ahead = [
        s._replace(start=s.start + 60, end=s.end + 60) if (s.step, s.event) == (last, Event.POSTPROCESS) else s
        for s in both
    ]
    assert max(s.total_s for s in steps_of(Recording(ahead, {}, {}, 0.0), "run").steps) < 1.0


def test_more_rows_never_take_less() -> None:
    assert growing({1: (5.0, 1), 2: (4.0, 3), 8: (6.0, 2), 9: (6.5, 1)}) == {
        1: (4.25, 1), 2: (4.25, 3), 8: (6.0, 2), 9: (6.5, 1)
    }  # fmt: skip
    assert [t for t, _ in growing({1: (3.0, 1), 2: (2.0, 1), 3: (1.0, 1)}).values()] == [2.0] * 3


def test_shapes_are_read() -> None:
    assert shapes_of("8x2048, 32x512:2", "--predict") == [RunShape(8, 2048), RunShape(32, 512, 2)]


@pytest.mark.long
def test_a_stall_takes_what_it_took_whatever_it_hits() -> None:
    """And a round that is longer meets more of them, as many for each second."""
    found, step_s, stall_s = fitted(), chain_s(8, 8 * 560), 0.05
    recorded = (*[StepDelay(step_s, 0.0)] * 29, StepDelay(step_s, stall_s))
    calm, stalled = (found._replace(delays=Delays(d)) for d in (recorded[:1], recorded))
    for shape in (RunShape(8, 512), RunShape(8, 2048)):
        without, beside = (predict_shape(c, shape, 300) for c in (calm, stalled))
        assert beside.tbt_p50_s == pytest.approx(without.tbt_p50_s, rel=2e-2)
        assert beside.tbt_p99_s == pytest.approx(without.tbt_p50_s + stall_s, rel=5e-2)
    took = stalled.delays.sampler(0)
    each = [sum(took(s) for _ in range(2000)) / 2000 / s for s in (step_s / 3, step_s, 8 * step_s)]
    assert each == pytest.approx([1 + stall_s / 30 / step_s] * 3, rel=0.08)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--calibrate", "RUN", "--predict", "8"], "--predict '8' is no number of sequences"),
        (["--calibrate", "RUN", "--predict", "0x8"], "--predict '0x8' is no number of sequences"),
        (["--calibrate", "RUN", "--devices", "h100:8"], "--devices does not go with --calibrate"),
        (["--calibrate", "RUN", "--gigabyte", "GB"], "--gigabyte does not go with --calibrate"),
        (["--calibrate", "/nowhere.json"], "/nowhere.json: No such file"),
        (["--calibrate", "EMPTY"], "is not a trace of lamina"),
        (["--calibrate", "RUN"], "is a run of 4 layers, and llama-33b has 60"),
        (["--calibrate", "PROMPTS"], "0 steps without prompts: record longer answers"),
        (["--calibrate", "PIPELINE"], "record a run of one compute worker and one batch"),
        (["--predict", "8x8", "--trace", "x", "--devices", "h100:1"], "--predict needs --calibrate, because "),
        (["--devices", "h100:1"], "--trace is missing: a plan needs --trace and --devices, or --calibrate"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "EMPTY").write_text("{}")
    many, run = recording(run_of(2, 64)), run_of(2, 64)
    write(str(tmp_path / "RUN"), many)
    write(str(tmp_path / "PROMPTS"), recording([s for s in run if s[0] == 32], layers=60))
    other = [s._replace(device="compute-1") if s.device == "compute-0" else s for s in many.spans]
    write(str(tmp_path / "PIPELINE"), Recording([*many.spans, *other], {}, {}, 0.0))
    named = {name: str(tmp_path / name) for name in ("EMPTY", "RUN", "PROMPTS", "PIPELINE")}
    assert main(["plan", "llama-33b", *(named.get(a, a) for a in arguments)]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1
