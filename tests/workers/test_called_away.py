"""A worker whose peers have gone on goes on too: the next Connect ends whatever it waits for under the older epoch.

Covers: lamina/workers/compute/model_server.py.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from lamina import netstack
from lamina.config.engine_config import (
    BatchingOptions,
    Deadlines,
    DeviceOptions,
    KVOptions,
    ModelOptions,
    TopologyOptions,
)
from lamina.netstack import Channel, ChannelError, Geometry, PeerFault, Terms
from lamina.protocol.control import (
    ChannelLost,
    ComputeReady,
    Connect,
    ControlLink,
    Failed,
    Loaded,
    Quiesce,
    Quiesced,
    RunRound,
    RunStep,
    StartCompute,
    Stats,
    StatsRequest,
    StepDone,
)
from lamina.protocol.step_plan import StepPlan
from lamina.workers.compute.attention_client import RefusedError
from lamina.workers.compute.model_server import ModelServer, serve
from lamina.workers.epoch_channels import EpochFabric, EpochListener

WAIT_S = 30.0
KEY = b"k" * 32
GEOMETRY = Geometry(slots=2, slot_bytes=64)
START = StartCompute(
    path="", model=ModelOptions(), kv=KVOptions(), batching=BatchingOptions(), topology=TopologyOptions(),
    devices=DeviceOptions(compute_device="cpu"), deadlines=Deadlines(), replica=0, rank=0, weight_copies=0,
    device_number=0,
    threads=0, scheme="loopback", address="", name="", key=KEY, trace=False,
)  # fmt: skip


class Waiting:
    """Each step waits for a message of its peer. A ComputeWorker, or so."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._rounds: list[RunRound] = []

    @property
    def has_work(self) -> bool:
        return bool(self._rounds)

    def submit(self, new: RunRound) -> None:
        self._rounds.append(new)

    def run_next(self) -> StepDone:
        plan = self._rounds[0].steps[0].plan
        self._channel.release(self._channel.wait_signal(timeout_s=WAIT_S))
        self._rounds.pop(0)
        return StepDone(epoch=plan.epoch, batch=0, step=plan.step, sampled_tokens=[])

    def stats(self) -> dict[str, float]:
        return {}


class Server(ModelServer):
    role = "compute worker"

    def load(self) -> Loaded:
        self.door = EpochListener(self.fabric.listen())
        return Loaded(pipeline_url=self.door.url)

    def connect(self, meeting: Connect, fabric: EpochFabric) -> tuple[Waiting, ComputeReady]:
        if meeting.previous_replica == "refused":
            raise RefusedError("no room")
        worker = Waiting(fabric.accept(self.door, WAIT_S))
        return worker, ComputeReady(
            epoch=meeting.epoch, vocab_size=1, num_layers=1, max_model_len=1, dtype="", eos_token_ids=[], windows=[],
            kv_shards=[], stripe_blocks=0, num_blocks=[], holders=[], block_size=1, summary={},
        )  # fmt: skip


@pytest.fixture
def driver() -> Iterator[SimpleNamespace]:
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=serve, args=(Server, theirs, None), daemon=True)
    thread.start()
    link = ControlLink(ours, Loaded | ComputeReady | StepDone | Stats | Failed | ChannelLost | Quiesced)
    link.send(START)
    url, fabric = link.recv(WAIT_S).pipeline_url, netstack.open("loopback", key=KEY)

    def knock(view: int) -> Channel:
        return fabric.connect(url, Terms(outbound=GEOMETRY, inbound=GEOMETRY, epoch=view))

    yield SimpleNamespace(link=link, knock=knock)
    link.close()
    thread.join(WAIT_S)
    fabric.close()
    assert not thread.is_alive()


def a_round(view: int, step: int) -> RunRound:
    return RunRound(
        round=step,
        steps=[RunStep(plan=StepPlan(epoch=view, step=step, ops=[], rows=[]), token_ids=[], sampling_requests=[])],
    )


