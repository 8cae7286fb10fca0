"""The messages between the server and its engine process: msgpack over one Unix socket, framed as on control links."""

from __future__ import annotations

import msgspec

from lamina.config.engine_config import EngineConfig
from lamina.request import ErrorOrigin, Refusal, ResumedCompletion, SamplingParams, Score
from lamina.scheduler.conductor import ConductorConfig
from lamina.scheduler.sessions.cache_options import DEFAULT_CACHE_OPTIONS, CacheOptions
from lamina.scheduler.sessions.session_table import SessionCopy, SessionInfo
from lamina.scheduler.slo_admission import SloCounts
from lamina.scheduler.sparsity.reference_decode import ErrorState

Logprobs = list[Score]  # the token itself first, then the best, among which it may be again


class StartEngine(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Server -> engine, first message. Answered by Progress messages, then Ready or Failed."""

    model: str
    tokenizer: str  # a path or hub id; "" = the model's own
    config: EngineConfig
    conductor_config: ConductorConfig = ConductorConfig()  # promises of times
    log_json: bool = False  # of the server: then the engine says no more than it must, as its lines are text
    is_first: bool = False  # of its server: then limits that a request alone does not keep are refused
    lost_hosts: list[str] = []  # hosts where no worker is to be; see HostLostError


class AddPrompt(msgspec.Struct, frozen=True, tag="add"):
    """Server -> engine: complete a prompt. Answered by the deltas of its completions, or by Refused.

    ``key`` is the server's name for it, never used twice. ``resumed``: of its completions, by an engine that has died.
    ``accepted``: by an engine or a server before; so it is not refused for load.
    """

    key: int
    prompt: list[int]
    params: SamplingParams
    resumed: list[ResumedCompletion] = []
    cache_options: CacheOptions = DEFAULT_CACHE_OPTIONS
    accepted: bool = False


class CancelPrompt(msgspec.Struct, frozen=True, tag="cancel"):
    """Server -> engine: nobody wants that any more. Not answered; a delta may still be under way."""

    key: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset"):
    """Server -> engine: prompts behind this find no KV of those before. Answered by itself once it is so."""

    number: int = 0


class SessionsRequest(msgspec.Struct, frozen=True, tag="ask-sessions"):
    """Server -> engine: the sessions of a tenant, answered by SessionsReply. ``drop``: the one to forget; then the
    answer has that one, or none where there is no such session. ``copy``: the one to copy; ``import_``: one to take
    over.
    """

    number: int
    tenant: bytes
    drop: str | None = None
    copy: str | None = None
    import_: SessionCopy | None = None


class SessionsReply(msgspec.Struct, frozen=True, tag="sessions-are"):
    """Engine -> server, in answer to SessionsRequest of that ``number``. ``refusal``: why nothing was copied or taken;
    ``blame``: who can put that right.
    """

    number: int
    sessions: list[SessionInfo]
    copy: SessionCopy | None = None
    refusal: str = ""
    blame: ErrorOrigin = ErrorOrigin.CLIENT


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Engine -> server: both pools are up."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    dtype: str
    block_size: int
    num_blocks: list[list[int]]  # group of layers -> blocks of its holders
    holders: list[list[int]]  # group -> numbers of the memory workers that have it
    attention_calls_per_step: int  # layers: each is one way to the memory workers and back
    caches_prefixes: bool = False  # of requests that have ended
    sparse: list[bool] = []  # group -> whether sequences lose KV blocks there; empty: they lose none
    truncates: bool = False  # prompts that are longer than the context, in place of refusing them
    max_tokens_that_fit: float = 0.0  # sequences of max_model_len tokens whose KV the pool holds at once
    row_bytes: dict[str, int]  # "q", "kv", "o": bytes of one row in all layers
    workers: list[str]  # such as "memory-0"
    hosts: dict[str, str] = {}  # worker -> address of its host


class ScaleMemory(msgspec.Struct, frozen=True, tag="scale"):
    """Server -> engine: go on with ``memory_workers`` memory workers, and with the other workers as they are.
    ``leaving_workers``: the workers that leave, by number; empty: the last ones. Answered by Scaled.
    """

    memory_workers: int
    leaving_workers: list[int] = []


class CordonWorker(msgspec.Struct, frozen=True, tag="cordon"):
    """Server -> engine: let no new sequence begin on this memory worker; or, not ``on``, let them again. Answered by
    Scaled.
    """

    worker: int
    on: bool


class ScaleReply(msgspec.Struct, frozen=True, kw_only=True, tag="scaled"):
    """Engine -> server: it does. ``error``: it goes on as before, and why; ``in_place``: whether another engine could
    do no better. ``pause_s``: in which no step was done. ``cordoned``: memory workers on which no sequence begins.
    ``was_requested``: whether somebody waits for it.
    """

    error: str = ""
    in_place: bool = True
    pause_s: float = 0.0
    cordoned: list[int] = []
    ready: EngineReady | None = None  # new facts; None: as before
    was_requested: bool = True


class PromptRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Engine -> server: a prompt that cannot be served, and why. ``refusal``: it would come too late."""

    key: int
    text: str
    blame: ErrorOrigin
    refusal: Refusal | None = None


class EngineDefect(msgspec.Struct, frozen=True, tag="broken_engine"):
    """Engine -> server, the last message: it has failed by a defect of its own, as it served. Another one may go on."""

    text: str


class PromptTimes(msgspec.Struct, frozen=True, array_like=True):
    """Of a prompt that has ended, in seconds by the engine's clock. ``queue``: until its first row ran; ``prefill``:
    from there to the first token.
    """

    queue: float
    prefill: float
    decode: float
    preemptions: int = 0  # how often KV of its completions was freed for others


class Delta(msgspec.Struct, kw_only=True, array_like=True):
    """How completion ``index`` of a prompt has grown. The server adds up what a slow reader has not taken yet.

    Log-probabilities stay encoded until an answer needs them: decoded they take six times the memory and time.
    """

    key: int
    index: int
    token_ids: list[int]
    text: str
    logprobs: list[msgspec.Raw] | None = None  # a Logprobs for each token, as encoded
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[msgspec.Raw] | None = None  # each a Logprobs or None; with the first delta of completion 0
    # Tokens of the prompt whose KV was there; with the first delta of completion 0.
    num_cached_tokens: int | None = None
    times: PromptTimes | None = None  # with the last delta of the whole prompt
    blame: ErrorOrigin | None = None  # where it has ended with an error, whose text is ``stop_reason``
    kv_rebuilt: bool = False  # it goes on with all KV, as answers with less were not good enough
    refusal: Refusal | None = None  # where it was computed and is not decoded


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Logprobs | None).decode


