"""The settings that ``lamina-launch check`` compares, and the promise of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from lamina.config.engine_config import KV_CACHE_DTYPES, ONLINE, KVOptions
from lamina.config.flag_groups import flag_words
from lamina.config.partition import PARTITIONS
from lamina.config.topology import TopologyOptions
from lamina.netstack import HERE

from .exactness import Exactness as Exactness
from .fault_promises import COMPUTE, ENGINE, MEMORY, PARITY, PREFILL, RANK, SERVED, Death


class Resize(NamedTuple):
    """A change to ``workers`` memory workers while sequences run. ``leaving``: numbers of the workers that leave;
    empty: the last ones.
    """

    workers: int
    leaving: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        gone = f" without {', '.join(map(str, self.leaving))}" if self.leaving else ""
        return f"{self.workers}{gone}"


@dataclass(frozen=True, eq=False)
class Setting:
    """One run of all prompts. ``options``: of an engine, where they differ from the base's."""

    axis: str
    promised: Exactness
    compared_with: Setting | None = None  # the earlier run with whose bits it is compared
    options: dict[str, Any] = field(default_factory=dict)
    runs_alone: bool = False  # one prompt after the other, instead of all at once
    early_q: bool = True  # False: Q waits for K and V, in the order of the captured program
    loads_from_disk: bool = False  # the pools were emptied before, so KV is loaded from storage
    changes: tuple[Resize, ...] = ()  # during the run; at its end there are as many workers as at first
    fault: Death | None = None  # during the run

    @property
    def lends(self) -> bool:
        """True if memory workers hold less than the longest sequence, so that a part of it is on loan."""
        return self.options.get("partition") == LENDING and not self.drops_blocks and self.options["memory_workers"] > 1

    @property
    def drops_blocks(self) -> bool:
        """True if sequences drop KV blocks."""
        return self.options.get("kv_sparsity") == "evict"

    @property
    def swaps(self) -> bool:
        """True if memory is too small for all running sequences, so that some are preempted and their KV is saved."""
        return self.options.get("preemption_mode") == "swap"

    @property
    def runs_in_server(self) -> bool:
        """True if a server's engine runs it, in a process of its own, which dies."""
        return self.fault is not None and self.fault.victim == ENGINE

    @property
    def text(self) -> str:
        """The setting as flags of ``lamina-launch``."""
        words = flag_words(self.options)
        tight = ["(too little memory for one sequence)"] * self.lends
        tight += ["(too little memory for all)"] * self.swaps
        labels = [*tight, *["(prompts one by one)"] * self.runs_alone, *["(KV loaded)"] * self.loads_from_disk]
        labels += ["(Q with K and V)"] * (not self.early_q)
        labels += [f"(while sequences run: {', then '.join(c.text for c in self.changes)})"] * bool(self.changes)
        labels += [f"({self.fault.victim} dies)"] if self.fault else []
        return " ".join([*words, *labels])


# Defaults of every run. Prompts longer than a chunk are computed in several steps, next to decoding sequences. With
# more prompts than sequences, some join during the run.
BASE_OPTIONS: dict[str, Any] = {
    "transport": "loopback", "memory_workers": 1, "dtype": "float32", "prefill_chunk": 32, "max_num_seqs": 4,
    "quantization_compute": "float",
}  # fmt: skip
BASE_STORE = KVOptions().kv_cache_dtype
LENDING = "spill"
HOLDING = [name for name in PARTITIONS if name != LENDING]
OTHERS = [name for name in HOLDING if name != TopologyOptions().partition]
# Options of runs in which processes die and are replaced: threads cannot.
_APART: dict[str, Any] = {"memory_workers": 2, "transport": HERE}
_SPILL: dict[str, Any] = {"partition": LENDING, "memory_workers": 3}  # two cannot hold all that runs at once
BASE = Setting("base", Exactness.TOKEN_EQUAL)
FIXED = Setting("deterministic", Exactness.TOKEN_EQUAL, BASE, {"deterministic": True})
# Sums over several ranks are rounded in another way than sums of one.
_TWO: dict[str, Any] = {"tensor_parallel_size": 2, "memory_workers": 2, "deterministic": True}
RANKS = Setting("tensor parallel", Exactness.TOKEN_EQUAL, BASE, _TWO)
# Approximate, so replies have no promise; but all runs choose the same blocks. The smallest possible budget.
_EVICT: dict[str, Any] = {"kv_sparsity": "evict", "kv_budget": 128, "kv_recent": 16, "deterministic": True}
EVICTING = Setting("kv sparsity", Exactness.NOTHING, None, _EVICT)
SELECTING = Setting("kv sparsity", Exactness.NOTHING, None, {**_EVICT, "kv_sparsity": "select"})
EVICTING_RANKS = Setting("kv sparsity", Exactness.NOTHING, None, {**_EVICT, **_TWO})