def view_of(driver: Any) -> int:
    ready = driver.link.recv(WAIT_S)
    assert isinstance(ready, ComputeReady), ready
    return ready.epoch


def test_of_peers_that_never_come(driver: Any) -> None:
    driver.link.send(Connect(epoch=1))
    driver.link.send(Connect(epoch=2))
    driver.knock(2)
    assert view_of(driver) == 2


def test_of_a_step_whose_message_never_comes(driver: Any) -> None:
    """All that is queued after the step is dropped, too."""
    driver.link.send(Connect(epoch=1))
    old = driver.knock(1)
    assert view_of(driver) == 1
    for step in range(2):
        driver.link.send(a_round(1, step))
    driver.link.send(Connect(epoch=2))
    with pytest.raises(PeerFault):
        old.wait_signal(timeout_s=WAIT_S)
    new = driver.knock(2)
    assert view_of(driver) == 2
    driver.link.send(a_round(2, 2))
    new.put_signal(new.reserve(0), b"")
    done = driver.link.recv(WAIT_S)
    assert (done.epoch, done.step) == (2, 2)


def test_one_that_is_not_called_away_says_that_its_peer_is_gone_and_goes_on_when_it_is_told_to(driver: Any) -> None:
    driver.link.send(Connect(epoch=1))
    channel = driver.knock(1)
    view_of(driver)
    driver.link.send(a_round(1, 0))
    channel.close()
    broken = driver.link.recv(WAIT_S)
    assert isinstance(broken, ChannelLost)
    assert broken.epoch == 1
    driver.link.send(a_round(1, 1))  # on its way when the driver heard of it
    driver.link.send(Quiesce(epoch=2))
    assert driver.link.recv(WAIT_S) == Quiesced(epoch=2)
    again(driver, 3)


def test_one_that_is_halted_in_a_step_comes_to_rest(driver: Any) -> None:
    driver.link.send(Connect(epoch=1))
    channel = driver.knock(1)
    view_of(driver)
    driver.link.send(a_round(1, 0))
    driver.link.send(Quiesce(epoch=2))
    assert driver.link.recv(WAIT_S) == Quiesced(epoch=2)
    with pytest.raises(ChannelError):
        channel.wait_signal(timeout_s=WAIT_S)
    driver.link.send(a_round(1, 1))
    again(driver, 3)


def again(driver: Any, view: int) -> None:
    """It meets others under another epoch, and serves steps of that one alone."""
    driver.link.send(Connect(epoch=view))
    channel = driver.knock(view)
    assert view_of(driver) == view
    driver.link.send(a_round(view, 7))
    channel.put_signal(channel.reserve(0), b"")
    done = driver.link.recv(WAIT_S)
    assert (done.epoch, done.step) == (view, 7)


def test_a_refusal_is_the_users(driver: Any) -> None:
    driver.link.send(Connect(epoch=1, previous_replica="refused"))
    assert driver.link.recv(WAIT_S) == Failed(text="no room", user_error=True)


def test_a_view_that_is_none_ends_the_link(driver: Any) -> None:
    """Nothing from the wire is trusted: an epoch has 16 bits."""
    driver.link.send(StatsRequest())
    assert isinstance(driver.link.recv(WAIT_S), Stats)
    driver.link.send(Connect(epoch=1 << 16))
    with pytest.raises(Exception, match="the other end is gone"):
        driver.link.recv(WAIT_S)


def test_a_compute_worker_opens_the_rdma_device_that_was_named() -> None:
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=serve, args=(Server, theirs, None), daemon=True)
    thread.start()
    link = ControlLink(ours, Loaded | Failed)
    link.send(structs.replace(START, scheme="tcp", devices=DeviceOptions(rdma_device="mlx5_7")))
    answer = link.recv(WAIT_S)
    assert isinstance(answer, Failed)
    assert "--rdma-device mlx5_7 is for --transport verbs, mlx5, auto" in answer.text
    link.close()
    thread.join(WAIT_S)
