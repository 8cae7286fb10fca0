"""``lamina-launch plan`` as a user calls it; verdicts both ways.

Covers: lamina/facts/hardware.py, lamina/tools/plan/simulated.py, lamina/tools/plan/verdict.py.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from planned import STOCK, even, planner
from transformers import LlamaConfig

from lamina.cli.launch import main
from lamina.config.flag_groups import RENAMED_FLAGS
from lamina.config.flat_options import make_config
from lamina.facts.hardware import DEVICES
from lamina.tools.plan.cost_model import BatchLoad, split_load
from lamina.tools.plan.deployment import Deployment, deployments
from lamina.tools.plan.ranking import MeanStoredTokens, Planner
from lamina.tools.plan.tables import network_link
from lamina.tools.plan.verdict import decide_by_simulation, decide_split, turning_point
from lamina.tools.request_traces import RequestTrace, TracedRequest

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def write_trace(path: Path, rows: list[tuple[int, int]]) -> str:
    lines = [f"2023-11-16 18:15:{46 + i // 60:02}.{i % 60:07},{a},{b}" for i, (a, b) in enumerate(rows)]
    path.write_text("\r\n".join([HEADER, *lines]))
    return str(path)


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def flags_of(command: str) -> dict[str, str]:
    words = command.split()
    assert words[:2] == ["lamina-launch", "serve"]
    named = {flag: option for option, flag in RENAMED_FLAGS.items()}
    pairs = zip(words[3::2], words[4::2], strict=True)
    return {named.get(f) or f.removeprefix("--").replace("-", "_"): v for f, v in pairs}


def test_a_plan_that_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "conv.csv", [(1000, 200)] * 40)
    told = plan_json(capsys, "llama3-70b", "--trace", trace, "--devices", "h100:8,h20:4", "--baseline", "calibrated")
    assert told["verdict"]["split"]
    assert told["verdict"]["headline"] == "split"
    assert told["verdict"]["gain"] > told["tie"] >= 0.15
    given = flags_of(told["serve"])
    config = make_config({k: int(v) if v.isdecimal() else v for k, v in given.items()})
    best = next(r for r in told["rows"] if r["split"])
    assert config.topology.num_compute == best["num_compute"]
    assert config.topology.memory_workers == best["memory_workers"]
    assert config.batching.max_num_seqs >= best["batch"]
    assert all(p["origin"] for p in best["parts"].values())
    assert all(c["origin"] for c in told["constants"].values())
    assert [r["dollars"] for r in told["rows"][:5]] == sorted(r["dollars"] for r in told["rows"][:5])


@pytest.mark.long
def test_a_plan_that_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "code.csv", [(2000, 30)] * 40)
    arguments = ("llama3-70b", "--trace", trace, "--devices", "h100:4,h20:4", "--link", "10Gbps")
    told = plan_json(capsys, *arguments)
    assert (told["verdict"]["headline"], told["serve"]) == ("do not disaggregate here", None)
    assert any(t["what"] == "rate of the link" and t["factor"] > 1 for t in told["verdict"]["turns"])
    assert main(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    assert "do not disaggregate here: " in text
    assert "modelled, not measured" in text
    assert "serve it" not in text
    assert "the first 1 of" not in text


@pytest.mark.long
def test_a_table_of_ones_own_stands_beside_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table is that of docs/planner.md: an H20 whose attention was measured, at half of its bandwidth."""
    trace, own = write_trace(tmp_path / "t.csv", [(1000, 200)] * 40), tmp_path / "own.csv"
    rows = (f"attention,h20,bfloat16,bytes={2**i} group=8,{2**i / 2e12},me" for i in range(20, 36, 5))
    own.write_text("\n".join(["# mine", "op,device,dtype,shape,seconds,source", *rows]))
    arguments = ("llama3-70b", "--trace", trace, "--devices", "h100:2,h20:4", "--simulate", "0")
    ours, both = (plan_json(capsys, *arguments, *more) for more in ((), ("--operators", str(own))))
    split = [next(r for r in told["rows"] if r["split"]) for told in (ours, both)]
    assert [r["parts"]["attention"]["origin"].split(":")[0] for r in split] == ["roofline", "table"]
    assert "h20" in split[1]["parts"]["attention"]["origin"]
    assert [r["parts"]["linear"]["origin"].split(":")[0] for r in split] == ["table", "table"], "ours of H100 stays"
    assert split[1]["parts"]["attention"]["seconds"] > 1.3 * split[0]["parts"]["attention"]["seconds"]


