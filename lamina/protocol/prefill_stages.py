"""The stages of prefill workers that compute a prompt together, each a run of layers. Policy: no torch, no I/O."""

from __future__ import annotations

from collections.abc import Sequence

from .step_plan import GRANTS_AHEAD


def stage_layers(num_layers: int, stages: int, stage: int) -> range:
    """Return the attention operators of a stage; stages differ by one at most. A stage runs the slices before its
    operators; the last stage also runs the final slice. Raises ValueError for more stages than layers.
    """
    if stages > num_layers:
        raise ValueError(
            f"--prefill-pipeline {stages}: the model has {num_layers} layers of attention, and each worker needs one: "
            f"use {num_layers} or fewer"
        )
    return range(num_layers * stage // stages, num_layers * (stage + 1) // stages)


def max_grants_in_flight(stages: int, windows: Sequence[int]) -> int:
    """Return how many chunks of a group of ``stages`` workers may wait for K and V at once: one for each worker, and
    one so that no worker idles. It is fewer with windows: there a third chunk might free blocks that the first still
    fills.
    """
    return GRANTS_AHEAD if any(windows) else GRANTS_AHEAD + stages - 1
