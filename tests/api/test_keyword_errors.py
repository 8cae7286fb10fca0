"""Errors of ``LLM`` name keywords; those of commands name flags."""

from __future__ import annotations

import pytest

from lamina import LLM, AsyncLLM
from lamina.api.keyword_errors import keyword_text
from lamina.api.llm import CommandLLM
from lamina.config.flag_groups import flag_name
from lamina.config.flat_options import OPTIONS


@pytest.mark.parametrize(
    ("flags", "keywords"),
    [
        ("--memory-workers must be at least 1, not 0", "memory_workers must be at least 1, not 0"),
        ("--kv-parity 1 does not go with --launcher ray:", 'kv_parity=1 does not go with launcher="ray":'),
        ("--kv-offload dir=/kv: chmod 700 /kv", "kv_store_dir=/kv: chmod 700 /kv"),
        ("--kv-offload ttl=7 is not a time", "kv_store_ttl=7 is not a time"),
        ("give --kv-cache-memory-bytes 8GiB.", 'give kv_cache_memory_bytes="8GiB".'),
        ("--kv-sparsity evict:max-kl= needs --kv-sparsity evict", 'kv_error_budget needs kv_sparsity="evict"'),
        ("--pipeline auto:3, not --pipeline 2 or more", 'plan="auto:3", not pipeline=2 or more'),
        ("--pipeline-parallel-size is not supported", "pipeline_parallel_size is not supported"),
        ("--memory-device cuda: no GPU", 'memory_device="cuda": no GPU'),
        ("--no-enable-prefix-caching, because", "enable_prefix_caching=False, because"),
        ("leave out --kv-cache-memory-bytes", "leave out kv_cache_memory_bytes"),
        ("--tokenizer and --ssl-keyfile stay", "--tokenizer and --ssl-keyfile stay"),
    ],
)
def test_a_text_gets_keywords(flags: str, keywords: str) -> None:
    assert keyword_text(flags) == keywords


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_of_a_flag_or_key_of_its_own_is_known(option: str) -> None:
    flag = flag_name(option)
    names = [name for name in OPTIONS if flag_name(name) == flag] + [flag.removeprefix("--").replace("-", "_")]
    assert keyword_text(f"{flag}: x") in [f"{name}: x" for name in names]


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_errors_of_a_start_name_keywords(kind: type[LLM | AsyncLLM]) -> None:
    with pytest.raises(ValueError, match="^tensor_parallel_size=2 or more does not go with memory_workers=1, because "):
        kind("no-model", tensor_parallel_size=2, memory_workers=1)
    with pytest.raises(ValueError, match="^pipeline_parallel_size is not supported: pipeline n rotates n batches"):
        kind("no-model", pipeline_parallel_size=2)


def test_errors_of_a_command_name_flags() -> None:
    with pytest.raises(ValueError, match="^--tensor-parallel-size 2 or more does not go with --memory-workers 1, "):
        CommandLLM("no-model", tensor_parallel_size=2, memory_workers=1)
