"""Every weight in a checkpoint's files is used, known by transformers to be left out, or refused by its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from lamina import LLM
from lamina.cli.common.preflight import workers_that_would_start
from lamina.config.flat_options import make_config
from lamina.models.errors import ModelError
from lamina.models.load import load

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
Q_PROJ = "model.layers.1.self_attn.q_proj"


def saved(path: Path, model: Any) -> Path:
    torch.manual_seed(0)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("llama"), LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16())


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


def change(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def configure(path: Path, **settings: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def refused(path: Path, words: str, **options: Any) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        load(path, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_more_layers_than_the_configuration_has_are_refused(model: Path, ranks: int) -> None:
    configure(model, num_hidden_layers=1)
    words = r"weights that LlamaForCausalLM .*does not use: model\.layers\.1\.\S+ and 8 more; --allow-unused-weights"
    refused(model, words, size=ranks)
    assert len(load(model, size=ranks, allow_unused_weights=True).model.model.layers) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_biases_that_the_configuration_does_not_know_are_refused(model: Path, ranks: int) -> None:
    change(model, lambda weights: weights.update({f"{Q_PROJ}.bias": torch.zeros(32, dtype=torch.bfloat16)}))
    refused(model, rf"does not use: {Q_PROJ}.bias; --allow-unused-weights", size=ranks)
    configure(model, attention_bias=True)
    refused(model, "lacks weights", size=ranks)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_weights_of_8_bits_without_a_quantisation_are_refused(model: Path, kind: torch.dtype, ranks: int) -> None:
    weight = f"{Q_PROJ}.weight"
    change(model, lambda weights: weights.update({weight: weights[weight].to(kind)}))
    for allowed in (False, True):
        words = rf"{weight} is stored as (I8|U8|F8_E4M3), where .*bfloat16.*without quantization_config"
        refused(model, words, dtype="bfloat16", size=ranks, allow_unused_weights=allowed)


def test_scales_of_8_bit_weights_are_refused(model: Path) -> None:
    change(model, lambda weights: weights.update({f"{Q_PROJ}.SCB": torch.ones(32)}))
    refused(model, rf"does not use: {Q_PROJ}.SCB", dtype="bfloat16")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_weight_of_another_shape_is_named(model: Path, ranks: int) -> None:
    change(model, lambda weights: weights.update({f"{Q_PROJ}.weight": torch.zeros(40, 32, dtype=torch.bfloat16)}))
    refused(model, rf"{Q_PROJ}.weight is \[\d+, 32\] .*\[\d+, 32\]", size=ranks)


def test_weights_that_transformers_leaves_out_are_no_fault(tmp_path: Path) -> None:
    """Rotary frequencies and masks of old files, layers for speculation, and the other name of tied embeddings."""
    shape = {**SHAPE, "num_key_value_heads": 4}
    few = {
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    }  # fmt: skip
    gpt2 = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2)
    neo = GPTNeoConfig(
        vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    )
    falcon = FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    further = DeepseekV3Config(**shape, **few, num_nextn_predict_layers=1)
    cases: list[tuple[Any, dict[str, Tensor]]] = [
        (LlamaForCausalLM(LlamaConfig(**SHAPE)), {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
        (LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)), {"lm_head.weight": torch.ones(64, 32)}),
        (GPT2LMHeadModel(gpt2), {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool)}),
        (DeepseekV3ForCausalLM(DeepseekV3Config(**shape, **few)), {"model.layers.61.eh_proj.weight": torch.ones(2, 2)}),
        (MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4)), {}),
        (GPT2LMHeadModel(gpt2).half(), {"transformer.h.0.attn.masked_bias": torch.tensor(-1e4)}),
        (GPT2LMHeadModel(gpt2).half(), {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8)}),
        (FalconForCausalLM(falcon), {"transformer.h.0.self_attention.maybe_rotary.inv_freq": torch.ones(4)}),
        (GPTNeoForCausalLM(neo), {"transformer.h.1.attn.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8)}),
        (DeepseekV3ForCausalLM(further), {"model.layers.2.eh_proj.weight": torch.ones(2, 2)}),
    ]
    for number, (model, more) in enumerate(cases):
        path = saved(tmp_path / str(number), model)
        change(path, lambda weights, more=more: weights.update(more))
        load(path)
        change(path, lambda weights: weights.update({"model.stranger": torch.ones(1)}))
        refused(path, r"does not use: model\.stranger; ")


def test_only_the_layers_that_are_announced_are_left_out(model: Path) -> None:
    configure(model, num_hidden_layers=1, num_nextn_predict_layers=1)
    load(model)
    change(model, lambda weights: weights.update({"model.layers.2.norm.weight": torch.ones(2)}))
    refused(model, r"does not use: model\.layers\.2\.norm")


@pytest.mark.long
def test_a_start_and_a_dry_run_refuse_the_same(model: Path) -> None:
    configure(model, num_hidden_layers=1)
    words = r"does not use: model\.layers\.1\."
    with pytest.raises(ValueError, match=words):
        LLM(str(model), transport="loopback")
    with LLM(str(model), transport="loopback", allow_unused_weights=True) as llm:
        assert llm.generate([[5, 6]])[0].outputs[0].token_ids
    with pytest.raises(ModelError, match=words):
        workers_that_would_start(str(model), make_config({"transport": "loopback"}))
    allowed = make_config({"transport": "loopback", "allow_unused_weights": True})
    assert "would start 1 compute worker" in workers_that_would_start(str(model), allowed)
