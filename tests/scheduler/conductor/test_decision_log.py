"""Events of the Conductor's choices: whose processes they name, and who is refused late; and words for people.

Covers: lamina/tools/timeline/command.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scheduled import make
from test_conducted_prefill import Hand

from lamina.cli.launch import main
from lamina.observe.perfetto import read
from lamina.observe.trace import Note
from lamina.protocol.kv_placement import KvLocation
from lamina.scheduler.conductor import ConductorConfig, PromptInfo
from lamina.scheduler.conductor.decision_log import DecisionLog, LoggedPrompt, prefill_worker_name
from lamina.scheduler.conductor.latency_model import PrefillPipelineShape
from lamina.scheduler.conductor.overload import SloLimits
from lamina.scheduler.slo_admission import SloAdmission
from lamina.scheduler.starts import DecodePlacement
from lamina.tools.timeline.command import choices_text

MODEL = Path(__file__).resolve().parents[3] / "examples" / "tiny_lm" / "model"
SEAT = DecodePlacement(batch=0, loads=[7], location=KvLocation(kv_shard=0), reason="the only one", free_blocks=[9])


def noting(workers: int, stages: int = 1, **limits: float) -> tuple[SloAdmission, list[Note]]:
    notes = list[Note]()
    promises = SloAdmission(workers, 8, Hand(), PrefillPipelineShape(stages, 16))
    promises.decision_log = DecisionLog(
        lambda name, said: notes.append(Note(0.0, name, said)), stages if workers else 0
    )
    promises.set_config(ConductorConfig(overload="baseline", limits=SloLimits(**limits)))
    return promises, notes


def test_a_group_has_the_names_of_its_processes() -> None:
    assert [prefill_worker_name(worker, 1) for worker in range(2)] == ["prefill-0", "prefill-1"]
    assert [prefill_worker_name(worker, 2) for worker in range(2)] == ["prefill-0..1", "prefill-2..3"]
    assert prefill_worker_name(1, 4) == "prefill-4..7"


@pytest.mark.parametrize(
    ("workers", "stages", "names"),
    [(2, 1, ["prefill-0", "prefill-1"]), (2, 2, ["prefill-0..1", "prefill-2..3"]), (0, 1, ["inline"])],
)
def test_a_choice_names_whoever_computes(workers: int, stages: int, names: list[str]) -> None:
    """The one that is taken, and all ways; where compute workers are alone, no prefill worker is named."""
    promises, notes = noting(workers, stages, ttft_s=100.0)
    for number, name in enumerate(names):
        sequence = make(number, 50, 5)
        promises.reserve(sequence)
        promises.on_placed(sequence, SEAT, by_prefill_worker=workers > 0)
        assert notes[-1].fields["by"] == name
        assert {way["by"] for way in notes[-1].fields["prices"]} == set(names)
    told = choices_text(notes, each=False)[2:]
    assert [line.split()[0] for line in told] == names


def test_what_moves_names_the_group_that_has_it() -> None:
    promises, notes = noting(2, 2)
    choice = promises.conductor.choose(PromptInfo(50), 0.0)._replace(source=1, transferred_tokens=32)
    assert promises.decision_log is not None
    promises.decision_log.log_routed(LoggedPrompt(0, 0, 50), 32, "prefill-0..1", "remote match", choice, [choice], SEAT)
    assert notes[0].fields["source"] == notes[0].fields["prices"][0]["source"] == "prefill-2..3"
    assert "(32 tokens from prefill-2..3)" in choices_text(notes, each=True)[-1]


def test_who_is_refused_behind_its_prompt_is_noted() -> None:
    promises, notes = noting(1, tbt_s=0.05)
    for number in range(2):
        promises.reserve(sequence := make(number, 50, 5))
        since = promises.on_prefill_started(sequence)
        sequence.num_output_placeholders += 1
        sequence.append(7)
        refusal = promises.check_decode_admission(sequence)
        assert (refusal is not None) == (number == 1)
        if refusal is None:
            promises.on_prefill_done(sequence, since)
        for _ in range(16):
            promises.on_round_done(1, 50.0, 0.2)
    (note,) = notes
    assert (note.name, note.fields["request"], note.fields["limit"]) == ("refusal", 1, "tbt after prefill")
    assert note.fields["tbt_s"] > 0.05
    *counted, _, line = choices_text(notes, each=True)
    assert any("refused" in c and "tbt after prefill" in c for c in counted)
    assert line.startswith("request 1, 50 tokens: refused by tbt after prefill, first token after 0 ms, steps of ")


@pytest.mark.long
def test_a_reader_finds_the_processes_of_a_choice_in_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real run with two groups of two stages: each that is named has spans of its own."""
    path = str(tmp_path / "run.json")
    prompts = [word for n in range(4) for word in ("--prompt", f"def f{n}(x):\n    return x + {n}\n" * 8)]
    flags = ["--prefill-workers", "4", "--prefill-pipeline", "2", "--prefill-chunk", "32", "--transport", "loopback"]
    assert main(["generate", str(MODEL), *prompts, *flags, "--max-tokens", "2", "--trace", path]) == 0
    capsys.readouterr()
    assert main(["timeline", path, "--json"]) == 0
    choices = [c for c in json.loads(capsys.readouterr().out)["choices"] if c["event"] == "choice"]
    devices = {span.device for span in read(path).spans}
    assert {c["by"] for c in choices} == {"prefill-0..1", "prefill-2..3"}
    for choice in choices:
        first, last = choice["by"].removeprefix("prefill-").split("..")
        assert {f"prefill-{w}" for w in range(int(first), int(last) + 1)} <= devices
