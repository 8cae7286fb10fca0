"""The wire contract between compute and memory workers: the StepPlan and the messages of a layer.

A step begins with one PLAN message to every memory worker. The plan fixes everything variable about the step. So the
layer messages after it have a fixed place and size: Q, KV and O carry only tensors.

    PLAN    msgpack of StepPlan, from replica 0; the plans of a round follow one another
    Q, KV   of the rows that the worker needs, its heads; their bytes are in protocol.codec
    O       back to the replica that the plan names
    BIND    msgpack of BindRequest, once an epoch, before any plan, from replica 0;  BOUND (BindReply) is the reply
    JOIN    msgpack of JoinRequest, once an epoch, from every other replica, then every prefill worker;  reply: BOUND
    DIRECT  msgpack of DevicePathRequest, once, the first message of an additional channel, if BOUND has offered that;
            reply: BOUND. From then on plans use this channel, and Q, KV and O go from device to device on BIND's
    CARRY   the tensors of a cut, from one replica to the next
    OPERANDS  of each recurrent layer, what all tokens share: after BOUND, before any plan
    MIX, MIXED  the inputs and the output of a recurrent layer: their bytes are in workers.mixer_messages. In an
            exchange with attention they follow its KV and O
    REFUSED utf-8 text, in place of BOUND or of the step's first O: nothing of the step was applied

An *epoch* numbers one set of connected workers. It is the epoch of every channel opened under it, and part of every
MessageKey. A message of an older epoch cannot reach a channel of a newer one, and is dropped if it does. Plans carry
the epoch too, since they are also queued without a channel. A BIND or JOIN of another epoch is refused.

Tensors are contiguous, in the wire dtype of BindRequest, rows in the order of the plan. Every message carries its
MessageKey as tag. A message without rows is not sent.

A *round* is one step of every batch that has one. All workers process a round in one order, by layer and then by batch,
and process rounds one after the other. So every worker knows which message comes next.

A prefill worker's K and V use a channel of their own, once a plan has granted them. After JOIN it has transfers alone
(workers.memory.kv_transfer): for each grant one with the layers in order, and an empty one back once all is stored.
Recurrent states come with a layer's K and V, if the grant says so.
They have no turn in the round; a memory worker receives them while it would otherwise wait.
"""

from __future__ import annotations

import enum
import struct
import threading
from functools import cache
from typing import NamedTuple, TypeVar

import msgspec

from lamina.config.engine_config import KVOptions
from lamina.config.partition import KvShards, Partition

from .kv_placement import FIRST_LOCATION, KvLocation
from .mixers import Exchange, MixerShape

VERSION = 29
# Grants of a sequence that may await K and V at once. With a window, a third might free blocks that the first fills.
GRANTS_AHEAD = 2
MEMORY_WORKERS = -1  # in place of a prefill worker's number: all memory workers
MAX_PAGES_PER_TRANSFER = 64
KEY_BYTES = 32  # of a page key
MAX_HINTED_PAGES = 1 << 16  # pages of all waiting turns together
MAX_RETENTION_S = 1e6  # the longest retention after the last op about a page
SCORE_BITS = 24  # after the binary point: a row's attention weights add up to about 1 << SCORE_BITS


class MessageKind(enum.IntEnum):
    BIND = 1
    BOUND = 2
    PLAN = 3
    Q = 4
    KV = 5
    O = 6  # noqa: E741 - the attention output's name in the literature
    REFUSED = 7
    JOIN = 8
    CARRY = 9
    DIRECT = 11
    MIX = 12
    MIXED = 13
    OPERANDS = 14


_KEY = struct.Struct("<QIIiI")


class MessageKey(NamedTuple):
    """The name of a message: (epoch, batch, step, layer, kind). Together with the channel's epoch it is unique."""

    kind: int
    step: int = 0
    batch: int = 0
    epoch: int = 0
    layer: int = -1  # -1: belongs to no layer

    def pack(self) -> bytes:
        """Return the key as 24 bytes, little-endian; they fit a channel's tag."""
        return _KEY.pack(self.step, self.batch, self.epoch, self.layer, self.kind)

    @staticmethod
    def for_step(kind: int, plan: StepPlan, layer: int = -1) -> MessageKey:
        """Return the key of a message of the step that ``plan`` describes."""
        return MessageKey(kind, plan.step, plan.batch, plan.epoch, layer)

    @staticmethod
    def packed_for_layer_0(plan: StepPlan) -> bytes:
        """Return the packed keys of Q, KV and O of layer 0, from which native modules make the keys of all layers."""
        return b"".join(
            MessageKey.for_step(kind, plan, 0).pack() for kind in (MessageKind.Q, MessageKind.KV, MessageKind.O)
        )

    @staticmethod
    def unpack(tag: bytes) -> MessageKey:
        """Return the key that ``pack`` encoded. Bytes after the first 24 are ignored."""
        step, batch, view, layer, kind = _KEY.unpack_from(tag)
        return MessageKey(kind, step, batch, view, layer)


