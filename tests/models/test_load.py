"""Loading: the right weights, mapped and not copied; and one clear line for everything that is wrong.

Covers: lamina/models/checkpoint.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Phi3Config,
)

from lamina.models.checkpoint import check_room
from lamina.models.errors import ModelError, UnsupportedModelError
from lamina.models.load import NO_LIMIT, from_config, load, longest_model_len, max_model_len

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": [1, 5],
    "pad_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16().save_pretrained(path)
    return path


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def refused(source: Any, words: str, kind: type[ModelError] = ModelError, **options: Any) -> None:
    with pytest.raises(kind, match=words) as caught:
        load(source, **options)
    assert "\n" not in str(caught.value)


def test_a_directory(whole: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    loaded = load(str(whole), progress=lambda *tick: seen.append(tick))
    assert loaded.dtype == torch.bfloat16
    assert loaded.eos_token_ids == (1, 5)
    assert loaded.max_model_len == 128
    assert loaded.path == whole
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    stages = ["opening the checkpoint", "loading weights", "reading weights (MB)"]
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == stages
    counts = [t[1:] for t in seen if t[0] == "loading weights"]
    assert counts[-1][0] == counts[-1][1] > 0
    assert sorted(counts) == counts


def test_end_tokens_that_cannot_be_drawn_are_left_out() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.generation_config.eos_token_id = [-1, 5, SHAPE["vocab_size"]]
    assert load(model).eos_token_ids == (5,)


ABSENT = object()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("file", [True, False])
def test_end_tokens_are_those_of_generate(model: Path, file: bool, size: int) -> None:
    """generation_config.json decides where it is there, even if it has none; else config.json does."""
    generation = model / "generation_config.json"
    for own, other in product((ABSENT, None, 5, [5, 6]), (ABSENT, None, 7, [7, 8])):
        edit(model / "config.json", partial(set_eos, own))
        if file:
            generation.write_text(json.dumps({} if other is ABSENT else {"eos_token_id": other}))
        else:
            generation.unlink(missing_ok=True)
        reference = AutoModelForCausalLM.from_pretrained(model)
        eos = reference.generation_config.eos_token_id
        decided = other if file else own
        assert eos == (None if decided is ABSENT else decided)
        assert list(load(model, size=size).eos_token_ids) == (
            [] if eos is None else eos if type(eos) is list else [eos]
        )


def set_eos(value: object, config: dict[str, Any]) -> None:
    config.pop("eos_token_id", None)
    if value is not ABSENT:
        config["eos_token_id"] = value


@pytest.mark.parametrize("eos", ["</s>", "5", [5, None], 5.5, True])
def test_end_tokens_that_are_no_ids_are_refused(model: Path, eos: object) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    refused(model, "eos_token_id of the model's GenerationConfig has (None|'</s>'|'5'|5.5|True): give ids of tokens")


def test_dtypes(whole: Path) -> None:
    plain, wide = load(whole).model, load(whole, dtype="float32").model
    for a, b in zip(plain.parameters(), wide.parameters(), strict=True):
        assert (a.dtype, b.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(a.float(), b)
    refused(whole, "--dtype int8 is not one of auto, float32", dtype="int8")


def test_weights_are_mapped_from_the_file(whole: Path) -> None:
    """A change of the file shows in the tensors, so they are not copies of it."""
    loaded = load(whole)
    weight = loaded.model.model.layers[0].mlp.up_proj.weight
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(whole) in line]
    ranges = [[int(x, 16) for x in line.split()[0].split("-")] for line in mapped]
    assert any(low <= weight.data_ptr() < high for low, high in ranges)


def test_a_module_is_taken_as_it_is() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).train()
    loaded = load(model)
    assert loaded.model is model
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert load(model, dtype="float32").dtype == torch.float32
    refused(model, r"--dtype bfloat16 on a module of torch.float32", dtype="bfloat16")
    refused(nn.Linear(2, 2), "Linear is not a Hugging Face model")


def test_paths_that_are_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused("/no/such/place", "no such model directory: /no/such/place")
    refused("./nothing", "no such model directory: ./nothing")
    refused("./nothing.gguf", "no such GGUF file: ./nothing.gguf")
    refused(str(tmp_path), "is no model directory: it has no config.json")
    (tmp_path / "file.bin").write_text("x")
    refused(str(tmp_path / "file.bin"), "is a file: give the directory")
    refused("somebody/no-such-model", "is not a directory here, and the hub cannot be reached")


@pytest.mark.parametrize(
    ("change", "words", "kind"),
    [
        (lambda c: c.update(model_type="novel"), "transformers has no architecture 'novel'", UnsupportedModelError),
        (lambda c: c.update(model_type="vit"), "'vit' is not a causal language model", UnsupportedModelError),
        (lambda c: c.pop("model_type"), "names no model_type", ModelError),
        (lambda c: c.update(model_type=["llama"]), "names no model_type", ModelError),
        (lambda c: c.update(is_encoder_decoder=True), "is an encoder-decoder", UnsupportedModelError),
        (lambda c: c.update(quantization_config={"quant_method": "fp8"}), "are quantised, and none is", ModelError),
        (lambda c: c.update(quantization_config="hqq"), r"quantised by hqq", UnsupportedModelError),
        (lambda c: c.update(num_attention_heads="many"), "not a valid configuration", ModelError),
        (lambda c: c.update(hidden_size=48), r"lm_head.weight is \[64, 32\] in its file, and \[64, 48\]", ModelError),
    ],
)
def test_bad_configurations(model: Path, change: Any, words: str, kind: type[ModelError]) -> None:
    edit(model / "config.json", change)
    refused(model, words, kind)


@pytest.mark.parametrize("text", ["", "{", "[]", '"llama"'])
def test_a_config_that_is_not_json(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    refused(model, "config.json (cannot be read|is not a JSON object)")


def test_code_of_a_model_is_not_run_unless_asked(model: Path, tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    code = f"""
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({str(witness)!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
    (model / "own.py").write_text(code)
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    edit(model / "config.json", lambda c: c.update(auto_map=names, model_type="own"))
    refused(model, "auto_map in config.json.*--trust-remote-code")
    assert not witness.exists()
    assert type(load(model, trust_remote_code=True).model).__name__ == "OwnForCausalLM"
    assert witness.exists()


def test_code_that_is_not_needed_is_not_run(model: Path) -> None:
    """Phi-3 and others have code for old versions of transformers, which has their architecture now."""
    (model / "own.py").write_text("raise SystemExit('ran')")
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    edit(model / "config.json", lambda c: c.update(auto_map=names))
    assert type(load(model).model).__name__ == "LlamaForCausalLM"
    edit(model / "config.json", lambda c: c.update(architectures=["OwnForCausalLM"]))
    refused(model, "auto_map in config.json.*--trust-remote-code")


def test_pickled_weights_are_refused(model: Path) -> None:
    torch.save(load(model).model.state_dict(), model / "pytorch_model.bin")
    load(model)
    (model / "model.safetensors").unlink()
    refused(model, r"pickled weights \(pytorch_model.bin\).*save_pretrained")


@pytest.mark.parametrize("lacks", ["config.json", "model.safetensors"])
def test_a_directory_of_gguf_files_is_refused_with_the_file_to_give(model: Path, lacks: str) -> None:
    for name in ("Mmproj-F16.gguf", "Qwen-Q4_0.gguf"):
        (model / name).write_bytes(b"GGUF")
    load(model)
    (model / lacks).unlink()
    refused(model, f"{model} has no {lacks}: give its GGUF file, as {model}/Qwen-Q4_0.gguf")


def test_files_that_transformers_does_not_read_decide_nothing(model: Path) -> None:
    save_file({"stray.weight": torch.ones(4, 4)}, model / "a_stray.safetensors")
    assert load(model).dtype == torch.bfloat16
    (model / "model.safetensors").unlink()
    refused(model, "no weights: no model.safetensors; no model.safetensors.index.json names a_stray.safetensors")


def test_missing_and_damaged_weights(model: Path) -> None:
    file = model / "model.safetensors"
    data = file.read_bytes()
    for size in (0, 5, 100, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:size])
        refused(model, "model.safetensors is truncated or corrupt")
    file.write_bytes(b"\xff" * 64 + data[64:])
    refused(model, "model.safetensors is truncated or corrupt")
    file.unlink()
    refused(model, "has no weights: no model.safetensors")
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    refused(model, "is a LoRA adapter of some/base, not a model: merge the two once with peft")
    (model / "config.json").unlink()
    refused(model, "is a LoRA adapter of some/base")


def test_a_missing_shard(whole: Path, tmp_path: Path) -> None:
    load(whole).model.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    shards = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(shards) > 1
    load(tmp_path / "m")
    shards[1].unlink()
    refused(tmp_path / "m", f"{shards[1].name} is missing")


@pytest.mark.parametrize("shards", [["a"], {"a": 5}, None])
def test_an_index_that_names_no_files(model: Path, shards: object) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    refused(model, "model.safetensors.index.json has no weight_map")


def test_weights_that_the_model_lacks_are_never_invented(tmp_path: Path) -> None:
    LlamaForSequenceClassification(LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    refused(tmp_path, "lacks weights of LlamaForCausalLM: lm_head.weight")


def test_a_plan_has_no_weights(whole: Path) -> None:
    model = from_config(whole)
    assert all(p.is_meta for p in model.parameters())
    assert next(model.parameters()).dtype == torch.bfloat16
    big = from_config(LlamaConfig(hidden_size=8192, num_hidden_layers=4, vocab_size=128256), dtype="float16")
    assert next(big.parameters()).dtype == torch.float16


def test_the_longest_text_is_one_that_is_exact() -> None:
    from transformers import BloomConfig, Llama4TextConfig, MptConfig

    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    phi = Phi3Config(**SHAPE, original_max_position_embeddings=64, rope_parameters=rope)
    assert max_model_len(phi) == 64
    assert max_model_len(MptConfig(max_seq_len=77)) == 77
    assert max_model_len(Llama4TextConfig(attention_chunk_size=100)) == 100
    assert max_model_len(Llama4TextConfig(attention_chunk_size=8192, floor_scale=4096)) == 4095
    assert max_model_len(BloomConfig()) == NO_LIMIT


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        ({"rope_type": "default"}, 128),
        ({"rope_type": "linear", "factor": 4.0}, 512),
        ({"rope_type": "dynamic", "factor": 2.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}, 128),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
          "original_max_position_embeddings": 64}, 128),
    ],
)  # fmt: skip
def test_the_longest_text_that_may_be_asked_for_is_that_of_vllm(rope: dict[str, Any], most: int) -> None:
    config = LlamaConfig(**SHAPE, rope_parameters={"rope_theta": 1e4, **rope})
    assert longest_model_len(config) == most
    assert max_model_len(config) == (64 if rope["rope_type"] == "longrope" else 128)


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 0.0, -2.0])
def test_a_factor_that_is_no_positive_number_is_refused(factor: float) -> None:
    config = LlamaConfig(**SHAPE, rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": factor})
    with pytest.raises(ModelError, match=f"^rope_parameters of the model have factor {factor}: give a positive number"):
        longest_model_len(config)


def test_the_least_factor_of_several_rotary_embeddings_counts() -> None:
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert longest_model_len(Gemma3TextConfig(max_position_embeddings=128, rope_parameters=ropes)) == 128


def test_room_for_every_replica(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    check_room(tmp_path, 2, free=2000)
    with pytest.raises(ModelError, match="--pipeline"):
        check_room(tmp_path, 2, free=1999)