def quick_settings(attention: Sequence[str]) -> list[Setting]:
    """Return settings for every axis, most of them once. ``attention``: backends other than the base's, the simplest
    last.
    """
    return [
        BASE,
        Setting("again", Exactness.BITWISE, BASE),
        _bits("memory workers", memory_workers=3),
        _bits("memory weights", memory_workers=2, memory_weights="0.7,0.3"),
        *(_bits("partition", memory_workers=2, partition=name) for name in OTHERS),
        _bits("overlap", memory_workers=2, overlap=False),
        Setting("early Q", Exactness.BITWISE, BASE, early_q=False),
        _bits("transport", memory_workers=2, transport="shm"),
        _bits("transport", memory_workers=2, transport="tcp"),
        FIXED,
        _fixed("partition", **_SPILL, transport="shm"),
        Setting("batch mates", Exactness.BITWISE, FIXED, FIXED.options, runs_alone=True),
        _fixed("pipeline", pipeline=3),
        _fixed("prefill workers", prefill_workers=1),
        *_cached(),
        *_restored(memory_workers=2),
        _planned(**_APART),
        _lost(COMPUTE, **_APART),
        _lost(MEMORY, **_APART),
        _planned(**_APART, partition="token"),
        *(_lost(MEMORY, **_APART, partition=name) for name in OTHERS),
        _lost(PREFILL, **_APART, prefill_workers=1),
        _lost(SERVED, **_APART),
        _swapped(),
        RANKS,
        _ranks(transport="shm", memory_workers=4),
        _lost(RANK, RANKS, **{**_TWO, "transport": "shm", "memory_workers": 4}),
        _ranks(pipeline=3),
        *(_bounded("attention", attention=name) for name in attention[-1:]),
        *_stored("int8"),
        *_quantized("int8"),
        EVICTING,
        _alike(memory_workers=2),
        SELECTING,
        _alike(SELECTING, memory_workers=2),
        _rounded("bfloat16"),
    ]


