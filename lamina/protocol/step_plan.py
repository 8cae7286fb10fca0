"""The wire contract between compute and memory workers: the StepPlan and the messages of a layer.

A step begins with one PLAN message to every memory worker. It fixes everything variable about the step, so that the
layer messages behind it have a fixed place and size: Q, KV and O carry tensors and nothing else.

    PLAN    msgpack of StepPlan, from replica 0; the plans of a round follow one another
    Q, KV   of the rows that the worker needs, its heads; their bytes are in protocol.codec
    O       back to the replica that the plan names
    BIND    msgpack of Bind, once an epoch, before any plan, from replica 0;  BOUND answers it
    JOIN    msgpack of Join, once an epoch, from every other replica and then every prefill worker;  BOUND answers it
    DIRECT  msgpack of Direct, once, first on a channel besides, where BOUND has offered that;  BOUND answers it. Then
            plans travel on that one, and Q, KV and O on the one of the Bind, from device to device
    CARRY   the tensors of a cut, from one replica to the next
    STORED  nothing; back to a prefill worker: all K and V of a grant are in the store
    REFUSED utf-8 text, in place of BOUND or of the step's first O: nothing of the step was applied

An *epoch* is one generation of who is connected. It is the epoch of every channel that is opened under it, and part of
every Key: so what was sent under an older epoch cannot reach a channel of a newer one, and is dropped where it does. A
plan bears it too, as plans are also queued where there is no channel; a Bind or Join of another epoch is refused.

Tensors are contiguous, in the wire dtype of Bind, rows in the order of the plan. Every message carries its Key as tag.
A message without any row is not sent.

A *round* is one step of every batch that has one. Everybody takes the turns of a round in one order, by layer and then
by batch, and rounds one after the other: so every worker knows whose message is next.

A prefill worker's K and V come besides, on a channel of its own, once a plan has granted them: layer by layer, grants
in the order of the plans. They have no turn; a memory worker takes them while it would wait.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple, TypeVar

import msgspec

from lamina.config.engine_config import KVOptions
from lamina.config.partition import KvShards, Partition

from .held_rows import FetchPrefix as FetchPrefix
from .held_rows import RowRange as RowRange
from .kv_placement import FIRST_LOCATION, KvLocation
from .migration_ops import CommitMigration as CommitMigration
from .migration_ops import CopyStripes as CopyStripes
from .sparse_ops import DropBlocks as DropBlocks
from .sparse_ops import RowOp as RowOp
from .storage_ops import MAX_HINTED_PAGES as MAX_HINTED_PAGES
from .storage_ops import MAX_RETENTION_S as MAX_RETENTION_S
from .storage_ops import DeletePages as DeletePages
from .storage_ops import PrefetchHint as PrefetchHint
from .storage_ops import SetRetention as SetRetention
from .storage_ops import StorageOp as StorageOp

VERSION = 18
# Of a sequence, whose K and V are still to come: behind a window, a third may give blocks back that the first fills.
GRANTS_AHEAD = 2
MAX_PAGES_PER_TRANSFER = 64  # of a transfer
KEY_BYTES = 32  # of a page's key


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
    STORED = 10
    DIRECT = 11


_KEY = struct.Struct("<QIIiI")


class MessageKey(NamedTuple):
    """Names a message: (epoch, batch, step, layer, kind). Together with the channel's epoch it is unique."""

    kind: int
    step: int = 0
    batch: int = 0
    epoch: int = 0
    layer: int = -1  # -1: not of a layer

    def pack(self) -> bytes:
        """24 bytes, little-endian; fits a channel's tag."""
        return _KEY.pack(self.step, self.batch, self.epoch, self.layer, self.kind)

    @staticmethod
    def for_step(kind: int, plan: StepPlan, layer: int = -1) -> MessageKey:
        """Of a message of the step that ``plan`` is for."""
        return MessageKey(kind, plan.step, plan.batch, plan.epoch, layer)

    @staticmethod
    def packed_for_layer_0(plan: StepPlan) -> bytes:
        """Of Q, K and V, and O of layer 0, packed: what native modules make the keys of all layers from."""
        return b"".join(
            MessageKey.for_step(kind, plan, 0).pack() for kind in (MessageKind.Q, MessageKind.KV, MessageKind.O)
        )

    @staticmethod
    def unpack(tag: bytes) -> MessageKey:
        """Inverse of ``pack``; bytes behind the first 24 are ignored."""
        step, batch, view, layer, kind = _KEY.unpack_from(tag)
        return MessageKey(kind, step, batch, view, layer)


class New(msgspec.Struct, frozen=True, array_like=True, tag="new"):
    """Start an empty sequence. Its id must not be in use."""

    sequence: int


