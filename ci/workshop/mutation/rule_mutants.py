"""Mutants of rules: rows, conditions, adapters and backward reductions changed in one place.

Every kind of change is one that bug studies of distributed training list: a reduction forgotten or of another kind, a
dim shifted, a partial value that every rank adds, an operator taken for linear, a condition dropped, the shard of the
next rank, an index off by one, a gradient not reduced or reduced twice.
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
    """One change of a rule.

    Attributes:
        kind: of the change.
        change: the changed place, before and after.
        change_strategies: makes the changed strategies of a call from the rule's own.
        change_claim: changes a claim, for mistakes that are made after the rule has answered.
        changes_adapter: the local call is what changes.
    """

    kind: str
    change: str
    change_strategies: Callable[[OpCall, Strategies], Strategies] | None = None
    change_claim: Callable[[Claim], Claim] | None = None
    changes_adapter: bool = False


def mutants_of(answers: Sequence[tuple[OpCall, Strategies]], requires_grad: Sequence[Sequence[bool]]) -> list[Mutant]:
    """Return every change of a rule's answers to some calls.

    Args:
        answers: calls, and the rule's answers.
        requires_grad: per call, whether each operand has a gradient.
    """
    unique: dict[tuple[str, str], Mutant] = {}
    for (call, answer), grads in zip(answers, requires_grad, strict=True):
        for mutant in (*_of_rows(call, answer), *_added(call, answer), *_adapters(answer), *_backward(grads)):
            unique.setdefault((mutant.kind, mutant.change), mutant)
    return list(unique.values())


# -- rows --------------------------------------------------------------------------------------------------------------


def _of_rows(call: OpCall, answer: Strategies) -> Iterator[Mutant]:
    known = {(row.inputs, row.outputs) for row in answer.rows}
    for row in dict.fromkeys(answer.rows):
        for kind, new in _edits(
            row, [operand.ndim for operand in call.operands], [len(shape) for shape in answer.outputs]
        ):
            if (new.inputs, new.outputs) not in known and not _holds_anyway(new):
                yield Mutant(kind, f"{_text(row)} becomes {_text(new)}", _instead(row, new))
        for name in _CONDITIONS:
            if getattr(row, name):
                yield Mutant("condition dropped", f"{_text(row)} without {name}", _unbound(row, name))


def _holds_anyway(row: Row) -> bool:
    """Whether a row is true in any case: a replicated value is its own average, maximum, minimum, `all` and `any`."""
    partial_ops = [place.reduce_op for place in row.outputs if isinstance(place, Partial)]
    replicated = all(isinstance(place, Replicate) for place in row.inputs)
    return replicated and len(partial_ops) == len(row.outputs) and all(op in _IDEMPOTENT for op in partial_ops)


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
        yield "shard taken for replicated", R
        if ndim > 1:
            yield "dim of a result shifted", Shard((place.dim + 1) % ndim)
    else:
        yield "reduction invented", SUM


def _input_edits(place: Placement, ndim: int) -> Iterator[tuple[str, Placement]]:
    if isinstance(place, Partial):
        if place.reduce_op not in _IDEMPOTENT:  # of those, a replicated value is a partial value as well
            yield "partial value on every rank", R
        yield "another reduction", Partial(_OTHER[place.reduce_op])
    elif isinstance(place, Shard):
        yield "label dropped", R
        if ndim > 1:
            yield "dim of an operand shifted", Shard((place.dim + 1) % ndim)
    else:
        yield "partial values accepted", SUM
        if ndim:
            yield "replicated operand sharded", Shard(ndim - 1)


def _instead(old: Row, new: Row) -> Callable[[OpCall, Strategies], Strategies]:
    """Replace row ``old`` by ``new`` in calls whose operands have the dims."""

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
    ndims = [*(operand.ndim for operand in call.operands), *map(len, answer.outputs)]
    places = (*row.inputs, *row.outputs)
    return all(not isinstance(place, Shard) or place.dim < ndim for place, ndim in zip(places, ndims, strict=True))


def _with(places: Sequence[Placement], index: int, new: Placement) -> tuple[Placement, ...]:
    return (*places[:index], new, *places[index + 1 :])


def _text(row: Row) -> str:
    return f"{', '.join(map(str, row.inputs))} -> {', '.join(map(str, row.outputs))}"


# -- rows that are not there -------------------------------------------------------------------------------------------


def _added(call: OpCall, answer: Strategies) -> Iterator[Mutant]:
    """Yield mutants with a row that the rule lacks: linear, increasing, or a dim that may not be sharded."""
    count, outputs = len(call.operands), len(answer.outputs)
    additions: list[tuple[str, tuple[Placement, ...], Placement]] = [
        ("taken for linear", (SUM,) * count, SUM),
        ("taken for increasing", (MAX,) * count, MAX),
    ]
    rest: tuple[Placement, ...] = (R,) * count
    additions.extend(("taken for linear", _with(rest, index, SUM), SUM) for index in range(count) if count > 1)
    for index, operand in enumerate(call.operands):
        additions.extend(
            ("unshardable dim sharded", _with(rest, index, Shard(dim)), Shard(dim)) for dim in range(operand.ndim)
        )
    known = {row.inputs for row in answer.rows}
    for kind, inputs, output in additions:
        row = Row(inputs, (output,) * outputs)
        if inputs not in known and _fits(row, call, answer):
            yield Mutant(kind, f"{_text(row)} is claimed", _also(row))


def _also(row: Row) -> Callable[[OpCall, Strategies], Strategies]:
    def changed(call: OpCall, answer: Strategies) -> Strategies:
        if not _fits(row, call, answer) or any(known.inputs == row.inputs for known in answer.rows):
            return answer
        return replace(answer, rows=(*answer.rows, row))

    return changed


# -- adapters ----------------------------------------------------------------------------------------------------------


def _adapters(answer: Strategies) -> Iterator[Mutant]:
    if answer.localize is None:
        return
    yield Mutant(
        "adapter dropped", "the local call is the caller's own", _adapted(lambda _: None), changes_adapter=True
    )
    yield Mutant("adapter off by one", "the first integer", _adapted(_off_by_one), changes_adapter=True)
    yield Mutant(
        "adapter of the next rank", "the local call of the next rank", _adapted(_next_rank), changes_adapter=True
    )


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
    """Return ``args`` with the first integer increased by one."""
    for name, value in args.items():
        if type(value) is int:
            return {**args, name: value + 1}
        if isinstance(value, (list, tuple)) and value and type(value[0]) is int:
            return {**args, name: type(value)((value[0] + 1, *value[1:]))}
    return args


def _next_rank(own: Localize) -> Localize:
    def localize(call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall | None:
        ranks = list(call.mesh.ranks)
        position = ranks.index(call.mesh.rank)
        mesh = call.mesh.for_rank(ranks[(position + 1) % len(ranks)])

        def seen(layout: Layout) -> Layout:
            return Layout.of(mesh, layout.dim_axes, layout.partials, layout.shape)

        operands = tuple(replace(operand, layout=seen(operand.layout)) for operand in call.operands)
        next_call = OpCall(call.op, mesh, operands, call.args)
        return own(next_call, tuple(map(seen, targets)), tuple(map(seen, outputs)))

    return localize


# -- backward ----------------------------------------------------------------------------------------------------------


def _backward(requires_grad: Sequence[bool]) -> Iterator[Mutant]:
    for index, has_gradient in enumerate(requires_grad):
        if has_gradient:
            yield Mutant(
                "gradient not reduced", f"of operand {index}", change_claim=_change_varying(index, lambda *_: ())
            )
            yield Mutant(
                "gradient reduced twice", f"of operand {index}", change_claim=_change_varying(index, _replicated_axes)
            )


def _change_varying(index: int, change: Callable[[Claim, int], tuple[int, ...]]) -> Callable[[Claim], Claim]:
    def changed(claim: Claim) -> Claim:
        varying = claim.choice.varying
        if index >= len(varying):
            return claim
        new = (*varying[:index], change(claim, index), *varying[index + 1 :])
        return replace(claim, choice=replace(claim.choice, varying=new))

    return changed


def _replicated_axes(claim: Claim, index: int) -> tuple[int, ...]:
    """Return every axis on which the operand is replicated, whatever the placements of the others."""
    layout = claim.choice.targets[index]
    return tuple(axis for axis in range(layout.mesh.ndim) if isinstance(layout.placement_on(axis), Replicate))
