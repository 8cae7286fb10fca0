"""The names that have something to stand for, by module of vLLM."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, AutoTokenizer

import lamina
from lamina import request

from .models import made
from .offline import LLM
from .tool_parsers import NAMES as TOOL_PARSER_NAMES


class Platform:
    """A device that can do all that is asked, so that no test is skipped for it; what runs is a CPU."""

    device_type = "cpu"

    def __getattr__(self, name: str) -> Any:
        if name in ("is_cuda", "is_cuda_alike", "has_device_capability"):
            return lambda *a, **k: True
        if name in ("is_rocm", "is_xpu", "is_cpu", "is_tpu", "is_out_of_tree", "supports_mx", "is_fp8_fnuz"):
            return lambda *a, **k: False
        raise AttributeError(name)

    def device_count(self) -> int:
        return 1

    def num_compute_units(self, device: int = 0) -> int:
        return 128


class ModelConfig:
    """``vllm.config.ModelConfig``, as far as tests of the server read it."""

    def __init__(self, model: str, **options: Any) -> None:
        self._config = AutoConfig.from_pretrained(made(model))

    def get_hidden_size(self) -> int:
        return int(self._config.hidden_size)

    def get_vocab_size(self) -> int:
        return int(self._config.vocab_size)


class Environment:
    """``vllm.envs``."""

    VLLM_BATCH_INVARIANT = False
    VLLM_USE_FLASHINFER_SAMPLER = False
    VLLM_USE_V2_MODEL_RUNNER = False

    def is_set(self, name: str) -> bool:
        return False

    def disable_envs_cache(self) -> None:
        return None


def get_tokenizer(tokenizer_name: str, *args: Any, **options: Any) -> Any:
    return AutoTokenizer.from_pretrained(made(tokenizer_name))


def get_open_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Hub:
    """A hub from which nothing comes: adapters, which are dropped anyway."""

    def snapshot_download(self, repo_id: str, **options: Any) -> str:
        return repo_id


def cleanup(*args: Any, **options: Any) -> None:
    return None


SAMPLING = {
    "SamplingParams": lamina.SamplingParams,
    "StructuredOutputsParams": request.StructuredOutputsParams,
}
OUTPUTS = {"CompletionOutput": lamina.CompletionOutput, "RequestOutput": lamina.RequestOutput}
PROMPTS = {"TextPrompt": dict, "TokensPrompt": dict, "PromptType": Any}
NAMES: Mapping[str, Mapping[str, Any]] = {
    "vllm": {"LLM": LLM, "envs": Environment(), "__version__": lamina.__version__, **SAMPLING, **OUTPUTS, **PROMPTS},
    "vllm.entrypoints.llm": {"LLM": LLM},
    "vllm.sampling_params": SAMPLING,
    "vllm.outputs": OUTPUTS,
    "vllm.inputs": PROMPTS,
    "vllm.logprobs": {"Logprob": request.Logprob},
    "vllm.exceptions": {"VLLMValidationError": ValueError},
    "vllm.platforms": {"current_platform": Platform()},
    "vllm.config": {"ModelConfig": ModelConfig, "StructuredOutputsConfig": dict},
    "vllm.tokenizers": {"get_tokenizer": get_tokenizer},
    "vllm.distributed": {"cleanup_dist_env_and_memory": cleanup},
    "vllm.transformers_utils.repo_utils": {"hf_api": Hub},
    "vllm.utils.network_utils": {"get_open_port": get_open_port},
    "vllm.triton_utils": {"HAS_TRITON": True},
    "vllm.version": {"__version__": lamina.__version__},
    **TOOL_PARSER_NAMES,
}
