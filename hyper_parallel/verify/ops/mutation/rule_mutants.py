"""Rules changed in one place: what a slip of the hand makes of rows, conditions, adapters and backward reductions.

Every change is one that bug studies of distributed training list: a reduction forgotten or of another kind, a dim
swapped, a summand that every rank adds, an operator taken for linear, a condition nobody checks, the piece of the
neighbour, an index off by one, a gradient that nobody reduces or that is reduced twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import Partial, Placement, Replicate, Shard
from hyper_parallel.core.shard.rule import LocalCall, Localize, OpCall, R, Row, Strategies

if TYPE_CHECKING:
    from hyper_parallel.verify.ops.claims import Claim

__all__ = ["Mutant", "mutants_of"]

SUM, MAX = Partial("sum"), Partial("max")
_OTHER = {"sum": "avg", "avg": "sum", "max": "min", "min": "max", "prod": "sum", "all": "any", "any": "all"}
_IDEMPOTENT = ("avg", "max", "min", "all", "any")
_CONDITIONS = ("even", "full", "sizes", "cut")


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        kind: what slipped.
        change: where, and what became of it.
        answer: what the rule answers instead.
        claim: what follows from it instead, where the slip lies behind the rule.
        adapter: the local call is what changed.
    """

    kind: str
    change: str
    answer: Callable[[OpCall, Strategies], Strategies] | None = None
    claim: Callable[[Claim], Claim] | None = None
    adapter: bool = False


def mutants_of(answers: Sequence[tuple[OpCall, Strategies]], wanted: Sequence[Sequence[bool]]) -> list[Mutant]:
    """Every change of what a rule answers to some calls.

    Args:
        answers: calls, and the rule's answers.
        wanted: per call, which operands get a gradient.
    """
    found: dict[tuple[str, str], Mutant] = {}
    for (call, answer), grads in zip(answers, wanted, strict=True):
        for one in (*_of_rows(call, answer), *_added(call, answer), *_adapters(answer), *_backward(grads)):
            found.setdefault((one.kind, one.change), one)
    return list(found.values())


# -- rows --------------------------------------------------------------------------------------------------------------


def _of_rows(call: OpCall, answer: Strategies) -> Iterator[Mutant]:
    known = {(row.inputs, row.outputs) for row in answer.rows}
    for row in dict.fromkeys(answer.rows):
        for kind, new in _edits(row, [one.ndim for one in call.operands], [len(one) for one in answer.outputs]):
            if (new.inputs, new.outputs) not in known and not _holds_anyway(new):
                yield Mutant(kind, f"{_text(row)} becomes {_text(new)}", _instead(row, new))
        for name in _CONDITIONS:
            if getattr(row, name):
                yield Mutant("condition dropped", f"{_text(row)} without {name}", _unbound(row, name))


def _holds_anyway(row: Row) -> bool:
    """What is whole is its own average, maximum, minimum, all and any."""
    pending = [place.reduce_op for place in row.outputs if isinstance(place, Partial)]
    whole = all(isinstance(place, Replicate) for place in row.inputs)
    return whole and len(pending) == len(row.outputs) and all(op in _IDEMPOTENT for op in pending)


def _edits(row: Row, inputs: Sequence[int], outputs: Sequence[int]) -> Iterator[tuple[str, Row]]:
    for index, place in enumerate(row.outputs):
        for kind, new in _output_edits(place, outputs[index]):
            yield kind, replace(row, outputs=_with(row.outputs, index, new))
    for index, place in enumerate(row.inputs):
        for kind, new in _input_edits(place, inputs[index]):
            yield kind, replace(row, inputs=_with(row.inputs, index, new))
    for index in range(len(row.inputs) - 1):
        first, second = row.inputs[index : index + 2]
        if first != second:
            swapped = _with(_with(row.inputs, index, second), index + 1, first)
            yield "operands swapped", replace(row, inputs=swapped)


def _output_edits(place: Placement, ndim: int) -> Iterator[tuple[str, Placement]]:
    if isinstance(place, Partial):
        yield "reduction forgotten", R
        yield "another reduction", Partial(_OTHER[place.reduce_op])
    elif isinstance(place, Shard):
        yield "chunk taken for the whole", R
        if ndim > 1:
            yield "dim of a result shifted", Shard((place.dim + 1) % ndim)
    else:
        yield "reduction invented", SUM


def _input_edits(place: Placement, ndim: int) -> Iterator[tuple[str, Placement]]:
    if isinstance(place, Partial):
        if place.reduce_op not in _IDEMPOTENT:  # of those, what is whole is one more way to hold it
            yield "summand on every rank", R
        yield "another reduction", Partial(_OTHER[place.reduce_op])
    elif isinstance(place, Shard):
        yield "label dropped", R
        if ndim > 1:
            yield "dim of an operand shifted", Shard((place.dim + 1) % ndim)
    else:
        yield "summands let in", SUM
        if ndim:
            yield "whole operand cut", Shard(ndim - 1)


def _instead(old: Row, new: Row) -> Callable[[OpCall, Strategies], Strategies]:
    """``new`` wherever the rule says ``old``, and the operands have the dims."""

    def changed(call: OpCall, answer: Strategies) -> Strategies:
        if not _fits(new, call, answer):
            return answer
        rows = tuple(
            replace(row, inputs=new.inputs, outputs=new.outputs)
            if (row.inputs, row.outputs) == (old.inputs, old.outputs) else row
            for row in answer.rows
        )  # fmt: skip
        return replace(answer, rows=rows)

    return changed


