"""The number of pages that a memory worker can offload: enough for one sequence at least."""

from __future__ import annotations

from lamina.config.engine_config import CHUNK_TOKENS
from lamina.kv.pages import PAGE
from lamina.kv.stored_format import head_bytes, stored_dtype
from lamina.protocol.kv_placement import KvLocation, KvPlacement
from lamina.protocol.offload_messages import OffloadConfig
from lamina.protocol.step_plan import BindRequest
from lamina.workers.memory.kv_store import DTYPES, store_shape
from lamina.workers.memory.state_store import bytes_of_version


def page_capacity(offload: OffloadConfig, bind: BindRequest, kv_bytes: int) -> int:
    """Return how many pages' parts the worker of ``bind`` can store outside its pool, which has ``kv_bytes``. Raises
    ValueError if one sequence has more pages, and as KvStore.
    """
    form, dtype = store_shape(bind, kv_bytes), stored_dtype(bind.kv.kv_cache_dtype, DTYPES[bind.dtype])
    held = [piece for layer in form.pieces for piece in layer]
    nbytes = max(1, PAGE * sum(piece.kv_heads * head_bytes(piece.qk_dim, piece.v_dim, dtype) for piece in held))
    # A sequence leaves no more tokens than the smallest window.
    tokens = min([bind.max_model_len, *(window for window in form.windows if window)])
    of = bind.partition
    placement, lanes = KvPlacement(of.num_kv_shards, of.stripe_chunks * CHUNK_TOKENS, of.single_shard), form.kv_shards
    firsts, places = range(0, tokens, PAGE), [KvLocation(lane) for lane in range(of.num_kv_shards)]
    owners = ([placement.kv_shard_at(place, first) for first in firsts] for place in places)
    pages = max(sum(any(lane in own for own in lanes) for lane in each) for each in owners)
    states = bytes_of_version(bind)  # with the last of these pages
    size = (offload.total_bytes + (offload.memory_bytes if offload.directory else 0)) // offload.workers
    room, least = (size - states) // nbytes, pages * nbytes + states
    if room < pages:
        flag = "--kv-offload size=" if offload.directory else "--kv-offloading-size"
        raise ValueError(
            f"{flag}: {offload.total_bytes} bytes have no space for one sequence of {tokens} tokens, which takes "
            f"{least} on each of {offload.workers} memory workers: give {least * offload.workers} at least, or lower "
            f"--max-model-len"
        )
    return room
