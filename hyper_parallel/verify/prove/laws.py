"""The laws of proofs, each of which relates the ranks' results of one primitive to its result on one device.

`docs/proofs.md` states them in words; `tests_unit/verify/prove/test_laws.py` checks each of them on every small case. A
law concerns one mesh axis of ``n`` ranks. The axis splits one label (an index of the primitive, as in einsum) of size
``s``; a rank has ``l`` of the ``s`` elements, possibly none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hyper_parallel.verify.frameworks.contract.primitives import Constant, Opaque, Primitive, Reshape, Step
from hyper_parallel.verify.frameworks.contract.sizes import ONE, Size, product

__all__ = ["Relation", "UnprovenError", "after"]


class UnprovenError(Exception):
    """No law relates the ranks' values to the value of one device."""


@dataclass(frozen=True)
class Relation:
    """Relation of the values of all ranks to the value of one device.

    Attributes:
        kind: ``whole``: each rank has the complete value; ``part``: each rank has a shard along ``dim``; ``pending``:
            the reduction of all ranks' values by ``reduce`` gives the value.
        dim: dim that is split, for a ``part``.
        outer: number of blocks of the dim; a rank has a shard of every block. 1 if the dim is the split label.
        factor: number of elements of the dim per element of the split label.
        reduce: reduction of a pending value, such as ``sum``.
        ranks: power of ``n`` by which the ranks' values are scaled.
        share: power of ``l / s`` by which the ranks' values are scaled.
        zero: whether the value is zero everywhere; such a value is replicated, a shard and pending at once.
    """

    kind: str
    dim: int = -1
    outer: Size = ONE
    factor: Size = ONE
    reduce: str = ""
    ranks: int = 0
    share: int = 0
    zero: bool = False

    @property
    def scaled(self) -> bool:
        """Whether the ranks' values are scaled."""
        return bool(self.ranks or self.share)


WHOLE = Relation("whole")
_LINEAR = ("sum",)


def after(
    step: Step,
    shapes: Sequence[Sequence[Size]],
    operands: Sequence[Relation],
    split: str,
    needs: set[tuple[str, Size]],
) -> Relation:
    """Return the relation of the result of ``step``, given those of its operands.

    Args:
        step: the primitive.
        shapes: shapes of its operands.
        operands: relations of its operands.
        split: symbol of the split label, or empty.
        needs: receives the conditions on sizes, such as ``("full", size)``: no rank has an empty shard of ``size``.

    Raises:
        UnprovenError: no law applies.
    """
    if isinstance(step.does, Opaque):
        raise UnprovenError(step.does.reason)
    if isinstance(step.does, Constant):
        return replace(WHOLE, zero=True) if step.does.zero else _sized(step, WHOLE, split)
    if isinstance(step.does, Reshape):
        return _checked(step, _reshaped(step, shapes[0], operands[0], split), split)
    if not isinstance(step.does, Primitive):
        msg = f"{step.name}: an operand that was not given"
        raise UnprovenError(msg)
    return _of_primitive(step, step.does, operands, split, needs)


def _of_primitive(
    step: Step, does: Primitive, operands: Sequence[Relation], split: str, needs: set[tuple[str, Size]]
) -> Relation:
    if any(split in size.symbols for size in does.values):
        msg = f"{step.name}: its values depend on the local size"
        raise UnprovenError(msg)
    share = _power(does.times, split) - _power(does.per, split)
    if _power(does.per, split):
        needs.add(("full", Size(1, (split,))))
    if operands and all(relation.zero for relation in operands) and does.joint and not does.values:
        return replace(WHOLE, zero=True)
    if any(operands[index].zero for index in does.each):
        return replace(WHOLE, zero=True)
    live = [index for index, relation in enumerate(operands) if not (relation.zero and index in does.joint)]
    pending = [index for index in live if operands[index].kind == "pending"]
    part = _split_label(step, does, operands, live)
    if pending:
        if part is not None and not _adds(does, operands, live, pending, part[0]):
            msg = f"{step.name}: a pending operand meets a split one"
            raise UnprovenError(msg)
        return _checked(step, _passed(step, does, operands, live, pending, share), split)
    ranks, scale = _scale(step, does, operands, live)
    if part is None:
        return _sized(step, Relation("whole", ranks=ranks, share=scale + share), split, does)
    label, outer, factor = part
    if label in does.output:
        dim = does.output.index(label)
        return _checked(step, Relation("part", dim, outer, factor, ranks=ranks, share=scale + share), split)
    result = Relation("pending", reduce=does.reduce, ranks=ranks, share=scale + share)
    _check_reduction(step, does, live, label, result)
    if does.reduce in {"max", "min"}:
        needs.add(("full", Size(1, (split,))))
    return _checked(step, result, split)


