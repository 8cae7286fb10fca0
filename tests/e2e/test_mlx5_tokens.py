"""Tokens over the mlx5 transport, on the software NIC, are those of the same run in one process, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamina import LLM, SamplingParams, netstack

pytestmark = pytest.mark.usefixtures("no_child_left")


def test_tokens_and_log_probabilities_are_identical(llama_path: Path, prompts: list[list[int]]) -> None:
    try:
        netstack.open("mlx5", key=bytes(32))
    except ImportError as error:
        pytest.skip(str(error))
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, ignore_eos=True)
    found = []
    for scheme in ("loopback", "mlx5"):
        with LLM(str(llama_path), transport=scheme, memory_workers=2, prefill_chunk=64, deterministic=True) as llm:
            found.append([o.outputs[0] for o in llm.generate(prompts, params)])
            assert llm.stats()["memory-1"]["bytes_received"] > 0
    in_one_process, over_mlx5 = found
    assert [o.token_ids for o in over_mlx5] == [o.token_ids for o in in_one_process]
    assert [o.logprobs for o in over_mlx5] == [o.logprobs for o in in_one_process]
    assert len({t for o in over_mlx5 for t in o.token_ids}) >= 10, "tokens that vary, so that equality says something"