def full_settings(
    attention: Sequence[str], gemm: Sequence[str], transports: Sequence[str], devices: Iterable[dict[str, str]] = ()
) -> list[Setting]:
    """Return every value of every axis, and combinations. The arguments are values other than the base's; ``devices``:
    of another kind, as options.
    """
    held: list[dict[str, Any]] = [{"memory_workers": n, "partition": name} for name in HOLDING for n in (2, 3)]
    splits = [*held, _SPILL]
    return [
        BASE,
        Setting("again", Exactness.BITWISE, BASE),
        *(_bits("memory workers", memory_workers=n) for n in (2, 3, 4)),
        *(_bits("memory weights", **o, memory_weights="5,3,2"[: 2 * o["memory_workers"] - 1]) for o in held),
        *(_bits("partition", memory_workers=n, partition=name) for name in OTHERS for n in (1, 2, 3)),
        _bits("partition", memory_workers=1, partition=LENDING),
        *(_bits("overlap", **o, overlap=False) for o in ({}, *held)),
        *(Setting("early Q", Exactness.BITWISE, BASE, o, early_q=False) for o in ({}, *held)),
        *(_bits("transport", memory_workers=2, transport=name) for name in transports),
        *(_bits("KV parity", memory_workers=2, transport=name, kv_parity=1) for name in ("shm", "tcp")),
        FIXED,
        *(_fixed("partition", **_SPILL, transport=name) for name in ("loopback", *transports)),
        _fixed("memory weights", **_SPILL, memory_weights="5,3,2"),
        _fixed("overlap", **_SPILL, overlap=False),
        Setting("batch mates", Exactness.BITWISE, FIXED, FIXED.options, runs_alone=True),
        *(_fixed("pipeline", pipeline=n) for n in (2, 3)),
        *(_fixed("prefill workers", prefill_workers=n) for n in (1, 2)),
        *_cached(),
        *(s for o in splits for s in _cached(**o, pipeline=2)),
        *(s for o in splits for s in _restored(**o)),
        *_resized(transports),
        *(_swapped(transport=name) for name in ("loopback", *transports)),
        *kv_reuse_settings("int8"),
        *(_planned(**_SPILL, transport=scheme) for scheme in ("loopback", *transports)),
        *(_fixed("prefill workers", **o, prefill_workers=1, pipeline=2) for o in splits),
        Setting("prefill workers", Exactness.TOKEN_EQUAL, BASE, {"prefill_workers": 1}),
        RANKS,
        *(_ranks(transport=name, pipeline=3) for name in transports),
        *(_ranks(memory_workers=4, partition=name) for name in HOLDING),
        _ranks(**{**_SPILL, "memory_workers": 6}),
        _planned(2, RANKS, **_TWO),
        *_losses(),
        *(Setting("tensor parallel", Exactness.TOKEN_EQUAL, BASE, {"tensor_parallel_size": n, "memory_workers": n})
          for n in (2, 4)),
        *(_fixed("combined", **o, overlap=overlap, pipeline=3) for o in splits for overlap in (True, False)),
        *(_fixed("combined", memory_workers=2, transport=name, pipeline=3) for name in transports),
        *(Setting("pipeline", Exactness.TOKEN_EQUAL, BASE, {"pipeline": n}) for n in (2, 3)),
        *(Setting("prefill chunk", Exactness.TOKEN_EQUAL, BASE, {"prefill_chunk": n}) for n in (5, 512)),
        *(s for name in attention for s in _backend(name)),
        *(s for name in ONLINE for s in _quantized(name)),
        *(s for name in KV_CACHE_DTYPES if name != BASE_STORE for s in _stored(name)),
        *_sparse(transports),
        *(_bounded("linear layers", gemm=name) for name in gemm),
        *(_bounded("device", **each) for each in devices),
        *(_rounded(name) for name in ("bfloat16", "float16")),
    ]  # fmt: skip


def settings_of_axes(settings: Iterable[Setting], axes: Sequence[str]) -> list[Setting]:
    """Return the settings of ``axes``, and those with which they are compared; no ``axes``: all. Raises ValueError for
    an unknown axis.
    """
    everything = list(settings)
    known = list(dict.fromkeys(s.axis for s in everything))
    for axis in axes:
        if axis not in known:
            raise ValueError(f"--axis must be one of {', '.join(known)}, not {axis!r}")
    wanted = {s for s in everything if s.axis in axes or not axes}
    while more := {s.compared_with for s in wanted if s.compared_with is not None} - wanted:
        wanted |= more
    return [s for s in everything if s in wanted or s is BASE]


def _bits(axis: str, **options: Any) -> Setting:
    return Setting(axis, Exactness.BITWISE, BASE, options)


def _fixed(axis: str, **options: Any) -> Setting:
    return Setting(axis, Exactness.BITWISE, FIXED, {**options, **FIXED.options})


