"""A stage of a prompt: a prefill worker with a run of the model's layers. What crosses from one stage to the next is
the cut, and what the layer in front of the next stage has attended.

(Chunked pipeline parallelism: Mooncake, arXiv 2407.00079 section 5.2.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lamina.compute.model_server import CutModel
from lamina.compute.ring import Move, RowShape, Stay, ring_inbox
from lamina.compute.staged import stage_ring
from lamina.netstack import Channel, Geometry, PeerFault, Reception, Terms
from lamina.protocol.beginnings import MeetPrefill
from lamina.protocol.options.engine import Deadlines
from lamina.protocol.plan import GRANTS_AHEAD, StepPlan
from lamina.workers.staging import Staging
from lamina.workers.view import ViewDoor, ViewFabric

from . import OwnAttention

NOTHING_BACK = Geometry(slots=1, slot_bytes=64)


def stage_name(worker: str) -> str:
    """The name of the place where the stage before ``worker`` connects."""
    return f"{worker}/stage"


def stage_reception(worker: str) -> Reception:
    """For the stage before it alone, under two views."""
    return Reception(name=stage_name(worker), channels=2)


def program_of(program: Any, layers: range, num_layers: int) -> Any:
    """The part of a cut program, of ``num_layers`` layers, that a stage runs: the slices in front of its layers, and in
    the last stage that behind all of them.
    """
    last = layers.stop == num_layers
    return replace(program, slices=program.slices[layers.start : layers.stop + last])


def without_model(cut: CutModel) -> CutModel:
    """The same, whose slices alone hold weights: those of other stages are let go."""
    return cut._replace(loaded=replace(cut.loaded, model=nn.Identity()))


class StageProgram:
    """What a compute worker runs of a stage: all slices by their numbers, None where another stage has them."""

    def __init__(self, program: Any, layers: range, num_layers: int) -> None:
        own, behind = list(program.slices), num_layers + 1 - layers.start - len(program.slices)
        self.slices: Sequence[Any] = [*[None] * layers.start, *own, *[None] * behind]


class StageRing:
    """A Ring: inside of a stage the cut stays where it is; from its last slice it goes to the next stage, with O of
    that slice's layer, which the ``attention`` of this stage has computed and that of the next one hands out.
    """

    def __init__(
        self, layers: range, attention: OwnAttention, move: Move, staging: Staging, dtype: torch.dtype, view: int
    ) -> None:
        """``move``: to the stages before and behind. ``dtype``: of O."""
        self._layers, self._attention, self._dtype, self._view = layers, attention, dtype, view
        self._stay, self._move, self._over = Stay(), move, stage_ring(move, staging)

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for the stage before."""
        return self._move.wait_s

    def comes(self, timeout_s: float) -> bool:
        """Whether the next slice can run, or could within so long. Raises ChannelError."""
        return not self._layers.start or self._stay.holds or self._move.sees(self._view, timeout_s)

    def give(self, plan: StepPlan, index: int, carry: tuple[Tensor, ...]) -> None:
        """The results of slice ``index``, for this stage or the next one."""
        if index + 1 < self._layers.stop or not self._move.goes_on:
            self._stay.give(plan, index, carry)
        else:
            self._over.give(plan, index, (*carry, self._attention.o(index, plan.num_rows, self._dtype)))

    def take(self, plan: StepPlan, index: int) -> tuple[Tensor, ...]:
        """The results of slice ``index``, of this stage or the one before."""
        if index >= self._layers.start:
            return self._stay.take(plan, index)
        *carry, o = self._over.take(plan, index)
        self._attention.take_over(o)
        return tuple(carry)


def stage_cuts(program: Any) -> list[list[RowShape]]:
    """Of the whole program: what crosses in front of each slice but the first, where another stage has it."""
    return [[*between.tensors, call.out] for between, call in zip(program.cuts, program.calls, strict=True)]


def stage_inboxes(cuts: Sequence[Sequence[RowShape]], max_rows: int) -> tuple[Geometry, Geometry]:
    """Of a stage, and of the one before it."""
    return ring_inbox(cuts, max_rows=max_rows, num_batches=GRANTS_AHEAD), NOTHING_BACK


def line_up(
    cut: CutModel,
    order: MeetPrefill,
    fabric: ViewFabric,
    door: ViewDoor,
    name: str,
    deadlines: Deadlines,
    max_rows: int,
) -> Move:
    """Meet the stages before and behind the worker ``name``: the one before comes to ``door``, and then this one goes
    to the one behind. Raises ChannelError.
    """
    cuts, limit_s = stage_cuts(cut.program), deadlines.start_timeout_s
    before: Channel | None = None
    behind: Channel | None = None
    if order.before:
        before = fabric.accept(door, limit_s)
        if before.peer_name != stage_name(order.before):
            raise PeerFault(f"{before.peer} is {before.peer_name!r} in place of {stage_name(order.before)!r}")
    if (there := order.behind) is not None:
        own, peer, (its, back) = stage_name(name), stage_name(there.name), stage_inboxes(cuts, max_rows)
        terms = Terms(outbound=its, inbound=back, name=own, peer=peer, key=there.key)
        behind = fabric.connect(there.url, terms, timeout_s=limit_s)
    return Move(before, behind, cuts, deadlines.step_timeout_s)
