"""Routing: every attention goes through the operator with its whole meaning, and nothing is left changed.

Covers: lamina/models/convert.py, lamina/models/rotary_embedding.py, lamina/models/shims.py.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    MptConfig,
    Phi3Config,
    Phi3ForCausalLM,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as build_falcon_alibi
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from lamina.converter import SlicedProgram
from lamina.models.attention_routing import DecodeStep, routed_attention
from lamina.models.convert import convert_model, layer_shapes
from lamina.models.errors import UnsupportedModelError
from lamina.models.shims import alibi_slopes, mpt_slopes
from lamina.ops.attention.spec import AttentionSpec

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 1}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **options}))


MODELS = {
    "llama": llama,
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=2)),
    "gptj": lambda: GPTJForCausalLM(GPTJConfig(**GPT, rotary_dim=8)),
    "bloom": lambda: BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)),
    "phi3-longrope": lambda: Phi3ForCausalLM(
        Phi3Config(**SHAPE, original_max_position_embeddings=64, rope_parameters=LONGROPE)
    ),
}


def found(model: nn.Module) -> list[Any]:
    """Everything that capturing a model could have changed, by identity."""
    state: list[Any] = [
        dict(i._global_mapping) for i in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS, ALL_EXPERTS_FUNCTIONS)
    ]
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    for owner in (*model.modules(), *configs.values()):
        state.append({k: id(v) for k, v in vars(owner).items()})
        state.append({k: list(v) for k, v in vars(owner).items() if isinstance(v, dict)})
    state.append({k: (id(v), v.clone()) for k, v in (*model.named_parameters(), *model.named_buffers())})
    return state


def same(before: list[Any], after: list[Any]) -> bool:
    tensors, others = (before[-1], after[-1]), (before[:-1], after[:-1])
    return others[0] == others[1] and all(
        a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(tensors[0].values(), tensors[1].values(), strict=True)
    )


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_conversion_leaves_everything_as_found(name: str) -> None:
    model = MODELS[name]()
    model.train()
    model.config._attn_implementation = "eager"
    before = found(model)
    convert_model(model, max_model_len=64)
    assert same(before, found(model))
    assert model.training


def meddle(model: nn.Module) -> None:
    """Does what the code of a model may do to itself in a forward pass; then fails."""
    for module in model.modules():
        module.stray = 1
        module.register_buffer("left_behind", torch.zeros(1))
        module._buffers.update(dict.fromkeys(module._buffers))
    raise KeyError


@pytest.mark.parametrize("name", MODELS)
def test_an_exception_leaves_everything_as_found(name: str) -> None:
    model = MODELS[name]()
    before = found(model)
    with pytest.raises(KeyError), routed_attention(model, max_model_len=64):
        meddle(model)
    assert same(before, found(model))


def test_the_comparison_of_states_can_fail() -> None:
    model = llama()
    before = found(model)
    model.model.layers[1].self_attn.scaling = 2.0
    assert not same(before, found(model))


def test_two_models_can_be_routed_at_once() -> None:
    with routed_attention(llama(), max_model_len=64) as outer, routed_attention(llama(), max_model_len=64) as inner:
        assert outer is not inner


@pytest.mark.long
def test_threads_convert_one_after_the_other() -> None:
    model = llama()
    with ThreadPoolExecutor(3) as pool:
        programs = list(pool.map(lambda m: convert_model(m, max_model_len=64), [model, model, llama()]))
    assert [len(p.calls) for p in programs] == [2, 2, 2]


def test_layers_say_what_they_compute() -> None:
    config = Gemma2Config(**SHAPE, head_dim=8, sliding_window=6, attn_logit_softcapping=2.0, query_pre_attn_scalar=16)
    shapes = layer_shapes(convert_model(Gemma2ForCausalLM(config), max_model_len=64))
    assert [AttentionSpec.decode(s.spec) for s in shapes] == [
        AttentionSpec(scale=0.25, window=6, softcap=2.0),
        AttentionSpec(scale=0.25, softcap=2.0),
    ]
    assert {(s.q_heads, s.kv_heads, s.qk_dim, s.v_dim) for s in shapes} == {(4, 2, 8, 8)}


@pytest.mark.long
def test_a_window_as_long_as_the_longest_text_is_none() -> None:
    config = Gemma2Config(**SHAPE, head_dim=8, sliding_window=64)
    shapes = layer_shapes(convert_model(Gemma2ForCausalLM(config), max_model_len=64))
    assert {AttentionSpec.decode(s.spec).window for s in shapes} == {0}


def call(monkeypatch: pytest.MonkeyPatch, **keywords: Any) -> None:
    """Trace a Llama whose second layer passes more keywords to its attention."""
    model = llama()
    layer = model.model.layers[1].self_attn
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *args, **kwargs: forward(*args, **{**kwargs, **keywords}))
    convert_model(model, max_model_len=64)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"position_bias": torch.zeros(1)}, "passes position_bias"),
        ({"block_indices": 3, "temperature": 2.0}, "passes block_indices, temperature"),
        ({"is_causal": False}, "not causal"),
        ({"sliding_window": 5}, "window of 5 tokens but its mask means all"),
    ],
)
def test_what_the_spec_cannot_express_is_refused(
    monkeypatch: pytest.MonkeyPatch, keywords: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"layer 1 \(model.layers.1.self_attn\) .*{words}") as caught:
        call(monkeypatch, **keywords)
    assert "\n" not in str(caught.value)


@pytest.mark.long
def test_harmless_keywords_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    call(monkeypatch, output_attentions=False, cu_seq_lens_q=None, some_future_option=None)


def test_bidirectional_layers_are_refused() -> None:
    model = llama()
    model.config.is_causal = False
    with pytest.raises(UnsupportedModelError, match="is not causal"):
        convert_model(model, max_model_len=64)


def frequencies(program: SlicedProgram) -> torch.Tensor:
    return next(t for name, t in program.slices[0].weights.items() if "inv_freq" in name)


@pytest.mark.long
def test_rotary_frequencies_that_switch_are_those_of_the_longest_text() -> None:
    model = MODELS["phi3-longrope"]()
    short, long = (frequencies(convert_model(model, max_model_len=n)) for n in (64, 65))
    assert torch.equal(short, model.model.rotary_emb.original_inv_freq)
    assert torch.equal(long, short / 4)


@pytest.mark.long
def test_frequencies_left_by_a_longer_text_are_not_captured() -> None:
    model = MODELS["phi3-longrope"]()
    with torch.no_grad():
        model(torch.full((1, 80), 3))  # switches, and writes the long frequencies into the buffer
    rotary = model.model.rotary_emb
    assert not torch.equal(rotary.inv_freq, rotary.original_inv_freq)
    weights = convert_model(model, max_model_len=64).slices[0].weights
    assert all(torch.equal(t, rotary.original_inv_freq) for n, t in weights.items() if "inv_freq" in n)


@pytest.mark.long
def test_dynamic_frequencies_are_those_of_the_longest_text_too() -> None:
    model = llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    short, longer, longest = (frequencies(convert_model(model, max_model_len=n)) for n in (128, 129, 256))
    assert torch.equal(short, model.model.rotary_emb.original_inv_freq)
    assert (short[1:] > longer[1:]).all()
    assert (longer[1:] > longest[1:]).all()


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 8, 12])
def test_slopes_are_the_families_own(heads: int) -> None:
    ones = torch.ones(1, 5)
    bloom = build_alibi_tensor(ones, heads, torch.float32)[:, 0]
    torch.testing.assert_close(alibi_slopes(heads)[:, None] * torch.arange(5), bloom)
    falcon = build_falcon_alibi(ones, heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(heads).bfloat16().float(), falcon, rtol=0, atol=0)
    mpt = build_mpt_alibi_tensor(heads, 5)[:, 0]
    torch.testing.assert_close(mpt_slopes(heads)[:, None] * torch.arange(-4, 1), mpt)


def test_falcon_ships_the_kv_heads_it_has() -> None:
    from transformers import FalconForCausalLM

    options = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8}
    config = FalconConfig(**options, new_decoder_architecture=True, num_kv_heads=2)
    assert layer_shapes(convert_model(FalconForCausalLM(config), max_model_len=64))[0].kv_heads == 2


def test_mpt_operands_are_little_endian_floats() -> None:
    from transformers import MptForCausalLM

    model = MptForCausalLM(MptConfig(d_model=48, n_layers=1, n_heads=6, vocab_size=64, max_seq_len=64))
    (shape,) = layer_shapes(convert_model(model, max_model_len=64))
    assert torch.equal(torch.frombuffer(bytearray(shape.slopes), dtype=torch.float32), mpt_slopes(6))


def test_a_decode_step_gives_the_model_what_it_accepts() -> None:
    class Plain(nn.Module):
        def forward(self, input_ids: torch.Tensor, use_cache: bool = True) -> Any:
            assert use_cache is False
            return type("Output", (), {"logits": input_ids.float()})

    ids = torch.ones(3, 1, dtype=torch.long)
    assert torch.equal(DecodeStep(Plain())(ids, ids), ids.float())
    with pytest.raises(UnsupportedModelError, match="no input_ids"):
        DecodeStep(nn.Linear(2, 2))


def test_a_plan_needs_no_weights() -> None:
    with torch.device("meta"):
        model = copy.deepcopy(llama())
    shapes = layer_shapes(convert_model(model.to("meta"), max_model_len=64))
    assert len(shapes) == 2
