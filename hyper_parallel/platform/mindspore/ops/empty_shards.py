"""Operators on empty shards, which uneven layouts have.

MindSpore's CPU kernels return uninitialised memory when they reduce over no elements: a sum, a contraction, and the
gradient of anything that was broadcast. This file wraps them to return the mathematically defined result. Special
properties of an operator are arguments of its ``kernel`` decorator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import mindspore
from mindspore import Tensor, mint, ops

from hyper_parallel._tree import CONTAINERS, leaves, tree_map
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.mindspore.ops.kernels import requires_grad
from hyper_parallel.platform.mindspore.versions import Function, no_grad, pynative_executor

__all__ = ["COMPUTED", "OnEmpty", "empty_safe", "kernel_on_elements", "no_elements", "set_on_elements"]

COMPUTED = "computed"
"""The value of ``OnEmpty.shape`` for kernels whose results have the right shape on empty operands."""


@dataclass(frozen=True)
class OnEmpty:
    """Special properties of an operator on empty shards.

    Attributes:
        value: the result of a reduction over no element; None where it is not defined.
        shape: method that finds the results' shapes and dtypes. ``COMPUTED``: the kernel is called on the empty
            operands. A function: called with the operator's arguments, it returns shape and dtype. None: the kernel is
            called with 1 and then with 2 in place of the sizes that are zero, and the sizes of its results are
            extrapolated linearly to zero.
        unchanged: writing no element returns the first operand.
        no_gradient: positions of the operands that no gradient reaches. The results are on the graph all the same, as
            MindSpore's are. All ranks must run the same collectives in backward, so an empty shard must not have a
            gradient where the other shards have none, nor lack one that they have.
        off_graph: whether the results are off the graph, whatever the operands are; or a function of the keyword
            arguments that returns it.
        handled_with: a keyword; a call that passes it is handled by the kernel itself.
    """

    value: Any = None
    shape: str | Callable[..., Any] | None = None
    unchanged: bool = False
    no_gradient: tuple[int, ...] = ()
    off_graph: bool | Callable[[dict[str, Any]], bool] = False
    handled_with: str | None = None


class _Zeros(Function):
    """Zeros that depend on ``source`` in the autograd graph, at any order of differentiation."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """Return the zeros."""
        ctx.like = (tuple(source.shape), source.dtype)
        return mint.zeros(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return zeros again."""
        return _Zeros.apply(grad, *ctx.like), None, None


class _Results(NamedTuple):
    """Results over no element.

    ``rerun`` is the same call on other operands, or None if the call is linear in each operand. ``no_gradient`` has the
    positions of the operands that get no gradient.

    A second backward runs, on every rank, the collectives that computed the inputs of the first. So the gradients of an
    empty shard must depend on the same inputs as on other ranks; a call on shards of one element shows which.
    """

    tensors: list[Tensor]
    rerun: Callable[[Sequence[Tensor]], Any] | None = None
    no_gradient: tuple[int, ...] = ()


