"""The control link between the driver (engine, launcher) and one worker: small typed messages over a stream socket.

Layer messages never pass here. The link is also the worker's life line: when the driver dies, the link reaches its end
and the worker goes too, so nothing is left behind whatever killed the driver.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from typing import Annotated, Any

import msgspec

from lamina.config.engine_config import BatchingOptions, Deadlines, DeviceOptions, KVOptions, ModelOptions
from lamina.config.partition import KvShards
from lamina.config.topology import TopologyOptions
from lamina.request import FILTERS, Score

from .migration_ops import MigrationPeer
from .offload_messages import OffloadConfig, OffloadFacts
from .step_plan import BindReply, BindRequest, StepPlan, SurvivingKv

MAX_FRAME = 1 << 28
EPOCH_BITS = 16  # of an epoch, which is the epoch of all channels that are opened under it
_LENGTH = struct.Struct("<I")


class LinkClosedError(Exception):
    """The other end is gone."""


class LinkBrokenError(LinkClosedError):
    """A frame has come over the link that is no message: its ends do not speak alike."""

    frame: bytes | bytearray = b""


class LinkStalledError(LinkClosedError):
    """The other end takes nothing: it stands still. What was sent in part has ended the link."""


class StartMemory(msgspec.Struct, frozen=True, kw_only=True, tag="start-memory"):
    """Driver -> memory worker, first message. Answered by MemoryReady or Failed."""

    scheme: str
    address: str  # where to listen, "" = any private place
    name: str = ""  # which it proves to compute and prefill workers
    key: bytes  # empty: the worker's environment has it
    threads: int  # of the attention backend
    devices: DeviceOptions = DeviceOptions()
    device_number: int = 0  # among the workers here that take the host's GPUs in turn
    device_users: int = 1  # how many they are
    trace: bool = False  # record spans


class MemoryReady(msgspec.Struct, frozen=True, kw_only=True, tag="memory-ready"):
    url: str  # where compute workers connect


class StatsRequest(msgspec.Struct, frozen=True, tag="ask-stats"):
    """Driver -> any worker. Answered by Stats, also while a step is running."""


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Seconds and bytes by name since the worker started, for instance attend_s, wait_s, steps, bytes_received."""

    values: dict[str, float]


class ClockRequest(msgspec.Struct, frozen=True, tag="ask-clock"):
    """Driver -> any worker. Answered by ClockTime at once."""


class ClockTime(msgspec.Struct, frozen=True, kw_only=True, tag="clock-time"):
    now: float  # seconds of the worker's own clock


class RateRequest(msgspec.Struct, frozen=True, tag="ask-rate"):
    """Driver -> memory worker, before it is bound: how fast is its memory? Answered by Rate."""


class Rate(msgspec.Struct, frozen=True, kw_only=True, tag="rate"):
    read_bytes_s: float


class TraceRequest(msgspec.Struct, frozen=True, tag="ask-trace"):
    """Driver -> any worker, at the end. Answered by Trace."""


class Trace(msgspec.Struct, frozen=True, kw_only=True, tag="trace"):
    """What ``observe.trace.Recorder.take`` gave; no records where none were asked for."""

    records: bytes
    dropped: int


