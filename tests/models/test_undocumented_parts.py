"""Parts of transformers and torch that Lamina uses and that are not documented: a release may take any of them away.

pyproject.toml allows no release of both that was not run, and `make ranges` runs this with each end of their ranges.
"""

from __future__ import annotations

import importlib
import inspect

import pytest
from transformers import GenerationMixin, LogitsProcessor

PARTS = [
    # The attention and the masks of a model become calls of Lamina's operator.
    "transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS.register",
    "transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS._global_mapping",
    "transformers.masking_utils:ALL_MASK_ATTENTION_FUNCTIONS.register",
    "transformers.masking_utils:ALL_MASK_ATTENTION_FUNCTIONS._global_mapping",
    # A rank reads its part of a checkpoint.
    "transformers.conversion_mapping:get_model_conversion_mapping",
    "transformers.core_model_loading:Concatenate",
    "transformers.core_model_loading:MergeModulelist",
    "transformers.core_model_loading:WeightConverter",
    "transformers.core_model_loading:WeightRenaming",
    "transformers.core_model_loading:rename_source_key",
    "transformers.modeling_utils:LoadStateDictConfig",
    "transformers.modeling_utils:PreTrainedModel._finalize_model_loading",
    "transformers.modeling_utils:PreTrainedModel._get_dtype_plan",
    "transformers.modeling_utils:PreTrainedModel._load_pretrained_model",
    # An architecture is known, or not, before anything is built; transformers' bars become Lamina's.
    "transformers.models.auto.configuration_auto:CONFIG_MAPPING_NAMES",
    "transformers.models.auto.modeling_auto:MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "transformers.utils.logging:set_tqdm_hook",
    # Families whose attention does not go through the attention interface.
    "transformers.models.bloom.modeling_bloom:BloomAttention._reshape",
    "transformers.models.falcon.modeling_falcon:FalconAttention._split_heads",
    "transformers.models.falcon.modeling_falcon:apply_rotary_pos_emb",
    "transformers.models.gpt_neo.modeling_gpt_neo:GPTNeoSelfAttention._attn",
    "transformers.models.mpt.modeling_mpt:MptAttention.forward",
    # A decode step is captured, read again from a file, and cut.
    "torch._C:_dispatch_has_kernel_for_dispatch_key",
    "torch._dynamo.source:ConstantSource",
    "torch._ops:HigherOrderOperator",
    "torch._ops:OpOverload",
    "torch._subclasses.fake_tensor:FakeTensor",
    "torch._subclasses.fake_tensor:FakeTensorMode",
    "torch.fx._lazy_graph_module:_use_lazy_graph_module",
    "torch.fx.experimental.symbolic_shapes:DimDynamic",
    "torch.fx.experimental.symbolic_shapes:ShapeEnv",
    "torch.utils._pytree:tree_leaves",
]


@pytest.mark.parametrize("part", PARTS)
def test_an_undocumented_part_is_there(part: str) -> None:
    module, _, path = part.partition(":")
    found: object = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)


@pytest.mark.parametrize("name", ["gptj:GPTJAttention", "codegen:CodeGenAttention"])
def test_attention_has_a_method_to_replace_or_goes_through_the_interface(name: str) -> None:
    """It goes through the interface from transformers 5.24 on."""
    module_name, _, class_name = name.partition(":")
    module = importlib.import_module(f"transformers.models.{module_name}.modeling_{module_name}")
    attention = getattr(module, class_name)
    assert hasattr(attention, "_attn") or "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(attention)


def test_a_decoding_loop_can_be_passed_to_generate() -> None:
    """It is documented; wrap is built on it, and on the processors that a call has."""
    assert "custom_generate" in inspect.signature(GenerationMixin.generate).parameters
    assert list(inspect.signature(LogitsProcessor.__call__).parameters) == ["self", "input_ids", "scores"]
