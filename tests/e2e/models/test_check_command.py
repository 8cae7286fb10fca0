"""``lamina-launch check`` on real engines: kept promises on many families, and broken ones that must turn it red.

Covers: lamina/tools/check/server_case.py.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES, Family
from torch import Tensor

from lamina.cli.launch import main
from lamina.config.flat_options import make_config
from lamina.executor.elastic import MemoryResizer, ResizePlan
from lamina.executor.launchers import local
from lamina.kv.paged_cache import LayerCache, SlotMapping
from lamina.kv.stored_format import StoredRows
from lamina.ops import attention
from lamina.ops.attention.reference import ReferenceAttention
from lamina.tools.check.matrix import BASE, BASE_OPTIONS, FIXED, LENDING, Exactness, Resize, Setting
from lamina.tools.check.runner import Check
from lamina.tools.check.verdict import Verdict, failed_verdict
from lamina.workers.compute.compute_worker import ComputeWorker
from lamina.workers.memory import main as memory_main
from lamina.workers.memory.kv_transfer import reshard
from lamina.workers.memory.kv_transfer.block_parts import scatter

pytestmark = [pytest.mark.usefixtures("no_child_left"), pytest.mark.timeout(300)]
NAMES = ("gpt2", "llama-gqa", "gemma2", "falcon-mqa", "mixtral")
FIVE = [f for f in FAMILIES if f.name in NAMES]
# Those that take long to cut are slow.
FIRST = [pytest.param(f, marks=() if f.name in NAMES[:3] else pytest.mark.slow, id=f.name) for f in FIVE]

FamilyPath = Callable[[Family], Path]


def _uncut(model: str) -> set[tuple[str, str]]:
    note = f"--tensor-parallel-size: {model} has no plan in transformers for how its layers are cut: leave it at 1"
    return {(axis, note) for axis in ("tensor parallel", "lost rank", "quantization")}


# The runs of a family that are refused: axis, and the note. Windows free the blocks that would be kept.
ONE_KV_HEAD = (
    "compares blocks where all tokens of a head are, and 1 KV head cannot be dealt out whole: use --memory-workers, or "
    "--memory-weights, by which heads can"
)
REFUSED = {
    "gpt2": _uncut("GPT2LMHeadModel"),
    "falcon-mqa": _uncut("FalconForCausalLM")
    | {("kv sparsity", f"--kv-sparsity {mode} {ONE_KV_HEAD}") for mode in ("evict", "select")},
    "gemma2": {
        ("restore", "no KV was loaded: prompts need more than 128 tokens"),
        ("preemption", "no sequence was preempted: a window frees blocks"),
    },
}


@pytest.fixture(scope="session")
def family_path(tmp_path_factory: pytest.TempPathFactory) -> FamilyPath:
    made: dict[str, Path] = {}

    def path(family: Family) -> Path:
        if family.name not in made:
            made[family.name] = tmp_path_factory.mktemp(family.name)
            family.build().save_pretrained(made[family.name])
        return made[family.name]

    return path


def check(model: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, what it printed as JSON, and its progress."""
    capsys.readouterr()
    status = main(["check", str(model), "--json", *flags])
    printed = capsys.readouterr()
    return status, json.loads(printed.out), printed.err


def held(found: dict[str, Any]) -> None:
    assert found["held"], [r for r in found["runs"] if r["held"] is False]
    assert all(r["held"] for r in found["runs"]), "nothing was refused"
    assert all(r["same_plans"] for r in found["runs"] if r["promised"] == "bitwise" and r["compared_with"] == "base")
    assert all(r["tokens"] >= 24 for r in found["runs"])