class New(msgspec.Struct, frozen=True, array_like=True, tag="new"):
    """Start an empty sequence. Its id must not be in use."""

    sequence: int


class Free(msgspec.Struct, frozen=True, array_like=True, tag="free"):
    """Forget a sequence and free its blocks. It must exist."""

    sequence: int


class Truncate(msgspec.Struct, frozen=True, array_like=True, tag="truncate"):
    """Keep the first ``length`` tokens and free the blocks after them."""

    sequence: int
    length: int


class Fork(msgspec.Struct, frozen=True, array_like=True, tag="fork"):
    """Start a sequence that shares the first ``length`` stored tokens of ``source``, at the same location. From now on
    no sequence writes the whole blocks that both hold. The new sequence gets a copy of a partial last block.
    """

    sequence: int
    source: int
    length: int


class RowRange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive new tokens of one sequence: positions ``first .. first + count``. A sequence is in a step once.

    Attention reads positions ``0 .. first`` from the store and the new ones from this step; it ignores rows stored
    after ``first``. Writes are positional, so a step can be sent again. ``location``: of the sequence, including these
    rows.
    """

    sequence: int
    first: int
    count: int
    location: KvLocation = FIRST_LOCATION


class FetchPrefix(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Hold blocks, as for rows, for blocks that prefill worker ``worker`` has of ``source``, at the same positions. The
    last one may be partial. The receiving prefill worker fetches them layer by layer, before it attends them. Until the
    step is done, the other worker must not free ``source``. No layer has a window.

    If ``worker`` is MEMORY_WORKERS, they have these blocks of ``source``, at ``source_location``.
    """

    sequence: int
    first: int
    count: int
    worker: int
    source: int
    source_location: KvLocation = FIRST_LOCATION

    @property
    def rows(self) -> RowRange:
        """The tokens for which the sequence holds blocks."""
        return RowRange(self.sequence, self.first, self.count)


class PrefillGrant(msgspec.Struct, frozen=True, array_like=True, tag="grant"):
    """Hold blocks, as for rows, for K and V that prefill worker ``worker`` (or the group of that number) sends as its
    step ``step``. Until they are stored, the sequence must have no rows and must not be freed or truncated.

    For that step the worker first fetches the ``num_fetched`` tokens before ``first``, which this one sends at once.
    ``has_states``: the recurrent states after these tokens come, too.
    """

    sequence: int
    first: int
    count: int
    worker: int
    step: int
    location: KvLocation = FIRST_LOCATION
    num_fetched: int = 0
    has_states: bool = False

    @property
    def rows(self) -> RowRange:
        """The tokens for which the grant holds blocks."""
        return RowRange(self.sequence, self.first, self.count, self.location)


class SaveKv(msgspec.Struct, frozen=True, array_like=True, tag="export"):
    """Save pages of a sequence to storage under ``keys``, from position ``first`` on; the last page may be partial.
    Until every memory worker has reported the end of the transfer, rows of the sequence must come after these pages.
    Where layers have windows, it must have no rows. It may be freed or truncated at any time, in the same plan too:
    then pages are copied first, or not saved. Transfers are numbered in the order of the plans. ``num_prompt_tokens``:
    tokens of the sequence's prompt. With ``count`` 0 it saves the recurrent states after ``first`` tokens, by one key.
    """

    sequence: int
    transfer_id: int
    first: int
    count: int
    keys: list[bytes]
    tenant: bytes
    num_prompt_tokens: int = 0

    @property
    def is_of_states(self) -> bool:
        """True if it saves recurrent states, not pages."""
        return not self.count


