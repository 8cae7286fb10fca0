"""The messages between the server and its engine process: msgpack over one Unix socket, framed as on control links."""

from __future__ import annotations

import msgspec

from lamina.config.engine_config import EngineConfig
from lamina.request import ErrorOrigin, Refusal, ResumedCompletion, SamplingParams, Score
from lamina.scheduler.conductor import ConductorConfig
from lamina.scheduler.sessions.cache_options import DEFAULT_CACHE_OPTIONS, CacheOptions
from lamina.scheduler.sessions.session_table import SessionCopy, SessionInfo

Logprobs = list[Score]  # the token itself first, then the best ones, among which it may be again


class StartEngine(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Server -> engine, first message. The engine replies with Progress messages, then EngineReady or Failed."""

    model: str
    tokenizer: str  # a path or hub id; "" = the model's own
    config: EngineConfig
    conductor_config: ConductorConfig = ConductorConfig()  # limits of times that the server promises
    log_level: str = "info"
    is_first: bool = False  # the server's first engine: it refuses limits that a single request would exceed
    lost_hosts: list[str] = []  # hosts where no worker may start; see HostLostError


class AddPrompt(msgspec.Struct, frozen=True, tag="add"):
    """Server -> engine: complete a prompt. The engine replies with deltas of its completions, or with PromptRefused.

    ``key``: the server's name for the prompt, never used twice. ``resumed``: completions so far, from an engine that
    died. ``accepted``: an earlier engine or server accepted the prompt, so it is not refused for load.
    """

    key: int
    prompt: list[int]
    params: SamplingParams
    resumed: list[ResumedCompletion] = []
    cache_options: CacheOptions = DEFAULT_CACHE_OPTIONS
    accepted: bool = False


class CancelPrompt(msgspec.Struct, frozen=True, tag="cancel"):
    """Server -> engine: cancel a prompt. There is no reply; a delta may still be on its way."""

    key: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset"):
    """Server -> engine: prompts after this message find no KV of earlier ones. The engine sends it back once done."""

    number: int = 0


class SessionsRequest(msgspec.Struct, frozen=True, tag="ask-sessions"):
    """Server -> engine: report the sessions of a tenant; SessionsReply is the reply. ``drop``: forget this session; the
    reply then lists only it, or none if it does not exist. ``copy``: the session to copy; ``import_``: one to take
    over.
    """

    number: int
    tenant: bytes
    drop: str | None = None
    copy: str | None = None
    import_: SessionCopy | None = None


class SessionsReply(msgspec.Struct, frozen=True, tag="sessions-are"):
    """Engine -> server: the reply to the SessionsRequest with that ``number``. ``refusal``: why nothing was copied or
    imported; ``blame``: where the error lies.
    """

    number: int
    sessions: list[SessionInfo]
    copy: SessionCopy | None = None
    refusal: str = ""
    blame: ErrorOrigin = ErrorOrigin.CLIENT


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Engine -> server: both pools are ready."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    dtype: str
    block_size: int
    num_blocks: list[list[int]]  # layer group -> blocks of each of its memory workers
    holders: list[list[int]]  # layer group -> numbers of its memory workers
    attention_calls_per_step: int  # attention layers: each is one round trip to the memory workers
    caches_prefixes: bool = False  # keeps KV of finished requests
    sparse: list[bool] = []  # layer group -> whether sequences drop KV blocks there; empty: none do
    end_token_ids: list[int] = []  # of the model
    truncates: bool = False  # cuts prompts that are longer than the context, instead of refusing them
    max_tokens_that_fit: float = 0.0  # number of sequences of max_model_len tokens whose KV the pool holds at once
    row_bytes: dict[str, int]  # "q", "kv", "o": bytes of one row in all layers
    workers: list[str]  # such as "memory-0"
    hosts: dict[str, str] = {}  # worker -> address of its host


class ScaleMemory(msgspec.Struct, frozen=True, tag="scale"):
    """Server -> engine: continue with ``memory_workers`` memory workers; all other workers stay. ``leaving_workers``:
    numbers of the workers that leave; empty: the last ones. ScaleReply is the reply.
    """

    memory_workers: int
    leaving_workers: list[int] = []


class CordonWorker(msgspec.Struct, frozen=True, tag="cordon"):
    """Server -> engine: let no new sequence begin on this memory worker; ``on=False``: allow it again. ScaleReply is
    the reply.
    """

    worker: int
    on: bool


class ScaleReply(msgspec.Struct, frozen=True, kw_only=True, tag="scaled"):
    """Engine -> server: the change is done. ``error``: why it was not, and the engine runs as before. ``in_place``:
    False if another engine could make the change. ``pause_s``: seconds in which no step was done. ``cordoned``: memory
    workers on which no sequence begins. ``was_requested``: whether the server has requested the change.
    """

    error: str = ""
    in_place: bool = True
    pause_s: float = 0.0
    cordoned: list[int] = []
    ready: EngineReady | None = None  # new facts; None: unchanged
    was_requested: bool = True


class PromptRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Engine -> server: a prompt that cannot be served, and why. ``refusal``: set if it would come too late."""

    key: int
    text: str
    blame: ErrorOrigin
    refusal: Refusal | None = None


class EngineDefect(msgspec.Struct, frozen=True, tag="broken_engine"):
    """Engine -> server, the last message: a running engine has failed by its own defect. Another engine may
    continue.
    """

    text: str


class PromptTimes(msgspec.Struct, frozen=True, array_like=True):
    """The times of a finished prompt, in seconds of the engine's clock. ``queue``: until its first row ran;
    ``prefill``: from there to the first token.
    """

    queue: float
    prefill: float
    decode: float
    preemptions: int = 0  # how often KV of its completions was freed for other sequences


class Delta(msgspec.Struct, kw_only=True, array_like=True):
    """The growth of completion ``index`` of a prompt. The server merges deltas that a slow reader has not read yet.

    Log-probabilities stay encoded until a reply needs them: decoded ones take six times the memory and time.
    """

    key: int
    index: int
    token_ids: list[int]
    text: str
    logprobs: list[msgspec.Raw] | None = None  # a Logprobs for each token, as encoded
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[msgspec.Raw] | None = None  # each a Logprobs or None; in the first delta of completion 0
    # Prompt tokens whose KV was cached; in the first delta of completion 0.
    num_cached_tokens: int | None = None
    times: PromptTimes | None = None  # in the last delta of the whole prompt
    blame: ErrorOrigin | None = None  # set if it ended by an error, whose text is ``stop_reason``
    kv_rebuilt: bool = False  # it continues with all KV, as sparse KV was not accurate enough
    refusal: Refusal | None = None  # set if the prompt was computed and is not decoded


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Logprobs | None).decode


