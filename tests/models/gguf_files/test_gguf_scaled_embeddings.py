"""Embeddings that a model scales, as Gemma does, stay packed in GGUF files, and have the bytes of the head."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from lamina import LLM, SamplingParams
from lamina.models.load import load
from lamina.models.quantization.quantized_embedding import QuantizedEmbedding
from lamina.ops.gemm import get

pytestmark = pytest.mark.no_retry
WIDTH, HEADS, VOCABULARY, TOKENS = 64, 4, 96, 8
IDS = torch.tensor([[3, 17, 90, 4, 56, 40, 8, 21]])


MATRICES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
NORMS = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip


def write(path: Path) -> Any:
    """Write a tiny Gemma 3 of one layer, with matrices of Q8_0. Returns transformers' model with the numbers of the
    package gguf.
    """
    draw, file, head = np.random.default_rng(0), gguf.GGUFWriter(path, "gemma3"), WIDTH // HEADS
    file.add_context_length(128)
    file.add_embedding_length(WIDTH)
    file.add_block_count(1)
    file.add_feed_forward_length(WIDTH)
    file.add_head_count(HEADS)
    file.add_head_count_kv(HEADS)
    file.add_key_length(head)
    file.add_value_length(head)
    file.add_rope_freq_base(10000.0)
    file.add_sliding_window(64)
    file.add_layer_norm_rms_eps(1e-6)
    file.add_vocab_size(VOCABULARY)
    file.add_tokenizer_model("gpt2")
    file.add_token_list([*map(chr, range(33, 33 + VOCABULARY - 4)), "aa", "ab", "<s>", "</s>"])
    file.add_token_types([1] * (VOCABULARY - 2) + [3, 3])
    file.add_token_merges(["a b"])
    file.add_bos_token_id(VOCABULARY - 2)
    file.add_eos_token_id(VOCABULARY - 1)
    names = {f"blk.0.{own}": f"model.layers.0.{name}" for own, name in MATRICES.items()}
    numbers = {}
    for own, name in (names | {"token_embd": "model.embed_tokens"}).items():
        shape = (VOCABULARY if own == "token_embd" else WIDTH, WIDTH)
        blocks = gguf.quants.quantize(draw.normal(0, 0.1, shape).astype(np.float32), Kind.Q8_0)
        file.add_tensor(f"{own}.weight", blocks, raw_dtype=Kind.Q8_0)
        numbers[f"{name}.weight"] = torch.from_numpy(gguf.quants.dequantize(blocks, Kind.Q8_0))
    norms = {f"blk.0.{own}": f"model.layers.0.{name}" for own, name in NORMS.items()}
    for own, name in (norms | {"output_norm": "model.norm"}).items():
        w = draw.uniform(0.5, 1.5, head if own.endswith(("q_norm", "k_norm")) else WIDTH).astype(np.float32)
        file.add_tensor(f"{own}.weight", w)
        numbers[f"{name}.weight"] = torch.from_numpy(w - np.float32(1))  # the file has what is multiplied
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    config = Gemma3TextConfig(
        hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, head_dim=head, vocab_size=VOCABULARY, max_position_embeddings=128,
        sliding_window=64,
    )  # fmt: skip
    config.rope_parameters["full_attention"]["rope_theta"] = 10000.0
    model: Any = Gemma3ForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(numbers, strict=False)
    assert not unexpected
    assert {name for name in missing if "rotary" not in name} <= {"lm_head.weight"}
    return model


def test_scaled_embeddings_stay_packed(tmp_path: Path) -> None:
    right = write(path := tmp_path / "m.gguf")
    model: Any = load(path, dtype="float32", backend=get("native", 1)).model
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(table, QuantizedEmbedding)
    assert table.data.data_ptr() == head.data.data_ptr()
    with torch.no_grad():
        due = right(IDS).logits
        assert float((model(IDS).logits - due).abs().max() / due.std()) < 1e-4
        assert torch.equal(table(IDS), right.get_input_embeddings()(IDS))
        narrow: Any = load(path, dtype="bfloat16", backend=get("native", 1)).model
        assert torch.equal(narrow.get_input_embeddings()(IDS), right.bfloat16().get_input_embeddings()(IDS))
    assert abs(float(table(IDS).std()) / (0.1 * math.sqrt(WIDTH)) - 1) < 0.1


def test_an_engine_serves_scaled_embeddings(tmp_path: Path) -> None:
    right = write(path := tmp_path / "m.gguf")
    due = right.generate(IDS, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)[0, IDS.shape[1] :].tolist()
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(str(path), dtype="float32", transport="loopback", memory_workers=2) as llm:
        (output,) = llm.generate([IDS[0].tolist()], greedy)
    assert output.outputs[0].token_ids == due