class LoadKv(msgspec.Struct, frozen=True, array_like=True, tag="import"):
    """Hold blocks, as for rows, for pages that memory workers load from storage; the last page may be partial. Until
    all have reported the end, the sequence must not be freed, truncated, forked or loaded twice. It may have rows once
    every worker has reported LoadReady. A worker does so when the rest of its load takes at most ``slack_s`` seconds,
    the duration of the sequence's first rows (0: never before the end). ``page_shift``: the pages were saved from
    positions so many pages further on, a whole number for all KV shards; K is rotated while it is loaded. With
    ``count`` 0 it loads the recurrent states after ``first`` tokens, by one key, after loads of these tokens' pages.
    """

    sequence: int
    transfer_id: int
    first: int
    count: int
    keys: list[bytes]
    location: KvLocation = FIRST_LOCATION
    slack_s: float = 0.0
    page_shift: int = 0

    @property
    def is_of_states(self) -> bool:
        """True if it loads recurrent states, not pages."""
        return not self.count

    @property
    def rows(self) -> RowRange:
        """The tokens for which the sequence holds blocks."""
        return RowRange(self.sequence, self.first, self.count, self.location)


class ContextShift(msgspec.Struct, frozen=True, array_like=True, tag="shift"):
    """Discard ``count`` tokens of a sequence from position ``first`` on, and move all later tokens to the freed
    positions: stored K is rotated. ``first`` and ``count`` are whole pages, and ``count`` is a multiple of all KV
    shards' stripes, so every token stays in its KV shard. No other sequence may hold blocks after the discarded ones.
    The sequence must have no rows, no transfer that loads it, and no other op in this plan except Free.
    """

    sequence: int
    first: int
    count: int


# Stripes, or a whole sequence, go from one memory worker to another. Stripes are copied while their sequence continues
# to decode; a whole sequence has no rows meanwhile. CopyStripes begins the copy, and the old owner continues to serve
# the stripes. Once the copy is there, a later plan's CommitMigration changes the location. Only then are the old
# blocks free. If anything ends before that, the sequence stays where it was.
class CopyStripes(msgspec.Struct, frozen=True, array_like=True, tag="move"):
    """Start ``sequence``, which holds only the stripes ``stripe .. stripe + count`` of ``source``, in ``kv_shard``.

    The one memory worker that has these stripes copies their K and V there. All their rows are of earlier plans. Where
    sequences are not divided, ``count`` is 0: all of the source is copied, and it has no rows before CommitMigration.
    Every memory worker replies with one StripesCopied.
    """

    sequence: int
    source: int
    stripe: int
    count: int
    kv_shard: int


class CommitMigration(msgspec.Struct, frozen=True, array_like=True, tag="adopt"):
    """Give ``sequence`` the blocks of ``copy``, which ends, and the new ``location``. Other stripes do not change."""

    sequence: int
    copy: int
    location: KvLocation


# A *dropped* block is freed and never seen again. The other tokens keep their positions, by which K was rotated. A
# sparse layer's attention sees the kept tokens side by side, as if there were no others.
class DropBlocks(msgspec.Struct, frozen=True, array_like=True, tag="prune"):
    """Drop whole blocks of a sequence in all sparse layers, for good. ``blocks``: ascending, counted from token 0; the
    sequence still has them there. Afterwards the sequence may only be freed, have later rows, and lose more blocks.
    """

    sequence: int
    blocks: list[int]


class ScoreBlocks(msgspec.Struct, frozen=True, array_like=True, tag="score"):
    """After this step, score how much the last ``rows`` rows of a sequence in it attend each of its blocks. Every
    memory worker replies with one BlockScoresReport.
    """

    sequence: int
    rows: int


class SelectBlocks(msgspec.Struct, frozen=True, array_like=True, tag="attend"):
    """Let the sequence's only row in this step attend its best blocks of ``tokens`` tokens, not the engine's budget; 0:
    all blocks.
    """

    sequence: int
    tokens: int = 0


class StateRows(msgspec.Struct, frozen=True, array_like=True, tag="state"):
    """The recurrent state of a sequence, with or without rows in this step. Versions of fewer than ``oldest`` tokens
    are not needed any more, since the steps that wrote that version are done. ``snapshots`` stay, for later prompts;
    a prefill worker sends them to memory workers. The first ``prompt`` rows belong to the request's prompt.
    """

    sequence: int
    oldest: int
    prompt: int = 0
    snapshots: list[int] = []