@pytest.mark.long
def test_a_turning_point_is_one() -> None:
    """On either side of the printed price the verdict is another one."""
    mine, trace = planner(base="calibrated"), even(50, 1000, 200)
    asked = list(deployments(STOCK, mine.costs.model))
    turn = decide_split(mine, mine.rank(asked, trace)).turning_points[0]
    assert turn.what == "price of h20"
    assert turn.factor is not None
    near, far = (mine.with_price("h20", turn.factor**share) for share in (0.98, 1.02))
    assert (
        decide_split(near, near.rank(asked, trace)).should_split
        != decide_split(far, far.rank(asked, trace)).should_split
    )


def test_the_nearest_of_two_turning_points_is_told_and_where_it_turns_back() -> None:
    turn = turning_point("price", lambda f: f - 0.6 if f < 1 else 4 - f, lambda f: f"{f:.1f}")
    assert (turn.factor, turn.value) == (pytest.approx(0.6, rel=1e-2), "0.6")
    back = turning_point("price", lambda f: (f - 2) * (f - 8), lambda f: f"{f:.1f}")
    assert back.value == "2.0, and back at 8.0"
    never = turning_point("price", lambda f: 1.0, str)
    assert (never.factor, never.low, never.high) == (None, pytest.approx(1 / 32), pytest.approx(32))
    short = turning_point("price", lambda f: 1.0 if f < 2 else float("nan"), str)
    assert short.factor is None, "no verdict where nothing can be compared"
    assert short.high == pytest.approx(2**0.5), "as far as it was looked for"


def test_a_faster_link_is_cut_by_the_card_and_a_search_has_faster_cards() -> None:
    fast = network_link("1600Gbps")
    assert fast.cut_by(DEVICES["h100"], DEVICES["h20"]) == "cut to 400 Gbps by the card of h100"
    assert network_link("400Gbps").cut_by(DEVICES["h100"], DEVICES["h20"]) == ""
    rates = [planner().with_link(f).costs.link.bandwidth(DEVICES["h100"], DEVICES["h20"]) for f in (0.5, 1, 4)]
    assert rates == [pytest.approx(rates[1] / 2), rates[1], pytest.approx(4 * rates[1])]


def test_dollars_of_a_row_are_those_of_its_hour() -> None:
    stored = MeanStoredTokens(even(10, 1000, 200), planner().costs.model)
    point = planner().operating_point(Deployment(DEVICES["h100"], 4), stored)
    assert point.hour == pytest.approx(4 * 11.06)  # type: ignore[union-attr]
    assert point.dollars == pytest.approx(44.24 / (point.tokens_s * 3600 / 1e6))  # type: ignore[union-attr]


def test_who_cannot_hold_more_than_a_tenth_is_refused_and_who_holds_more_drops_nothing() -> None:
    asked = [Deployment(DEVICES["h100"], 2, DEVICES["h20"], n, 2) for n in (2, 8)]
    room = planner().memory.kv_bytes(planner().costs.model, asked[0]) / planner().costs.model.kv_bytes_per_token
    long, short = int(1.2 * room), 1000

    def ranked(longer: int) -> tuple[int, int]:
        rows = [TracedRequest(0.0, long, 10)] * longer + [TracedRequest(0.0, short, 10)] * (100 - longer)
        ranking = planner().rank(asked, RequestTrace("made", tuple(rows)))
        return len(ranking.points), len(ranking.trace.requests)

    assert ranked(9) == (2, 100)
    assert ranked(11) == (1, 100)