def _cached(**options: Any) -> tuple[Setting, Setting]:
    """Return two runs in one engine: all prompts, and all again, which then begin with KV of the first run."""
    switches = {**options, **FIXED.options, "enable_prefix_caching": True}
    settings = (
        Setting("prefix cache", Exactness.BITWISE, FIXED, switches, runs_alone=alone) for alone in (False, True)
    )
    return next(settings), next(settings)


def _restored(**options: Any) -> tuple[Setting, Setting]:
    """Return two runs in one engine: all prompts, and all again with empty pools."""
    switches = {**options, **FIXED.options, "enable_prefix_caching": True, "kv_offloading_size": "1GiB"}
    first = Setting("restore", Exactness.BITWISE, FIXED, switches)
    return first, Setting("restore", Exactness.BITWISE, FIXED, switches, runs_alone=True, loads_from_disk=True)


def _planned(size: int = 1, like: Setting = FIXED, **options: Any) -> Setting:
    """Return a run in which each of ``size`` ranks gets one more worker, and then each rank's first worker leaves."""
    had = options["memory_workers"]
    changes = Resize(had + size), Resize(had, tuple(range(size)))
    return Setting("planned change", Exactness.BITWISE, like, {**options, **FIXED.options}, changes=changes)


def _resized(transports: Sequence[str]) -> list[Setting]:
    """Return planned changes, over every partition except that of loans."""
    return [
        *(_planned(memory_workers=2, partition=name) for name in HOLDING),
        *(_planned(memory_workers=2, partition=name, transport=scheme) for name in HOLDING for scheme in transports),
        *(_planned(memory_workers=2, partition=name, prefill_workers=1, pipeline=2) for name in HOLDING),
    ]


def _lost(fault: Death, like: Setting = FIXED, **options: Any) -> Setting:
    return Setting(fault.axis, fault.promised, like, {**options, **FIXED.options}, fault=fault)


def _losses() -> list[Setting]:
    """Return deaths over all partitions, and combined with other features."""
    held = [{**_APART, "partition": name, "transport": scheme} for name in HOLDING for scheme in ("shm", "tcp")]
    busy: list[dict[str, Any]] = [{}, {"prefill_workers": 1, "pipeline": 2}]
    loose = COMPUTE.without_determinism
    return [
        *(_lost(fault, **o) for o in (*held, {**_SPILL, "transport": "shm"}) for fault in (COMPUTE, MEMORY)),
        *(_lost(fault, **_APART, pipeline=3) for fault in (COMPUTE, MEMORY)),
        _lost(PARITY, **_APART, kv_parity=1),
        *(_lost(PREFILL, **o, prefill_workers=1) for o in held),
        *(_lost(SERVED, **_APART, **o) for o in busy),
        *(_lost(RANK, RANKS, **{**_TWO, "transport": name}) for name in ("shm", "tcp")),
        Setting(loose.axis, loose.promised, BASE, _APART, fault=loose),
        Setting("planned change", Exactness.TOKEN_EQUAL, BASE, _APART, changes=(Resize(3), Resize(2, (0,)))),
    ]


def _swapped(**options: Any) -> Setting:
    """Return a run in which some sequences are preempted, and continue with their saved KV."""
    switches = {**options, **FIXED.options, "kv_offloading_size": "1GiB", "preemption_mode": "swap", "block_size": 16}
    return Setting("preemption", Exactness.BITWISE, FIXED, switches)


def kv_reuse_settings(dtype: str) -> list[Setting]:
    """Return the settings in which KV outlives its sequences, stored as ``dtype``; first the one with which they are
    compared.
    """
    if dtype == BASE_STORE:
        return [FIXED, *_cached(), *_restored(), _swapped()]
    like = Setting("kv cache dtype", Exactness.BOUNDED, None, {**FIXED.options, "kv_cache_dtype": dtype})
    each = [*_cached(kv_cache_dtype=dtype), *_restored(kv_cache_dtype=dtype), _swapped(kv_cache_dtype=dtype)]
    return [like, *(replace(setting, compared_with=like) for setting in each)]