def _adds(
    does: Primitive, operands: Sequence[Relation], live: Sequence[int], pending: Sequence[int], label: int
) -> bool:
    """Whether the operation adds operands split along ``label`` and pending operands, so that its result is pending."""
    terms = [index for index in live if index in does.joint]
    return (
        does.reduce == "sum"
        and not does.each
        and label not in does.output
        and all(index in terms and operands[index].reduce == "sum" for index in pending)
        and all(index in pending or operands[index].kind == "part" for index in terms)
    )


def _check_reduction(step: Step, does: Primitive, live: Sequence[int], label: int, result: Relation) -> None:
    """Raise an error if the reduction of a split label does not leave a pending value."""
    if not does.reduce:
        msg = f"{step.name}: its result depends on all elements along a split dim"
        raise UnprovenError(msg)
    if does.reduce != "sum" and result.scaled:
        msg = f"{step.name}: a {does.reduce} of scaled values"
        raise UnprovenError(msg)
    for index in live:
        if label not in does.inputs[index] and index in does.joint:
            msg = f"{step.name}: operand {index} would be added once per rank"
            raise UnprovenError(msg)


def _split_label(
    step: Step, does: Primitive, operands: Sequence[Relation], live: Sequence[int]
) -> tuple[int, Size, Size] | None:
    """Return the split label, with ``outer`` and ``factor`` of its dims; None if nothing is split.

    It must be split in all operands that have it.
    """
    parts = [(does.inputs[index][operands[index].dim], operands[index].outer, operands[index].factor)
             for index in live if operands[index].kind == "part"]  # fmt: skip
    if not parts:
        return None
    (label, outer, factor), *others = parts
    if label is None or any(other != (label, outer, factor) for other in others):
        msg = f"{step.name}: operands are split along different dims"
        raise UnprovenError(msg)
    if label in does.whole:
        msg = f"{step.name}: its result depends on all elements along a split dim"
        raise UnprovenError(msg)
    for index in live:
        if operands[index].kind != "part" and label in does.inputs[index]:
            msg = f"{step.name}: operand {index} has all elements of a dim that is split in another one"
            raise UnprovenError(msg)
    if any(labels.count(label) > 1 for labels in does.inputs):
        msg = f"{step.name}: two dims of one operand are split"
        raise UnprovenError(msg)
    return label, outer, factor


def _scale(step: Step, does: Primitive, operands: Sequence[Relation], live: Sequence[int]) -> tuple[int, int]:
    """Return ``ranks`` and ``share`` of the result, which are powers of its scale."""
    ranks = share = 0
    for index in does.each:
        ranks, share = ranks + operands[index].ranks, share + operands[index].share
    together = [index for index in live if index in does.joint]
    kinds = {(operands[index].ranks, operands[index].share) for index in together}
    rest = [index for index in live if index not in does.each and index not in does.joint]
    if len(kinds) > 1 or any(operands[index].scaled for index in rest):
        msg = f"{step.name}: not linear, and an operand is scaled"
        raise UnprovenError(msg)
    (more,) = kinds or {(0, 0)}
    return ranks + more[0], share + more[1]


