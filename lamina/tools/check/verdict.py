"""Compares two runs of ``lamina-launch check``, and decides whether the promise is kept. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lamina.request import CompletionOutput

from .fault_promises import Death
from .matrix import Exactness, Setting

if TYPE_CHECKING:
    from .agreement import Agreement

# (batch, rows of it as (sequence in order of arrival, first position, count)) of each step, in their order
Plans = list[tuple[int, tuple[tuple[int, int, int], ...]]]


@dataclass(frozen=True)
class Outcome:
    """The result of a run. ``bound``: of the log-probabilities' error, for its dtype."""

    completions: Sequence[CompletionOutput]
    plans: Plans
    num_preemptions: int
    agreement: Agreement  # with the reference
    bound: float
    seconds: float
    idle: tuple[str, ...] = ()  # memory workers that had nothing to attend
    lent: int = 0  # stripes that were on loan
    moved_bytes: int = 0  # of KV, while memory workers joined and left
    num_swapped: int = 0  # preempted ones that continued with their own KV
    had_kv: frozenset[int] = frozenset()  # prompts of whose KV a worker that died had a part


@dataclass(frozen=True)
class Difference:
    """The difference between two runs of the same prompts."""

    equal_tokens: int
    equal_prompts: int
    worst: float  # of a log-probability, as far as the tokens before it are the same
    first: tuple[int, int] | None  # prompt and token where the bits first differ


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One line of the report."""

    axis: str
    setting: str
    promised: str
    exactness: str  # the strictest that holds
    held: bool | None  # None: could not be run
    tokens: int = 0
    prompts: int = 0
    compared_with: str = ""  # axis of the run whose tokens and bits were compared; "" = only with the reference
    equal_tokens: int | None = None
    equal_prompts: int | None = None
    worst_difference: float | None = None  # of a log-probability, compared with that run
    same_plans: bool | None = None  # as that run
    logit_error: float = 0.0  # compared with the reference
    bound: float = 0.0
    ties: int = 0
    wrong: int = 0
    worst_margin: float = 0.0
    same_as_generate: int = 0  # prompts
    seconds: float = 0.0
    note: str = ""

    @property
    def word(self) -> str:
        if self.held and self.promised == Exactness.NOTHING.word:
            return "-"
        return "refused" if self.held is None else "held" if self.held else "BROKEN"


def judge(setting: Setting, run: Outcome, like: Outcome | None) -> Verdict:
    """Judge a run. ``like``: the outcome of ``setting.compared_with``, None if it has none."""
    difference = compare(run.completions, like.completions) if like is not None else None
    exactness = _strictest(run, difference)
    promised, notes, why = setting.promised, [], _excuse(setting, run, like) if like is not None else ""
    if promised == Exactness.BITWISE > exactness and why:
        promised = Exactness.TOKEN_EQUAL
        notes.append(why)
    held = exactness >= promised
    for is_so, text in _looks(setting, run, like, bool(why)):
        held = held and is_so
        notes.append(text)
    if not held and difference is not None and difference.first is not None:
        notes.append("first difference in prompt {}, token {}".format(*difference.first))
    if run.agreement.worst_margin:
        notes.append(f"worst margin {run.agreement.worst_margin:.2g}")
    if promised == Exactness.BOUNDED:
        notes.append(f"an error of {run.bound:.2g} is allowed")
    if run.idle:
        notes.append(f"nothing to attend for {', '.join(run.idle)}")
    a = run.agreement
    verdict = Verdict(
        axis=setting.axis, setting=setting.text, promised=promised.word, exactness=exactness.word, held=held,
        tokens=a.num_tokens, prompts=a.num_completions, logit_error=a.logit_error, bound=run.bound, ties=a.num_ties,
        wrong=a.num_wrong, worst_margin=a.worst_margin, same_as_generate=a.num_same_as_generate,
        seconds=run.seconds, note="; ".join(notes),
    )  # fmt: skip
    if difference is None or setting.compared_with is None:
        return verdict
    return replace(
        verdict, compared_with=setting.compared_with.axis, equal_tokens=difference.equal_tokens,
        equal_prompts=difference.equal_prompts, worst_difference=difference.worst,
        same_plans=like is not None and run.plans == like.plans,
    )  # fmt: skip


def _looks(setting: Setting, run: Outcome, like: Outcome | None, excused: bool) -> Iterator[tuple[bool, str]]:
    """Yield, for each effect that a setting is meant to show, whether it occurred, and a note. ``excused``: bits may
    differ.
    """
    if setting.fault and like is not None and (counts := _other_counts(run, like)):
        yield False, "; ".join("prompt {} got {} tokens, not {}".format(*each) for each in counts)
    if setting.fault and run.had_kv:
        yield True, f"{setting.fault.victim} had KV of prompts {_listed(run.had_kv)}"
    if setting.fault and like is not None and (differing := _others_that_differ(setting.fault, run, like)):
        yield excused, f"{setting.fault.victim} had no KV of prompts {_listed(differing)}, whose bits differ"
    if setting.lends:
        yield run.lent > 0, f"stripes lent: {run.lent}"
    if setting.changes:
        yield run.moved_bytes > 0, f"bytes of KV moved: {run.moved_bytes}"
    if setting.swaps:
        yield True, f"preempted: {run.num_preemptions}, with their KV: {run.num_swapped}"


def _other_counts(run: Outcome, like: Outcome) -> list[tuple[int, int, int]]:
    """Return prompts with more or fewer tokens than in the other run, and both numbers."""
    pairs = enumerate(zip(run.completions, like.completions, strict=True))
    counts = ((i, len(one.token_ids), len(other.token_ids)) for i, (one, other) in pairs)
    return [each for each in counts if each[1] != each[2]]


def _others_that_differ(fault: Death, run: Outcome, like: Outcome) -> list[int]:
    """Return prompts of whose KV the dead worker had none, and that differ by more than is promised of them."""
    if fault.other_prompts <= fault.promised:  # all prompts are checked for that
        return []
    others = [i for i in range(len(run.completions)) if i not in run.had_kv]
    return [i for i in others if compare([run.completions[i]], [like.completions[i]]).first is not None]


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def failed_verdict(setting: Setting, why: str, *, held: bool | None) -> Verdict:
    """Return the verdict on a setting without an outcome: refused (``held=None``) or broken (``held=False``)."""
    exactness = Exactness.NOTHING.word if held is False else "-"
    promised = setting.promised.word
    return Verdict(axis=setting.axis, setting=setting.text, promised=promised, exactness=exactness, held=held, note=why)


def compare(run: Sequence[CompletionOutput], like: Sequence[CompletionOutput]) -> Difference:
    """Compare the completions of the same prompts in two runs, both generated with ``logprobs``."""
    equal_tokens = equal_prompts = 0
    worst, first = 0.0, None
    for prompt, (one, other) in enumerate(zip(run, like, strict=True)):
        pairs = list(zip(one.token_ids, other.token_ids, strict=False))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        equal_tokens += sum(a == b for a, b in pairs)
        equal_prompts += one.token_ids == other.token_ids
        ours, theirs = one.logprobs or [], other.logprobs or []
        if first is None and (one.token_ids, ours) != (other.token_ids, theirs):
            at = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
            first = prompt, next(at, same)
        for entry, entry_like in zip(ours[: same + 1], theirs[: same + 1], strict=False):
            gaps = (abs(x.logprob - entry_like[token].logprob) for token, x in entry.items() if token in entry_like)
            worst = max([worst, *(math.inf if math.isnan(gap) else gap for gap in gaps)])
    return Difference(equal_tokens, equal_prompts, worst, first)


def _strictest(run: Outcome, difference: Difference | None) -> Exactness:
    if difference is not None and difference.first is None:
        return Exactness.BITWISE
    if run.agreement.identical:
        return Exactness.TOKEN_EQUAL
    sure = run.agreement.num_tokens > 0 and run.agreement.num_wrong == 0
    return Exactness.BOUNDED if sure and run.agreement.logit_error <= run.bound else Exactness.NOTHING


def _excuse(setting: Setting, run: Outcome, like: Outcome) -> str:
    """Return why the bits of two runs may differ; "" = they may not. The KV of a preempted sequence is computed again
    in other steps. Without ``deterministic`` bits are promised for equal plans only.
    """
    if run.num_preemptions > run.num_swapped or like.num_preemptions > like.num_swapped:
        return "a sequence was preempted: bits are not promised (raise --kv-cache-memory-bytes)"
    if not setting.options.get("deterministic") and run.plans != like.plans:
        return "the plans differed: bits are not promised"
    return ""