class StartCompute(msgspec.Struct, frozen=True, kw_only=True, tag="start-compute"):
    """Driver -> compute or prefill worker, first message. Answered by Progress, then Loaded or Failed."""

    path: str  # of the model, or its hub id; "" where the worker was given a module in its own process
    model: ModelOptions
    kv: KVOptions
    batching: BatchingOptions
    topology: TopologyOptions  # with the weights of all memory workers, measured ones too
    devices: DeviceOptions
    deadlines: Deadlines
    replica: int  # of the replica, or of the prefill worker among its own kind
    rank: int  # which part of the weights
    weight_copies: int  # of the weights on this host, for the first worker there to find room for; 0 for the others
    device_number: int  # among the workers here that take the host's GPUs in turn
    threads: int  # 0 = torch's own choice
    scheme: str
    address: str  # where replicas listen for each other, as for memory workers
    name: str  # which it proves to other workers
    key: bytes  # empty: the worker's environment has it
    trace: bool  # record spans
    progress: bool = True  # somebody listens to it
    needs_identity: bool = False  # tell the model's identity
    rotates_keys: bool = False  # prove how its keys turn with their position


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """Compute or prefill worker -> driver: the model is cut, and a Connect may come. Where other workers find it."""

    pipeline_url: str = ""  # for the replica, or the stage of prefill workers, before it; empty: there is none
    rank_url: str = ""  # for the other ranks of its replica; empty: there is one rank
    prefix_url: str = ""  # for the other prefill workers; empty: it is none, or the only one
    identity: bytes = b""  # of the model, as kv.page_keys has it; empty: nobody keeps its KV beside the pool


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where a worker listens, and the name that it proves there. ``key``: by which, where it has not the others'."""

    url: str
    name: str
    key: bytes = b""


class Connect(msgspec.Struct, frozen=True, kw_only=True, tag="connect"):
    """Driver -> any worker: whom to meet, under an epoch. It may come again, of a higher epoch: the worker lets go of
    all channels, and keeps its weights or KV. All but memory workers answer it, with ComputeReady or Failed.
    """

    epoch: Annotated[int, msgspec.Meta(ge=0, lt=1 << EPOCH_BITS)]
    joining_names: list[str] = []  # of a memory worker: the names of all that come, by number; empty: they have none
    replica: int | None = None  # of a compute worker: its replica's; None: as it was started for
    replicas: int = 0  # of others than memory workers: that there are in this epoch; 0: as the topology says
    memory_addresses: list[Address] = []  # of others: the memory workers of its rank
    rank_addresses: list[
        Address
    ] = []  # of a compute worker: all ranks of its replica, in order; empty: it is the only one
    next_replica: Address | None = None  # of a compute worker: the next replica; None: it is the only one
    previous_replica: str = ""  # the name of the replica before it
    topology: TopologyOptions | None = None  # of others than memory workers; None: as they were started for
    # Of memory and prefill workers: the KV that stays, and no other; None: all of it.
    surviving: list[SurvivingKv] | None = None
    kv_bytes: list[int] = []  # of compute workers: what each of these memory workers has for KV; empty: none has yet
    storage: OffloadConfig | None = None  # of a memory worker: None: it keeps nothing beside its pool
    peers: list[Address] = []  # of a memory worker: all that have pages for each other, itself too; empty: none have
    migration_peers: list[MigrationPeer] = []  # of a memory worker: all of its rank, by number; empty: no stripes move


class Quiesce(msgspec.Struct, frozen=True, kw_only=True, tag="halt"):
    """Driver -> any worker: a worker is lost. Let go of all channels of epochs before ``epoch``, come to rest, and keep
    what you have loaded and stored. Answered by Quiesced, behind whatever was said before; a Connect follows.
    """

    epoch: Annotated[int, msgspec.Meta(ge=0, lt=1 << EPOCH_BITS)]


class Quiesced(msgspec.Struct, frozen=True, kw_only=True, tag="halted"):
    """Any worker -> driver: nothing of an older epoch will be done, or written, any more."""

    epoch: int
    surviving_tokens: dict[int, int] = {}  # of a memory worker: sequence -> tokens whose K and V it has in all layers


