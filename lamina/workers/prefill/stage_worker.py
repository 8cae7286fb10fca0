"""A stage of a prompt: a prefill worker with a run of the model's layers.

It sends the next stage the cut, and O of the layer before that stage's first slice. (Chunked pipeline parallelism:
Mooncake, arXiv 2407.00079 section 5.2.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lamina.config.engine_config import Deadlines
from lamina.netstack import Channel, Geometry, ListenTerms, PeerFault, Terms
from lamina.protocol.prefix_fetch import ConnectPrefillPeers
from lamina.protocol.step_plan import GRANTS_AHEAD, StepPlan
from lamina.workers.compute.compute_worker import LocalPipeline
from lamina.workers.compute.model_server import CutModel
from lamina.workers.compute.pipeline_comm import RemotePipeline, RowShape, pipeline_inbox
from lamina.workers.compute.staged_comm import with_staging
from lamina.workers.epoch_channels import EpochFabric, EpochListener
from lamina.workers.staging import Staging

from .prefill_worker import LocalAttention

NO_REPLY_INBOX = Geometry(slots=1, slot_bytes=64)


def stage_name(worker: str) -> str:
    """Return the name of the listener at which the stage before ``worker`` connects."""
    return f"{worker}/stage"


def stage_listener_terms(worker: str) -> ListenTerms:
    """Return the terms for the stage before alone, in up to two epochs."""
    return ListenTerms(name=stage_name(worker), channels=2)


def stage_program(program: Any, layers: range, num_layers: int) -> Any:
    """Return the part of a cut program, of ``num_layers`` layers, that a stage runs. These are the slices before its
    layers, and in the last stage also the slice after all layers.
    """
    last = layers.stop == num_layers
    return replace(program, slices=program.slices[layers.start : layers.stop + last])


def drop_model(cut: CutModel) -> CutModel:
    """Return the model without its module: weights remain only in its slices, so those of other stages are freed."""
    return cut._replace(loaded_model=replace(cut.loaded_model, model=nn.Identity()))


class StageProgram:
    """A stage's program for a compute worker: all slices by their numbers, None if another stage has them."""

    def __init__(self, program: Any, layers: range, num_layers: int) -> None:
        own, following = list(program.slices), num_layers + 1 - layers.start - len(program.slices)
        self.slices: Sequence[Any] = [*[None] * layers.start, *own, *[None] * following]


class StagePipeline:
    """A PipelineComm. Inside a stage the cut stays in place. The stage's last slice sends the cut to the next stage,
    with O of its layer. The ``attention`` of this stage computes it, and that of the next stage returns it.
    """

    def __init__(
        self,
        layers: range,
        attention: LocalAttention,
        move: RemotePipeline,
        staging: Staging,
        dtype: torch.dtype,
        epoch: int,
    ) -> None:
        """``move``: to the stages before and after. ``dtype``: of O."""
        self._layers, self._attention, self._dtype, self._view = layers, attention, dtype, epoch
        self._local, self._remote, self._carries_output = LocalPipeline(), move, with_staging(move, staging)

    @property
    def wait_s(self) -> float:
        """The seconds spent waiting for the stage before."""
        return self._remote.wait_s

    def can_receive(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds until the next slice can run, and return whether it can. Raises
        ChannelError.
        """
        return not self._layers.start or self._local.has_carry or self._remote.can_receive(self._view, timeout_s)

    def send(self, plan: StepPlan, index: int, carry: tuple[Tensor, ...]) -> None:
        """Send the results of slice ``index`` within this stage, or to the next one."""
        if index + 1 < self._layers.stop or not self._remote.has_next:
            self._local.send(plan, index, carry)
        else:
            self._carries_output.send(plan, index, (*carry, self._attention.o(index, plan.num_rows, self._dtype)))

    def receive(self, plan: StepPlan, index: int) -> tuple[Tensor, ...]:
        """Return the results of slice ``index``, of this stage or the one before."""
        if index >= self._layers.start:
            return self._local.receive(plan, index)
        *carry, o = self._carries_output.receive(plan, index)
        self._attention.receive_output(o)
        return tuple(carry)


def stage_cuts(program: Any) -> list[list[RowShape]]:
    """Return, for each slice of the whole program but the first, the tensors that it receives if another stage
    precedes.
    """
    return [[*between.tensors, call.out] for between, call in zip(program.cuts, program.calls, strict=True)]


def stage_inboxes(cuts: Sequence[Sequence[RowShape]], max_rows: int) -> tuple[Geometry, Geometry]:
    """Return the inboxes of a stage, and of the one before it."""
    return pipeline_inbox(cuts, max_rows=max_rows, num_batches=GRANTS_AHEAD), NO_REPLY_INBOX


def connect_stages(
    cut: CutModel,
    order: ConnectPrefillPeers,
    fabric: EpochFabric,
    listener: EpochListener,
    name: str,
    deadlines: Deadlines,
    max_rows: int,
) -> RemotePipeline:
    """Connect the worker ``name`` with the stages before and after. The stage before connects to ``listener``; then
    this worker connects to the stage after. Raises ChannelError.
    """
    cuts, limit_s = stage_cuts(cut.program), deadlines.start_timeout_s
    previous: Channel | None = None
    following: Channel | None = None
    if order.previous_stage:
        previous = fabric.accept(listener, limit_s)
        if previous.peer_name != stage_name(order.previous_stage):
            raise PeerFault(
                f"{previous.peer} is {previous.peer_name!r} in place of {stage_name(order.previous_stage)!r}"
            )
    if (there := order.next_stage) is not None:
        own, peer, (its, back) = stage_name(name), stage_name(there.name), stage_inboxes(cuts, max_rows)
        terms = Terms(outbound=its, inbound=back, name=own, peer=peer, key=there.key)
        following = fabric.connect(there.url, terms, timeout_s=limit_s)
    return RemotePipeline(previous, following, cuts, deadlines.step_timeout_s)
