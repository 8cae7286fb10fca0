"""Floats that are rounded while they are loaded: the numbers of compressed-tensors, and refusals in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from lamina import LLM
from lamina.cli.launch import main
from lamina.models.checkpoint import check_room
from lamina.models.load import load
from lamina.models.quantization.quantized_linear import QuantizedLinear
from lamina.ops.gemm import get
from lamina.ops.gemm.quantized import PackedForm

pytestmark = pytest.mark.no_retry
CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
FLOATS = CHECKPOINTS / "llama_floats"
TINY: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.4,
}  # fmt: skip


def forms(model: Any) -> dict[str, PackedForm]:
    layers = {name: each for name, each in model.named_modules() if isinstance(each, QuantizedLinear)}
    return {name: PackedForm.decode(layer.form) for name, layer in layers.items()}


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_logits_are_those_of_weights_that_compressed_tensors_rounds(name: str, backend: str) -> None:
    known = json.loads((FLOATS / f"{name}.json").read_text())
    model: Any = load(FLOATS, dtype="float32", quantization=name, backend=get(backend, 1)).model
    assert len(forms(model)) == 15
    assert {form.bits for layer, form in forms(model).items() if layer != "lm_head"} == {int(name[3:])}
    assert forms(model)["lm_head"].bits == 8
    ids = torch.tensor([known["prompt"] + known["tokens"][:-1]])
    with torch.no_grad():
        logits = model(ids).logits[0]
    assert logits[len(known["prompt"]) - 1 :].argmax(-1).tolist() == known["tokens"]
    due = torch.tensor(known["logits"])
    assert float((logits[-1, : len(due)] - due).abs().max()) < 1e-4 * float(logits.std())


@pytest.mark.parametrize("own_head", [False, True])
def test_tied_embeddings_stay_floats_and_lm_head_is_rounded(tmp_path: Path, own_head: bool) -> None:
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=True)).bfloat16()
    plain.save_pretrained(tmp_path)
    if own_head:  # another one than the embeddings, in a file that says that both are one
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["lm_head.weight"] = torch.randn(96, 64).bfloat16()
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    loaded: Any = load(tmp_path, quantization="int4", backend=get("native", 1)).model
    assert torch.equal(loaded.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    assert type(loaded.lm_head) is QuantizedLinear
    due = tensors["lm_head.weight"] if own_head else plain.lm_head.weight
    with torch.no_grad():
        found = loaded.lm_head(torch.eye(64).bfloat16()).T.float()
    step = due.float().unflatten(1, (-1, 32)).abs().amax(-1) / 127
    assert bool(((found - due.float()).abs() <= 1.1 * step.repeat_interleave(32, 1)).all())
    down = forms(loaded)["model.layers.0.mlp.down_proj"]
    assert (down.bits, down.group) == (4, 32)


def test_inputs_that_no_group_divides_have_a_scale_by_channel(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**TINY | {"intermediate_size": 100})).save_pretrained(tmp_path)
    down = forms(load(tmp_path, quantization="int4", backend=get("native", 1)).model)["model.layers.0.mlp.down_proj"]
    assert (down.bits, down.group) == (8, 0)


def test_a_weight_that_is_no_number_is_named(tmp_path: Path) -> None:
    shutil.copytree(FLOATS, tmp_path / "model")
    tensors = load_file(file := tmp_path / "model" / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 5] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"^model.layers.1.self_attn.o_proj.weight has a value that is no finite"):
        load(tmp_path / "model", quantization="int8", backend=get("native", 1))


@pytest.mark.parametrize(
    ("model", "asked", "words"),
    [
        ("llama_awq", "int8", "--quantization int8 rounds floats, and {} is stored as awq: leave it out"),
        ("llama_q4_0.gguf", "int4", "--quantization int4 rounds floats, and {} is stored as gguf: leave it out"),
        ("llama_awq", "gptq", "--quantization gptq: {} is stored as awq: leave it out"),
        ("llama_floats", "awq", "--quantization awq: {} is not quantised: use int8 or int4, or leave it out"),
        ("llama_floats", "int3", "--quantization must be int8 or int4, or the format of a quantised checkpoint "),
    ],
)
def test_a_contradiction_is_refused_in_one_line(
    model: str, asked: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(CHECKPOINTS / model)
    assert main(["generate", path, "--prompt", "a", "--dry-run", "--quantization", asked]) == 2
    error = capsys.readouterr().err
    assert words.format(path) in error
    assert len(error.strip().splitlines()) == 1
    with pytest.raises(ValueError, match=f"quantization.*{'must' if asked == 'int3' else asked}"):
        LLM(path, quantization=asked)


@pytest.mark.parametrize(
    ("model", "asked"), [("llama_awq", "awq"), ("llama_gptq", "gptq_marlin"), ("llama_q4_0.gguf", "gguf")]
)
def test_vllms_name_of_the_stored_format_changes_nothing(model: str, asked: str) -> None:
    given, plain = (load(CHECKPOINTS / model, quantization=name, backend=get("native", 1)) for name in (asked, ""))
    assert forms(given.model) == forms(plain.model) != {}


def test_a_module_or_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="^--quantization does not go with a torch.nn.Module as the model"):
        load(LlamaForCausalLM(LlamaConfig(**TINY)), quantization="int8")
    with pytest.raises(ValueError, match="^--quantization int8 or int4 does not go with --compute-device cuda"):
        load(FLOATS, quantization="int8")


def test_room_counts_rounded_bytes() -> None:
    size = (FLOATS / "model.safetensors").stat().st_size
    with pytest.raises(ValueError, match="do not fit"):
        check_room(FLOATS, 1, int(0.6 * size))
    check_room(FLOATS, 1, int(0.6 * size), "int8")
    check_room(FLOATS, 1, int(0.35 * size), "int4")
    with pytest.raises(ValueError, match="do not fit"):
        check_room(FLOATS, 1, int(0.2 * size), "int4")


@pytest.mark.long
def test_explain_counts_the_bytes_of_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = []
    for more in ([], ["--no-weights"]):
        for name in ("", "int8", "int4"):
            assert main(["explain", str(FLOATS), "--json", "--quantization", name, *more]) == 0
            numbers.append(json.loads(capsys.readouterr().out)["weight_bytes"])
    assert numbers[:3] == numbers[3:]
    plain, eight, four = numbers[:3]
    assert plain > eight > four
    model: Any = load(FLOATS, quantization="int4", backend=get("native", 1)).model
    held = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    assert held - 100 < four <= held, "apart from rotary frequencies"
