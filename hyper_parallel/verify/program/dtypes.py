"""`--dtypes`: checks that parameters, gradients, reductions, optimizer states and masters have the declared dtypes.

Comparing one rank with several cannot expose a dtype that is too narrow, because both compute in this dtype. This
checks the dtypes of all recorded values, on every rank, in every step.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hyper_parallel._text import near_hint
from hyper_parallel.verify.engine.causes import Cause
from hyper_parallel.verify.engine.verdict import Difference, Verdict
from hyper_parallel.verify.frameworks.contract.record_log import REDUCED
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Run
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.report import HardenedCase

__all__ = ["DeclaredDtype", "compare_dtypes", "parse_dtypes"]

_KINDS = ("parameters", "gradients", "reductions", "states", "masters")
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_OWN = "optimizer "
"""Prefix of the names of weights that only an optimizer has, such as float32 copies."""


@dataclass(frozen=True)
class DeclaredDtype:
    """One declaration.

    Attributes:
        kind: kind of the values: ``parameters``, ``gradients``, ``reductions``, ``states`` or ``masters``.
        pattern: pattern of the names of parameters.
        dtype: name of the dtype, such as ``float32``.
        text: the declaration as it was given.
    """

    kind: str
    pattern: str
    dtype: str
    text: str


class _Seen(NamedTuple):
    """The dtype of a value: kind in declarations; kind, name, parameter, module and step of the record; its line."""

    kind: str
    recorded: str
    name: str
    parameter: str
    module: str
    step: int
    site: str
    dtype: str


def parse_dtypes(texts: Sequence[str]) -> list[DeclaredDtype]:
    """Return the declarations of texts such as ``states=float32`` and ``parameters:*.norm.*=float32``.

    Raises:
        InputError: a text is invalid.
    """
    declared = []
    for text in texts:
        value, sign, dtype = text.rpartition("=")
        kind, _, pattern = value.partition(":")
        if not sign or kind not in _KINDS:
            hint = near_hint(kind, _KINDS) or f"; kinds: {', '.join(_KINDS)}"
            msg = f"--dtypes {text!r} must look like KIND=DTYPE or KIND:PATTERN=DTYPE, such as states=float32{hint}"
            raise InputError(msg)
        if dtype not in _DTYPES:
            msg = f"--dtypes {text!r}: {dtype or 'nothing'} is none of {', '.join(_DTYPES)}{near_hint(dtype, _DTYPES)}"
            raise InputError(msg)
        declared.append(DeclaredDtype(kind, pattern or "*", dtype, text))
    return declared


def compare_dtypes(run: Run, declared: Sequence[DeclaredDtype]) -> HardenedCase:
    """Return the case that lists values without their declared dtype; of several matching declarations the last counts.

    Args:
        run: run of the ranks.
        declared: the declarations.
    """
    words = [f"declared: {', '.join(each.text for each in declared)}"]
    verdict = Verdict(run.world_size)
    used: set[DeclaredDtype] = set()
    wrong: dict[tuple[str, str, str], tuple[_Seen, DeclaredDtype, set[int]]] = {}
    for rank in run.ranks:
        for seen in _seen(rank):
            choice = next((each for each in reversed(declared) if _declares(each, seen)), None)
            if choice is None:
                continue
            used.update(each for each in declared if _declares(each, seen))
            verdict.checked += 1
            verdict.counts["dtype"] += 1
            if seen.dtype != choice.dtype:
                key = (seen.kind, seen.name, seen.dtype)
                wrong.setdefault(key, (seen, choice, set()))[2].add(rank.rank)
    verdict.differences = [
        Difference(
            seen.recorded, seen.name, seen.module, tuple(sorted(ranks)), seen.step, 0, math.inf, 0.0,
            f"its dtype is {seen.dtype}; declared is {choice.dtype}",
            cause=Cause("dtype", "", f"--dtypes {choice.text}"), site=seen.site,
        )
        for seen, choice, ranks in wrong.values()
    ]  # fmt: skip
    verdict.differences.sort(key=lambda each: each.step)
    unused = [each.text for each in declared if each not in used]
    if unused and not wrong:
        why = f"no value was seen that {unused[0]!r} declares"
        return HardenedCase(words, title="dtypes", skipped=why, asked=True)
    verdict.skipped = [f"no value was seen that {text!r} declares" for text in unused]
    return HardenedCase(words, verdict, title="dtypes")


def _declares(declared: DeclaredDtype, seen: _Seen) -> bool:
    return declared.kind == seen.kind and fnmatch.fnmatchcase(seen.parameter, declared.pattern)


def _seen(rank: RankRecords) -> Iterator[_Seen]:
    """Yield the dtypes of a rank's floating values."""
    for record in rank.records:
        kind = _kind(record)
        dtype = record.dtype or record.value.dtype.name
        if kind and dtype in _DTYPES:
            parameter = record.name.rpartition(":")[0] if record.kind == "state" else record.name
            yield _Seen(kind, record.kind, record.name, parameter, record.module, record.step, record.site, dtype)
    reduced: dict[tuple[str, int, str], int] = rank.notes.get(REDUCED, {})
    for dtype, step, site in reduced:
        yield _Seen("reductions", "reduction", "gradients", "gradients", "", step, site, dtype)


def _kind(record: Record) -> str:
    """Return the kind that declarations use for a record; empty if they cannot declare it."""
    value: Any = record.value
    if record.kind == "weight":
        return "masters" if record.name.startswith(_OWN) else "parameters"
    if record.kind == "gradient" and not record.name.startswith(_OWN):
        return "gradients"
    if record.kind == "state" and len(value.shape):  # counts of steps are zero-dimensional
        return "masters" if "master" in record.name.rpartition(":")[2] else "states"
    return ""
