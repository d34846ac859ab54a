"""Compares the expressions that a parallel step computes with those of the step on one device.

If all ends (losses, effects of hooks, gradients, new weights) have the same expressions, the parallel run makes the
calls of one device. Otherwise the first difference is named. It is reported as wrong only if all differences are the
same one call that was replaced, added or left out, and if the two results differ on random numbers. Otherwise the
difference is listed as open, because different expressions may have equal values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel._tree import leaves, unflatten
from hyper_parallel.verify.prove.expressions import TREES, Expression, Expressions, first_differences
from hyper_parallel.verify.prove.program import RETURNED

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.prove.program import Program

__all__ = ["Comparison", "compared"]

_LARGEST = 1 << 22
"""Maximum number of operand elements, in total, for which two calls are computed and compared."""


@dataclass
class Comparison:
    """The result of comparing two runs.

    Attributes:
        equal: number of ends with equal expressions.
        wrong: differences from one device.
        open: differences in expressions that need not change a value.
    """

    equal: int = 0
    wrong: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)


def compared(platform: Platform, parallel: Program, single: Program) -> Comparison:
    """Return the comparison of a parallel run with the run of one device."""
    found, table = Comparison(), parallel.table
    _complete(parallel, single)
    _complete(single, parallel)
    names = list(dict.fromkeys([*parallel.ends, *single.ends]))
    differing = [name for name in names if parallel.ends.get(name) != single.ends.get(name)]
    found.equal = len(names) - len(differing)
    if not differing:
        return found
    pairs: dict[tuple[int, int], str] = {}
    for name in differing:
        ends = single.ends.get(name, 0), parallel.ends.get(name, 0)
        for pair in first_differences(table, *ends) if all(ends) else [ends]:
            pairs.setdefault(pair, name)
    last = len(parallel.first) + len(single.first)

    def position(pair: tuple[int, int]) -> int:
        return min(run.first.get(each, (last, ""))[0] for run, each in zip((single, parallel), pair, strict=True))

    first = min(pairs, key=position)
    where = parallel.first.get(first[1], (0, ""))[1] or single.first.get(first[0], (0, ""))[1] or "(model)"
    kinds = {_kind(table, *pair) for pair in pairs}
    line = _line(table, *first, where, pairs[first])
    certain = len(kinds) == 1 and None not in kinds and _differs(platform, table, *first)
    (found.wrong if certain else found.open).append(line)
    return found


def _complete(run: Program, other: Program) -> None:
    """Add the ends that only the other run has.

    Where the other run's hook changed a gradient, this run has the gradient unchanged. Where the other run's ``step``
    returned a loss, this run returned the loss of backward.
    """
    for name in other.ends:
        default = run.ends.get("the loss") if name == RETURNED else other.unhooked.get(name)
        if name not in run.ends and default:
            run.ends[name] = default


def _line(table: Expressions, one: int, own: int, where: str, name: str) -> str:
    """Return a difference as text."""
    first, second = table.items[one], table.items[own]
    if own and _is_call(second) and one in second.operands:
        return f"{where}: the parallel run also calls {table.text_of(own)}, which one device does not"
    if one and _is_call(first) and own in first.operands:
        return f"{where}: the parallel run does not call {table.text_of(one)}, which one device calls"
    if not own or not one:
        has, lacks = ("one device", "the parallel run") if one else ("the parallel run", "one device")
        text = table.text_of(one or own)
        what = f"{has} has {text}" if name.startswith(text) else f"{name} is {text} on {has}"
        return f"{where}: {what}, and {lacks} has none"
    texts = [table.text_of(each) for each in (own, one)]
    if texts[0] == texts[1] and first.dtype != second.dtype:
        texts = [f"{text} of {table.items[each].notation}" for text, each in zip(texts, (own, one), strict=True)]
    calls = "calls" if _is_call(second) else "has"
    if texts[0] == texts[1]:
        return (
            f"{where}: the parallel run {calls} {texts[0]} with other arguments than one device, or without a gradient"
        )
    return f"{where}: the parallel run {calls} {texts[0]}, where one device {calls} {texts[1]}"


def _is_call(item: Expression) -> bool:
    return bool(item.func)


def _kind(table: Expressions, one: int, own: int) -> Any:
    """Return the two calls in which two values differ, without their operands.

    None unless both values are calls on the same operands, or one value is a call on the other value.
    """
    first, second = table.items[one], table.items[own]
    same = first.operands == second.operands and _is_call(first) and _is_call(second)
    more = second.operands == (one,) and _is_call(second)
    fewer = first.operands == (own,) and _is_call(first)
    if not (same or more or fewer):
        return None
    calls = [(item.name, repr(item.args), item.part) for item in (first, second)]
    return (calls[0] if not more else None, calls[1] if not fewer else None)


def _differs(platform: Platform, table: Expressions, one: int, own: int) -> bool:
    """Return whether two values differ if their operands are random numbers; False if they cannot be computed."""
    computed = [each for each, other in ((one, own), (own, one)) if each not in table.items[other].operands]
    numbers = sorted({operand for each in computed for operand in table.items[each].operands})
    known = [table.items[each] for each in numbers]
    if any(each.shape is None for each in known) or sum(math.prod(each.shape or ()) for each in known) > _LARGEST:
        return False
    random = np.random.default_rng(0)
    values = {number: _random(platform, random, table.items[number]) for number in numbers}
    try:
        results = [values[each] if each in values else _result(platform, table.items[each], values)
                   for each in (one, own)]  # fmt: skip
    except Exception:  # noqa: BLE001 - a call on other values than its own may fail in any way
        return False
    first, second = (platform.tensor_to_numpy(platform.detach(each)) for each in results)
    return first.shape != second.shape or not np.allclose(first, second, rtol=1e-3, atol=1e-6)


def _random(platform: Platform, random: Any, item: Expression) -> Any:
    shape = item.shape or ()
    value = platform.from_numpy(random.standard_normal(shape).astype(np.float32))
    floating = "float" in str(item.dtype)
    return platform.tensor_type_cast(value if floating else value * 0, item.dtype)


def _result(platform: Platform, item: Expression, values: dict[int, Any]) -> Any:
    """Return the result of a call, or the operand that it writes; operands are copied before the call."""
    operands = [platform.copy(values[each]) for each in item.operands]
    filled = list(leaves(item.args, TREES))
    for place, each in zip(item.places, operands, strict=True):
        filled[place] = each
    args, kwargs = unflatten(item.args, filled, TREES)
    assert item.func is not None
    result = item.func(*args, **kwargs)
    results: Sequence[Any] = leaves([result], TREES)
    return operands[-1 - item.part] if item.part < 0 else results[item.part]