@pytest.mark.long
def test_a_model_keeps_what_is_promised(tiny_lm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    axes = ("memory weights", "kv sparsity", "dtype")
    status, found, progress = check(tiny_lm, capsys, "--max-tokens", "16", *(f"--axis={a}" for a in axes))
    held(found)
    assert status == 0
    assert [r["axis"] for r in found["runs"]] == ["base", axes[0], *[axes[1]] * 4, axes[2]]
    assert "7/7 dtype --dtype bfloat16: held" in progress
    base, _, *sparse, dtype = found["runs"]
    assert [r["promised"] for r in sparse] == ["nothing", "bitwise"] * 2
    assert {r["exactness"] for r in sparse[1::2]} == {"bitwise"}
    assert all(r["logit_error"] > 10 * base["logit_error"] for r in sparse), "KV was left out"
    assert base["same_as_generate"] == base["prompts"] == 6
    assert 0.0 < base["logit_error"] < 1e-4
    assert base["logit_error"] < dtype["logit_error"] < dtype["bound"]


@pytest.mark.long
@pytest.mark.parametrize("family", FIRST)
def test_families_keep_what_is_promised(
    family: Family, family_path: FamilyPath, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run that splits the heads, without overlap; the rest is slow."""
    status, found, _ = check(family_path(family), capsys, "--max-tokens", "16", "--axis", "overlap")
    held(found)
    assert (status, len(found["runs"])) == (0, 2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FIVE, ids=lambda f: f.name)
def test_families_keep_what_is_promised_on_every_axis(
    family: Family, family_path: FamilyPath, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found, _ = check(family_path(family), capsys)
    refused = {(r["axis"], r["note"]) for r in found["runs"] if r["held"] is None}
    assert refused == REFUSED.get(family.name, set())
    found["runs"] = [r for r in found["runs"] if r["held"] is not None]
    held(found)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_matrix(tiny_lm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, found, _ = check(tiny_lm, capsys, "--all")
    assert found["held"], found["broken"]
    refused = {r["setting"] for r in found["runs"] if r["held"] is None}
    hardware, sparse = ("verbs", "mlx5", "gin", "cuda", "flashinfer"), {s for s in refused if "--kv-sparsity" in s}
    assert all(any(name in s for name in hardware) for s in refused - sparse), refused
    assert len(sparse) == 3, "tokens of a head lie on several workers: three, striped, lent"
    assert any(r["setting"] == "--memory-workers 2 --transport tcp" and r["held"] for r in found["runs"])


@pytest.mark.long
def test_own_prompts(tiny_lm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--prompt", "def read(path):\n", "--prompt", "import os\n", "--max-tokens", "24", "--axis", "again")
    status, found, _ = check(tiny_lm, capsys, *flags)
    held(found)
    assert status == 0
    assert [r["prompts"] for r in found["runs"]] == [2, 2]


class Careless(ReferenceAttention):
    """An attention that is slightly wrong."""

    def finish(self, op: Any, prepared: Any, stored: Any, q: Tensor, kv: StoredRows, out: Tensor) -> None:
        super().finish(op, prepared, stored, q, kv, out)
        out.mul_(1.05)


class Broken(ReferenceAttention):
    """An attention that fails."""

    def finish(self, *args: Any) -> None:
        raise RuntimeError("out of order")


@pytest.fixture
def add_backend(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[ReferenceAttention]], None]:
    def add(backend: type[ReferenceAttention]) -> None:
        module = ModuleType("lamina.ops.attention.added")
        module.open_backend = lambda device, dtype, store_dtype: backend(device)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(attention.BACKENDS, "added", "added")

    return add


@pytest.mark.long
def test_a_wrong_attention_gives_status_1_and_its_axis(
    llama_path: Path, add_backend: Callable[[type[ReferenceAttention]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    add_backend(Careless)
    assert main(["check", str(llama_path), "--axis", "attention", "--max-tokens", "8"]) == 1
    printed = capsys.readouterr()
    assert "2/2 attention --attention-backend added: BROKEN" in printed.err
    assert "1 of 2 promises BROKEN (attention)" in printed.out


@pytest.fixture(scope="module")
def based(llama_path: Path) -> Check:
    """A base run that the broken ones are compared with."""
    comparison = Check(str(llama_path), make_config(BASE_OPTIONS), [], max_tokens=8, seed=1)
    assert [v.held for v in comparison.run([BASE])] == [True]
    return comparison


SPLIT = Setting("memory workers", Exactness.BITWISE, BASE, {"memory_workers": 2})


@pytest.mark.long
def test_a_forgetful_memory_worker_is_found(based: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    write = LayerCache.write

    def forget(self: LayerCache, at: SlotMapping, rows: StoredRows) -> None:
        write(self, at, StoredRows(rows.k * 0.0, rows.v * 0.0))

    monkeypatch.setattr(LayerCache, "write", forget)
    (found,) = based.run([SPLIT])
    assert (found.held, found.exactness) == (False, "nothing")
    assert found.logit_error > 0.01


@pytest.mark.long
def test_a_single_bit_is_found(based: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    write = LayerCache.write

    def jog(self: LayerCache, at: SlotMapping, rows: StoredRows) -> None:
        write(self, at, StoredRows(rows.k, torch.nextafter(rows.v, torch.full_like(rows.v, torch.inf))))

    monkeypatch.setattr(LayerCache, "write", jog)
    (found,) = based.run([SPLIT])
    assert (found.held, found.exactness) == (False, "token-equal")
    assert "first difference" in found.note


@pytest.mark.long
def test_rounding_that_depends_on_batch_mates_is_found(based: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ComputeWorker.__init__

    def uneven(run: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        def run_unevenly(*inputs: Any) -> tuple[Tensor, ...]:
            rows = inputs[0].shape[0]
            return tuple(x * (1 + 1e-6 * rows) if x.is_floating_point() else x for x in run(*inputs))

        return run_unevenly

    def make_uneven(self: ComputeWorker, program: Any, *args: Any, **options: Any) -> None:
        program = SimpleNamespace(slices=[uneven(run) for run in program.slices])
        made(self, program, *args, **{**options, "deterministic": False})

    monkeypatch.setattr(ComputeWorker, "__init__", make_uneven)
    alone = Setting("batch mates", Exactness.BITWISE, FIXED, FIXED.options, runs_alone=True)
    fixed, mates = based.run([FIXED, alone])
    assert fixed.held
    assert (mates.held, mates.exactness) == (False, "token-equal")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_lost_worker_is_a_breach_and_the_check_goes_on(
    based: Check, add_backend: Callable[[type[ReferenceAttention]], None]
) -> None:
    add_backend(Broken)
    lost, kept = based.run([Setting("attention", Exactness.BOUNDED, BASE, {"attention": "added"}), SPLIT])
    assert lost.held is False
    assert "worker" in lost.note, "whoever speaks first"
    assert kept.held


def test_workers_that_the_prompts_leave_idle_are_named(based: Check) -> None:
    options = {"memory_workers": 7, "partition": "request"}  # for six prompts
    (found,) = based.run([Setting("partition", Exactness.BITWISE, BASE, options)])
    assert found.held
    assert "nothing to attend for memory-" in found.note


@pytest.mark.long
def test_a_row_that_lends_has_loans_and_the_same_bits(based: Check) -> None:
    lends = Setting("partition", Exactness.BITWISE, BASE, {"memory_workers": 3, "partition": LENDING})
    (found,) = based.run([lends])
    assert (found.held, found.exactness) == (True, "bitwise")
    assert re.fullmatch("stripes lent: [1-9]", found.note), found.note
    (moved,) = based.run([replace(lends, changes=(Resize(4), Resize(3, (0,))))])
    assert (moved.held, moved.exactness) == (True, "bitwise")
    assert re.fullmatch("stripes lent: [1-9]; bytes of KV moved: [1-9][0-9]*", moved.note), moved.note


PLANNED = Setting(
    "planned change", Exactness.BITWISE, BASE, {"memory_workers": 2}, changes=(Resize(3), Resize(2, (0,)))
)


@pytest.mark.long
def test_kv_that_is_damaged_as_it_moves_is_found(based: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(stored: Any, ids: Any, message: Any, staging: Any) -> None:
        scatter(stored, ids, message * 0, staging)

    (sound,) = based.run([PLANNED])
    assert (sound.held, sound.exactness) == (True, "bitwise"), sound.note
    assert re.fullmatch("bytes of KV moved: [1-9][0-9]*", sound.note), sound.note
    monkeypatch.setattr(reshard, "scatter", forget)
    (found,) = based.run([PLANNED])
    assert (found.held, found.exactness) == (False, "nothing")


def test_a_change_that_comes_to_nothing_is_a_broken_promise(based: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = MemoryResizer.begin

    def begin_late(self: MemoryResizer, change: ResizePlan, leaving: Sequence[int] = ()) -> None:
        begin(self, change, leaving)
        self._deadline = -math.inf

    monkeypatch.setattr(MemoryResizer, "begin", begin_late)
    (verdict,) = based.run([PLANNED])
    assert verdict.held is False
    assert "memory workers could not come or go: new memory workers took too long" in verdict.note


@pytest.mark.long
def test_sequences_that_end_before_a_change_are_no_run_of_it(based: Check) -> None:
    many = replace(PLANNED, changes=PLANNED.changes * 9)
    (found,) = based.run([many])
    assert found.held is None
    assert "raise --max-tokens" in found.note


def test_what_cannot_be_run_is_refused(based: Check) -> None:
    options = {"memory_workers": 2, "memory_weights": "1,1000"}
    unfit = Setting("memory weights", Exactness.BITWISE, BASE, options)
    (found,) = based.run([unfit])
    assert found.held is None
    assert "would get nothing" in found.note
    (behind,) = based.run([Setting("x", Exactness.BITWISE, unfit)])
    assert (behind.held, behind.note) == (None, "memory weights could not be run")


@pytest.mark.slow
def test_a_forgetful_worker_process_is_found(
    llama_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(local.ROLES, "memory", ("forgetful", "serve_memory"))
    monkeypatch.setitem(sys.modules, "forgetful", memory_main)  # the base's worker, a thread of this process, is sound
    status, found, _ = check(llama_path, capsys, "--axis", "transport", "--max-tokens", "8")
    assert (status, found["broken"]) == (1, ["transport"])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_check_that_is_ended_early_prints_the_table_of_what_was_run(
    number: int, status: int, llama_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: Check, settings: Sequence[Setting]) -> Iterator[Verdict]:
        yield failed_verdict(settings[1], "broken by this test", held=False)
        os.kill(os.getpid(), number)
        time.sleep(60.0)  # the signal ends it

    monkeypatch.setattr(Check, "run", run)
    try:
        found = main(["check", str(llama_path)])
    except SystemExit as end:
        found = end.code  # type: ignore[assignment]
    printed = capsys.readouterr().out
    assert found == status
    assert "again -: BROKEN: broken by this test".replace(" -", "") in printed
    assert re.search(r"ended early, \d\d settings were not run; ", printed)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--axis", "colour"], "--axis must be one of base, again, memory workers"),
        (["--max-tokens", "1"], "--max-tokens"),
        (["--max-tokens", "512"], "--max-tokens 512 leaves no room"),
        (["--prompt-seed", "-1"], "--prompt-seed"),
        (["--attention-backend", "magic"], "--attention-backend"),
        (["--prompt", "no tokenizer"], "tokenizer"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    flags: list[str], words: str, llama_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["check", str(llama_path), *flags]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_a_missing_model_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "no/such/model"]) == 2
    assert "no/such/model" in capsys.readouterr().err


def test_dry_run_and_print_config(llama_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(llama_path), "--dry-run", "--all"]) == 0
    text = capsys.readouterr().out
    assert "transport: --memory-workers 2 --transport tcp (bitwise)" in text
    assert main(["check", "m", "--print-config", "--axis", "dtype"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["base"]["transport"] == "loopback"
    assert [r["axis"] for r in printed["runs"]] == ["base", "dtype"]
