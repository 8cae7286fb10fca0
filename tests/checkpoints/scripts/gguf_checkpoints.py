"""Writes the tiny GGUF files in the folder above, with the tokens and logits that they must give.

    python tests/checkpoints/scripts/gguf_checkpoints.py

needs the packages gguf (0.19) and accelerate. Weights are quantised by gguf, whose K-quants are random blocks with
finite scales. ``NAME.json`` has what transformers computes in fp32 with the file's weights, as gguf dequantises them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from oracle import oracle
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parents[1]
HEADS, KV_HEADS, VOCABULARY = 4, 2, 160
HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where blocks have their scales
# Name -> the kinds of matrices, in turns.
CASES = {
    "f32": ("F32",), "f16": ("F16",), "bf16": ("BF16",), "q8_0": ("Q8_0",), "q4_0": ("Q4_0",),
    "q4_1": ("Q4_1",), "q5_0": ("Q5_0",), "q5_1": ("Q5_1",),
    "q4_k_m": ("Q4_K", "Q5_K", "Q6_K"),
}  # fmt: skip


def blocks_of(kind: str, w: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Returns rows of blocks: of w, or random ones of about its size."""
    if kind not in HALVES:
        return gguf.quants.quantize(w, Kind[kind])
    size = gguf.GGML_QUANT_SIZES[Kind[kind]][1]
    blocks = draw.integers(0, 256, (w.shape[0], w.shape[1] // 256, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scale = 0.0006 if kind == "Q6_K" else 0.004 if at else 0.0006
        halves = (scale * draw.uniform(0.5, 1, blocks.shape[:2])).astype(np.float16)
        blocks[..., at : at + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(w.shape[0], -1)


def write(name: str, kinds: Sequence[str], seed: int) -> bool:
    """Returns False if a token of this seed's model is a near tie."""
    draw, path = np.random.default_rng(seed), HERE / f"llama_{name}.gguf"
    width = 256 if kinds[0] in HALVES else 64
    file = gguf.GGUFWriter(path, "llama")
    file.add_context_length(128)
    file.add_embedding_length(width)
    file.add_block_count(1)
    file.add_feed_forward_length(width)
    file.add_head_count(HEADS)
    file.add_head_count_kv(KV_HEADS)
    file.add_rope_dimension_count(width // HEADS)
    file.add_rope_freq_base(10000.0)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_vocab_size(VOCABULARY)
    file.add_tokenizer_model("gpt2")
    letters = [*map(chr, range(33, 127)), *map(chr, range(256, 256 + VOCABULARY - 97)), "ab", "<s>", "</s>"]
    file.add_token_list(letters)
    file.add_token_types([1] * (VOCABULARY - 2) + [3, 3])
    file.add_token_merges(["a b"])
    file.add_bos_token_id(VOCABULARY - 2)
    file.add_eos_token_id(VOCABULARY - 1)
    inner = width // HEADS * KV_HEADS
    matrices = {
        "token_embd.weight": (VOCABULARY, width), "output.weight": (VOCABULARY, width),
        "blk.0.attn_q.weight": (width, width), "blk.0.attn_k.weight": (inner, width),
        "blk.0.attn_v.weight": (inner, width), "blk.0.attn_output.weight": (width, width),
        "blk.0.ffn_gate.weight": (width, width), "blk.0.ffn_up.weight": (width, width),
        "blk.0.ffn_down.weight": (width, width),
    }  # fmt: skip
    for (name, shape), kind in zip(matrices.items(), cycle(kinds), strict=False):
        w = draw.normal(0, 0.1, shape).astype(np.float32)
        own = "Q8_0" if name == "token_embd.weight" and kind in HALVES else kind
        if own in ("F32", "F16"):
            file.add_tensor(name, w.astype(np.float32 if own == "F32" else np.float16))
        else:
            file.add_tensor(name, blocks_of(own, w, draw), raw_dtype=Kind[own])
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        file.add_tensor(f"{name}.weight", draw.uniform(0.5, 1.5, width).astype(np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    model = AutoModelForCausalLM.from_pretrained(HERE, gguf_file=path.name, dtype=torch.float32)
    known = oracle(model)
    path.with_suffix(".json").write_text(json.dumps(known))
    return known is not None


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[1:] or CASES:
        print(case, next(seed for seed in range(100) if write(case, CASES[case], seed)))
