"""The command-line spelling of an option: a flag of its own, or a key of a flag that sets several options.

``GROUPS`` is the one place that knows which. Options keep their names in ``LLM`` and in ``EngineConfig``. One grammar
holds for all groups: KEY=VALUE, separated by commas, after a mode and a colon where the flag has modes. Within a value,
a comma is written ``\\,`` and a backslash ``\\\\``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from lamina.utils.yaml_file import read_yaml, yaml_table

ERROR_BUDGET = "top1=0.1,kl=0.1,shadow=0.05"  # what `default` means, as text of kv_error_budget


@dataclass(frozen=True, kw_only=True)
class FlagGroup:
    """A flag that sets several options: KEY=VALUE separated by commas."""

    flag: str
    form: str  # the value, as --help shows it
    help: str
    keys: Mapping[str, str]  # key -> its option; OPTION.PART for a part of an option that is a list NAME=NUMBER
    option: str = ""  # what stands before the keys
    parts: Mapping[str, str] = field(default_factory=dict)  # help of keys that are parts of an option

    @property
    def options(self) -> tuple[str, ...]:
        """The options that it sets."""
        return tuple(dict.fromkeys([*[self.option] * bool(self.option), *map(_option_of, self.keys.values())]))

    def parse(self, text: str) -> dict[str, str]:
        """The values that ``text`` sets, by option. Raises ValueError, in one line that names flag, key and fix."""
        return self._by_option(split_pairs(text, f"{self.flag} ", self.keys)) if text else {}

    def write(self, values: Mapping[str, str]) -> str:
        """The text that sets ``values``, which are by option."""
        return self._pairs(values)

    def spelling(self, option: str) -> str:
        """The spelling of ``option``, up to its value."""
        return f"{self.flag} {self._key(option)}="

    def entry(self, key: str) -> str:
        """The beginning of a key's entry."""
        return f"{key}="

    def _by_option(self, pairs: Mapping[str, str]) -> dict[str, str]:
        values = dict[str, str]()
        for key, value in pairs.items():
            option, _, part = self.keys[key].partition(".")
            before = f"{values[option]}," if option in values else ""
            values[option] = f"{before}{part}={value}" if part else value
        return values

    def _pairs(self, values: Mapping[str, str]) -> str:
        return ",".join(f"{key}={escape(value)}" for key, value in self._keyed(values))

    def _keyed(self, values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        for key, target in self.keys.items():
            option, _, part = target.partition(".")
            value = values.get(option)
            if value is not None and not part:
                yield key, value
            elif value is not None:
                parts = dict(x.strip().split("=", 1) for x in _error_budget(value).split(","))
                yield from ((key, parts[part]) for _ in range(part in parts))

    def _key(self, option: str) -> str:
        return next(key for key, target in self.keys.items() if option in (target, _option_of(target)))


@dataclass(frozen=True, kw_only=True)
class ModeFlag(FlagGroup):
    """A flag whose mode is an option, too: MODE, or MODE:KEY=VALUE,..."""

    modes: Mapping[str, Collection[str]] = field(default_factory=dict)  # mode -> its keys; others have none

    def parse(self, text: str) -> dict[str, str]:
        mode, colon, rest = (x.strip() if i < 2 else x for i, x in enumerate(text.partition(":")))
        like = next(iter(self.modes))
        if "=" in mode:
            raise ValueError(f"{self.flag} {text}: a mode is missing: write {self.flag} {like}:{text.lstrip(':')}")
        if colon and mode not in self.modes:
            raise ValueError(
                f"{self.flag} {text}: {mode or 'nothing'} takes no keys; they follow "
                f"{' or '.join(f'{each}:' for each in self.modes)}"
            )
        pairs = split_pairs(rest, f"{self.flag} {mode}:", self.modes[mode]) if colon else {}
        return ({self.option: mode} if mode else {}) | self._by_option(pairs)

    def write(self, values: Mapping[str, str]) -> str:
        others = {name: value for name, value in values.items() if name != self.option}
        mode = values.get(self.option, "")
        if others and mode not in self.modes:
            mode = self._mode(next(iter(others)))
        return f"{mode}:{self._pairs(others)}" if others else mode

    def spelling(self, option: str) -> str:
        if option == self.option:
            return self.flag
        return f"{self.flag} {self._mode(option)}:{self._key(option)}="

    def _mode(self, option: str) -> str:
        return next(mode for mode, keys in self.modes.items() if self._key(option) in keys)


@dataclass(frozen=True, kw_only=True)
class HeadFlag(FlagGroup):
    """A flag with a value of its own before its keys: VALUE, or VALUE,KEY=VALUE,..."""

    def parse(self, text: str) -> dict[str, str]:
        head, *others = split_parts(text)
        pairs = split_pairs(",".join(others), f"{self.flag} {head},", self.keys) if others else {}
        return {self.option: unescape(head)} | self._by_option(pairs)

    def write(self, values: Mapping[str, str]) -> str:
        pairs = self._pairs(values)
        return escape(values.get(self.option, self.form.partition("[")[0])) + f",{pairs}" * bool(pairs)

    def spelling(self, option: str) -> str:
        return self.flag if option == self.option else f"{self.flag} {self.form.partition('[')[0]},{self._key(option)}="


@dataclass(frozen=True, kw_only=True)
class PlanFlag(FlagGroup):
    """A flag with a number, or with the word ``auto`` or ``auto:N``, which is another option."""

    word: str

    @property
    def options(self) -> tuple[str, ...]:
        return (self.option, self.word)

    def parse(self, text: str) -> dict[str, str]:
        is_number = re.fullmatch(r"\s*[+-]?\d+\s*", text)
        if not is_number and not re.fullmatch(r"(auto(:[1-9][0-9]*)?)?", text):
            raise ValueError(f"{self.flag} must be {self.form.replace('|', ' or ')}, such as auto:3, not {text!r}")
        return {self.option if is_number else self.word: text}

    def write(self, values: Mapping[str, str]) -> str:
        return values.get(self.word) or values[self.option]

    def spelling(self, option: str) -> str:
        return self.flag


@dataclass(frozen=True, kw_only=True)
class DriverFlag(FlagGroup):
    """A flag with an address, and perhaps a name before it: NAME@HOST:PORT."""

    name: str

    @property
    def options(self) -> tuple[str, ...]:
        return (self.option, self.name)

    def parse(self, text: str) -> dict[str, str]:
        name, at, address = text.rpartition("@")
        if (at and not name) or not address:
            raise ValueError(f"{self.flag} must be {self.form}, such as team-a@10.0.0.1:7000, not {text!r}")
        return {self.option: address} | ({self.name: name} if at else {})

    def write(self, values: Mapping[str, str]) -> str:
        name = f"{values[self.name]}@" if self.name in values else ""
        return name + values.get(self.option, "HOST:PORT")

    def spelling(self, option: str) -> str:
        return self.flag if option == self.option else f"{self.flag} NAME@"


@dataclass(frozen=True, kw_only=True)
class FileFlag(FlagGroup):
    """A flag with a file of YAML, whose entries are keys, or tables of keys: KEY, or TABLE.KEY."""

    def parse(self, text: str) -> dict[str, str]:
        return self._read(text) if text else {}

    def write(self, values: Mapping[str, str]) -> str:
        tables = dict[str, list[str]]()
        for key, value in self._keyed(values):
            table, dot, name = key.rpartition(".")
            tables.setdefault(table if dot else "", []).append(f"{name}: {value}")
        entries = [f"{table}: {{{', '.join(each)}}}" if table else ", ".join(each) for table, each in tables.items()]
        return f"FILE with {', '.join(entries)}"

    def spelling(self, option: str) -> str:
        return f"{self.flag} {self._key(option)}"

    def entry(self, key: str) -> str:
        return f"{key}:"

    def _read(self, path: str, also: Collection[str] = ()) -> dict[str, str]:
        """The values of a file, by option; ``also``: entries that are read elsewhere."""
        where = f"{self.flag} {path}"
        heads = dict.fromkeys(key.partition(".")[0] for key in self.keys)
        values = dict[str, str]()
        for head, entry in yaml_table(read_yaml(path, where), where, (*heads, *also)).items():
            names = [key.partition(".")[2] for key in self.keys if key.startswith(f"{head}.")]
            pairs = yaml_table(entry, f"{where}: {head}", names) if names else {"": entry} if head in heads else {}
            for name, value in pairs.items():
                key = f"{head}.{name}".rstrip(".")
                if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
                    raise ValueError(f"{where}: {key} must be a text or a number, not {value!r}")
                values[self.keys[key]] = str(value)
        return values


@dataclass(frozen=True, kw_only=True)
class ClusterFlag(FileFlag):
    """A flag with the place of a cluster, or with a file of YAML, which names the cluster or its hosts."""

    def parse(self, text: str) -> dict[str, str]:
        if not text.endswith((".yaml", ".yml")):
            return {self.option: text} if text else {}
        also = ("hosts", "port", "ssh", "python", "address")
        values, table = self._read(text, also), read_yaml(text)
        if "address" not in table:
            return {self.option: text, **values}
        if others := [name for name in also if name in table and name != "address"]:
            raise ValueError(f"{self.flag} {text}: it has address and {others[0]}: leave one out")
        return {self.option: str(table["address"]), **values}

    def write(self, values: Mapping[str, str]) -> str:
        place = values.get(self.option) or values.get("hosts", "")
        text = super().write(values) if any(name in values for name in self.keys.values()) else place
        return text.replace("FILE", place or "FILE") if place.endswith((".yaml", ".yml")) else text

    def spelling(self, option: str) -> str:
        return super().spelling(option) if option in self.keys.values() else self.flag

    @property
    def options(self) -> tuple[str, ...]:
        return (self.option, "hosts", *self.keys.values())


def split_pairs(text: str, where: str, known: Collection[str]) -> dict[str, str]:
    """The values of ``text`` by key. ``where``: what is written before them. Raises ValueError, in one line that names
    the key, the keys that there are and the fix.
    """
    given, keys = dict[str, str](), f"its keys are {', '.join(known)}"
    for part in split_parts(text):
        key, equals, value = part.partition("=")
        name = key.strip().replace("_", "-")
        if not name:
            raise ValueError(f"{where}{text}: a key is missing: write KEY=VALUE, separated by commas; {keys}")
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? {keys}" if near else f"{keys} (a comma of a value is written \\,)"
            raise ValueError(f"{where}{name}: there is no such key; {hint}")
        if not value.strip():
            raise ValueError(f"{where}{name}{equals} has no value: write {name}=VALUE, or leave it out")
        if name in given:
            raise ValueError(f"{where}{name}= is given twice: leave one out")
        given[name] = unescape(value)
    return given


def split_parts(text: str) -> list[str]:
    """The parts between commas, as they are written."""
    parts = [""]
    for token in re.findall(r"\\.|,|[^\\,]+|\\", text, re.DOTALL):
        if token == ",":
            parts.append("")
        else:
            parts[-1] += token
    return parts


def escape(value: str) -> str:
    """``value`` as it is written between commas."""
    return re.sub(r"[\\,]", r"\\\g<0>", value)


def unescape(text: str) -> str:
    """The value that ``escape`` wrote as ``text``."""
    return re.sub(r"\\([\\,])", r"\1", text)


def _option_of(target: str) -> str:
    return target.partition(".")[0]


def _error_budget(text: str) -> str:
    return ERROR_BUDGET if text == "default" else text


_SPARSITY_KEYS = {
    "budget": "kv_budget",
    "full-layers": "kv_full_layers",
    "sink": "kv_sink",
    "recent": "kv_recent",
    "window": "kv_observation_window",
    "max-top1": "kv_error_budget.top1",
    "max-kl": "kv_error_budget.kl",
    "reference-share": "kv_error_budget.shadow",
}
GROUPS: tuple[FlagGroup, ...] = (
    FlagGroup(
        flag="--limits",
        form="KEY=VALUE,...",
        help="bounds of a request, and of the memory that all requests take",
        keys={
            "body": "max_body",
            "body-total": "body_total",
            "answer-total": "answer_total",
            "nesting": "max_nesting",
            "prompts": "max_prompts",
            "n": "max_n",
            "stop": "max_stop",
            "stop-chars": "max_stop_chars",
            "template-memory": "template_memory",
            "queued-tokens": "max_num_queued_tokens",
            "logit-bias": "max_logit_bias",
        },
    ),
    FlagGroup(
        flag="--timeouts",
        form="KEY=SECONDS,...",
        help="deadlines of the HTTP server, in seconds",
        keys={
            "header": "header_timeout_s",
            "body": "body_timeout_s",
            "template": "template_timeout_s",
            "tokenizer": "tokenizer_timeout_s",
            "slow-reader": "slow_reader_timeout_s",
            "sse-keep-alive": "sse_keep_alive_s",
            "health": "health_timeout_s",
        },
    ),
    FlagGroup(
        flag="--threads",
        form="KEY=N,...",
        help="threads of the workers",
        keys={"compute": "compute_threads", "memory": "memory_threads"},
    ),
    FlagGroup(
        flag="--slo",
        form="KEY=VALUE,...",
        help="times that the server promises; a request that would break one gets status 429",
        keys={"ttft": "slo_ttft", "tbt": "slo_tbt", "overload": "overload"},
    ),
    ModeFlag(
        flag="--prefill-policy",
        form="POLICY[:KEY=VALUE]",
        help="",
        option="prefill_policy",
        keys={"threshold": "kvcache_balancing_threshold"},
        modes={"mooncake": ("threshold",)},
    ),
    HeadFlag(flag="--journal", form="DIR[,size=SIZE]", help="", option="journal", keys={"size": "journal_size"}),
    ModeFlag(
        flag="--kv-sparsity",
        form="MODE[:KEY=VALUE,...]",
        help="",
        option="kv_sparsity",
        keys=_SPARSITY_KEYS,
        parts={
            "max-top1": "the share of tokens that may differ from those with all KV, before kv_budget doubles",
            "max-kl": "the same in nats of KL",
            "reference-share": "the share of completions that are computed with all KV too, to measure both",
        },
        modes={"evict": tuple(_SPARSITY_KEYS), "select": tuple(key for key in _SPARSITY_KEYS if key != "window")},
    ),
    FlagGroup(
        flag="--kv-offload",
        form="KEY=VALUE,...",
        help="where the KV of finished requests is kept beyond the pool, for later prompts that begin alike",
        keys={
            "dir": "kv_store_dir",
            "size": "kv_store_size",
            "ttl": "kv_store_ttl",
            "key": "kv_key_file",
            "eviction": "kv_eviction_policy",
            "on-load-failure": "kv_load_failure_policy",
        },
    ),
    ModeFlag(
        flag="--context-overflow",
        form="MODE[:KEY=VALUE,...]",
        help="",
        option="context_overflow",
        keys={"ratio": "truncate_ratio", "keep-first": "keep_first"},
        modes={"truncate": ("ratio", "keep-first")},
    ),
    DriverFlag(
        flag="--driver",
        form="[NAME@]HOST:PORT",
        help="",
        option="driver_address",
        name="driver_name",
        keys={},
    ),
    ClusterFlag(
        flag="--cluster",
        form="auto|HOST:PORT|FILE",
        help="",
        option="ray_address",
        keys={
            "placement.policy": "placement",
            "placement.compute_on": "compute_on",
            "placement.memory_on": "memory_on",
        },
    ),
    FileFlag(
        flag="--lending",
        form="FILE",
        help="a YAML file that says what this engine borrows from other deployments, and what it lends them",
        keys={
            "ledger": "ledger",
            "place": "lending_place",
            "borrow.max": "borrow",
            "borrow.wait_s": "borrow_wait_s",
            "lend.share": "lend",
            "lend.address": "lend_address",
            "lend.max_gbps": "lend_gbps",
        },
    ),
    PlanFlag(
        flag="--pipeline",
        form="N|auto[:N]",
        help="auto:N measures at the start how long both pools and their link take, and serves by it, with up to N "
        "batches and --memory-weights measured; auto = auto:2",
        option="pipeline",
        word="plan",
        keys={},
    ),
)
# Options whose flag has another name than their keyword of LLM: the name that vLLM has for it.
RENAMED_FLAGS = {"attention": "--attention-backend", "kv_memory": "--kv-cache-memory-bytes"}
GROUP_OF = {option: group for group in GROUPS for option in group.options}


def flag_name(name: str) -> str:
    """The spelling of an option, or of OPTION.PART, up to its value: ``--seed``, or ``--kv-offload dir=``."""
    if group := GROUP_OF.get(_option_of(name)):
        return group.spelling(name)
    return RENAMED_FLAGS.get(name) or "--" + name.replace("_", "-")


def with_value(flag: str, value: Any) -> str:
    """A flag as ``flag_name`` spells it, and its value."""
    return f"{flag}{value}" if flag.endswith("=") else f"{flag} {value}"


def flag_words(options: Mapping[str, Any]) -> list[str]:
    """Options with their values as words of a command line, each flag once."""
    words = dict[str, list[str]]()
    for name, value in options.items():
        if group := GROUP_OF.get(name):
            own = {each: str(options[each]) for each in group.options if each in options}
            words[group.flag] = [group.flag, group.write(own)]
        elif isinstance(value, bool):
            words[name] = [flag_name(name if value else f"no_{name}")]
        else:
            words[name] = [flag_name(name), ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return [word for each in words.values() for word in each]


def flag_text(name: str, value: Any) -> str:
    """An option with its value, as its user writes it."""
    return " ".join(flag_words({name: value}))