def tailed(share: float) -> tuple[Planner, list[Deployment], RequestTrace]:
    """Two deployments, and requests of which a share are too long for the first one alone."""
    mine, asked = planner(), [Deployment(DEVICES["h100"], 2, DEVICES["h20"], n, 2) for n in (2, 8)]
    room = mine.memory.kv_bytes(mine.costs.model, asked[0]) / mine.costs.model.kv_bytes_per_token
    longer = round(100 * share)
    rows = [TracedRequest(0.0, int(1.2 * room), 100)] * longer + [TracedRequest(0.0, 1000, 100)] * (100 - longer)
    return mine, asked, RequestTrace("made", tuple(rows))


def test_one_that_cannot_hold_a_request_is_charged_for_it() -> None:
    """Its own tokens have its own price, and the others what they cost where they fit."""
    mine, asked, trace = tailed(0.08)
    points = {p.deployment: p for p in mine.rank(asked, trace).points}
    small, large = (points[d] for d in asked)
    assert (small.refused, large.refused, small.elsewhere) == (pytest.approx(0.08), 0.0, asked[1])
    alone = mine.rank(asked[:1], trace.within(1200)).points[0].dollars
    rest = mine.rank(asked[1:], trace.beyond(1200)).points[0].dollars
    assert small.dollars == pytest.approx(0.92 * alone + 0.08 * rest)
    assert rest > 3 * alone, "the tail is dear"
    dearer = mine.repriced(small, "h20", 2.0)
    assert dearer.dollars > small.dollars
    again = {p.deployment: p for p in mine.with_price("h20", 2.0).rank(asked, trace).points}[asked[0]]
    assert dearer.dollars == pytest.approx(again.dollars)


def test_a_tail_that_only_one_holds_is_not_a_loss_of_that_one() -> None:
    """Charged, both serve the same requests: so the one without room is no cheaper by what it cannot do."""
    mine, asked, trace = tailed(0.08)
    points = {p.deployment: p for p in mine.rank(asked, trace).points}
    uncharged = mine.rank(asked[:1], trace.within(1200)).points[0].dollars
    assert uncharged < points[asked[1]].dollars
    assert points[asked[0]].dollars > 1.2 * uncharged


