"""The states of the executor, its worker group, and a change of the memory workers. ARCHITECTURE.md draws them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum


class ExecutorState(Enum):
    """The states of the executor, as the engine sees it. The registry knows whether the workers have been ended."""

    STARTING = "starting"  # workers start, load and connect for the first time
    RUNNING = "running"  # rounds are served; a loss may wait to be reported
    # After a loss, when a replica has loaded, or as memory workers come or go: workers stop using the epoch's channels.
    QUIESCING = "quiescing"
    QUIESCED = "quiesced"  # EpochChanged was returned: the engine lays its sequences out
    RESUMING = "resuming"  # lost workers are replaced, KV moves, all reconnect


EXECUTOR_TRANSITIONS: Mapping[ExecutorState, Collection[ExecutorState]] = {
    ExecutorState.STARTING: {ExecutorState.RUNNING},
    ExecutorState.RUNNING: {ExecutorState.QUIESCING},
    ExecutorState.QUIESCING: {ExecutorState.QUIESCED},
    ExecutorState.QUIESCED: {ExecutorState.RESUMING},
    ExecutorState.RESUMING: {ExecutorState.RUNNING, ExecutorState.QUIESCING},  # the latter: more workers are lost
}


class GroupState(Enum):
    """The states of the worker group."""

    CREATED = "created"  # no launcher, no worker
    OPENING = "opening"  # all workers run; memory workers begin to listen
    LOADING = "loading"  # compute and prefill workers load the model
    CONNECTING = "connecting"  # an epoch begins
    CONNECTED = "connected"
    REPLACING = "replacing"  # workers start in the places of lost ones


GROUP_TRANSITIONS: Mapping[GroupState, Collection[GroupState]] = {
    GroupState.CREATED: {GroupState.OPENING},
    GroupState.OPENING: {GroupState.LOADING},
    GroupState.LOADING: {GroupState.CONNECTING},
    # A loss while workers connect, or are replaced, begins another attempt.
    GroupState.CONNECTING: {GroupState.CONNECTED, GroupState.CONNECTING, GroupState.REPLACING},
    GroupState.CONNECTED: {GroupState.CONNECTING, GroupState.REPLACING},
    GroupState.REPLACING: {GroupState.CONNECTING, GroupState.REPLACING},
}


class ResizeState(Enum):
    """The states of a change of the memory workers."""

    IDLE = "idle"  # none is requested
    PREPARING = "preparing"  # coming workers start, and all take memory; before an evacuation all reconnect
    EVACUATING = "evacuating"  # sequences leave memory workers that will be removed, while all others decode
    MOVING = "moving"  # the new members are those of the group: KV moves to them, and all reconnect


RESIZE_TRANSITIONS: Mapping[ResizeState, Collection[ResizeState]] = {
    ResizeState.IDLE: {ResizeState.PREPARING},
    ResizeState.PREPARING: {ResizeState.EVACUATING, ResizeState.MOVING, ResizeState.IDLE},  # the last: it has failed
    ResizeState.EVACUATING: {ResizeState.MOVING, ResizeState.IDLE},
    ResizeState.MOVING: {ResizeState.IDLE},
}
