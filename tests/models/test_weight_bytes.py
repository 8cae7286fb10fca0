"""The weights that stay in the pages of their files, all of which are read when a model is loaded.

Covers: lamina/models/read_shard.py, lamina/models/tensor_parallel_shard.py, lamina/models/weight_pages.py.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
)

from lamina.models.checkpoint import stored_weights
from lamina.models.errors import ModelError
from lamina.models.load import from_config, load, max_model_len
from lamina.models.read_shard import WeightBytes, weight_bytes
from lamina.models.tensor_parallel_shard import plan_shard
from lamina.models.weight_pages import prefault_weights

SHAPE: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixtral")
    config = MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)
    MixtralForCausalLM(config).save_pretrained(path)
    return path


def planned(path: Path, dtype: str = "auto", ranks: int = 1) -> WeightBytes:
    model, shard = from_config(path, dtype=dtype), None
    if ranks > 1:
        shard = plan_shard(model, 0, ranks, max_model_len(model.config))
        shard.shrink_to_shard(model)
    return weight_bytes(model, path, shard)


def loaded(path: Path, dtype: str = "auto", ranks: int = 1) -> WeightBytes:
    """Sorts the tensors of a loaded model by where they lie."""
    model = load(path, dtype=dtype, rank=0, size=ranks).model
    files = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    spans = [[int(x, 16) for x in span.split("-")] for span in files]
    weights: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    mapped = sum(w.nbytes for w in weights if any(low <= w.data_ptr() < high for low, high in spans))
    return WeightBytes(mapped, sum(w.nbytes for w in weights) - mapped)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_mapped_and_copied_as_loaded(llama: Path, dtype: str, ranks: int) -> None:
    found = planned(llama, dtype, ranks)
    assert found == loaded(llama, dtype, ranks)
    assert (found.mapped > 0) == (dtype == "auto")


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_are_copied(mixtral: Path, ranks: int) -> None:
    found = planned(mixtral, "auto", ranks)
    assert found == loaded(mixtral, "auto", ranks)
    assert found.copied > found.mapped


def test_tied_weights_count_once(tmp_path: Path) -> None:
    config = LlamaConfig(**SHAPE, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    found = planned(tmp_path)
    assert found == loaded(tmp_path)
    assert found.mapped == sum(torch.Size(w.shape).numel() * 4 for w in stored_weights(tmp_path))


def test_all_pages_are_there_once_it_is_loaded(tmp_path: Path) -> None:
    """An embedding is else read row by row, as tokens come."""
    LlamaForCausalLM(LlamaConfig(**{**SHAPE, "vocab_size": 20_000})).save_pretrained(tmp_path)
    ticks: list[tuple[str, int, int]] = []
    model = load(tmp_path, progress=lambda *tick: ticks.append(tick)).model
    weight = model.get_input_embeddings().weight  # type: ignore[operator]
    assert resident_kb(weight) >= weight.nbytes >> 10
    reading = [t for t in ticks if t[0] == "reading weights (MB)"]
    assert reading[0][1] == 0
    assert reading[-1][1] == reading[-1][2] == 10


def test_weights_for_images_stay_in_their_file(tmp_path: Path) -> None:
    """A multimodal model serves texts alone."""
    config = LlavaConfig(text_config=LlamaConfig(**SHAPE), vision_config=CLIPVisionConfig(num_hidden_layers=2))
    model = LlavaForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    text = sum(weight.nbytes for part in (model.model.language_model, model.lm_head) for weight in part.parameters())
    image = sum(weight.nbytes for weight in model.model.vision_tower.parameters())
    head: torch.Tensor = load(tmp_path).model.get_output_embeddings().weight  # type: ignore[operator]
    assert text >> 10 <= resident_kb(head) < (text + image // 4) >> 10
    assert planned(tmp_path).mapped == text


def resident_kb(x: torch.Tensor) -> int:
    """Returns the resident memory of the mapping that ``x`` lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low <= x.data_ptr() < high
        elif inside and head == "Rss:":
            return int(line.split()[1])
    return 0


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """It has become shorter since it was mapped: touching it would end the process."""
    file = tmp_path / "data"
    file.write_bytes(bytes(4 * mmap.PAGESIZE))
    with open(file, "r+b") as f:
        memory = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
        x = torch.frombuffer(memory, dtype=torch.uint8)
        f.truncate(mmap.PAGESIZE)
        with pytest.raises(OSError, match="its pages cannot be read"):
            prefault_weights([x], lambda done, total: None)


def mixed(path: Path, change: Any) -> Path:
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16()
    change(model.get_submodule("model.layers.0"))
    model.save_pretrained(path)  # type: ignore[operator]
    return path


def test_matrices_of_several_dtypes_need_a_word(tmp_path: Path) -> None:
    path = mixed(tmp_path, lambda layer: layer.mlp.float())
    words = r"mixes weights of bfloat16 \(\S+\) and float32 \(model.layers.0.mlp.\S+\): choose .*--dtype"
    with pytest.raises(ModelError, match=words) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert {p.dtype for p in load(path, dtype="float32").model.parameters()} == {torch.float32}


def test_norms_may_be_of_another_dtype(tmp_path: Path) -> None:
    load(mixed(tmp_path, lambda layer: layer.input_layernorm.float()))


def test_matrices_that_transformers_keeps_in_fp32_may_be_of_another_dtype(tmp_path: Path) -> None:
    small = {**SHAPE, "moe_intermediate_size": 32, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}
    model = Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**small)).bfloat16()
    kept = tuple(model._keep_in_fp32_modules_strict)
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if any(part in name for part in kept):
            weight.data = weight.data.float()
    model.save_pretrained(tmp_path)
    held = {name: p.dtype for name, p in load(tmp_path).model.named_parameters()}
    in_fp32 = {name for name, dtype in held.items() if dtype == torch.float32}
    assert in_fp32 == {name for name in held if any(part in name for part in kept)} != set()
    model.model.layers[1].self_attn.q_proj.float()
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"float32 \(model.layers.1.self_attn.q_proj.weight\)"):
        load(tmp_path)
