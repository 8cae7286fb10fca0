"""The control link between the driver (engine, launcher) and one worker: small typed messages over a stream socket.

Layer messages never pass here. A worker exits when its link ends. So no worker outlives the driver, whatever killed it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from lamina.config.engine_config import BatchingOptions, Deadlines, DeviceOptions, KVOptions, ModelOptions
from lamina.config.partition import KvShards
from lamina.config.topology import TopologyOptions
from lamina.request import FILTERS, Score

from .offload_messages import OffloadConfig, OffloadFacts
from .step_plan import BindReply, BindRequest, StepPlan, SurvivingKv

MAX_FRAME = 1 << 28
EPOCH_BITS = 16  # width of an epoch, which is also the epoch of all channels opened under it
_LENGTH = struct.Struct("<I")


class LinkClosedError(Exception):
    """The other end of the link is gone."""


class LinkBrokenError(LinkClosedError):
    """A frame is no valid message: the two ends use different protocols. ``frame``: its bytes."""

    frame: bytes | bytearray = b""


class LinkStalledError(LinkClosedError):
    """The other end receives nothing: it is stopped or hangs. The link has ended, as a message was sent in part."""


class StartMemory(msgspec.Struct, frozen=True, kw_only=True, tag="start-memory"):
    """Driver -> memory worker, first message. The reply is MemoryReady or Failed."""

    scheme: str
    address: str  # where to listen, "" = any private place
    name: str = ""  # that the worker proves to compute and prefill workers
    key: bytes  # empty: the worker's environment has it
    threads: int  # of the attention backend
    devices: DeviceOptions = DeviceOptions()
    device_number: int = 0  # its number among this host's workers, which share its GPUs round-robin
    device_users: int = 1  # number of these workers
    trace: bool = False  # record spans


class MemoryReady(msgspec.Struct, frozen=True, kw_only=True, tag="memory-ready"):
    """Memory worker -> driver: the worker listens."""

    url: str  # where compute workers connect


class StatsRequest(msgspec.Struct, frozen=True, tag="ask-stats"):
    """Driver -> any worker. The reply is Stats, also while a step is running."""


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Any worker -> driver. ``values``: seconds and bytes since its start, by name: attend_s, bytes_received ..."""

    values: dict[str, float]


class ClockRequest(msgspec.Struct, frozen=True, tag="ask-clock"):
    """Driver -> any worker. The reply is ClockTime, at once."""


class ClockTime(msgspec.Struct, frozen=True, kw_only=True, tag="clock-time"):
    """Any worker -> driver: the time of its own clock."""

    now: float  # seconds


class RateRequest(msgspec.Struct, frozen=True, tag="ask-rate"):
    """Driver -> memory worker, before it is bound: measure the speed of your memory. The reply is Rate."""


class Rate(msgspec.Struct, frozen=True, kw_only=True, tag="rate"):
    """Memory worker -> driver: bytes a second that it reads from its memory."""

    read_bytes_s: float


class TraceRequest(msgspec.Struct, frozen=True, tag="ask-trace"):
    """Driver -> any worker, at the end. The reply is Trace."""


class Trace(msgspec.Struct, frozen=True, kw_only=True, tag="trace"):
    """Any worker -> driver: the result of ``observe.trace.Recorder.take``; no records if tracing is off."""

    records: bytes
    dropped: int


class StartCompute(msgspec.Struct, frozen=True, kw_only=True, tag="start-compute"):
    """Driver -> compute or prefill worker, first message. The reply is Progress messages, then Loaded or Failed."""

    path: str  # of the model, or its hub id; "" if the worker got a module in its own process
    model: ModelOptions
    kv: KVOptions
    batching: BatchingOptions
    topology: TopologyOptions  # with the weights of all memory workers, measured ones too
    devices: DeviceOptions
    deadlines: Deadlines
    replica: int  # number of the replica, or of the prefill worker among prefill workers
    memory_ranks: int = 1  # ranks that have memory workers of their own, to all of which a prefill worker connects
    rank: int  # selects the part of the weights
    # Copies of the weights on this host, for which its first worker checks the memory; 0 for its other workers.
    weight_copies: int
    device_number: int  # its number among this host's workers, which share its GPUs round-robin
    threads: int  # 0 = torch's own choice
    scheme: str
    address: str  # where it listens for other replicas, as memory workers do for it
    name: str  # that it proves to other workers
    key: bytes  # empty: the worker's environment has it
    trace: bool  # record spans
    progress: bool = True  # send Progress: the driver reads it
    needs_identity: bool = False  # report the model's identity
    rotates_keys: bool = False  # prove the rotation of its keys by position


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """Compute or prefill worker -> driver: the model is cut, and a Connect may come. Other workers use the URLs."""

    pipeline_url: str = ""  # for the replica, or the stage of prefill workers, before it; empty: there is none
    rank_url: str = ""  # for the other ranks of its replica; empty: there is one rank
    prefix_url: str = ""  # for the other prefill workers; empty: it is no prefill worker, or the only one
    identity: bytes = b""  # of the model, see kv.page_keys; empty: its KV is not offloaded