def _passed(
    step: Step, does: Primitive, operands: Sequence[Relation], live: Sequence[int], pending: Sequence[int], share: int
) -> Relation:
    """Return the relation of the result if the operands with indices ``pending`` are pending."""
    kinds = {operands[index].reduce for index in pending}
    (reduce, *others) = kinds
    if others:
        msg = f"{step.name}: operands are pending by {' and '.join(sorted(kinds))}"
        raise UnprovenError(msg)
    if reduce not in _LINEAR:
        passes = does.moves or (does.increasing and reduce in {"max", "min"} and does.reduce in {"", reduce})
        # Operands that determine positions, such as indices, are equal on all ranks and need not be pending.
        moved = [index for index in live if index in does.each] if does.each else live
        if not passes or set(pending) != set(moved) or share:
            msg = f"{step.name}: not known to be increasing, and an operand is a pending {reduce}"
            raise UnprovenError(msg)
        if any(operands[index].scaled for index in live):
            msg = f"{step.name}: a pending {reduce} is scaled"
            raise UnprovenError(msg)
        return Relation("pending", reduce=reduce)
    terms = {index for index in live if operands[index].kind == "part"} & set(does.joint)  # see _adds
    linear_alone = len(pending) == 1 and pending[0] in does.each
    linear_together = set(pending) | terms == set(live) & set(does.joint)
    if not (linear_alone or linear_together) or (does.reduce not in {"", "sum"}):
        msg = f"{step.name}: not linear, and an operand is a pending sum"
        raise UnprovenError(msg)
    ranks, scale = _scale(step, does, operands, live)
    return Relation("pending", reduce="sum", ranks=ranks, share=scale + share)


def _power(sizes: Sequence[Size], split: str) -> int:
    count = 0
    for size in sizes:
        if split and split in size.symbols:
            if size.formula:
                msg = f"a factor {size} that is not a product of sizes"
                raise UnprovenError(msg)
            count += size.symbols.count(split)
    return count


def _reshaped(step: Step, source: Sequence[Size], x: Relation, split: str) -> Relation:
    """Return the relation of a reshaped tensor.

    A shard remains a shard if a dim of the result has as many elements before it, and per index, as the split dim.
    """
    if x.kind != "part" or x.zero:
        return x if x.zero else _checked(step, x, split)
    if tuple(source) == step.shape:
        return x
    before, row = product(source[: x.dim]) * x.outer, product(source[x.dim + 1 :]) * x.factor
    for dim, size in enumerate(step.shape):
        inside = size.over(Size(1, (split,)))
        outer, factor = before.over(product(step.shape[:dim])), row.over(product(step.shape[dim + 1 :]))
        if inside is not None and outer is not None and factor is not None and outer * factor == inside:
            return replace(x, dim=dim, outer=outer, factor=factor)
    msg = f"{step.name}: the part is not a block of the result"
    raise UnprovenError(msg)


def _sized(step: Step, relation: Relation, split: str, does: Primitive | None = None) -> Relation:
    """Return the relation of a result with new dims along which it is constant; one of them may have a local size."""
    dims = [dim for dim, size in enumerate(step.shape) if split and split in size.symbols]
    if not dims or (does is not None and not all(does.output[dim] in does.copies for dim in dims)):
        return _checked(step, relation, split)
    if len(dims) > 1:
        msg = f"{step.name}: two dims of its result are split"
        raise UnprovenError(msg)
    factor = step.shape[dims[0]].over(Size(1, (split,)))
    if factor is None:
        msg = f"{step.name}: a dim of size {step.shape[dims[0]]} is split"
        raise UnprovenError(msg)
    return _checked(step, replace(relation, kind="part", dim=dims[0], factor=factor), split)


def _checked(step: Step, relation: Relation, split: str) -> Relation:
    """Return ``relation`` if it fits the local sizes of the result, in which ``l`` replaces ``s``."""
    for dim, size in enumerate(step.shape):
        wanted = relation.kind == "part" and dim == relation.dim
        if (split in size.symbols) != wanted and split:
            msg = f"{step.name}: dim {dim} of its result has local size {size}"
            raise UnprovenError(msg)
        if wanted and size != relation.outer * relation.factor * Size(1, (split,)):
            msg = f"{step.name}: dim {dim} of its result has local size {size}"
            raise UnprovenError(msg)
    return relation