class Free(msgspec.Struct, frozen=True, array_like=True, tag="free"):
    """Forget a sequence and give its blocks back. It must exist."""

    sequence: int


class Truncate(msgspec.Struct, frozen=True, array_like=True, tag="truncate"):
    """Keep the first ``length`` tokens and give the blocks behind them back."""

    sequence: int
    length: int


class Fork(msgspec.Struct, frozen=True, array_like=True, tag="fork"):
    """Start a sequence that has the first ``length`` tokens of ``source``, which are stored, and lies where
    that does. Nobody writes their whole blocks from now on, which both have; of a block behind these the new one gets a
    copy.
    """

    sequence: int
    source: int
    length: int


class PrefillGrant(msgspec.Struct, frozen=True, array_like=True, tag="grant"):
    """Hold blocks as Rows do, for K and V that prefill worker ``worker``, or the group of that number, sends as
    its step ``step``. Until they are stored, the sequence must have no rows and must not be freed or truncated.
    """

    sequence: int
    first: int
    count: int
    worker: int
    step: int
    location: KvLocation = FIRST_LOCATION

    @property
    def rows(self) -> RowRange:
        """What it holds blocks for."""
        return RowRange(self.sequence, self.first, self.count, self.location)


class SaveKv(msgspec.Struct, frozen=True, array_like=True, tag="export"):
    """Save pages of a sequence, from position ``first`` on, in the medium under ``keys``; the last one may be partial.
    Until every memory worker has reported the end of the transfer, the sequence must have no rows but behind them, none
    where layers have windows. It may be freed or truncated at any time, in the same plan too: then pages are copied
    first, or not saved. Transfers are numbered in the order of the plans. ``num_prompt_tokens``: tokens of the
    sequence's prompt.
    """

    sequence: int
    transfer_id: int
    first: int
    count: int
    keys: list[bytes]
    tenant: bytes
    num_prompt_tokens: int = 0


class LoadKv(msgspec.Struct, frozen=True, array_like=True, tag="import"):
    """Hold blocks as Rows do, for pages that memory workers load from the medium; the last may be partial. Until all
    have reported its end, the sequence must not be freed, truncated, forked or loaded twice. It has rows once all gates
    are open: when what is to come takes no longer than its first rows, ``slack_s`` (0: never). ``page_shift``: the
    pages were saved from positions so much further on, whole pages of all KV shards: K is rotated as it comes.
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
    def rows(self) -> RowRange:
        """The tokens for which the sequence holds blocks."""
        return RowRange(self.sequence, self.first, self.count, self.location)


class ContextShift(msgspec.Struct, frozen=True, array_like=True, tag="shift"):
    """Discard ``count`` tokens of a sequence from position ``first`` on, and move all that is behind them to the
    positions that become free: stored K is rotated. Both are whole pages, and ``count`` is a multiple of all KV shards'
    stripes, so every token stays in its KV shard. Nobody else may hold blocks behind the discarded ones. The sequence
    must have no rows, no transfer that loads it, and no other op in this plan but Free.
    """

    sequence: int
    first: int
    count: int


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
)  # of the pool
SequenceOp = BlockOp | StorageOp | RowOp


class SurvivingKv(msgspec.Struct, frozen=True, array_like=True):
    """What is left of a sequence behind a change of the epoch: its first ``length`` tokens, which lie at ``location``.
    ``previous_location``: where they lie by the partition before, and are to be moved from; None: where they are.
    """

    sequence: int
    length: int
    location: KvLocation = FIRST_LOCATION
    previous_location: KvLocation | None = None


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Everything a memory worker must know of one pass of one batch over all slices (arXiv 2405.01814 section 4.3).

    Sent by replica 0 only. The ops apply in order, all or nothing, before layer 0 of its round; then blocks for all
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
    has_more: bool = False  # the plan of another batch in the same round comes behind this one

    @property
    def num_rows(self) -> int:
        return sum(r.count for r in self.rows)

    def replica_of(self, index: int) -> int:
        """The replica that runs slice ``index``; the last slice belongs to the one that receives the last O."""
        if index < len(self.send_from):
            return self.send_from[index]
        return self.reply_to[-1] if self.reply_to else 0


class Rotary(msgspec.Struct, frozen=True, array_like=True):
    """How K turns with its position: pair i of the elements from ``start`` on by ``frequencies[i]`` radians a position
    (fp64, little-endian; empty = it does not). Pairs are neighbours, or else elements of the two halves.
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
    rotary: Rotary | None = None  # None: not known, so its K stays where it is


class BindRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a memory worker must know before the first plan. It takes its own part of everything by the partition."""

    version: int = VERSION
    epoch: int = 0
    worker: int
    partition: Partition
    layers: list[LayerShape]
    dtype: str  # of the wire: "float32", "bfloat16", "float16"
    kv: KVOptions
    kv_bytes: int  # memory for KV blocks on this worker
    # Of them, all sequences need no more; a device of its own memory takes them, as far as it has it.
    max_kv_bytes: int = 0
    max_rows: int  # rows in a step at most
    max_model_len: int  # tokens in a sequence at most
    replicas: int = 1  # compute workers: this one, and the ones that will join
    prefill_workers: int = 0  # that will join behind them
    prefill_pipeline: int = 1  # of these, one behind the other, that send a grant's K and V together, each some layers
    device_path: bool = False  # the devices of this side could send and receive what is of a layer
    parity: bool = False  # K and V are to be stored alone: no Q comes, and nobody waits for O

    @property
    def unconnected(self) -> BindRequest:
        """A copy without the fields that differ by peer; a store's memory follows from the rest."""
        alone = {"epoch": 0, "replicas": 1, "prefill_workers": 0, "prefill_pipeline": 1, "device_path": False}
        return msgspec.structs.replace(self, **alone)


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Another replica, or a prefill worker, whose numbers follow the replicas'. ``layers`` must be those of Bind."""

    version: int = VERSION
    epoch: int = 0
    peer_number: int
    layers: list[LayerShape]


class DevicePathRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The channel is for hosts, in place of that of the Bind, which is for kernels, none of which waits longer than
    ``wait_s``; 0: it is over. ``graphs``: whether rounds of decoding are to be recorded.
    """

    version: int = VERSION
    wait_s: float
    graphs: bool = True


class BindReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to Bind: the capacity of every group (pieces of one window length and the same KV shards, of sparse
    layers or of others).
    """

    windows: list[int]  # group -> window in tokens, 0 = all tokens
    kv_shards: list[KvShards]  # group -> the KV shards whose KV it keeps
    sparse: list[bool] = []  # group -> whether it is of sparse layers; empty: none is
    stripe: int  # KV blocks of a sequence that stay together; 0 = all
    single_shard: bool = False  # all do, but for stripes on loan
    num_blocks: list[int]  # group -> KV blocks
    backend: str = ""  # attention backend, by its name in the table
    device_path: bool = False  # the device of this side can too, and a channel for hosts is due
    kv_bytes: int = 0  # of its memory, for KV blocks


class ProtocolError(Exception):
    """A message that does not fit the contract: wrong version, key, size, or an op that this worker cannot do."""


T = TypeVar("T", StepPlan, BindRequest, JoinRequest, DevicePathRequest)
_plan_decoder = msgspec.msgpack.Decoder(StepPlan)
_bind_decoder = msgspec.msgpack.Decoder(BindRequest)
_join_decoder = msgspec.msgpack.Decoder(JoinRequest)
_direct_decoder = msgspec.msgpack.Decoder(DevicePathRequest)
_bound_decoder = msgspec.msgpack.Decoder(BindReply)
encode = msgspec.msgpack.Encoder().encode


def decode_plan(data: bytes | memoryview) -> StepPlan:
    """Raises ProtocolError on anything that is not a StepPlan of this version."""
    return _checked(_plan_decoder, data)


def decode_bind(data: bytes | memoryview) -> BindRequest:
    """Raises ProtocolError on anything that is not a Bind of this version."""
    return _checked(_bind_decoder, data)


def decode_join(data: bytes | memoryview) -> JoinRequest:
    """Raises ProtocolError on anything that is not a Join of this version."""
    return _checked(_join_decoder, data)


def decode_device_path(data: bytes | memoryview) -> DevicePathRequest:
    """Raises ProtocolError on anything that is not a Direct of this version."""
    return _checked(_direct_decoder, data)


def decode_bind_reply(data: bytes | memoryview) -> BindReply:
    """Raises ProtocolError on anything that is not a Bound."""
    try:
        bound = _bound_decoder.decode(data)
    except msgspec.MsgspecError as e:
        raise ProtocolError(f"not a Bound: {e}") from e
    sizes = {len(x) for x in (bound.windows, bound.kv_shards, bound.num_blocks, bound.sparse or bound.windows)}
    if len(sizes) > 1 or not all(x.pattern for x in bound.kv_shards):
        raise ProtocolError(f"not a Bound: groups of {bound.windows}, {bound.kv_shards}, {bound.num_blocks}")
    return bound


def _checked(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    try:
        message = decoder.decode(data)
    except msgspec.MsgspecError as e:
        raise ProtocolError(f"not a {decoder.type.__name__}: {e}") from e
    if message.version != VERSION:
        raise ProtocolError(f"{decoder.type.__name__} of version {message.version}, this worker speaks {VERSION}")
    return message
