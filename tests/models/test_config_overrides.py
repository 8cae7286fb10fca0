"""Overrides of config.json: what vLLM's --hf-overrides would give, and no more than the file itself may say.

Covers: lamina/models/config_overrides.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from model_table.tiny_models import build, enlarge
from transformers import (
    AutoConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lamina import LLM, SamplingParams
from lamina.cli.launch import main
from lamina.config.engine_config import ModelOptions
from lamina.config.flat_options import make_config
from lamina.models.checkpoint import peek_config, read_config
from lamina.models.errors import ModelError
from lamina.models.load import load
from lamina.models.model_files import own_class_text

SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 2,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
THETA = 5e4


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": THETA}))
    enlarge(model, seed=0)
    model.eval().save_pretrained(path)
    (path / "generation_config.json").unlink()
    return path


def text_of(given: dict[str, Any]) -> str:
    text: str = make_config({"hf_overrides": given}).model.hf_overrides
    return text


def read(path: Path, given: dict[str, Any], *, trust: bool = False) -> Any:
    return read_config(path, trust_remote_code=trust, hf_overrides=text_of(given))


def of_vllm(path: Path, given: dict[str, Any]) -> Any:
    """The configuration as vLLM makes it: entries become attributes, and those of a nested one are set in it."""
    config = AutoConfig.from_pretrained(path)

    def apply(owner: Any, entries: dict[str, Any]) -> None:
        for key, value in entries.items():
            inner = getattr(owner, key, None)
            if hasattr(inner, "to_dict") and isinstance(value, dict):
                apply(inner, value)
            else:
                setattr(owner, key, value)

    apply(config, given)
    return config


@pytest.mark.parametrize(
    "given",
    [
        {"rope_parameters": {**YARN, "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "max_position_embeddings": 32},
        {"rms_norm_eps": 0.5, "tie_word_embeddings": True, "eos_token_id": [4, 5]},
    ],
)
def test_entries_are_those_that_vllm_would_have(llama: Path, given: dict[str, Any]) -> None:
    got, wanted = read(llama, given).to_dict(), of_vllm(llama, given).to_dict()
    wanted["rope_parameters"] |= {k: v for k, v in got["rope_parameters"].items() if k == "attention_factor"}
    differ = {key for key in wanted if got.get(key) != wanted[key]}
    assert differ <= {"attn_implementation", "_attn_implementation_internal", "experts_implementation"}
    assert read(llama, {}).to_dict() != got, "they matter"


def test_those_of_a_nested_configuration_replace_single_entries(tmp_path: Path) -> None:
    text = {**SHAPE, "head_dim": 16, "sliding_window": 8}
    Gemma3ForConditionalGeneration(Gemma3Config(text_config=text)).config.save_pretrained(tmp_path)
    given = {"text_config": {"sliding_window": 4, "max_position_embeddings": 48}}
    got, plain = read(tmp_path, given), read(tmp_path, {})
    assert (got.text_config.sliding_window, got.text_config.max_position_embeddings) == (4, 48)
    assert (plain.text_config.sliding_window, plain.text_config.max_position_embeddings) == (8, 64)
    assert got.text_config.hidden_size == plain.text_config.hidden_size == 64
    assert got.vision_config.to_dict() == plain.vision_config.to_dict()
    layers = {"text_config": {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}}
    rope, old = read(tmp_path, layers).text_config.rope_parameters, plain.text_config.rope_parameters
    assert rope["full_attention"]["factor"] == 8.0
    assert rope["full_attention"]["rope_theta"] == old["full_attention"]["rope_theta"]
    assert rope["sliding_attention"] == old["sliding_attention"]


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("old", [False, True])
def test_a_scaling_keeps_the_base_of_frequencies_under_either_name(
    llama: Path, tmp_path: Path, name: str, old: bool
) -> None:
    raw = json.loads((llama / "config.json").read_text())
    if old:  # as files of older versions have it
        raw |= {"rope_theta": raw.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    rope = read(tmp_path, {name: YARN}).rope_parameters
    assert {key: rope[key] for key in (*YARN, "rope_theta")} == {**YARN, "rope_theta": THETA}
    assert "factor" not in read(tmp_path, {name: None}).rope_parameters


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("scaling", [{}, {"rope_scaling": YARN}, {"rope_parameters": YARN}])
def test_a_base_of_frequencies_by_itself_replaces_the_stored_one(
    llama: Path, tmp_path: Path, scaling: dict[str, Any], old: bool
) -> None:
    raw = json.loads((llama / "config.json").read_text())
    if old:
        raw |= {"rope_theta": raw.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    rope = read(tmp_path, {"rope_theta": 7e6, "partial_rotary_factor": 0.5, **scaling}).rope_parameters
    assert (rope["rope_theta"], rope["partial_rotary_factor"]) == (7e6, 0.5)
    assert rope.get("factor") == (YARN["factor"] if scaling else None)
    both = {"rope_theta": 7e6, "rope_parameters": {**YARN, "rope_theta": 8e6}}
    assert read(tmp_path, both).rope_parameters["rope_theta"] == 8e6


def test_what_only_the_text_model_reads_is_refused_outside_of_its_configuration(tmp_path: Path) -> None:
    Gemma3Config(text_config=SHAPE).save_pretrained(tmp_path)
    for key in ("rope_parameters", "rope_scaling"):  # transformers itself refuses these
        with pytest.raises(ModelError, match="with --hf-overrides is not a valid configuration"):
            read(tmp_path, {key: YARN})
    with pytest.raises(ModelError) as refused:
        read(tmp_path, {"rope_theta": 7e6})
    assert str(refused.value) == (
        f"--hf-overrides rope_theta: {tmp_path}/config.json has no such entry; did you mean text_config.rope_theta?"
    )
    with pytest.raises(ModelError) as refused:
        read(tmp_path, {"text_config": {"rope_theta": 7e6}})
    assert str(refused.value) == (
        "--hf-overrides text_config.rope_theta: layers have several in rope_parameters: give rope_parameters, by types "
        "of layers"
    )


def test_longer_texts_are_those_of_transformers_with_that_scaling(llama: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(
        llama, config=LlamaConfig(**SHAPE, rope_parameters={**YARN, "rope_theta": THETA})
    )
    prompt = list(range(5, 105))
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": 8, "do_sample": False}
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
    plain = LlamaForCausalLM.from_pretrained(llama)
    other = plain.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
    params = SamplingParams(max_tokens=8, temperature=0.0)
    with LLM(str(llama), transport="loopback", max_model_len=256, hf_overrides={"rope_parameters": YARN}) as llm:
        (output,) = llm.generate([prompt], params)
    assert output.outputs[0].token_ids == wanted
    assert wanted != other, "the scaling matters"


def test_tokens_that_end_a_text_follow_where_no_file_names_them(llama: Path) -> None:
    assert load(llama, hf_overrides=text_of({"eos_token_id": [4, 5]})).eos_token_ids == (4, 5)
    assert load(llama).eos_token_ids == ()


def test_other_overrides_add_no_token_that_ends_a_text(llama: Path, tmp_path: Path) -> None:
    """A class has an id of its own for a config.json without one, and ``generate`` of transformers leaves it out."""
    copytree(llama, tmp_path, dirs_exist_ok=True)
    raw = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k != "eos_token_id"}))
    assert LlamaForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id is None
    assert load(tmp_path, hf_overrides=text_of({"rms_norm_eps": 0.5})).eos_token_ids == ()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"auto_map": {"AutoConfig": "mine.Config"}},
            (
                "--hf-overrides names its own code (auto_map), which is not used by default: pass --trust-remote-code "
                "if you trust it, or leave it out"
            ),
        ),
        (
            {"text_config": {"auto_map": {"AutoConfig": "mine.Config"}}},
            (
                "--hf-overrides names its own code (text_config.auto_map), which is not used by default: pass "
                "--trust-remote-code if you trust it, or leave it out"
            ),
        ),
        (
            {"attn_implementation": "kernels-community/flash-attn"},
            (
                "--hf-overrides names a model or kernels of a hub (attn_implementation), which is not used by default: "
                "pass --trust-remote-code if you trust it, or leave it out"
            ),
        ),
        ({"num_hidden_layers": 10**9}, "{path}/config.json has num_hidden_layers 1000000000: at most 10000 are made"),
        ({"is_encoder_decoder": True}, "{path} is an encoder-decoder: only decoder-only models can be served"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "--hf-overrides quantization_config: weights are read as their files have them: leave it out",
        ),
        (
            {"rope_parameters": "yarn"},
            (
                "--hf-overrides rope_parameters is 'yarn': it must be an object, such as "
                '{"rope_type": "linear", "factor": 2}'
            ),
        ),
    ],
)
def test_what_the_file_may_not_say_is_refused(llama: Path, given: dict[str, Any], words: str) -> None:
    text = text_of(given)
    for use in (
        lambda: peek_config(llama, ModelOptions(hf_overrides=text)),
        lambda: read_config(llama, hf_overrides=text),
    ):
        with pytest.raises(ModelError) as refused:
            use()
        assert str(refused.value) == words.replace("{path}", str(llama))


def test_an_entry_that_would_do_nothing_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refused:
        read(llama, {"rope_parameter": YARN})
    assert str(refused.value) == (
        f"--hf-overrides rope_parameter: {llama}/config.json has no such entry; did you mean rope_parameters?"
    )
    Gemma3Config(text_config=SHAPE).save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"--hf-overrides text_config.sliding_windows: .*did you mean sliding_window\?"
    ):
        read(tmp_path, {"text_config": {"sliding_windows": 3}})


def test_deep_and_unknown_ones_are_refused(llama: Path) -> None:
    deep: dict[str, Any] = {}
    for _ in range(70):
        deep = {"a": deep}
    with pytest.raises(ModelError, match="--hf-overrides is nested too deeply: at most 64 levels are read"):
        read(llama, deep)
    with pytest.raises(ModelError, match=r"config.json with --hf-overrides is not a valid configuration: "):
        read(llama, {"hidden_size": "wide"})
    with pytest.raises(ModelError, match="transformers has no architecture 'nine'"):
        read(llama, {"model_type": "nine"})


def test_a_gguf_file_and_a_module_have_no_file_to_override(llama: Path) -> None:
    file = Path(__file__).parents[1] / "checkpoints" / "llama_q8_0.gguf"
    with pytest.raises(ModelError) as refused:
        read(file, {"rms_norm_eps": 0.5})
    assert str(refused.value) == (
        f"--hf-overrides replaces entries of a config.json, and {file} has none: leave it out"
    )
    with pytest.raises(ModelError, match="--hf-overrides does not go with a torch.nn.Module as the model"):
        load(LlamaForCausalLM(LlamaConfig(**SHAPE)), hf_overrides='{"rms_norm_eps": 0.5}')


def test_the_code_of_a_trusted_model_takes_them_too(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from transformers import LlamaConfig\n\n\nclass Own(LlamaConfig):\n    pass\n")
    raw = json.loads((llama / "config.json").read_text())
    raw |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read(tmp_path, {"rms_norm_eps": 0.5}, trust=True)
    assert (type(config).__name__, config.rms_norm_eps) == ("Own", 0.5)


def test_the_flag_is_json_and_checked_before_a_start(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["serve", str(llama), "--dry-run", "--port", "0", "--kv-cache-memory-bytes", "64MiB"]
    yarn = json.dumps({"rope_parameters": YARN})
    assert main([*command, "--max-model-len", "256", "--hf-overrides", yarn]) == 0
    capsys.readouterr()
    assert main([*command, "--max-model-len", "256"]) == 2
    line = "--max-model-len 256 exceeds the model's own limit of 64 tokens"
    assert line in capsys.readouterr().err
    assert main([*command, "--hf-overrides", '{"rms_norm_epz": 1}']) == 2
    assert "did you mean rms_norm_eps?" in capsys.readouterr().err


OWN = (
    '; transformers has DeepseekV3ForCausalLM itself: --hf-overrides \'{"model_type": "deepseek_v3"}\' uses that, '
    "if it is the same"
)


def test_a_model_whose_code_is_of_another_time_can_take_the_class_that_transformers_has(tmp_path: Path) -> None:
    """Kimi K2's: its type is unknown, its class is DeepSeek-V3's, and its code wants an older transformers."""
    model = build("deepseek_v3")
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "own.py").write_text("from transformers import gone\n")
    with pytest.raises(ModelError) as refused:
        load(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path} names its own code (auto_map in config.json), which is not used by default: pass "
        f"--trust-remote-code if you trust it, or remove the key{OWN}"
    )
    with pytest.raises(
        ModelError, match=r"is not a valid configuration: cannot import name 'gone'.*deepseek_v3.*same$"
    ):
        load(tmp_path, trust_remote_code=True)
    given = text_of({"model_type": "deepseek_v3"})
    loaded = load(tmp_path, trust_remote_code=True, hf_overrides=given).model
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k != "auto_map"}))
    with pytest.raises(ModelError) as refused:
        load(tmp_path)
    assert str(refused.value) == f"{tmp_path}: transformers has no architecture 'kimi_k2'{OWN}"
    assert type(load(tmp_path, hf_overrides=given).model) is type(model)


def test_of_types_that_share_a_class_its_own_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "later", "LlamaForCausalLM")
    told = own_class_text({"architectures": ["LlamaForCausalLM"], "model_type": "mine"})
    assert """--hf-overrides '{"model_type": "llama"}'""" in told
    assert own_class_text({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}) == ""


def test_the_code_that_fails_when_the_model_is_made_says_so_too(tmp_path: Path) -> None:
    build("deepseek_v3").save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "two.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    own = "from transformers import DeepseekV3Config\n\n\nclass Own(DeepseekV3Config):\n    model_type = 'kimi_k2'\n"
    (tmp_path / "own.py").write_text(own)
    (tmp_path / "two.py").write_text("from transformers import gone\n")
    with pytest.raises(ModelError, match=r"cannot be loaded: cannot import name 'gone'.*deepseek_v3.*same$"):
        load(tmp_path, trust_remote_code=True)
