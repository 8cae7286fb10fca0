"""Tiny GGUF files of mixtures of experts, written with the package gguf, and the models that they describe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoConfig, AutoModelForCausalLM

HEADS, KV_HEADS, EXPERTS, CHOSEN, VOCABULARY = 4, 2, 4, 2, 96
IDS = torch.tensor([[3, 17, 90, 4, 56, 40, 8, 21]])
HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where blocks have their scales
FAMILIES = {"qwen3moe": "qwen3_moe", "qwen2moe": "qwen2_moe", "minimax-m2": "minimax_m2"}
FLOATS = ("F32", "F16", "BF16")
KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
Stored = dict[str, tuple[np.ndarray, str]]  # by name: rows of numbers, or of blocks of a kind


def blocks(kind: str, shape: tuple[int, ...], draw: np.random.Generator) -> np.ndarray:
    """Blocks of gguf's own quantiser, or random ones with scales of a weight's size, where it has none; or floats."""
    if kind in ("F32", "F16"):
        return draw.normal(0, 0.1, shape).astype(np.float32 if kind == "F32" else np.float16)
    if kind not in HALVES:
        return gguf.quants.quantize(draw.normal(0, 0.1, shape).astype(np.float32), Kind[kind])
    size = gguf.GGML_QUANT_SIZES[Kind[kind]][1]
    made = draw.integers(0, 256, (*shape[:-1], shape[-1] // 256, size), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = (0.0006 * draw.uniform(0.5, 1, made.shape[:-1]) * (6 if at == 2 else 1)).astype(np.float16)
        made[..., at : at + 2] = halves[..., None].view(np.uint8)
    return made.reshape(*shape[:-1], -1)


class Mixture:
    """A tiny file of one layer, and the model that it describes. ``kinds``: of gate and up, and of down. Other matrices
    are Q8_0, or floats if the first of them are.
    """

    def __init__(self, arch: str, kinds: tuple[str, str, str], *, tied: bool = False) -> None:
        self.arch, self.kinds, self.tied, self.draw = arch, kinds, tied, np.random.default_rng(0)
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
        kind = self.kinds[0] if self.kinds[0] in FLOATS else "Q8_0"
        self.stored[own] = blocks(kind, shape, self.draw), kind
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


def tokens_of(right: Any, count: int) -> list[int]:
    """Greedy tokens after IDS."""
    ids = IDS
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, right(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0, IDS.shape[1] :].tolist()
