"""Tokens over nic-model, a NIC in software, and over cuda, on a stand-in of the driver, are those of one process, bit
for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda_stand_in import STAND_IN, scheme_of

from lamina import LLM, SamplingParams, netstack

pytestmark = pytest.mark.usefixtures("no_child_left")


@pytest.mark.long(but=["nic-model"])
@pytest.mark.parametrize("transport", ["nic-model", STAND_IN])
def test_tokens_and_log_probabilities_are_identical(transport: str, llama_path: Path, prompts: list[list[int]]) -> None:
    with scheme_of(transport) as scheme:
        try:
            netstack.open(scheme, key=bytes(32)).close()
        except ImportError as error:
            pytest.skip(str(error))
        check(scheme, llama_path, prompts)


def check(other: str, llama_path: Path, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, ignore_eos=True)
    found = []
    for scheme in ("loopback", other):
        with LLM(str(llama_path), transport=scheme, memory_workers=2, prefill_chunk=64, deterministic=True) as llm:
            found.append([o.outputs[0] for o in llm.generate(prompts, params)])
            assert llm.stats()["memory-1"]["bytes_received"] > 0
    in_one_process, over_other = found
    assert [o.token_ids for o in over_other] == [o.token_ids for o in in_one_process]
    assert [o.logprobs for o in over_other] == [o.logprobs for o in in_one_process]
    assert len({t for o in over_other for t in o.token_ids}) >= 10, "tokens that vary, so that equality says something"