def _ranks(**options: Any) -> Setting:
    return Setting("tensor parallel", Exactness.BITWISE, RANKS, {**RANKS.options, **options})


def _bounded(axis: str, **options: Any) -> Setting:
    return Setting(axis, Exactness.BOUNDED, BASE, options)


def _backend(name: str) -> tuple[Setting, Setting]:
    """Return settings for a backend: no two backends give equal bits, but each gives its own for every division of the
    work.
    """
    full_settings = _bounded("attention", attention=name)
    split = {**full_settings.options, "memory_workers": 3, "overlap": False}
    return full_settings, Setting("attention", Exactness.BITWISE, full_settings, split)


def _stored(name: str) -> tuple[Setting, Setting]:
    """Return settings for 8-bit KV: within a bound of the reference's, and equal bits for every division of
    the work.
    """
    full_settings = Setting("kv cache dtype", Exactness.BOUNDED, None, {"kv_cache_dtype": name})
    split = {**full_settings.options, "memory_workers": 3, "partition": "token", "overlap": False}
    return full_settings, Setting("kv cache dtype", Exactness.BITWISE, full_settings, split)


def _quantized(name: str) -> list[Setting]:
    """Return settings for rounded weights: the reference has the same ones, which torch multiplies as floats. Workers
    and partitions change no bit, and ranks have parts of the same rounded weights. Rows of int8 are within a bound.
    """
    whole = Setting("quantization", Exactness.TOKEN_EQUAL, None, {"quantization": name})
    split = {**whole.options, "memory_workers": 3, "partition": "token", "overlap": False}
    ranks = Setting("quantization", Exactness.TOKEN_EQUAL, None, {**whole.options, **_TWO})
    rows = Setting("quantization", Exactness.BOUNDED, None, {**whole.options, "quantization_compute": "int8"})
    return [
        whole,
        Setting("quantization", Exactness.BITWISE, whole, split),
        ranks,
        rows,
        Setting("quantization", Exactness.BITWISE, rows, {**split, **rows.options}),
    ]


def _alike(like: Setting = EVICTING, **options: Any) -> Setting:
    return Setting("kv sparsity", Exactness.BITWISE, like, {**like.options, **options})


def _sparse(transports: Sequence[str]) -> list[Setting]:
    """Return settings with KV sparsity. Scores are sums over heads, on any worker. If a head's tokens are divided, no
    worker can score them: such settings are refused.
    """
    return [
        EVICTING,
        Setting("kv sparsity", Exactness.BITWISE, EVICTING, _EVICT, runs_alone=True),
        *(_alike(memory_workers=n) for n in (2, 3, 4)),
        _alike(memory_workers=2, memory_weights="0.75,0.25"),
        *(_alike(memory_workers=2, transport=name, overlap=False) for name in transports[:2]),
        *(_alike(memory_workers=2, partition=name) for name in ("token", LENDING)),
        SELECTING,
        Setting("kv sparsity", Exactness.BITWISE, SELECTING, SELECTING.options, runs_alone=True),
        *(_alike(SELECTING, memory_workers=n) for n in (2, 4)),
        _alike(SELECTING, memory_workers=2, memory_weights="0.75,0.25"),
        *(_alike(SELECTING, memory_workers=2, transport=name, overlap=False) for name in transports[:2]),
        EVICTING_RANKS,
        *(_alike(EVICTING_RANKS, memory_workers=4, transport=name) for name in transports[:1]),
    ]


def _rounded(dtype: str) -> Setting:
    """Return a setting for another dtype. Its bits differ from the base's, so it is compared with the
    reference alone.
    """
    return Setting("dtype", Exactness.BOUNDED, None, {"dtype": dtype})
