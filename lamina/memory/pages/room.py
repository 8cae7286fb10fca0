"""How many pages a memory worker has room for beside its pool: as many at least as one sequence may leave."""

from __future__ import annotations

from lamina.kv.pages import PAGE
from lamina.kv.stored import head_bytes, stored_dtype
from lamina.memory.store import DTYPES, form_of
from lamina.protocol.options.engine import CHUNK_TOKENS
from lamina.protocol.placement import Place, Placement
from lamina.protocol.plan import Bind
from lamina.protocol.tiers import TierPlace


def room_of(tier: TierPlace, bind: Bind, kv_bytes: int) -> int:
    """Pages of which the worker of ``bind`` can keep its part; its pool has ``kv_bytes``. Raises ValueError where these
    are fewer than one sequence leaves, and as Store.
    """
    form, dtype = form_of(bind, kv_bytes), stored_dtype(bind.kv.kv_cache_dtype, DTYPES[bind.dtype])
    held = [piece for layer in form.pieces for piece in layer]
    nbytes = max(1, PAGE * sum(piece.kv_heads * head_bytes(piece.qk_dim, piece.v_dim, dtype) for piece in held))
    tokens = min([bind.max_model_len, *(window for window in form.windows if window)])  # where some have, no more
    of = bind.partition
    placement, lanes = Placement(of.num_lanes, of.stripe * CHUNK_TOKENS, of.stays), form.lanes
    firsts, places = range(0, tokens, PAGE), [Place(lane) for lane in range(of.num_lanes)]
    owners = ([placement.lane_at(place, first) for first in firsts] for place in places)
    pages = max(sum(any(lane in own for own in lanes) for lane in each) for each in owners)
    room = (tier.size + (tier.memory if tier.directory else 0)) // tier.workers // nbytes
    if room < pages:
        flag = "--kv-store-size" if tier.directory else "--kv-offloading-size"
        raise ValueError(
            f"{flag}: {tier.size} bytes have no room for one sequence of {tokens} tokens, which takes {pages * nbytes} "
            f"on each of {tier.workers} memory workers: give {pages * nbytes * tier.workers} at least, or lower "
            f"--max-model-len"
        )
    return room