class ChannelLost(msgspec.Struct, frozen=True, tag="broken"):
    """Compute or prefill worker -> driver: a channel of ``epoch`` has ended. It waits for Quiesce, Connect, or its
    end.
    """

    epoch: int
    text: str
    missing_kv: bool = False  # no worker is lost, but one lacks KV that the driver counts on
    peer: str = ""  # the name of the peer, if this worker has connected to it


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Compute worker -> driver while it starts: what it does, and how much of it is done."""

    stage: str
    done: int
    total: int


class ComputeReady(msgspec.Struct, frozen=True, kw_only=True, tag="compute-ready"):
    """Compute or prefill worker -> driver, in answer to a Connect: memory workers are bound. All say one model."""

    epoch: int = 0  # of the Connect
    vocab_size: int
    num_layers: int  # attention operators
    max_model_len: int
    dtype: str
    eos_token_ids: list[int]
    windows: list[int]  # as in Bound, for the groups of all memory workers
    kv_shards: list[KvShards]
    stripe: int
    single_shard: bool = False
    sparse: list[bool] = []
    num_blocks: list[list[int]]  # group -> blocks, by holder
    holders: list[list[int]]  # group -> memory workers
    block_size: int
    kv_bytes: list[int] = []  # of each memory worker of this rank
    bind: BindRequest | None = None  # of this rank's first memory worker; None: others have bound them
    summary: dict[str, Any]  # of the program: slices, cut and message bytes, seconds of each stage
    # Of the memory workers, filled in by the driver; None: they keep nothing beside it.
    storage: OffloadFacts | None = None
    replicas: int = 0  # that there are in this epoch, filled in by the driver; 0: as many as at the start
    prefill_stores: list[BindReply] = []  # of a prefill worker, its own; the driver puts those of all together


class Penalties(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Of a sequence's logits; bias; the tokens of the prompt that count; tokens that are forbidden."""

    presence: float
    frequency: float
    repetition: float
    logit_bias: dict[int, float]
    prompt_token_ids: list[int]  # distinct tokens of the prompt, where the repetition penalty wants them
    # The last token of each is forbidden where the completion ends with the others.
    bad_words_token_ids: list[list[int]] = []
    allowed_token_ids: list[int] = []  # all others are forbidden; empty: none


class LogitsUpdate(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """That a row's logits are changed, and what the workers do not know yet of the tokens that penalties count."""

    num_known_tokens: int  # tokens of the completion that the sequence's draws have told before; 0 with ``penalties``
    tokens: list[int]  # the tokens behind these; without the one that is still being drawn
    penalties: Penalties | None = None  # None: as a draw before has said


class SamplingRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How to sample behind one row. A pure function of the row's logits, these fields and, if ``has_pending_token``,
    the token that the step before drew for the sequence.
    """

    row: int  # index into the step's rows, flat
    sequence: int
    temperature: float  # 0 = greedy
    top_k: int  # 0 = all
    top_p: float
    seed: int
    output_index: int  # of the output token; with seed it keys the random number
    logprobs: int  # -1 = none, else the number of alternatives to report besides the chosen token
    banned_token_ids: list[int] = []  # token ids that must not be chosen (the stop tokens before min_tokens)
    min_p: float = 0.0
    logits_update: LogitsUpdate | None = None
    # The sequence's last token is being drawn by the step before: penalties count it too.
    has_pending_token: bool = False
    prompt_logprob_token: int = -1  # a token of the prompt, behind this row: only its log-probability is wanted
    filter_order: tuple[str, ...] = FILTERS  # of the filters: top_p is a share of the tokens that earlier filters leave
    return_logits: bool = False  # nothing is drawn: the driver wants all logits of the row
    reference_request: int = -1  # a draw of this step: this one gets its token, and compares its own logits with it


class RunStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one batch, as the replicas need it."""

    plan: StepPlan
    token_ids: list[int]  # per row; -1 = what the previous step of this batch drew for the row's sequence
    sampling_requests: list[SamplingRequest]


class RunRound(msgspec.Struct, frozen=True, kw_only=True, tag="run-round"):
    """Driver -> compute workers: a step of each batch; or to one prefill worker: a chunk of a prompt. May be queued."""

    round: int
    steps: list[RunStep]


NO_TOKEN = -1
ALL_TOKENS_BANNED = -2


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """One sampled token; NO_TOKEN where the largest logit is no finite number, ALL_TOKENS_BANNED where the draw bans
    every token whose logit is one. ``logprobs``: of the chosen one first, then of the best, among which it may be
    again. ``logits``: of a whole draw, whose token says nothing: fp32, by token, little-endian. ``divergence``: of a
    draw beside another, whether the most likely token is another one, and the KL of that one's distribution from its
    own, in nats.
    """

    sequence: int
    token_id: int
    logprobs: list[Score] = []
    logits: bytes = b""
    divergence: tuple[bool, float] | None = None


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag="step-done"):
    """The replica of the last slice, or a prefill worker once all its K and V are stored -> driver: a step's tokens."""

    epoch: int = 0  # of the step's plan
    batch: int
    step: int
    sampled_tokens: list[SampledToken]  # in the order of its draws
    has_more: bool = False  # of the step's tokens follow, in messages of their own; see step_parts
    fetch_s: float = 0.0  # seconds of a prefill worker's Fetch


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Driver -> any worker: finish and exit with status 0. The end of the link means the same."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Worker -> driver: what happened, in one line for people."""

    text: str
    user_error: bool = False  # bad input, not a defect
    caused_by_peer: bool = False  # a channel ended, so that the other end knows better
    workers_that_fit: dict[str, int] = {}  # of a server's engine: so many workers have room, see ReducedCapacityError
    lost_hosts: list[str] = []