class Address(msgspec.Struct, frozen=True, array_like=True):
    """The URL at which a worker listens, and the name that it proves there. ``key``: its own; empty: the cluster's."""

    url: str
    name: str
    key: bytes = b""


class TransferPeer(msgspec.Struct, frozen=True, array_like=True):
    """A memory worker with which another one transfers KV in an epoch, as described to that one.

    ``connects``: the receiver connects to it at ``url``, by its own ``key`` if it has one. ``is_awaited``: it connects
    to the receiver. Two workers with keys of their own do not connect. ``is_receiver``: it is the receiver itself.
    """

    name: str
    connects: bool = False
    is_awaited: bool = False
    is_receiver: bool = False
    url: str = ""
    key: bytes = b""


class Connect(msgspec.Struct, frozen=True, kw_only=True, tag="connect"):
    """Driver -> any worker: the peers to connect to in an epoch. It may come again with a higher epoch: the worker
    closes all channels, and keeps its weights or KV. All workers but memory workers reply with ComputeReady or Failed.
    """

    epoch: Annotated[int, msgspec.Meta(ge=0, lt=1 << EPOCH_BITS)]
    joining_names: list[str] = []  # to a memory worker: names of all peers that will connect, by number; empty: none
    replica: int | None = None  # to a compute worker: its replica's number; None: as in StartCompute
    replicas: int = 0  # to all but memory workers: number of replicas in this epoch; 0: as the topology says
    memory_addresses: list[Address] = []  # to all but memory workers: the memory workers of its rank
    # To a compute worker: all ranks of its replica, in order; empty: it is the only one.
    rank_addresses: list[Address] = []
    next_replica: Address | None = None  # to a compute worker: the next replica; None: it is the only one
    previous_replica: str = ""  # the name of the replica before it
    topology: TopologyOptions | None = None  # to all but memory workers; None: as in StartCompute
    # To memory and prefill workers: the KV that stays, and no other; None: all of it.
    surviving: list[SurvivingKv] | None = None
    kv_bytes: list[int] = []  # to compute workers: KV memory of each of these memory workers; empty: not yet known
    storage: OffloadConfig | None = None  # to a memory worker; None: no offload
    # To a memory worker: with ``storage``, all workers that exchange pages, itself too; else those of its rank, by
    # number, whose stripes may move. Empty: there are none.
    peers: list[TransferPeer] = []
    prefix_readers: list[str] = []  # to a memory worker: prefill workers that will connect again to fetch stored KV
    # With ``storage`` and --kv-parity, to a memory worker: the parity worker of its rank. To that one: all others, to
    # which it connects, and itself. Empty: there are none.
    parity_peers: list[TransferPeer] = []
    start_timeout_s: float = Deadlines().start_timeout_s  # for these peers to connect


class Quiesce(msgspec.Struct, frozen=True, kw_only=True, tag="halt"):
    """Driver -> any worker: the epoch changes. Close all channels of epochs before ``epoch``, quiesce, and keep what is
    loaded and stored. The reply is Quiesced, after all earlier messages; a Connect follows.
    """

    epoch: Annotated[int, msgspec.Meta(ge=0, lt=1 << EPOCH_BITS)]


class Quiesced(msgspec.Struct, frozen=True, kw_only=True, tag="halted"):
    """Any worker -> driver: nothing of an older epoch will be done, or written, any more."""

    epoch: int
    surviving_tokens: dict[int, int] = {}  # from a memory worker: sequence -> tokens whose K and V it has in all layers
    # From one with recurrent layers: sequence -> numbers of tokens after which it has the state of all these layers.
    state_versions: dict[int, list[int]] = {}