class DeletePages(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Delete pages from storage, after the saves that are in progress. No worker waits for it. ``sequence``: the one
    that had the pages; it need not exist.
    """

    sequence: int
    keys: list[bytes]


class PrefetchHint(msgspec.Struct, frozen=True, array_like=True, tag="expect"):
    """A waiting sequence needs stored pages from page ``first`` on, and will probably lie at ``location``. A smaller
    ``order`` needs its pages earlier. No keys: it needs no pages any more. No worker waits for this op.
    """

    order: int
    first: int = 0
    keys: list[bytes] = []
    location: KvLocation = FIRST_LOCATION


class SetRetention(msgspec.Struct, frozen=True, array_like=True, tag="prolong"):
    """Keep stored pages for ``seconds``: other pages are evicted before them, and their age does not matter. It takes
    effect after the saves in progress; no worker waits for it. ``sequence``: the one that had the pages; it need not
    exist.
    """

    sequence: int
    seconds: float
    keys: list[bytes]


Transfer = SaveKv | LoadKv
BlockOp = (
    New
    | Fork
    | Free
    | Truncate
    | ContextShift
    | PrefillGrant
    | FetchPrefix
    | Transfer
    | DropBlocks
    | CopyStripes
    | CommitMigration
)  # ops that change the blocks of the pool
StorageOp = DeletePages | SetRetention | PrefetchHint  # about offloaded pages alone
RowOp = ScoreBlocks | SelectBlocks | StateRows  # about rows of the step; it holds no blocks
SequenceOp = BlockOp | StorageOp | RowOp


class StripesCopied(msgspec.Struct, frozen=True, kw_only=True, tag="stripes-copied"):
    """Memory worker -> driver: its part of the CopyStripes of ``sequence`` is done. ``nbytes``: K and V received, with
    right checksums; ``error``: the reason for a failure.
    """

    epoch: int
    sequence: int
    nbytes: int = 0
    error: str = ""


class BlockScoresReport(msgspec.Struct, frozen=True, kw_only=True, tag="scored"):
    """Memory worker -> driver: the weight that softmax gives to each block of a sequence, the step's blocks included.

    ``scores``: summed over the rows, and over the worker's query heads of all sparse layers, as fixed-point numbers
    with SCORE_BITS bits; 0 for dropped blocks. Each (row, head, layer) is rounded separately, so sums do not depend on
    how heads are divided.
    """

    epoch: int
    step: int
    sequence: int
    scores: list[int]


class SurvivingKv(msgspec.Struct, frozen=True, array_like=True):
    """The KV of a sequence that remains after a change of the epoch: its first ``length`` tokens, at ``location``.
    ``previous_location``: where they lie under the previous partition, and are to be moved from; None: they do not
    move. ``snapshots``: versions of its recurrent states that remain, in addition to that of ``length``.
    """

    sequence: int
    length: int
    location: KvLocation = FIRST_LOCATION
    previous_location: KvLocation | None = None
    snapshots: list[int] = []


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Everything a memory worker must know of one pass of one batch over all slices (arXiv 2405.01814 section 4.3).
    Only replica 0 sends it. The ops apply in order, all or nothing, before layer 0 of its round. Then blocks for all
    rows are allocated, or the step is refused as a whole.
    """

    version: int = VERSION
    epoch: int = 0
    batch: int = 0
    step: int
    ops: list[SequenceOp]
    rows: list[RowRange]
    send_from: list[int] = []  # layer -> replica that sends its Q and KV; empty = replica 0 for all
    reply_to: list[int] = []  # layer -> replica that receives its O; empty = replica 0 for all
    has_more: bool = False  # another batch's plan of the same round follows

    @property
    def num_rows(self) -> int:
        return sum(r.count for r in self.rows)

    def replica_of(self, index: int) -> int:
        """Return the replica that runs slice ``index``; the last slice belongs to the one that receives the last O."""
        if index < len(self.send_from):
            return self.send_from[index]
        return self.reply_to[-1] if self.reply_to else 0


class Rotary(msgspec.Struct, frozen=True, array_like=True):
    """The rotation of K by position: pair i of the elements from ``start`` on turns by ``frequencies[i]`` radians a
    position (fp64, little-endian; empty: no rotation). ``interleaved``: pairs are neighbours, else elements of the two
    halves.
    """

    frequencies: bytes
    start: int = 0
    interleaved: bool = False


class LayerShape(msgspec.Struct, frozen=True, array_like=True):
    """One attention operator of the model, all heads. Static operands ([Hq], fp32, little-endian) travel as bytes."""

    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    spec: str  # AttentionSpec.encode()
    sinks: bytes = b""
    slopes: bytes = b""
    rotary: Rotary | None = None  # None: unknown, so stored K cannot be moved to other positions


class BindRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a memory worker needs before any plan. It takes its part of each field by the partition."""

    version: int = VERSION
    epoch: int = 0
    worker: int
    partition: Partition
    layers: list[LayerShape]
    dtype: str  # of the wire: "float32", "bfloat16", "float16"
    kv: KVOptions
    kv_bytes: int  # memory for KV blocks on this worker
    # All sequences together need no more of kv_bytes; a device with its own memory allocates this, as far as it fits.
    max_kv_bytes: int = 0
    max_rows: int  # rows in a step at most
    max_model_len: int  # tokens in a sequence at most
    replicas: int = 1  # compute workers: the sender, and those that will join
    prefill_workers: int = 0  # that will join after the replicas
    prefill_pipeline: int = 1  # consecutive prefill workers that send a grant's K and V together, each some layers
    device_path: bool = False  # the sender's devices could send and receive layer messages
    parity: bool = False  # only store K and V: no Q comes, and no O is sent
    mixers: list[MixerShape] = []  # the recurrent layers
    exchanges: list[Exchange] = []  # in their order; empty: of each layer one, with its attention
    # Versions of sequences' states: the most that are wanted, in a part of ``kv_bytes``, and those of one sequence. The
    # rest of ``kv_bytes`` is for the KV of ``num_sequences`` sequences, at most.
    state_slots: int = 0
    state_versions: int = 0
    num_sequences: int = 0

    @property
    def unconnected(self) -> BindRequest:
        """A copy without the fields that differ by peer; the remaining fields determine a store's memory."""
        alone = {"epoch": 0, "replicas": 1, "prefill_workers": 0, "prefill_pipeline": 1, "device_path": False}
        return msgspec.structs.replace(self, **alone)


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Another replica or a prefill worker joins. Prefill workers' numbers follow replicas'; ``layers`` equal Bind's."""

    version: int = VERSION
    epoch: int = 0
    peer_number: int
    layers: list[LayerShape]


class DevicePathRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of a channel for hosts, which replaces the BIND's channel; that one is now for kernels.
    ``wait_s``: seconds that a kernel waits at most; 0: the device path ends. ``graphs``: whether rounds of decoding are
    to be recorded.
    """

    version: int = VERSION
    wait_s: float
    graphs: bool = True


class BindReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to BindRequest: the capacity of every group. A group is all pieces of one window length, the same KV
    shards, and sparse layers or others.
    """

    windows: list[int]  # group -> window in tokens, 0 = all tokens
    kv_shards: list[KvShards]  # group -> the KV shards whose KV it keeps
    sparse: list[bool] = []  # group -> whether its layers are sparse; empty: none are
    stripe_blocks: int  # KV blocks of a sequence that stay together; 0 = all
    single_shard: bool = False  # all blocks stay together, except for stripes on loan
    num_blocks: list[int]  # group -> KV blocks
    backend: str = ""  # attention backend, by its name in the table
    device_path: bool = False  # the worker's device can send and receive, too, and expects a DIRECT channel
    kv_bytes: int = 0  # memory of this worker for KV blocks
    state_shards: KvShards | None = None  # the KV shards whose sequences have states here; None: it has no states
    state_slots: int = 0  # versions of sequences' states for which there is memory


class ProtocolError(Exception):
    """A message breaks the contract: wrong version, key, size, or an op that this worker cannot do."""


T = TypeVar("T", bound=msgspec.Struct)
encode = msgspec.msgpack.Encoder().encode


def decode(form: type[T], data: bytes | memoryview) -> T:
    """Decode a message of type ``form``. Raises ProtocolError for anything else, or another version."""
    try:
        message: T = _decoder(form).decode(data)
    except msgspec.MsgspecError as e:
        raise ProtocolError(f"not a {form.__name__}: {e}") from e
    if (version := getattr(message, "version", VERSION)) != VERSION:
        raise ProtocolError(f"{form.__name__} of version {version}, this worker speaks {VERSION}")
    return message


_decoder_lock = threading.Lock()  # msgspec reads a type's fields once, and two threads that do so crash the process


@cache
def _decoder(form: type[T]) -> msgspec.msgpack.Decoder[T]:
    with _decoder_lock:
        return msgspec.msgpack.Decoder(form)


def decode_bind_reply(data: bytes | memoryview) -> BindReply:
    """Decode a BindReply. Raises ProtocolError for anything else."""
    bound = decode(BindReply, data)
    sizes = {len(x) for x in (bound.windows, bound.kv_shards, bound.num_blocks, bound.sparse or bound.windows)}
    if len(sizes) > 1 or not all(x.pattern for x in bound.kv_shards):
        raise ProtocolError(f"not a Bound: groups of {bound.windows}, {bound.kv_shards}, {bound.num_blocks}")
    return bound