def _unbound(old: Row, name: str) -> Callable[[OpCall, Strategies], Strategies]:
    def changed(call: OpCall, answer: Strategies) -> Strategies:
        del call
        empty: Any = {name: ()}
        rows = tuple(
            replace(row, **empty) if (row.inputs, row.outputs) == (old.inputs, old.outputs) else row
            for row in answer.rows
        )
        return replace(answer, rows=rows)

    return changed


def _fits(row: Row, call: OpCall, answer: Strategies) -> bool:
    if (len(row.inputs), len(row.outputs)) != (len(call.operands), len(answer.outputs)):
        return False
    ndims = [*(one.ndim for one in call.operands), *map(len, answer.outputs)]
    places = (*row.inputs, *row.outputs)
    return all(not isinstance(place, Shard) or place.dim < ndim for place, ndim in zip(places, ndims, strict=True))


def _with(places: Sequence[Placement], index: int, new: Placement) -> tuple[Placement, ...]:
    return (*places[:index], new, *places[index + 1 :])


def _text(row: Row) -> str:
    return f"{', '.join(map(str, row.inputs))} -> {', '.join(map(str, row.outputs))}"


# -- rows that are not there -------------------------------------------------------------------------------------------


def _added(call: OpCall, answer: Strategies) -> Iterator[Mutant]:
    """An operator taken for linear or increasing, a dim that must be whole taken for one of many."""
    count, outputs = len(call.operands), len(answer.outputs)
    sets: list[tuple[str, tuple[Placement, ...], Placement]] = [
        ("taken for linear", (SUM,) * count, SUM),
        ("taken for increasing", (MAX,) * count, MAX),
    ]
    rest: tuple[Placement, ...] = (R,) * count
    sets.extend(("taken for linear", _with(rest, index, SUM), SUM) for index in range(count) if count > 1)
    for index, operand in enumerate(call.operands):
        sets.extend(("whole dim cut", _with(rest, index, Shard(dim)), Shard(dim)) for dim in range(operand.ndim))
    taken = {row.inputs for row in answer.rows}
    for kind, inputs, output in sets:
        row = Row(inputs, (output,) * outputs)
        if inputs not in taken and _fits(row, call, answer):
            yield Mutant(kind, f"{_text(row)} is claimed", _also(row))


def _also(row: Row) -> Callable[[OpCall, Strategies], Strategies]:
    def changed(call: OpCall, answer: Strategies) -> Strategies:
        if not _fits(row, call, answer) or any(one.inputs == row.inputs for one in answer.rows):
            return answer
        return replace(answer, rows=(*answer.rows, row))

    return changed


# -- adapters ----------------------------------------------------------------------------------------------------------


def _adapters(answer: Strategies) -> Iterator[Mutant]:
    if answer.localize is None:
        return
    yield Mutant("adapter dropped", "the local call is the caller's own", _adapted(lambda _: None), adapter=True)
    yield Mutant("adapter off by one", "the first whole number", _adapted(_off_by_one), adapter=True)
    yield Mutant("adapter of the neighbour", "what the next rank calls", _adapted(_neighbour), adapter=True)


def _adapted(change: Callable[[Localize], Localize | None]) -> Callable[[OpCall, Strategies], Strategies]:
    def changed(call: OpCall, answer: Strategies) -> Strategies:
        del call
        return answer if answer.localize is None else replace(answer, localize=change(answer.localize))

    return changed


def _off_by_one(own: Localize) -> Localize:
    def localize(call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall | None:
        local = own(call, targets, outputs)
        if local is None or not local.args:
            return local
        return LocalCall(_one_more(local.args), local.run)

    return localize


def _one_more(args: dict[str, Any]) -> dict[str, Any]:
    """The first whole number among the arguments, one larger."""
    for name, value in args.items():
        if type(value) is int:
            return {**args, name: value + 1}
        if isinstance(value, (list, tuple)) and value and type(value[0]) is int:
            return {**args, name: type(value)((value[0] + 1, *value[1:]))}
    return args


def _neighbour(own: Localize) -> Localize:
    def localize(call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall | None:
        ranks = list(call.mesh.ranks)
        here = ranks.index(call.mesh.rank)
        mesh = call.mesh.for_rank(ranks[(here + 1) % len(ranks)])

        def seen(layout: Layout) -> Layout:
            return Layout.of(mesh, layout.dim_axes, layout.partials, layout.shape)

        operands = tuple(replace(one, layout=seen(one.layout)) for one in call.operands)
        theirs = OpCall(call.op, mesh, operands, call.args)
        return own(theirs, tuple(map(seen, targets)), tuple(map(seen, outputs)))

    return localize


# -- backward ----------------------------------------------------------------------------------------------------------


def _backward(wanted: Sequence[bool]) -> Iterator[Mutant]:
    for index, gets in enumerate(wanted):
        if gets:
            yield Mutant("gradient not reduced", f"of operand {index}", claim=_varying(index, lambda *_: ()))
            yield Mutant("gradient reduced twice", f"of operand {index}", claim=_varying(index, _all_whole))


def _varying(index: int, change: Callable[[Claim, int], tuple[int, ...]]) -> Callable[[Claim], Claim]:
    def changed(claim: Claim) -> Claim:
        varying = claim.choice.varying
        if index >= len(varying):
            return claim
        new = (*varying[:index], change(claim, index), *varying[index + 1 :])
        return replace(claim, choice=replace(claim.choice, varying=new))

    return changed


def _all_whole(claim: Claim, index: int) -> tuple[int, ...]:
    """Every axis on which the operand is whole, whatever the others do."""
    layout = claim.choice.targets[index]
    return tuple(axis for axis in range(layout.mesh.ndim) if isinstance(layout.placement_on(axis), Replicate))