class ControlLink:
    """One end of the link. ``send`` is safe from any thread; one thread receives."""

    def __init__(self, sock: socket.socket, messages: Any, most_bytes: int = MAX_FRAME) -> None:
        """``messages``: the union of types that this end accepts, each of ``most_bytes`` at most."""
        self._sock, self._most_bytes = sock, most_bytes
        self._sock.setblocking(True)
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(messages)

    def limit_sends(self, seconds: float) -> None:
        """Until a send is over of which the other end takes nothing. Without it, as long as it takes."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1.0 * 1e6))  # struct timeval
        with contextlib.suppress(OSError):  # it is closed
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, message: msgspec.Struct) -> None:
        """Raises LinkClosedError when the other end is gone, LinkStalledError by ``limit_sends``."""
        data = self._encoder.encode(message)
        try:
            with self._lock:
                self._sock.sendall(_LENGTH.pack(len(data)) + data)
        except BlockingIOError as e:
            raise LinkStalledError("control link: the other end takes nothing") from e
        except OSError as e:
            raise LinkClosedError(f"control link: {e}") from e

    def recv(self, timeout_s: float | None = None) -> Any:
        """The next message. None waits for ever: only where the end of the link is the deadline. Raises TimeoutError,
        LinkClosedError at the end of the link, LinkBrokenError by a frame that does not decode.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        if length > self._most_bytes:
            raise LinkBrokenError(f"control link: frame of {length} bytes")
        frame = self._read(length, deadline)
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, RecursionError) as e:
            broken = LinkBrokenError(f"control link: {e}")
            broken.frame = frame
            raise broken from e

    def fileno(self) -> int:
        """For select and poll."""
        return self._sock.fileno()

    def close(self) -> None:
        """Ends the link in both directions and wakes a blocked recv. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _wait(self, deadline: float) -> None:
        if getattr(self._sock, "pending", 0):
            return  # a sealed socket has taken it from the kernel already
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError("control link: no message in time")

    def _read(self, nbytes: int, deadline: float | None) -> bytearray:
        data = bytearray(nbytes)
        view = memoryview(data)
        while view:
            try:
                if deadline is not None:
                    self._wait(deadline)
                got = self._sock.recv_into(view)
            except (OSError, ValueError) as e:
                if isinstance(e, TimeoutError):
                    raise
                raise LinkClosedError(f"control link: {e}") from e
            if got == 0:
                raise LinkClosedError("control link: the other end is gone")
            view = view[got:]
        return data