class ChannelLost(msgspec.Struct, frozen=True, tag="broken"):
    """Compute or prefill worker -> driver: a channel of ``epoch`` has ended. It awaits Quiesce, Connect, or its end.
    Parity worker -> driver: a channel to another memory worker has ended.
    """

    epoch: int
    text: str
    missing_kv: bool = False  # no worker is lost, but one lacks KV that the driver counts on
    peer: str = ""  # the name of the peer, if this worker has connected to it
    is_serving: bool = False  # from a parity worker: it serves on, and all are to reconnect unless a worker is lost


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Compute worker -> driver while it starts: the name of a stage, and how much of it is done."""

    stage: str
    done: int
    total: int


class ComputeReady(msgspec.Struct, frozen=True, kw_only=True, tag="compute-ready"):
    """Compute or prefill worker -> driver, the reply to Connect: memory workers are bound. All report one model."""

    epoch: int = 0  # of the Connect
    vocab_size: int
    num_layers: int  # exchanges between slices: attention operators, and those of recurrent layers
    max_model_len: int
    dtype: str
    eos_token_ids: list[int]
    windows: list[int]  # as in BindReply, for the groups of all memory workers
    kv_shards: list[KvShards]
    stripe_blocks: int
    single_shard: bool = False
    sparse: list[bool] = []
    num_blocks: list[list[int]]  # group -> blocks, by holder
    holders: list[list[int]]  # group -> memory workers
    block_size: int
    kv_bytes: list[int] = []  # KV memory of each memory worker of this rank
    bind: BindRequest | None = None  # sent to this rank's first memory worker; None: another replica has bound them
    # Memory worker -> KV shards whose sequences have recurrent states there, None for none; empty: the model has none.
    state_shards: list[KvShards | None] = []
    state_slots: int = 0  # versions of states that each of these workers can hold
    clamps_prompts: bool = False  # states after a prompt's tokens differ from those after the same tokens as an answer
    summary: dict[str, Any]  # facts of the program: slices, cut and message bytes, seconds of each stage
    # Offload of the memory workers, filled in by the driver; None: no offload.
    storage: OffloadFacts | None = None
    replicas: int = 0  # number of them in this epoch, filled in by the driver; 0: as many as at the start
    prefill_stores: list[BindReply] = []  # from a prefill worker: its own store; the driver lists those of all


class Penalties(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The penalties, biases and bans that change the logits of one sequence."""

    presence: float
    frequency: float
    repetition: float
    logit_bias: dict[int, float]
    prompt_token_ids: list[int]  # distinct tokens of the prompt, if the repetition penalty needs them
    # The last token of each is forbidden where the completion ends with the others.
    bad_words_token_ids: list[list[int]] = []
    allowed_token_ids: list[int] = []  # all others are forbidden; empty: none
    grammar: str = ""  # of the completion, as llguidance reads it; empty: none


class LogitsUpdate(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A change of a row's logits, and the tokens counted by penalties that the workers do not know yet."""

    num_known_tokens: int  # tokens of the completion that earlier draws sent; 0 with ``penalties``
    tokens: list[int]  # the tokens after these, without the one still being drawn
    penalties: Penalties | None = None  # None: as in an earlier draw


class SamplingRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The parameters by which the token after one row is sampled. The result depends only on the row's logits, these
    fields and, with ``has_pending_token``, the token that the step before drew for the sequence.
    """

    row: int  # index into the step's rows, flat
    sequence: int
    temperature: float  # 0 = greedy
    top_k: int  # 0 = all
    top_p: float
    seed: int
    output_index: int  # number of the output token; with seed it keys the random number
    logprobs: int  # -1 = none, else the number of alternatives to report in addition to the chosen token
    banned_token_ids: list[int] = []  # token ids that must not be chosen (the stop tokens before min_tokens)
    min_p: float = 0.0
    logits_update: LogitsUpdate | None = None
    # The sequence's last token is being drawn by the step before: penalties count it too.
    has_pending_token: bool = False
    prompt_logprob_token: int = -1  # the prompt's token after this row: only its log-probability is wanted
    filter_order: tuple[str, ...] = FILTERS  # top_p is a share of the tokens that earlier filters leave
    return_logits: bool = False  # nothing is drawn: the driver wants all logits of the row
    reference_request: int = -1  # number of this step's draw whose token and logits it takes and compares


class RunStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one batch, as the replicas need it."""

    plan: StepPlan
    token_ids: list[int]  # per row; -1: the token that the previous step of this batch drew for the row's sequence
    sampling_requests: list[SamplingRequest]


class Vocabulary(msgspec.Struct, frozen=True, array_like=True):
    """The bytes of each token, by which a grammar decides. Special tokens begin with the byte 0xFF, which no text has;
    tokens without bytes are never drawn.
    """

    tokens: list[bytes]  # as many as logits
    special_token_ids: list[int]
    end_token_ids: list[int]  # that may follow a finished text; at least one


class RunRound(msgspec.Struct, frozen=True, kw_only=True, tag="run-round"):
    """Driver -> compute workers: a step of each batch; to a prefill worker: a chunk of a prompt. It may be queued."""

    round: int
    steps: list[RunStep]
    vocabulary: Vocabulary | None = None  # with the worker's first grammar in an epoch


NO_TOKEN = -1
ALL_TOKENS_BANNED = -2


class SampledToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sampled token. ``token_id``: NO_TOKEN if the largest logit is not finite, ALL_TOKENS_BANNED if every token
    with a finite logit is banned. ``logprobs``: of the chosen token first, then of the best ones, which may include it
    again. ``logits``: if requested, all of the row, fp32, by token, little-endian; ``token_id`` then has no meaning.
    ``divergence``: of a reference draw: whether its most likely token differs from the other draw's, and KL(own ||
    other) in nats.
    """

    sequence: int
    token_id: int
    logprobs: list[Score] = []
    logits: bytes = b""
    divergence: tuple[bool, float] | None = None


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag="step-done"):
    """The replica of the last slice, or a prefill worker once all its K and V are stored -> driver: a step's tokens."""

    epoch: int = 0  # the plan's
    batch: int
    step: int
    sampled_tokens: list[SampledToken]  # in the order of the sampling requests
    has_more: bool = False  # more of the step's tokens follow in other messages
    fetch_s: float = 0.0  # seconds of a prefill worker's FetchPrefix


