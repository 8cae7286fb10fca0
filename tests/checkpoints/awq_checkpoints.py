"""Writes the tiny checkpoint of AWQ in this folder, with the tokens and logits that it must give.

    python tests/checkpoints/awq_checkpoints.py PATH_OF_AUTOAWQ/awq/utils/packing_utils.py

takes that file of autoawq 0.2.9, which dequantises random words. ``oracle.json`` has what transformers computes in fp32
with these weights.
"""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from oracle import oracle
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

HERE, GROUP = Path(__file__).parent, 32
SHAPE: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "tie_word_embeddings": False, "initializer_range": 0.4,
}  # fmt: skip


def write(dequantize: Any, seed: int) -> bool:
    """Returns False if a token of this seed's model is a near tie."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    tensors: dict[str, torch.Tensor] = {}
    for key, w in model.state_dict().items():
        if not key.endswith("_proj.weight"):
            tensors[key] = w.half().contiguous()
            w.copy_(tensors[key].float())
            continue
        owner, (outputs, inputs) = key.removesuffix(".weight"), w.shape
        words = torch.randint(-(2**31), 2**31, (inputs, outputs // 8), dtype=torch.int64).int()
        zeros = torch.full((inputs // GROUP, outputs // 8), 0x77778787, dtype=torch.int64)
        scales = (0.05 + 0.05 * torch.rand(inputs // GROUP, outputs)).half()
        tensors |= {f"{owner}.qweight": words, f"{owner}.qzeros": zeros.int(), f"{owner}.scales": scales}
        w.copy_(dequantize(words, zeros.int(), scales.float(), 4, GROUP).T)
    path = HERE / "llama_awq"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = model.config.to_dict() | {"dtype": "float16", "architectures": ["LlamaForCausalLM"]}
    config["quantization_config"] = {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True,
        "modules_to_not_convert": None,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config, indent=1))
    known = oracle(model)
    (path / "oracle.json").write_text(json.dumps(known))
    return known is not None


if __name__ == "__main__":
    torch.set_num_threads(1)
    library = runpy.run_path(sys.argv[1])
    print(next(seed for seed in range(100) if write(library["dequantize_gemm"], seed)))
