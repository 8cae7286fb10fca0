"""Copied over vLLM's ``tests/conftest.py``."""

from lamina_as_vllm.absent import absent_of
from lamina_as_vllm.fixtures import HfRunner, VllmRunner, example_prompts, hf_runner, local_asset_server, vllm_runner

__all__ = ["HfRunner", "VllmRunner", "example_prompts", "hf_runner", "local_asset_server", "vllm_runner"]
_absent = absent_of(__name__, {})


def __getattr__(name: str) -> object:
    if name.startswith(("pytest_", "collect_")):
        raise AttributeError(name)
    return _absent(name)