def encode_scores(entry: Logprobs | None) -> msgspec.Raw:
    """An item of a Delta's log-probabilities; None where a token has none."""
    return msgspec.Raw(_encode(entry))


def decode_scores(raw: msgspec.Raw) -> Logprobs | None:
    """The item that ``encode_scores`` made. Raises msgspec.MsgspecError."""
    entry: Logprobs | None = _decode(raw)
    return entry


def detach(delta: Delta) -> None:
    """Copy encoded log-probabilities, which else keep the frame of all requests in memory that they came in."""
    delta.logprobs = delta.logprobs and [raw.copy() for raw in delta.logprobs]
    delta.prompt_logprobs = delta.prompt_logprobs and [raw.copy() for raw in delta.prompt_logprobs]


def merge_delta(held: Delta, new: Delta) -> None:
    """``held`` grows by what has come behind it."""
    held.token_ids += new.token_ids
    held.text += new.text
    if held.logprobs is not None and new.logprobs is not None:
        held.logprobs += new.logprobs
    held.finish_reason, held.stop_reason = new.finish_reason, new.stop_reason
    held.times, held.blame, held.refusal = new.times, new.blame, new.refusal
    held.kv_rebuilt |= new.kv_rebuilt  # also where a later engine does not know of it


class EngineState(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """Engine -> server, a few times a second: sent only when a step was done, or when all workers have answered and the
    engine is idle or one of them has gone on. So its age tells whether the engine lives.
    """

    running: int
    waiting: int
    free_blocks: list[int]  # by group, of the holder with the fewest blocks
    preemptions: int
    steps: int
    evictable_blocks: list[int] = []  # free ones with KV of finished requests
    dropped_blocks: int = 0  # KV blocks that sequences have lost, each in all sparse layers
    errors: ErrorState | None = None  # None: nothing measures them
    borrowed_blocks: list[int] | None = None  # KV blocks by the group that lends them; None: none does
    # Bytes by the deployment that lends them; None: nothing may be borrowed.
    leased_blocks: dict[str, int] | None = None
    lent_blocks: dict[str, int] | None = None  # blocks of 1 MiB by the deployment that has them; None: nothing is lent
    loan_refusals: int = 0
    debt_cycles: int | None = None  # None: no ledger has told
    moved_blocks: int | None = None  # of KV that went home from loan, or left, while others decoded; None: none may
    moved_bytes: dict[str, int] = {}  # bytes of KV that went from one memory worker to another, by the reason
    prefix_queries: int = 0  # tokens of all completions that were admitted
    prefix_hits: int = 0  # how many of these had their KV in the pools
    external_queries: int = 0  # how many had not, where KV is kept beside the pools
    external_hits: int = 0  # how many of the latter had their KV loaded
    sessions: dict[str, int] = {}  # by the tier that has their KV
    session_hits: dict[str, int] = {}  # turns behind the first, by the tier that had it
    session_waits: dict[str, float] = {}  # seconds for which these waited for their first row
    # A worker was lost, and another one takes its place: the engine lives, and no step is done.
    recovering: bool = False
    slo: SloCounts | None = None  # None: nothing is
    kv_replicas: int | None = None  # pages of prompts that prefill workers have besides; None: they keep none


def state_for_workers(state: EngineState, ready: EngineReady) -> EngineState:
    """``state`` beside ``ready``: where one of them is of other memory workers, which come and go, all blocks count as
    free until the next State.
    """
    return state if len(state.free_blocks) == len(ready.num_blocks) else idle_state(state, ready)


def idle_state(state: EngineState, ready: EngineReady) -> EngineState:
    """``state`` with all blocks of ``ready`` free."""
    free = list(map(min, ready.num_blocks))
    return msgspec.structs.replace(state, free_blocks=free, evictable_blocks=[0] * len(free), borrowed_blocks=None)


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """Engine -> server: everything that one step has brought. ``num_tokens``: of the completions, and of prompts whose
    first token is among them. ``has_more``: the rest follows; see output_parts.
    """

    deltas: list[Delta]
    num_tokens: int = 0
    has_more: bool = False


class WorkerCounters(msgspec.Struct, frozen=True, tag="counters"):
    """Engine -> server, every second or so, and once all have met anew: each worker's counters since its start, by its
    name.
    """

    workers: dict[str, dict[str, float]]
    pids: list[int] = []  # of their processes
    hosts: dict[str, str] = {}  # worker -> address of its host, which may be a new one; empty: as before
