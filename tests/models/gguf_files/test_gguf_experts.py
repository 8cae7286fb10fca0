"""Mixtures of experts in GGUF files: experts and embeddings stay packed, and give the logits that transformers computes
in fp32 with weights as the package gguf dequantises them.

Covers: lamina/models/quantization/quantized_embedding.py.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_mixture import IDS, KINDS, Mixture, tokens_of

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


def error(model: Any, right: Any) -> float:
    with torch.no_grad():
        due = right(IDS).logits
        return float((model(IDS).logits - due).abs().max() / due.std())


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
