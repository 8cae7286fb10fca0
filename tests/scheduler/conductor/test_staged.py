"""Prefill workers that compute a prompt together: one worker to the Conductor, with the law of a pipeline."""

from __future__ import annotations

import pytest

from lamina.scheduler.conductor import Conductor, ConductorConfig, PromptInfo
from lamina.scheduler.conductor.latency_model import (
    SINGLE_STAGE,
    PrefillLatency,
    PrefillLatencyEstimator,
    PrefillPipelineShape,
    TransferLatency,
)
from lamina.scheduler.conductor.overload import DecodeLoadModel, StepLatency
from lamina.scheduler.prefix_index import PrefixIndex
from lamina.tools.plan.simulator.conducted_run import SimulatedPools, SimulatedPoolSpec, TracedPrompt

CHUNK, STAGE = 1000, PrefillLatency(0.0, 1e-3, 0.0)  # a second of each stage for a chunk


def pools(staged: PrefillPipelineShape) -> SimulatedPools:
    conductor = Conductor(
        config=ConductorConfig(policy="auto"),
        prefix_index=PrefixIndex(),
        prefill_latency=PrefillLatencyEstimator(STAGE),
        transfer_latency=None,
        decode_load_model=DecodeLoadModel(1, StepLatency(0.0, 0.0, 0.0), 0.0),
        num_workers=1,
        staged=staged,
    )
    return SimulatedPools(conductor, SimulatedPoolSpec(STAGE, TransferLatency(0.0, 0.0)))


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_prompt_of_n_chunks_takes_n_and_the_other_stages_more_and_the_next_one_its_own_chunks(stages: int) -> None:
    one = pools(PrefillPipelineShape(stages, CHUNK))
    one.run([TracedPrompt(at, PromptInfo(6 * CHUNK), 1) for at in (0.0, 0.0, 100.0)])
    first, behind, alone = (r.ttft_s for r in one.requests)
    assert first == alone == pytest.approx(6 + stages - 1)
    assert behind == pytest.approx(2 * 6 + stages - 1), "no stage rests between two prompts"
    assert [r.choice.ttft_s for r in one.requests] == pytest.approx([first, behind, alone]), "foreseen"
    assert one.busy_s == [3 * 6], "of each stage"


def test_what_a_stage_was_at_a_prompt_is_its_part_of_the_time() -> None:
    staged = PrefillPipelineShape(4, CHUNK)
    assert staged.stage_share(6 * CHUNK, 0) == pytest.approx(6 / 9)
    assert staged.stage_share(6 * CHUNK, 5 * CHUNK + 1) == pytest.approx(1 / 4), "a chunk that is not whole"
    assert staged.fill_s(6 * CHUNK, 0, 6.0) == pytest.approx(3.0)
    assert (SINGLE_STAGE.stage_share(7, 0), SINGLE_STAGE.fill_s(7, 0, 1.0)) == (1.0, 0.0)
