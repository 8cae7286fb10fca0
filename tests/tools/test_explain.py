"""``lamina-launch explain`` as a user calls it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.models.hybrids import build_hybrid
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from lamina.cli.launch import main
from lamina.facts.report import alike_items
from lamina.tools.plan.model_facts import model_facts

CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"

_SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def _config(directory: Path, num_layers: int) -> str:
    config = LlamaConfig(num_hidden_layers=num_layers, dtype="bfloat16", architectures=["LlamaForCausalLM"], **_SIZES)
    config.save_pretrained(directory)
    return str(directory)


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["explain", *arguments, "--json"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


@pytest.mark.long
def test_plan_from_a_configuration_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = _json(capsys, _config(tmp_path, 8), "--no-weights")
    assert (facts["num_slices"], facts["stamped"], facts["stamped_layers"]) == (9, True, 4)
    assert [c["bytes_per_token"] for c in facts["cuts"]] == [132] * 7 + [128]
    assert (facts["messages"]["q"], facts["messages"]["kv"], facts["messages"]["o"]) == (128, 128, 128)
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    assert facts["weight_bytes"] == 2 * (8 * layer + 2 * 96 * 64 + 64) + 8 * 4  # and 8 fp32 frequencies
    assert _json(capsys, str(tmp_path / "config.json"), "--no-weights")["cuts"] == facts["cuts"]


@pytest.mark.long
def test_alternating_windows_are_stamped_by_their_period(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = (["sliding_attention"] * 2 + ["full_attention"]) * 4
    special = {"layer_types": kinds, "sliding_window": 16, "head_dim": 16, "architectures": ["Gemma3ForCausalLM"]}
    Gemma3TextConfig(num_hidden_layers=12, **special, **_SIZES).save_pretrained(tmp_path)
    facts = _json(capsys, str(tmp_path), "--no-weights")
    assert (facts["num_slices"], facts["stamped_layers"]) == (13, 3)


@pytest.mark.long
def test_a_model_with_weights_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = LlamaConfig(num_hidden_layers=3, **_SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert main(["explain", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "3 attention layers" in text
    square, kv, mlp = 64 * 64, 2 * 64 * 32, 3 * 64 * 96
    early = round(100 * (2 * square + mlp) / (2 * square + mlp + kv))
    assert f"Q leaves after {early} % of a slice's GEMM weights, K and V after 100 %" in text
    assert main(["explain", str(tmp_path), "--no-early-q"]) == 0
    assert "(--no-early-q): Q, K and V leave together" in capsys.readouterr().out
    assert "4 slices of 4 kinds (all captured); row independence shown by rule and by running" in text
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    help = " ".join(capsys.readouterr().out.split())
    for column in ("operators", "GEMM before Q", "Q to KV", "Q first", "cut N", "uncut", "messages N"):
        assert f'"{column}"' in help, "each column is defined"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-cache-dtype", "int4"], "--kv-cache-dtype must be one of auto, int8, fp8, not 'int4'"),
        (["--length", "0"], "--length must be at least 1, not 0"),
        (["--dtype", "int3"], "--dtype int3"),
    ],
)
def test_bad_flags_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["explain", _config(tmp_path, 2), "--no-weights", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_nothing_is_planned_when_only_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = _config(tmp_path, 2)
    assert main(["explain", model, "--no-weights", "--dry-run"]) == 0
    assert "LlamaForCausalLM) without weights" in capsys.readouterr().out
    assert main(["explain", model, "--length", "7", "--print-config"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["length"] == 7
    assert not {"command", "print_config", "dry_run"} & set(printed)
    assert main(["explain", str(tmp_path / "absent"), "--no-weights"]) == 2


@pytest.mark.long
def test_code_of_a_model_is_run_only_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _config(tmp_path, 2)
    own = "from transformers import LlamaConfig, LlamaForCausalLM\n"
    own += 'class OwnConfig(LlamaConfig):\n    model_type = "own"\n'
    own += "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    (tmp_path / "own.py").write_text(own)
    config = json.loads((tmp_path / "config.json").read_text())
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": names}))
    assert main(["explain", path, "--no-weights"]) == 2
    assert "--trust-remote-code" in capsys.readouterr().err
    assert _json(capsys, path, "--no-weights", "--trust-remote-code")["architecture"] == "OwnForCausalLM"


@pytest.mark.long
@pytest.mark.parametrize("flags", [[], ["--no-weights"], ["--no-weights", "--tensor-parallel-size", "2"]])
def test_a_model_is_traced_for_the_first_explanation_alone(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LlamaConfig(num_hidden_layers=3, **_SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    monkeypatch.setenv("LAMINA_CACHE", str(tmp_path / "cache"))

    def told(*more: str) -> dict[str, Any]:
        """But for times, and the names that tracing gives to the number of rows, which are part of signatures."""
        facts = _json(capsys, str(tmp_path / "model"), *flags, *more)
        facts["timings_s"] = None
        for each in facts["slices"]:
            each["signature"] = None
        return facts

    def traced(*_: object, **__: object) -> None:
        raise AssertionError("it is traced again")

    first = told()
    monkeypatch.setattr(sys.modules["lamina.converter.convert"], "capture", traced)
    assert told() == first
    with pytest.raises(AssertionError, match="traced again"):  # code that comes with a model may be anything
        told("--trust-remote-code")


@pytest.mark.long
def test_kv_that_a_budget_keeps_is_told_by_tier_of_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = [_config(tmp_path, 4), "--no-weights", "--length", "1000", "--kv-sparsity", "evict:budget=256"]
    facts = _json(capsys, *plan, "--kv-cache-memory-bytes", "10MB")
    token = 2 * (16 + 16) * 2  # KV heads, K and V of 16 numbers in bf16, in one layer
    assert [(t["name"], t["layers"], t["token_bytes"]) for t in facts["kv_tiers"]["tiers"]] == [
        ("full", 1, token), ("sparse", 3, 3 * token)
    ]  # fmt: skip
    assert facts["kv_tiers"]["gain"] == pytest.approx(4000 / 1768)
    assert facts["kv_split"]["sparse"] > 1.5 * facts["kv_split"]["full"] > 0
    assert main(["explain", *plan]) == 0
    assert "2.26 times as many sequences" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kv-cache-memory-bytes", "1GB"], "--kv-cache-memory-bytes needs --kv-sparsity evict, because "),
        (["--kv-sparsity", "evict:budget=0"], "--kv-sparsity evict:budget="),
        (["--kv-sparsity", "evict:budget=64"], "--kv-sparsity evict:budget=64 has no room"),
        (
            ["--kv-sparsity", "evict:budget=256", "--kv-cache-memory-bytes", "much"],
            "--kv-cache-memory-bytes must be a size",
        ),
        (
            ["--kv-sparsity", "evict:budget=256,full-layers=4"],
            "--kv-sparsity evict:full-layers=4 leaves none of 4 layers",
        ),
        (["--kv-sparsity", "evict:budget=256", "--kv-cache-memory-bytes", "10KB"], "raise --kv-cache-memory-bytes"),
    ],
)
def test_budgets_that_nothing_can_be_told_of_are_one_line(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", _config(tmp_path, 4), "--no-weights", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.parametrize("name", ["llama_int4_group", "llama_awq", "llama_q8_0.gguf"])
def test_packed_weights_are_counted_without_reading_them(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The counts are those of a model whose weights are read, and below two bytes for each of its numbers."""
    model, sizes = str(CHECKPOINTS / name), []
    for how in (["--no-weights"], []):
        assert main(["explain", model, "--json", *how]) == 0
        facts = json.loads(capsys.readouterr().out)
        sizes.append([facts["weight_bytes"], *(each["weight_bytes"] for each in facts["slices"])])
    assert sizes[0] == sizes[1]
    plain = model_facts(model, dtype="bfloat16")
    packed = model_facts(model, dtype="bfloat16", packed=True)
    assert packed.weight_bytes == sizes[0][0] < 0.9 * plain.weight_bytes, "a plan for CPUs counts them, too"
    for group in packed.products:
        assert group.work(1)[0] == group.count * group.weight_bytes, "a row reads all of them"
    assert sum(g.work(1)[1] for g in packed.products) == sum(g.work(1)[1] for g in plain.products)