_DRAWN_BYTES, _SCORE_BYTES = 64, 20  # encoded sizes, at most


def split_step_done(done: StepDone, most: int | None = None) -> Iterator[StepDone]:
    """Yield messages that together are ``done``. ``most``: the bytes of each, unless one token takes more. The default
    is a quarter of a frame.
    """
    most = MAX_FRAME // 4 if most is None else most
    part, size = list[SampledToken](), 0
    for drawn in done.sampled_tokens:
        taken = _DRAWN_BYTES + len(drawn.logits) + _SCORE_BYTES * len(drawn.logprobs)
        if part and size + taken > most:
            yield msgspec.structs.replace(done, sampled_tokens=part, has_more=True)
            part, size = [], 0
        part.append(drawn)
        size += taken
    yield done if len(part) == len(done.sampled_tokens) else msgspec.structs.replace(done, sampled_tokens=part)


class StepDoneAssembler:
    """Joins the parts of a step, which one worker sends one after the other."""

    def __init__(self) -> None:
        self._held: StepDone | None = None

    def add(self, part: StepDone) -> StepDone | None:
        """Return the whole step, or None while parts are missing. Parts of another, unfinished step are dropped."""
        held, self._held = self._held, None
        if held is not None and (held.epoch, held.batch, held.step) == (part.epoch, part.batch, part.step):
            part = msgspec.structs.replace(part, sampled_tokens=[*held.sampled_tokens, *part.sampled_tokens])
        if part.has_more:
            self._held = part
            return None
        return part


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Driver -> any worker: finish and exit with status 0. The end of the link means the same."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Worker -> driver: an error of the worker, in one line for people."""

    text: str
    user_error: bool = False  # bad input, not a defect
    caused_by_peer: bool = False  # a channel ended, so the peer knows the cause better
    workers_that_fit: dict[str, int] = {}  # from a server's engine, see ReducedCapacityError
    lost_hosts: list[str] = []


class ControlLink:
    """One end of a control link. ``send`` is safe from any thread; one thread receives."""

    def __init__(self, sock: socket.socket, messages: Any, most_bytes: int = MAX_FRAME) -> None:
        """``messages``: the union of types that this end accepts, each of ``most_bytes`` at most."""
        self._sock, self._most_bytes = sock, most_bytes
        self._sock.setblocking(True)
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(messages)

    def limit_sends(self, seconds: float) -> None:
        """Limit, in seconds, how long a send waits while the other end receives nothing. The default is no limit."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1.0 * 1e6))  # struct timeval
        with contextlib.suppress(OSError):  # it is closed
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raises LinkClosedError if the other end is gone, LinkStalledError by ``limit_sends``."""
        data = self._encoder.encode(message)
        try:
            with self._lock:
                self._sock.sendall(_LENGTH.pack(len(data)) + data)
        except BlockingIOError as e:
            raise LinkStalledError("control link: the other end takes nothing") from e
        except OSError as e:
            raise LinkClosedError(f"control link: {e}") from e

    def recv(self, timeout_s: float | None = None) -> Any:
        """Return the next message. ``timeout_s``: None waits for ever; use it only if the end of the link is the
        deadline. Raises TimeoutError, LinkClosedError at the end of the link, LinkBrokenError if a frame does not
        decode.
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
        """The socket's file descriptor, for select and poll."""
        return self._sock.fileno()

    def close(self) -> None:
        """End the link in both directions and wake a blocked recv. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _wait(self, deadline: float) -> None:
        if getattr(self._sock, "pending", 0):
            return  # an encrypted socket has read it from the kernel already
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
