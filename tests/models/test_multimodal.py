"""Multimodal checkpoints open as text models: from a directory, as a module, and wrapped.

Covers: lamina/models/meta_capture.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_table.tiny_models import POSITIONS, build
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import lamina
from lamina import LLM, SamplingParams
from lamina.models.attention_routing import routed_attention
from lamina.models.convert import convert_model
from lamina.models.errors import ModelError, UnsupportedModelError
from lamina.models.load import load
from lamina.models.meta_capture import plan_cuts

# Those whose text part is served.
KINDS = (
    "aya_vision", "cohere2_vision", "gemma3", "gemma4", "gemma4_unified", "glm4v", "got_ocr2", "internvl",
    "llama4", "llava", "llava_onevision", "mistral3", "qwen2_5_vl", "qwen3_vl", "smolvlm",
)  # fmt: skip
QUICK = ("llava",)
QUANTISED = Path(__file__).parents[1] / "checkpoints/llama_awq"
PROMPT = list(range(40, 61))  # longer than the windows
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
OPTIONS: dict[str, Any] = {"transport": "loopback", "max_model_len": POSITIONS}


def expected(model: Any) -> list[int]:
    """The tokens of transformers. Skips the test if this version of transformers cannot run the model."""
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    ids = torch.tensor([PROMPT])
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": PARAMS.max_tokens, "do_sample": False}
    try:
        out = model.generate(ids, **settings)
    except AttributeError as error:  # Llama 4 in 5.24 reads image_outputs, which its text part does not return
        pytest.skip(f"transformers {transformers.__version__} cannot run it: {error}")
    tokens: list[int] = out[0, len(PROMPT) :].tolist()
    return tokens


@pytest.mark.long(but=QUICK)
@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_with_a_multimodal_model_gives_its_text(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    want = expected(model)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert type(loaded.model) is type(model)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids == want
    assert len(plan_cuts(str(tmp_path)).program.calls) == model.config.get_text_config(decoder=True).num_hidden_layers


def test_a_text_part_may_be_quantised_alone(tmp_path: Path) -> None:
    config = json.loads((QUANTISED / "config.json").read_text())
    vision = CLIPVisionConfig(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_hidden_layers=2)
    whole = LlavaForConditionalGeneration(LlavaConfig(text_config=LlamaConfig(**config), vision_config=vision))
    whole.save_pretrained(tmp_path)
    packed, tensors = load_file(QUANTISED / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    text = {f"language_model.{name}": tensor for name, tensor in packed.items()}
    assert text.keys() & tensors.keys()
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith("language_model.")}
    save_file(others | text, tmp_path / "model.safetensors", {"format": "pt"})
    written = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in written
    assert written["text_config"]["quantization_config"]["quant_method"] == "awq"
    tokens = []
    for path in (QUANTISED, tmp_path):
        with LLM(str(path), transport="loopback", dtype="float32") as llm:
            tokens.append(llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1]


@pytest.mark.long(but=QUICK)
@pytest.mark.parametrize("kind", KINDS)
def test_a_multimodal_module_can_be_wrapped(kind: str) -> None:
    model = build(kind)
    ids = torch.tensor([[0, 0, *PROMPT], [*PROMPT, 7, 9]])
    mask = torch.tensor([[0, 0, *[1] * len(PROMPT)], [1] * (len(PROMPT) + 2)])
    settings = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    want = expected(model)
    with lamina.wrap(model, **OPTIONS) as split:
        assert split.generate(ids, **settings)[0, ids.shape[1] :].tolist() == want


@pytest.mark.long
def test_a_part_for_images_whose_package_is_missing_is_left_out(tmp_path: Path) -> None:
    """timm makes that of Gemma 3n. Its weights are in the files, and no text runs through them."""
    assert find_spec("timm") is None, "this test is of a place without it"
    model = build("gemma3n")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    seen = {**weights, "model.vision_tower.timm_model.conv_stem.weight": torch.ones(4, 4)}
    save_file(seen, tmp_path / "model.safetensors", {"format": "pt"})
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids == expected(model)
    save_file({**weights, "model.other.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"does not use: model\.other\.weight; --allow-unused-weights"):
        load(tmp_path)


def run_with(model: Any, change: Callable[[dict[str, Any]], Any]) -> None:
    """Run the routed model on a text, with ``change`` made to the arguments of the second attention's forward."""
    attention, ids = model.model.layers[1].self_attn, torch.arange(3, 11)[None]
    forward = attention.forward
    attention.forward = lambda *args, **options: forward(*args, **{**options, **change(options)})
    try:
        with routed_attention(model, max_model_len=64) as router, torch.no_grad():
            router.local = True
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
    finally:
        attention.forward = forward


def test_an_argument_to_attention_that_says_nothing_is_harmless() -> None:
    """transformers adds arguments to calls, which reach the attention of models that pass on what they do not know."""
    model = build("llama")
    for value in (None, False, 0, {}, [], (), ""):
        run_with(model, lambda options, value=value: {"mm_encoder_outputs": value})
    for value in (True, 1, 0.0, {"image": 1}, [0], torch.zeros(1)):
        with pytest.raises(UnsupportedModelError, match=r"layer 1 .*passes mm_encoder_outputs to its attention"):
            run_with(model, lambda options, value=value: {"mm_encoder_outputs": value})


def test_a_slice_that_has_all_of_a_mask_is_that_mask() -> None:
    """A text that is no longer than a slice's bound says nothing of longer ones, so the slice itself decides."""
    model = build("llama")

    def take(of: Callable[[Any], Any]) -> None:
        run_with(model, lambda options: {"attention_mask": of(options["attention_mask"])})

    for whole in (lambda m: m, lambda m: m[:], lambda m: m[:, :, -0:, :], lambda m: m[:, :, :, : m.shape[-1]]):
        take(whole)
    for part in (lambda m: m[:, :, :, -32:], lambda m: m[:, :, :, :32], lambda m: m[..., ::2], lambda m: m.clone()):
        with pytest.raises(UnsupportedModelError, match=r"layer 1 .*alters its mask"):
            take(part)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma4_text:shared KV", "nemotron_h:attention and mlp"])
def test_layers_that_share_kv_or_have_none_are_served(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids == expected(model)


@pytest.mark.long
def test_a_model_keeps_no_cache_even_if_its_forward_does_not_name_it() -> None:
    model = build("granitemoe")
    model.config.use_cache = True
    seen: list[Any] = []
    model.model.register_forward_hook(lambda m, args, output: seen.append(output.past_key_values))
    convert_model(model, max_model_len=64)
    assert {type(cache).__name__ for cache in seen} == {"NoneType", "RecordingCache"}, "that which records is not kept"
    assert model.config.use_cache