def test_a_plan_counts_packed_bytes_where_all_devices_are_cpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = '[{}]\ntitle = "A"\ntflops = 2\nmemory = "64 GB"\nbandwidth = 40\nnetwork = 1\nsource = "us"\n{}'
    file = tmp_path / "devices.toml"
    file.write_text(entry.format("one", "cpu = true\n") + entry.format("other", ""))
    prices = tmp_path / "prices.toml"
    prices.write_text('[book]\ndate = "2026"\ncurrency = "USD"\nsource = "us"\n[one]\nhour = 1\n[other]\nhour = 1\n')
    trace = tmp_path / "trace.csv"
    times = [f"2024-05-10 00:00:{second:02}.0000000,40,20" for second in range(40)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *times, ""]))
    files = ["--trace", str(trace), "--device-file", str(file), "--prices", str(prices)]
    sizes = []
    for name in ("one", "other"):
        flags = ["--devices", f"{name}:4", "--json", "--simulate", "0", *files]
        assert main(["plan", str(CHECKPOINTS / "llama_int4_group"), *flags]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["model"]["weight_bytes"])
    assert sizes[0] < 0.9 * sizes[1]


@pytest.mark.long
def test_a_hybrid_model_shows_its_mixers_with_their_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_hybrid("qwen3_next").save_pretrained(tmp_path)
    facts, state = _json(capsys, str(tmp_path)), 4 * (3 * (4 + 2 * 2) * 16 + 4 * 16 * 16)  # history, and S of each head
    assert [layer["exchange"] for layer in facts["messages"]["layers"]] == [3]
    assert [(m["exchange"], m["kind"], m["state"]) for m in facts["mixers"]] == [
        (n, "gated_delta", state) for n in range(3)
    ]
    half, alone = (_json(capsys, str(tmp_path), "--dtype", "bfloat16", *more) for more in ([], ["--no-weights"]))
    assert (alone["mixers"], alone["cuts"]) == (half["mixers"], half["cuts"])
    assert main(["explain", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "1 attention layer and 3 mixers (recurrent layers)" in text
    for line in (
        r"  messages +3    768  Q 256, KV 256, O 256",
        rf"  mixers +0-2    800  inputs 544, output 256; gated_delta, state {state:,}",
        r"  a sequence has 16\.9 kB of states, and 256 B of K and V for each token",
    ):
        assert re.search(f"^{line}$", text, re.MULTILINE), text


def test_labels_of_many_layers_are_short() -> None:
    each = [{"exchange": n, "size": n % 4 == 3} for n in range(48)]
    assert [label for label, _ in alike_items(each, ("size",))] == ["0-2, 4-6, ..., 44-46", "3, 7, ..., 47"]
    assert [label for label, _ in alike_items(each[:9], ("size",))] == ["0-2, 4-6, 8", "3, 7"]
