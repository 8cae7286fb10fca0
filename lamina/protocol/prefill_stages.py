"""Prefill workers that compute a prompt together: each is a stage, and has a run of the model's layers. Policy: no
torch, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

from .step_plan import GRANTS_AHEAD


def stage_layers(num_layers: int, stages: int, stage: int) -> range:
    """The attention operators of a stage, as many as those of the others, or one more. It runs the slices in front of
    them; the last stage that behind all of them, too. Raises ValueError for more stages than layers.
    """
    if stages > num_layers:
        raise ValueError(
            f"--prefill-pipeline {stages}: the model has {num_layers} layers of attention, and each worker needs one: "
            f"use {num_layers} or fewer"
        )
    return range(num_layers * stage // stages, num_layers * (stage + 1) // stages)


def max_grants_in_flight(stages: int, windows: Sequence[int]) -> int:
    """Chunks of a group of ``stages`` workers, at most, whose K and V are still to come: one for each, and one so that
    nobody waits. Fewer where layers have windows: behind one, a third chunk may give blocks back that the first fills.
    """
    return GRANTS_AHEAD if any(windows) else GRANTS_AHEAD + stages - 1