def test_the_refused_share_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(1000, 100)] * 96 + [(120_000, 100)] * 4
    trace = write_trace(tmp_path / "t.csv", rows)
    arguments = ("llama-65b", "--trace", trace, "--devices", "h100:4,h20:8", "--simulate", "0")
    told = plan_json(capsys, *arguments)
    shares = {row["devices"]: row["refused"] for row in told["rows"]}
    assert {round(share, 3) for share in shares.values()} == {0.0, 0.04}, shares
    assert main(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    assert "4.0%" in text
    assert "refused: tokens of requests that do not fit; $/Mtoken has them at the price of" in text


def test_the_verdict_of_runs_that_were_played_goes_before_the_closed_form() -> None:
    plan, trace = planner(), even(10, 1000, 200)
    asked = [Deployment(DEVICES["h100"], 4), Deployment(DEVICES["h100"], 2, DEVICES["h20"], 4, 2)]
    ranking = plan.rank(asked, trace)
    formed = decide_split(plan, ranking)
    split, alone = ranking.best(split=True), ranking.best(split=False)
    assert split is not None
    assert alone is not None
    slow, quick = (split._replace(dollars=alone.dollars * f) for f in (0.95, 0.5))
    assert decide_by_simulation(plan, formed, [slow, alone]).headline == "do not disaggregate here"
    assert decide_by_simulation(plan, formed, [quick, alone]).should_split
    assert "played" in decide_by_simulation(plan, formed, [quick, alone]).words
    assert decide_by_simulation(plan, formed, [quick]) == formed, "one kind alone says nothing"


def test_one_batch_is_better_where_both_would_read_the_weights_again() -> None:
    costs = planner().costs
    one, two = (Deployment(DEVICES["h100"], 2, DEVICES["h20"], 4, n) for n in (1, 2))
    few, many = BatchLoad(8, {0: 8 * 1000.0}), BatchLoad(256, {0: 256 * 4000.0})
    assert costs.round(one, [few]).seconds < costs.round(two, split_load(few, 2)).seconds
    assert costs.round(two, split_load(many, 2)).seconds < costs.round(one, [many]).seconds


def test_the_slo_bounds_the_batch() -> None:
    where, trace = Deployment(DEVICES["h100"], 2, DEVICES["h20"], 4, 2), even(10, 1000, 200)
    stored = MeanStoredTokens(trace, planner().costs.model)
    free, bound = planner().operating_point(where, stored), planner(slo_s=0.06).operating_point(where, stored)
    assert bound.batch < free.batch  # type: ignore[union-attr]
    assert bound.tbt_s <= 0.06 < free.tbt_s  # type: ignore[union-attr]
    assert bound.limit.startswith("the SLO")  # type: ignore[union-attr]
    impossible = planner(slo_s=0.005).operating_point(where, stored)
    assert (impossible.tbt_s > 0.005, impossible.missing_bytes) == (True, 0.0)  # type: ignore[union-attr]


def test_heads_that_do_not_divide_cost_messages() -> None:
    costs, load = planner().costs, BatchLoad(256, {0: 256 * 1000})
    four, three = (costs.step(Deployment(DEVICES["h100"], 1, DEVICES["h20"], n), load).network_s for n in (4, 3))
    assert three > four


def test_nothing_is_ranked_that_does_not_fit() -> None:
    mine = planner()
    ranking = mine.rank(deployments(STOCK, mine.costs.model), even(10, 1000, 100))
    assert all(p.deployment.ranks > 1 for p in ranking.points), "137.5 GB do not fit one device"
    assert any("do not fit one h100" in r.why for r in ranking.refused)


def test_requests_that_nothing_holds_are_left_out_and_counted() -> None:
    from lamina.tools.request_traces import RequestTrace, TracedRequest

    mine = planner("llama-33b")
    trace = RequestTrace("mixed", (*even(40, 1000, 100).requests, TracedRequest(99.0, 10**7, 10)))
    ranking = mine.rank(deployments(STOCK, mine.costs.model), trace)
    assert (ranking.trace.dropped, len(ranking.trace.requests)) == (1, 40)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--devices", "h300:4"], "--devices h300 is not one of h100, h20"),
        (["--devices", "h300:4"], "--device-file FILE adds others"),
        (["--devices", "l4:8"], "only of h100, h20, tpu-v6e: write a file with [book] and [l4] hour = ..."),
        (["--operators", "OTHERS"], "has operators of h300, and --devices are h100, h20"),
        (["--devices", "h100"], "such as h100:8"),
        (["--devices", "h100:0"], "such as h100:8"),
        (["--devices", "h100:2,H100:2"], "h100 twice"),
        (["--devices", "l4:8"], "no price of l4"),
        (["--prices", "nobody"], "--prices nobody is neither a file nor one of paper"),
        (["--slo-tbt", "100"], "--slo-tbt 100 is not a time"),
        (["--slo-tbt", "1us"], "the best is"),
        (["--link", "fast"], "--link fast is not a rate"),
        (["--link", "400Gbps:tcp"], "tcp is not one of fhbn, nccl"),
        (["--baseline", "vllm"], "--baseline vllm is not one of ideal, calibrated"),
        (["--gigabyte", "MB"], "--gigabyte MB is not one of GiB, GB"),
        (["--devices", "h100:1"], "--devices: nothing that can be built"),
        (["--rows", "0"], "--rows must be at least 1"),
        (["--rate", "0"], "--rate 0 is neither a number of requests a second above 0"),
        (["--rate", "fast"], "--rate fast is neither"),
        (["--prompts", "there"], "--prompts there is not one of elsewhere, here"),
        (["--dtype", "int8"], "--dtype must be one of auto, float32, bfloat16, float16, not 'int8'"),
        (["--dtype", "float32"], "--dtype float32: llama3-70b is known by the paper's sizes alone"),
        (["--trace", "/nowhere.csv"], "--trace /nowhere.csv: No such file"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, others = write_trace(tmp_path / "t.csv", [(1000, 200)] * 20), tmp_path / "others.csv"
    others.write_text("op,device,dtype,shape,seconds,source\nattention,h300,bfloat16,bytes=1e9 group=8,1e-3,me\n")
    given = ["plan", "llama3-70b", "--trace", trace, "--devices", "h100:4,h20:4", *arguments]
    given = [str(others) if word == "OTHERS" else word for word in given]
    assert main(given) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n", "line 1: 'a,b' is not the first line of a trace"),
        (f"{HEADER}\n2023-11-16 18:15:46.6,5,0\n", "line 2: 5 and 0 tokens"),
        (f"{HEADER}\n2023-11-16 18:15:46.6,5,x\n", "line 2: "),
        (f"{HEADER}\n2023-11-16 18:15:46.6,5,5\n2023-11-16 18:15:45.6,5,5\n", "line 3: it came before"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5}\n{"no": 1}\n', "line 2: fields must be"),
        ('{"timestamp": 0, "input_length": 513, "output_length": 5, "hash_ids": [0]}', "line 1: hash_ids must have"),
        ('{"timestamp": 0, "input_length": true, "output_length": 5}', "line 1: input_length"),
        (f"{HEADER}\n", "has no requests"),
        (f"{HEADER}\n2023-11-16 18:15:46+00:00,1,0\n", "line 2: 1 and 0 tokens"),
        (f"{HEADER}\n{'x' * 140000},5,5\n", "cannot be read: field larger"),
        ('{"timestamp": 1' + "0" * 400 + ', "input_length": 5, "output_length": 5}', "line 1: timestamp"),
        ("[" * 100000, "line 1: "),
        ('{"a":' * 100000, "line 1: no JSON"),
    ],
)
def test_a_bad_trace_names_its_line(text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t").write_text(text)
    assert main(["plan", "llama3-70b", "--trace", str(tmp_path / "t"), "--devices", "h100:4"]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "--trace" in told


@pytest.mark.long
def test_prompts_and_arrivals_are_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts take time, so their users wait, and those of a burst wait longer."""
    trace = write_trace(tmp_path / "t.csv", [(1500, 60)] * 60)
    arguments = ("llama3-70b", "--trace", trace, "--devices", "h100:4,h20:4", "--rows", "1")
    free = plan_json(capsys, *arguments, "--rate", "2")
    paid = plan_json(capsys, *arguments, "--rate", "2", "--prompts", "here")
    assert paid["rows"][0]["dollars"] > 1.5 * free["rows"][0]["dollars"]
    waited = [next(p["first_p50_s"] for p in t["simulated"] if p["devices"] == "4 h100") for t in (free, paid)]
    assert waited[0] < 0.05 < waited[1]
    crowd = plan_json(capsys, *arguments, "--rate", "200", "--prompts", "here")
    last = [next(p["first_p99_s"] for p in t["simulated"] if p["devices"] == "4 h100") for t in (paid, crowd)]
    assert last[1] > 3 * last[0]
    same = write_trace(tmp_path / "same.csv", [(1500, 60)])
    assert main(["plan", *arguments, "--trace", same, "--rate", "2"]) == 2
    assert "came at one time" in capsys.readouterr().err


def test_too_few_requests_to_play_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "t.csv", [(1000, 200)] * 5)
    assert main(["plan", "llama3-70b", "--trace", trace, "--devices", "h100:4"]) == 0
    assert "no row was played: 5 requests are too few for a replay" in capsys.readouterr().out


def test_a_reason_that_holds_for_all_rows_is_printed_once_with_the_number_to_play(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "llama3-70b", "--trace", "example", "--devices", "h100:4,h20:4", "--simulate", "200"]) == 0
    played = capsys.readouterr().out.rsplit("\n\n", 1)[1].splitlines()
    assert played[0] == "  no row was played: 200 requests are too few for a replay: they never fill the deployment"
    assert len(played) == 2
    assert "--simulate 3624" in played[1], "four for each of the 906 sequences of a row"


def test_a_short_trace_is_repeated_and_runs_agree_with_the_table_and_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is by formulas. Runs of enough requests decide, and say the same within the formulas' error."""
    trace = write_trace(tmp_path / "t.csv", [(1000, 60), (400, 40), (2000, 50)])
    asked = ("llama3-70b", "--trace", trace, "--devices", "h100:4,h20:4", "--max-num-seqs", "24", "--rows", "2")
    formed = plan_json(capsys, *asked, "--simulate", "0")
    played = plan_json(capsys, *asked, "--simulate", "150")
    assert "played" in played["verdict"]["why"]
    assert played["verdict"]["headline"] == formed["verdict"]["headline"]
    table = {row["devices"]: row["dollars"] for row in played["rows"]}
    runs = {run["devices"]: run for run in played["simulated"]}
    assert runs.keys() == table.keys()
    assert {run["requests"] for run in runs.values()} == {150}
    for devices, run in runs.items():
        assert run["dollars"] == pytest.approx(table[devices], rel=0.15), devices


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ("h20:8,h100:2", "2 h100 + "),
        ("h20:4,h100:1", "none with h100 is ranked: 1 h100 + 1 h20, n = 1: 137.5 GB of weights do not fit one h100"),
    ],
)
def test_a_device_that_was_asked_for_has_a_row_or_a_reason(
    devices: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows shown first have none of it."""
    asked = ["plan", "llama3-70b", "--trace", "example", "--devices", devices, "--simulate", "0", "--rows", "1"]
    assert main(asked) == 0
    assert words in capsys.readouterr().out.split("\n\n")[1]


def test_a_sample_trace_is_shipped_and_help_and_errors_name_the_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "llama3-70b", "--devices", "h100:4", "--dry-run", "--trace"]
    assert main([*asked, "example"]) == 0
    assert "on 200 requests" in capsys.readouterr().out
    assert main([*asked, "exmaple"]) == 2
    assert "`--trace example` is a file that Lamina ships" in capsys.readouterr().err
    (tmp_path / "t").write_text("a,b\n")
    assert main([*asked, str(tmp_path / "t")]) == 2
    printed = [capsys.readouterr().err]
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    printed.append(capsys.readouterr().out)
    for name in (HEADER, "input_length", "output_length"):
        assert all(name in text for text in printed)


@pytest.mark.long
def test_a_surrogate_is_named_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = json.dumps({"timestamp": 0, "input_length": 600, "output_length": 50, "hash_ids": [0, 1]})
    with gzip.open(tmp_path / "kimi_ta_SURROGATE.jsonl.gz", "wt") as file:
        file.write("\n".join([line] * 20))
    write_trace(tmp_path / "azure_llm_2023_conv.csv", [(600, 50)] * 20)
    trace = str(tmp_path / "kimi_ta_SURROGATE.jsonl.gz")
    plan = ["plan", "llama3-70b", "--trace", trace, "--devices", "h100:4,h20:4", "--simulate", "0"]
    for command in (
        plan,
        [*plan, "--json"],
        ["plan", "simulate", "--trace", trace, "--policy", "random"],
        ["plan", "simulate", "--trace", trace, "--policy", "random", "--json"],
    ):
        assert main(command) == 0
        assert "SURROGATE" in capsys.readouterr().out, command


@pytest.mark.long
def test_facts_of_a_configuration_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAMINA_CACHE", str(tmp_path / "cache"))
    LlamaConfig(
        num_hidden_layers=8, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, max_position_embeddings=4096, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    trace = write_trace(tmp_path / "t.csv", [(1000, 200)] * 20)
    arguments = (str(tmp_path / "model"), "--trace", trace, "--devices", "h100:1,h20:2", "--max-num-seqs", "64")
    first = plan_json(capsys, *arguments)
    assert first["model"]["kv_bytes_per_token"] == 8 * 2 * 2 * 16 * 2
    assert len(list((tmp_path / "cache" / "facts").glob("*.json"))) == 1
    monkeypatch.setattr("lamina.tools.plan.model_facts.captured_facts", None)
    assert plan_json(capsys, *arguments) == first
