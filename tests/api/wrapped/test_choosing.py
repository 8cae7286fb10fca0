"""The caller can choose the token of a row on any replica: the best one each time is greedy decoding.

Covers: lamina/api/wrapped/stepwise_generate.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lamina import LLM, SamplingParams

MODEL = Path(__file__).resolve().parents[3] / "examples" / "tiny_lm" / "model"
PROMPTS = [[320, 480] * 10, [7, 8], [9]]


@pytest.mark.long
def test_the_best_token_each_time_is_greedy() -> None:
    """The first token after a prompt comes from a prefill worker."""
    options = {"prefill_workers": 1, "pipeline": 2, "memory_workers": 2, "max_model_len": 64}
    with LLM(str(MODEL), dtype="float32", transport="loopback", **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
        chosen: list[list[int]] = []
        with llm.lockstep(PROMPTS, 6) as rows:
            for _ in range(5):
                chosen.append([int(np.frombuffer(row, dtype="<f4").argmax()) for row in rows.logits()])
                rows.choose(chosen[-1])
        assert [list(each) for each in zip(*chosen, strict=True)] == expected
        assert len(set(map(tuple, expected))) == 3
        again = llm.generate(PROMPTS, params)
        assert [o.outputs[0].token_ids for o in again] == expected, "rows that are dropped leave nothing behind"


def test_what_has_no_room_beside_rows_that_are_being_chosen_is_told() -> None:
    """A processor may ask for other texts while its own rows fill the engine."""
    options = {"memory_workers": 1, "max_model_len": 64, "max_num_seqs": 2}
    with LLM(str(MODEL), dtype="float32", transport="loopback", **options) as llm:
        with llm.lockstep(PROMPTS[:2], 6) as rows:
            rows.logits()
            with pytest.raises(ValueError, match="does not fit next to rows whose tokens are being chosen"):
                llm.generate([[5, 6]], SamplingParams(max_tokens=2))
        assert llm.generate([[5, 6]], SamplingParams(max_tokens=2))[0].finished
        with pytest.raises(ValueError, match="shorten them, or start with a larger max_model_len"):
            llm.lockstep([[5] * 60], 8)