def encode_scores(entry: Logprobs | None) -> msgspec.Raw:
    """Encode an item of a Delta's log-probabilities; None if a token has none."""
    return msgspec.Raw(_encode(entry))


def decode_scores(raw: msgspec.Raw) -> Logprobs | None:
    """Decode what ``encode_scores`` returned. Raises msgspec.MsgspecError."""
    entry: Logprobs | None = _decode(raw)
    return entry


def detach(delta: Delta) -> None:
    """Copy encoded log-probabilities, which otherwise keep the frame of all requests in memory."""
    delta.logprobs = delta.logprobs and [raw.copy() for raw in delta.logprobs]
    delta.prompt_logprobs = delta.prompt_logprobs and [raw.copy() for raw in delta.prompt_logprobs]


def merge_delta(held: Delta, new: Delta) -> None:
    """Append ``new``, a later delta, to ``held``."""
    held.token_ids += new.token_ids
    held.text += new.text
    if held.logprobs is not None and new.logprobs is not None:
        held.logprobs += new.logprobs
    held.finish_reason, held.stop_reason = new.finish_reason, new.stop_reason
    held.times, held.blame, held.refusal = new.times, new.blame, new.refusal
    held.kv_rebuilt |= new.kv_rebuilt  # kept if a later engine does not know of it


class EngineState(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """Engine -> server, a few times a second. It is sent only after a step, or when all workers have replied and the
    engine is idle or one of them has progressed. So its age shows whether the engine lives.
    """

    running: int
    waiting: int
    free_blocks: list[int]  # layer group -> free blocks of the memory worker with the fewest blocks
    steps: int
    evictable_blocks: list[int] = []  # free blocks that hold KV of finished requests
    recovering: bool = False  # a worker was lost and is being replaced: the engine lives, but does no steps
    # Values of other metrics, by their names in metric_table.py. A metric with a label has a value for each of these.
    metrics: dict[str, float | dict[str, float]] = {}


def state_for_workers(state: EngineState, ready: EngineReady) -> EngineState:
    """Return ``state`` for use with ``ready``. If they describe different memory workers, as these come and go, all
    blocks count as free until the next EngineState.
    """
    return state if len(state.free_blocks) == len(ready.num_blocks) else idle_state(state, ready)


def idle_state(state: EngineState, ready: EngineReady) -> EngineState:
    """Return ``state`` with all blocks of ``ready`` free."""
    free = list(map(min, ready.num_blocks))
    kept = {name: value for name, value in state.metrics.items() if name != "spilled_blocks"}
    return msgspec.structs.replace(state, free_blocks=free, evictable_blocks=[0] * len(free), metrics=kept)


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """Engine -> server: all results of one step. ``num_tokens``: tokens of completions, and of prompts whose first
    token is in it. ``has_more``: the rest follows; see output_parts.
    """

    deltas: list[Delta]
    num_tokens: int = 0
    has_more: bool = False


class WorkerCounters(msgspec.Struct, frozen=True, tag="counters"):
    """Engine -> server, about every second, and after all workers have reconnected: worker name -> its counters since
    its start.
    """

    workers: dict[str, dict[str, float]]
    pids: list[int] = []  # process ids of the workers
    hosts: dict[str, str] = {}  # worker -> address of its host, which may be a new one; empty: as before
