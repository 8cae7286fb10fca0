"""Mixtures of experts in GGUF files: experts and embeddings stay packed, and give the logits that transformers computes
in fp32 with weights as the package gguf dequantises them.

Covers: lamina/models/quantization/quantized_embedding.py.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoConfig, AutoModelForCausalLM

from lamina import LLM, SamplingParams
from lamina.models.attention_routing import WeightShard
from lamina.models.errors import ModelError
from lamina.models.load import load
from lamina.models.quantization.pack_weights import replace_layers
from lamina.models.quantization.quantized_embedding import QuantizedEmbedding
from lamina.models.quantization.quantized_experts import ExpertWeights
from lamina.models.quantization.quantized_linear import QuantizedLinear
from lamina.models.tensor_parallel_shard import ShardedDim, ShardPlan
from lamina.ops.gemm import get

pytestmark = pytest.mark.no_retry
HEADS, KV_HEADS, EXPERTS, CHOSEN, VOCABULARY = 4, 2, 4, 2, 96
IDS = torch.tensor([[3, 17, 90, 4, 56, 40, 8, 21]])
HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where blocks have their scales
FAMILIES = {"qwen3moe": "qwen3_moe", "qwen2moe": "qwen2_moe", "minimax-m2": "minimax_m2"}
KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
Stored = dict[str, tuple[np.ndarray, str]]  # by name: rows of numbers, or of blocks of a kind


def blocks(kind: str, shape: tuple[int, ...], draw: np.random.Generator) -> np.ndarray:
    """Blocks of gguf's own quantiser, or random ones with scales of a weight's size, where it has none."""
    if kind not in HALVES:
        return gguf.quants.quantize(draw.normal(0, 0.1, shape).astype(np.float32), Kind[kind])
    size = gguf.GGML_QUANT_SIZES[Kind[kind]][1]
    made = draw.integers(0, 256, (*shape[:-1], shape[-1] // 256, size), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = (0.0006 * draw.uniform(0.5, 1, made.shape[:-1]) * (6 if at == 2 else 1)).astype(np.float16)
        made[..., at : at + 2] = halves[..., None].view(np.uint8)
    return made.reshape(*shape[:-1], -1)


class Mixture:
    """A tiny file of one layer, and the model that it describes. ``kinds``: of gate and up, and of down."""

    def __init__(self, arch: str, kinds: tuple[str, str, str], *, tied: bool = False) -> None:
        self.arch, self.tied, self.draw = arch, tied, np.random.default_rng(0)
        self.width, self.inner = (256, 256) if set(kinds) & set(HALVES) else (64, 128)
        self.stored: Stored = {}
        self.names: dict[str, tuple[str, ...]] = {}  # names in the file, by those of the model
        self._attention()
        layer, file, width, inner = "model.layers.0.mlp", "blk.0.ffn", self.width, self.inner
        for part, kind in zip(("gate", "up", "down"), kinds, strict=True):
            shape = (EXPERTS, width, inner) if part == "down" else (EXPERTS, inner, width)
            self.stored[f"{file}_{part}_exps.weight"] = blocks(kind, shape, self.draw), kind
        self.names[f"{layer}.experts.gate_up_proj"] = f"{file}_gate_exps.weight", f"{file}_up_exps.weight"
        self.names[f"{layer}.experts.down_proj"] = (f"{file}_down_exps.weight",)
        self.plain(f"{layer}.gate.weight", f"{file}_gate_inp.weight", EXPERTS, width, spread=0.5)
        if arch == "minimax-m2":
            self.plain(f"{layer}.e_score_correction_bias", "blk.0.exp_probs_b.bias", EXPERTS)
        if arch == "qwen2moe":
            self.plain(f"{layer}.shared_expert_gate.weight", f"{file}_gate_inp_shexp.weight", width)
            for part in ("gate", "up", "down"):
                shape = (width, 2 * inner) if part == "down" else (2 * inner, width)
                self.matrix(f"{layer}.shared_expert.{part}_proj.weight", f"{file}_{part}_shexp.weight", shape)

    def _attention(self) -> None:
        width, layer = self.width, "model.layers.0"
        sizes = {"q": width, "k": width * KV_HEADS // HEADS, "v": width * KV_HEADS // HEADS}
        for name, size in sizes.items():
            self.matrix(f"{layer}.self_attn.{name}_proj.weight", f"blk.0.attn_{name}.weight", (size, width))
            if self.arch == "qwen2moe":
                self.plain(f"{layer}.self_attn.{name}_proj.bias", f"blk.0.attn_{name}.bias", size)
        self.matrix(f"{layer}.self_attn.o_proj.weight", "blk.0.attn_output.weight", (width, width))
        norms = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
        for name, own in norms.items():
            self.plain(f"{layer}.{name}.weight", f"blk.0.{own}.weight", width)
        of_heads = self.arch != "qwen2moe"
        for name in ("q", "k") if of_heads else ():
            size = sizes[name] if self.arch == "minimax-m2" else width // HEADS
            self.plain(f"{layer}.self_attn.{name}_norm.weight", f"blk.0.attn_{name}_norm.weight", size)
        self.plain("model.norm.weight", "output_norm.weight", width)
        self.matrix("model.embed_tokens.weight", "token_embd.weight", (VOCABULARY, width))
        if not self.tied:
            self.matrix("lm_head.weight", "output.weight", (VOCABULARY, width))

    def plain(self, name: str, own: str, *shape: int, spread: float = 0.1) -> None:
        self.stored[own] = self.draw.normal(0, spread, shape).astype(np.float32), "F32"
        self.names[name] = (own,)

    def matrix(self, name: str, own: str, shape: tuple[int, int]) -> None:
        self.stored[own] = blocks("Q8_0", shape, self.draw), "Q8_0"
        self.names[name] = (own,)

    def write(self, path: Path) -> Path:
        file, width, inner = gguf.GGUFWriter(path, self.arch), self.width, self.inner
        file.add_context_length(128)
        file.add_embedding_length(width)
        file.add_block_count(1)
        file.add_feed_forward_length(inner if self.arch == "minimax-m2" else 2 * inner)
        file.add_expert_feed_forward_length(inner)
        if self.arch == "qwen2moe":
            file.add_expert_shared_feed_forward_length(2 * inner)
        file.add_head_count(HEADS)
        file.add_head_count_kv(KV_HEADS)
        if self.arch != "qwen2moe":
            file.add_key_length(width // HEADS)
            file.add_value_length(width // HEADS)
        file.add_rope_dimension_count(width // HEADS)
        file.add_expert_count(EXPERTS)
        file.add_expert_used_count(CHOSEN)
        file.add_rope_freq_base(10000.0)
        file.add_layer_norm_rms_eps(1e-6)
        file.add_vocab_size(VOCABULARY)
        file.add_tokenizer_model("gpt2")
        file.add_token_list([*map(chr, range(33, 33 + VOCABULARY - 4)), "aa", "ab", "<s>", "</s>"])
        file.add_token_types([1] * (VOCABULARY - 2) + [3, 3])
        file.add_token_merges(["a b"])
        file.add_bos_token_id(VOCABULARY - 2)
        file.add_eos_token_id(VOCABULARY - 1)
        for name, (data, kind) in self.stored.items():
            file.add_tensor(name, data, raw_dtype=Kind[kind])
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.write_tensors_to_file()
        file.close()
        return path

    def model(self) -> Any:
        """transformers' model with the numbers of the package gguf."""
        width, inner = self.width, self.inner
        of_heads = {} if self.arch == "qwen2moe" else {"head_dim": width // HEADS}
        own: dict[str, dict[str, Any]] = {
            "minimax-m2": {"intermediate_size": inner, "rotary_dim": width // HEADS, "num_local_experts": EXPERTS},
            "qwen3moe": {"moe_intermediate_size": inner, "num_experts": EXPERTS, "norm_topk_prob": True},
            "qwen2moe": {
                "moe_intermediate_size": inner,
                "num_experts": EXPERTS,
                "shared_expert_intermediate_size": 2 * inner,
            },
        }
        config = AutoConfig.for_model(
            FAMILIES[self.arch],
            hidden_size=width,
            num_hidden_layers=1,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            num_experts_per_tok=CHOSEN,
            vocab_size=VOCABULARY,
            max_position_embeddings=128,
            tie_word_embeddings=self.tied,
            rms_norm_eps=1e-6,
            **of_heads,
            **own[self.arch],
        )
        config.rope_parameters["rope_theta"] = 10000.0
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        numbers = {}
        for name, parts in self.names.items():
            pieces = [gguf.quants.dequantize(data, Kind[kind]) for data, kind in (self.stored[own] for own in parts)]
            own = torch.from_numpy(np.concatenate(pieces, 1 if len(pieces) > 1 else 0))
            numbers[name] = own[None] if name.endswith("shared_expert_gate.weight") else own
        missing, unexpected = model.load_state_dict(numbers, strict=False)
        assert not unexpected
        assert not [name for name in missing if "rotary" not in name and not (self.tied and name == "lm_head.weight")]
        return model


def error(model: Any, right: Any) -> float:
    with torch.no_grad():
        due = right(IDS).logits
        return float((model(IDS).logits - due).abs().max() / due.std())


def tokens_of(right: Any, count: int) -> list[int]:
    """Greedy tokens after IDS."""
    ids = IDS
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, right(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0, IDS.shape[1] :].tolist()


def experts_of(model: Any) -> list[ExpertWeights]:
    return [module for module in model.modules() if isinstance(module, ExpertWeights)]


CASES = [("qwen3moe", (kind, kind, kind)) for kind in KINDS]
CASES += [("qwen3moe", ("Q4_K", "Q4_K", "Q6_K"))]  # as files of Q4_K_M have it
CASES += [("qwen2moe", ("Q4_0",) * 3), ("minimax-m2", ("Q4_1", "Q4_1", "Q8_0"))]


@pytest.mark.parametrize(("arch", "kinds"), CASES, ids=str)
def test_experts_stay_packed(arch: str, kinds: tuple[str, str, str], tmp_path: Path) -> None:
    mixture = Mixture(arch, kinds)
    path, right = mixture.write(tmp_path / "m.gguf"), mixture.model()
    model = load(path, dtype="float32", backend=get("native", 1)).model
    assert len(experts_of(model)) == 2
    assert isinstance(model.get_input_embeddings(), QuantizedEmbedding)
    assert error(model, right) < 1e-4
    assert error(load(path, dtype="float32").model, right) < 1e-4
    data = mixture.stored["blk.0.ffn_up_exps.weight"][0]
    data[:, 0] = data[:, 1]
    mixture.write(tmp_path / "other.gguf")
    assert error(load(tmp_path / "other.gguf", dtype="float32", backend=get("native", 1)).model, right) > 1e-3


@pytest.mark.parametrize("entry", ["native", "torch"])
def test_tied_embeddings_have_the_bytes_of_the_head(entry: str, tmp_path: Path) -> None:
    mixture = Mixture("qwen3moe", ("Q8_0",) * 3, tied=True)
    model: Any = load(mixture.write(tmp_path / "m.gguf"), dtype="float32", backend=get(entry, 1)).model
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(table, QuantizedEmbedding)
    assert isinstance(head, QuantizedLinear)
    assert table.data.data_ptr() == head.data.data_ptr()
    assert error(model, mixture.model()) < 1e-4
    data = mixture.stored["token_embd.weight"][0]
    data[17] = data[18]  # a token of IDS
    other = load(mixture.write(tmp_path / "other.gguf"), dtype="float32", backend=get(entry, 1)).model
    assert error(model, other) > 1e-3


def test_a_head_and_embeddings_of_other_cuts_become_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mixture = Mixture("qwen3moe", ("Q8_0",) * 3, tied=True)
    path, model = mixture.write(tmp_path / "m.gguf"), mixture.model()
    shard = ShardPlan(WeightShard(0, 2), {"lm_head.weight": ShardedDim(-2)}, {})
    with caplog.at_level(logging.WARNING):
        replace_layers(model, path, shard, get("native", 1))
    assert type(model.get_input_embeddings()) is torch.nn.Embedding
    assert type(model.get_output_embeddings()) is torch.nn.Linear
    words = "embed_tokens.weight is not packed, but becomes numbers of --dtype: ranks have other parts of the head"
    assert words in caplog.text


def test_gate_and_up_are_in_any_order(tmp_path: Path) -> None:
    mixture = Mixture("qwen3moe", ("Q4_0",) * 3)
    mixture.stored = dict(reversed(mixture.stored.items()))
    model = load(mixture.write(tmp_path / "m.gguf"), dtype="float32", backend=get("native", 1)).model
    assert len(experts_of(model)) == 2
    assert error(model, mixture.model()) < 1e-4


def test_parts_of_several_forms_become_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mixture = Mixture("qwen3moe", ("Q4_0", "Q8_0", "Q8_0"))
    with caplog.at_level(logging.WARNING):
        model = load(mixture.write(tmp_path / "m.gguf"), dtype="float32", backend=get("native", 1)).model
    assert not experts_of(model)
    assert "experts are not packed, but become numbers of --dtype: model.layers.0.mlp.experts" in caplog.text
    assert error(model, mixture.model()) < 1e-4


@pytest.mark.parametrize("backend", ["", "native"])
def test_an_expert_that_is_no_number_is_refused_by_name(backend: str, tmp_path: Path) -> None:
    mixture = Mixture("qwen3moe", ("Q8_0",) * 3)
    mixture.stored["blk.0.ffn_down_exps.weight"][0][2, 5, :2] = 0xFF
    path = mixture.write(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"blk.0.ffn_down_exps.weight has a (scale|value) that is no finite number"):
        load(path, backend=get(backend, 1) if backend else None)


@pytest.mark.parametrize("kinds", [("Q4_0", "Q4_0", "Q5_0"), ("Q4_K", "Q4_K", "Q6_K")], ids=str)
def test_a_rank_has_its_part_of_packed_experts(kinds: tuple[str, str, str], tmp_path: Path) -> None:
    path = Mixture("qwen3moe", kinds).write(tmp_path / "m.gguf")
    whole = experts_of(load(path, backend=get("native", 1)).model)
    for rank in range(2):
        own = experts_of(load(path, backend=get("native", 1), rank=rank, size=2).model)
        assert [2 * each.data.nbytes for each in own] == [each.data.nbytes for each in whole]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_engines_serve_packed_experts(ranks: int, tmp_path: Path) -> None:
    mixture = Mixture("qwen3moe", ("Q4_1", "Q4_1", "Q8_0"), tied=ranks == 2)
    path, due = mixture.write(tmp_path / "m.gguf"), tokens_of(mixture.model(), 12)
    greedy = SamplingParams(temperature=0.0, max_tokens=len(due), ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "transport": "loopback", "memory_workers": 2}
    with LLM(str(path), tensor_parallel_size=ranks, **options) as llm:
        outputs = llm.generate([IDS[0].tolist()] * 3, greedy)
    assert [output.outputs[0].token_ids for output in outputs] == [due] * 3