class _Constant(Function):
    """Results that no input element reached: every gradient is zero."""

    @staticmethod
    def forward(ctx: Any, results: _Results, *inputs: Tensor) -> Any:
        """Return the results."""
        ctx.rerun, ctx.no_gradient = results.rerun, results.no_gradient
        ctx.inputs = [ops.stop_gradient(x) if index in results.no_gradient else x for index, x in enumerate(inputs)]
        return results.tensors[0] if len(results.tensors) == 1 else tuple(results.tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return zeros."""
        zeros = _zero_gradients(ctx.inputs, grads, ctx.rerun)
        return (None, *(None if index in ctx.no_gradient else zero for index, zero in enumerate(zeros)))


def _zero_gradients(
    inputs: Sequence[Tensor], grads: Sequence[Tensor], rerun: Callable[[Sequence[Tensor]], Any] | None
) -> list[Tensor]:
    zeros = [mint.zeros(tuple(tensor.shape), dtype=tensor.dtype) for tensor in inputs]
    if not pynative_executor.requires_grad():  # second derivatives are not needed
        return zeros
    sources = _sources_in_grads(inputs, grads) if rerun is None else _sources_by_rerun(inputs, grads, rerun)
    return [
        zero if source is None or not requires_grad(source) else _Zeros.apply(source, tuple(zero.shape), zero.dtype)
        for zero, source in zip(zeros, sources, strict=True)
    ]


def _shape_of_ones(tensor: Tensor) -> tuple[int, ...]:
    return tuple(size or 1 for size in tensor.shape)


def _sources_in_grads(inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor | None]:
    source = next((grad for grad in grads if requires_grad(grad)), None)
    return [source if _carries_gradient(tensor) else None for tensor in inputs]


def _sources_by_rerun(
    inputs: Sequence[Tensor], grads: Sequence[Tensor], rerun: Callable[[Sequence[Tensor]], Any]
) -> list[Tensor | None]:
    """Gradients of the same call on shards of one element, as functions of ``inputs`` and ``grads``."""
    operands = [
        _Zeros.apply(tensor, _shape_of_ones(tensor), tensor.dtype) if requires_grad(tensor) else _resized(tensor, 1)
        for tensor in inputs
    ]
    positions = [index for index, tensor in enumerate(inputs) if requires_grad(tensor)]

    def pulled_back(*leaves: Tensor) -> Tensor:
        replaced = list(operands)
        for index, leaf in zip(positions, leaves, strict=True):
            replaced[index] = leaf
        outs = rerun(replaced)
        pairs = zip(outs if isinstance(outs, (list, tuple)) else (outs,), grads, strict=True)
        floating = ((out, grad) for out, grad in pairs if _carries_gradient(out))
        return sum((out * _Zeros.apply(grad, tuple(out.shape), out.dtype)).sum() for out, grad in floating)

    sources: list[Tensor | None] = [None] * len(inputs)
    if positions:
        gradients = mindspore.grad(pulled_back, tuple(range(len(positions))))(*(operands[at] for at in positions))
        for index, grad in zip(positions, gradients if len(positions) > 1 else (gradients,), strict=True):
            sources[index] = grad
    return sources


class _Unchanged(Function):
    """Returns the first operand, into which nothing was written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Any:
        """Return a copy."""
        ctx.others = others
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return the gradient for the first operand, and zeros for the others."""
        return (grad, *_zero_gradients(ctx.others, (grad,), None))


def no_elements(shape: tuple[int, ...], *inputs: Tensor) -> Tensor:
    """Return an empty tensor of the first input's dtype that depends on ``inputs`` for autograd.

    Their gradients are zero; kernels would sum over no element and return uninitialised memory.
    """
    return _Constant.apply(_Results([mint.zeros(shape, dtype=inputs[0].dtype)]), *inputs)


def empty_safe(op: str, compute: Callable[..., Any], special: OnEmpty | None = None) -> Callable[..., Any]:
    """Return ``compute``, corrected for empty shards; ``op`` names it in messages.

    Raises:
        UnsupportedOperatorError: at a call whose result over no element is not defined.
    """
    special = special or OnEmpty()
    keyword = special.handled_with

    @wraps(compute)
    def run(*args: Any, **kwargs: Any) -> Any:
        if keyword is not None and kwargs.get(keyword) is not None:
            return compute(*args, **kwargs)
        for operand in args:
            if isinstance(operand, Tensor) and 0 in operand.shape:
                return _run_empty(op, compute, special, args, kwargs)
        if kwargs and any(0 in operand.shape for operand in _tensors(tuple(kwargs.values()))):
            return _run_empty(op, compute, special, args, kwargs)
        return compute(*args, **kwargs)

    set_on_elements(run, compute)
    return run


# By kernel that is correct on empty shards: an equivalent function for other shards. The files of operators fill it.
_ON_ELEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {}


def set_on_elements(kernel: Callable[..., Any], compute: Callable[..., Any]) -> None:
    """Use ``compute`` instead of ``kernel`` where no operand is empty."""
    _ON_ELEMENTS[kernel] = compute


def kernel_on_elements(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the equivalent of ``kernel`` for non-empty operands, which does not search for empty ones."""
    return _ON_ELEMENTS.get(kernel, kernel)


def _run_empty(
    op: str, compute: Callable[..., Any], special: OnEmpty, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    operands = list(_tensors((args, tuple(kwargs.values()))))
    if special.unchanged and 0 not in operands[0].shape:
        return _Unchanged.apply(*operands)
    with no_grad():
        facts = _shapes(compute, special, args, kwargs)
    many = isinstance(facts, list)
    tensors = [_value(op, special, shape, dtype) for shape, dtype in (facts if many else [facts])]

    def rerun(others: Sequence[Tensor]) -> Any:
        rest = iter(others)
        return compute(*_replaced(args, rest), **_replaced(kwargs, rest))

    off_graph = special.off_graph(kwargs) if callable(special.off_graph) else special.off_graph
    linear = special.shape is not None
    on_graph = [not off_graph and _carries_gradient(tensor) for tensor in tensors]
    without = special.no_gradient
    if not (off_graph or all(on_graph)) and any(map(requires_grad, operands)):
        elsewhere = [(True, True)] * len(tensors) if linear else _elsewhere(operands, rerun, len(tensors))
        if not (any(on_graph) or any(reached for _, reached in elsewhere)):
            without = tuple(range(len(operands)))
        on_graph = [own or node for own, (node, _) in zip(on_graph, elsewhere, strict=True)]
    if not any(on_graph):
        return tuple(tensors) if many else tensors[0]
    outs = _Constant.apply(_Results(tensors, None if linear else rerun, without), *operands)
    if not many:
        return outs
    results = (outs,) if len(tensors) == 1 else outs
    return tuple(out if kept else own for out, own, kept in zip(results, tensors, on_graph, strict=True))


class _Noted(Function):
    """The identity, which records whether backward reaches its operand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reached: Callable[[], None]) -> Any:
        """Return a copy."""
        ctx.reached = reached
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Record that there is a gradient."""
        ctx.reached()
        return grad, None


def _elsewhere(
    operands: Sequence[Tensor], rerun: Callable[[Sequence[Tensor]], Any], results: int
) -> list[tuple[bool, bool]]:
    """Return for each result, on shards of one element, whether it has a node, and whether backward reaches an operand.

    Results that are not floating-point may have a node, at which the gradient ends. If such a result is cast to a
    floating-point dtype, backward runs the collectives of the forward after this node but not those before it, and must
    do so on every rank.
    """
    positions = [index for index, tensor in enumerate(operands) if requires_grad(tensor)]
    ones = [ops.stop_gradient(_resized(tensor, 1)) for tensor in operands]

    def look(place: int) -> tuple[bool, bool]:
        nodes: list[bool] = []
        notes: list[bool] = []

        def total(*leaves: Tensor) -> Tensor:
            replaced = list(ones)
            for index, leaf in zip(positions, leaves, strict=True):
                replaced[index] = _Noted.apply(leaf, lambda: notes.append(True))
            outs = rerun(replaced)
            out = outs[place] if isinstance(outs, (list, tuple)) else outs
            nodes.append(requires_grad(out))
            return ops.cast(out, mindspore.float32).sum()

        mindspore.grad(total, tuple(range(len(positions))))(*(ones[index] for index in positions))
        return nodes[0], bool(notes)

    return [look(place) for place in range(results)]


def _carries_gradient(tensor: Tensor) -> bool:
    """False for indices, counts and booleans, which have no gradient themselves."""
    return str(tensor.dtype).startswith(("Float", "BFloat", "Complex"))


def _shapes(compute: Callable[..., Any], special: OnEmpty, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Shape and dtype of the result, or a list of them."""
    if callable(special.shape):
        return special.shape(*args, **kwargs)
    return (_computed if special.shape == COMPUTED else _extrapolated)(compute, args, kwargs)


def _computed(compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    outs = compute(*args, **kwargs)
    return (
        [(tuple(out.shape), out.dtype) for out in outs]
        if isinstance(outs, (list, tuple))
        else (tuple(outs.shape), outs.dtype)
    )


def _extrapolated(compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return shape and dtype of the result for empty operands, without calling the kernel on them.

    They are extrapolated from sizes 1 and 2: the result's shape is linear in the size that is zero.
    """
    first, second = (_computed(compute, _resized(args, size), _resized(kwargs, size)) for size in (1, 2))
    if isinstance(first, list):
        return [_at_zero(*pair) for pair in zip(first, second, strict=True)]
    return _at_zero(first, second)


def _at_zero(first: tuple[tuple[int, ...], Any], second: tuple[tuple[int, ...], Any]) -> tuple[tuple[int, ...], Any]:
    return tuple(2 * at_one - at_two for at_one, at_two in zip(first[0], second[0], strict=True)), first[1]


def _replaced(tree: Any, operands: Iterator[Tensor]) -> Any:
    """``tree`` with ``operands`` in the places of its tensors."""
    return tree_map(lambda leaf: next(operands) if isinstance(leaf, Tensor) else leaf, tree, CONTAINERS)


def _resized(tree: Any, size: int) -> Any:
    """``tree`` with zeros in place of its empty tensors, whose zero sizes become ``size``."""

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or 0 not in leaf.shape:
            return leaf
        return ops.zeros(tuple(own or size for own in leaf.shape), leaf.dtype)

    return tree_map(resized, tree, CONTAINERS)


def _value(op: str, special: OnEmpty, shape: tuple[int, ...], dtype: Any) -> Tensor:
    if 0 in shape:
        return mint.zeros(shape, dtype=dtype)
    if special.value is None:
        msg = f"{op}: this rank's shard is empty and the result over no element is not defined; redistribute it first"
        raise UnsupportedOperatorError(msg)
    return ops.full(shape, special.value, dtype=dtype)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in leaves(tree) if isinstance(leaf, Tensor))
