"""MindSpore operators that are canonical ones in another shape: transposed flags, attributes, several results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
from mindspore import Parameter, Tensor

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.dispatch import Dispatcher
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.mindspore.indexing import normalised, positions, replicated
from hyper_parallel.platform.mindspore.intercept import METHOD
from hyper_parallel.platform.mindspore.op_line import line_of
from hyper_parallel.platform.mindspore.tensors import BY_NUMBER

__all__ = ["COMPOSED", "MATRIX", "METHOD", "composed", "expect", "gather_rows", "unless"]

MATRIX = 2

COMPOSED: dict[str, Callable[[Dispatcher, Any, tuple[Any, ...], dict[str, Any]], Any]] = {}


def composed(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register ``run(ops, primitive, *args, **kwargs)`` where ``ops`` are canonical operators on DTensors."""

    def declare(run: Callable[..., Any]) -> Callable[..., Any]:
        def line(dispatcher: Dispatcher, primitive: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return run(dispatcher.ops, primitive, *args, **kwargs)

        COMPOSED.update(dict.fromkeys(names, line))
        return run

    return declare


def expect(operator: str, name: str, given: Any, served: Any) -> None:
    """Refuse an option that has no rule.

    Raises:
        UnsupportedOperatorError: ``given`` is not what is ``served``.
    """
    if given != served:
        msg = (
            f"operator {operator}: {name}={given!r} has no sharding rule, {name}={served!r} has; "
            "redistribute the operands and use to_local()"
        )
        raise UnsupportedOperatorError(msg)


# -- matrices and layers ---------------------------------------------------------------------------------------------


@composed("MatMul", "BatchMatMul")
def _matmul(ops: Any, _: Any, x: Any, y: Any, transpose_x: bool = False, transpose_y: bool = False) -> Any:
    """``nn.Dense`` multiplies with ``transpose_y``, which is what ``linear`` means."""
    if transpose_y and not transpose_x and len(y.shape) == MATRIX:
        return ops.linear(x, y)
    x = ops.matrix_transpose(x) if transpose_x else x
    y = ops.matrix_transpose(y) if transpose_y else y
    return ops.matmul(x, y)


@composed("BiasAdd")
def _bias_add(ops: Any, primitive: Any, x: Any, bias: Any, *__: Any) -> Any:
    """``nn.Dense`` adds its bias this way; the channel of more than two dims is dim 1."""
    expect("BiasAdd", "data_format", primitive.init_attrs["data_format"], "NCHW")
    if len(x.shape) != MATRIX:
        bias = ops.view(bias, (-1, *(1,) * (len(x.shape) - MATRIX)))
    return ops.add(x, bias)


@composed("LayerNorm")
def _layer_norm(ops: Any, primitive: Any, x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    """With the mean and the deviation, as the primitive returns them."""
    begin = rest[0] if rest else primitive.begin_norm_axis
    eps = rest[2] if len(rest) > MATRIX else getattr(primitive, "epsilon", 1e-7)
    return ops.native_layer_norm(x, tuple(x.shape[begin % len(x.shape) :]), weight, bias, eps)


@composed("DropoutGenMask", "DropoutDoMask")
def _no_mask(*_: Any, **__: Any) -> Any:
    msg = "dropout by bit masks has no sharding rule; use mint.nn.functional.dropout"
    raise UnsupportedOperatorError(msg)


# -- shapes ----------------------------------------------------------------------------------------------------------


@composed("Transpose", "DeprecatedTranspose", "DeprecatedPermute")
def _transpose(ops: Any, _: Any, x: Any, *dims: Any) -> Any:
    """``x.T`` and ``ops.transpose(x, order)``; two numbers of a tensor of more dims are two dims to swap."""
    order = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (list, tuple)) else dims
    if len(order) == MATRIX and len(x.shape) != MATRIX:
        return ops.transpose(x, *order)
    return ops.permute(x, order)


@composed("Flatten")
def _flatten(ops: Any, _: Any, x: Any, *__: Any) -> Any:
    return ops.view(x, (x.shape[0], -1))


@composed("Stack", "Pack")
def _stack(ops: Any, primitive: Any, tensors: Any, *__: Any) -> Any:
    return ops.stack(list(tensors), primitive.axis)


@composed("AddN", "IdentityN")
def _add_n(ops: Any, primitive: Any, tensors: Any, *__: Any) -> Any:
    if primitive.name == "IdentityN":
        return tuple(tensors)
    total = tensors[0]
    for one in tensors[1:]:
        total = ops.add(total, one)
    return total


@composed("Split")
def _split(ops: Any, primitive: Any, x: Any, *args: Any) -> Any:
    """``ops.Split(axis, output_num)`` splits into equal parts, or fails."""
    axis, count = args if len(args) == MATRIX else (primitive.axis, primitive.output_num)
    expect("Split", f"the rest of size {x.shape[axis]} in {count} parts", x.shape[axis] % count, 0)
    return ops.split(x, x.shape[axis] // count, axis)


@composed("ReshapeAs", "ViewAs")
def _view_as(ops: Any, _: Any, x: Any, other: Any) -> Any:
    return ops.view(x, tuple(other.shape))


@composed("ExpandAs")
def _expand_as(ops: Any, _: Any, x: Any, other: Any) -> Any:
    return ops.expand(x, tuple(other.shape))


@composed("TypeAs")
def _type_as(ops: Any, _: Any, x: Any, other: Any) -> Any:
    return x if x.dtype == other.dtype else ops.cast(x, dtype=other.dtype)


@composed("Unstack")
def _unstack(ops: Any, primitive: Any, x: Any, *args: Any) -> Any:
    return ops.unbind(x, args[0] if args else primitive.axis)


@composed("ToDevice")
def _to_device(ops: Any, _: Any, x: Any, *__: Any, **___: Any) -> Any:
    """Locals stay on the device of the mesh."""
    del ops
    return x


# -- indices ---------------------------------------------------------------------------------------------------------


@composed("__getitem__", "GetItem")
def _getitem(ops: Any, _: Any, x: Any, index: Any) -> Any:
    found, advanced = normalised(x, index)
    return ops.index(x, found) if advanced else ops.getitem(x, found)


def _write(dispatcher: Dispatcher, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, index, value = args
    return dispatcher.dispatch(line_of("setitem", in_place=True).entry, (x, normalised(x, index)[0], value), kwargs)


COMPOSED["__setitem__"] = _write


@composed("Gather")
def _gather(ops: Any, _: Any, x: Any, index: Any, axis: int, batch_dims: int = 0) -> Any:
    return gather_rows(ops, x, index, axis, batch_dims)


def gather_rows(ops: Any, x: Any, index: Any, axis: int, batch_dims: int = 0) -> Any:
    """Rows along ``axis``; ``nn.Embedding`` looks up its table this way."""
    if batch_dims:
        msg = f"Gather: batch_dims={batch_dims} has no sharding rule; use mint.gather"
        raise UnsupportedOperatorError(msg)
    index = index if isinstance(index, DTensor) else replicated(index, x)  # made by MindSpore's Python layer
    axis = axis % len(x.shape)
    if axis == 0 and len(x.shape) == MATRIX:
        return ops.embedding(index, x)
    return ops.index(x, (*(slice(None),) * axis, index))


@composed("NonZero")
def _nonzero(ops: Any, _: Any, x: Any) -> Any:
    return ops.stack(positions(ops.ne(x, 0), x), 1)


@composed("OneHot")
def _one_hot(ops: Any, _: Any, x: Any, depth: int, on: Any, off: Any, axis: int = -1) -> Any:
    hot = ops.movedim(ops.one_hot(x, depth), -1, axis % (len(x.shape) + 1))
    first = on.asnumpy().item() if isinstance(on, Tensor) and not isinstance(on, DTensor) else on
    second = off.asnumpy().item() if isinstance(off, Tensor) and not isinstance(off, DTensor) else off
    kind = on.dtype if isinstance(on, Tensor) else None
    hot = ops.cast(hot, dtype=kind) if kind is not None else hot
    return hot if (first, second) == (1, 0) else ops.add(ops.mul(hot, first - second), second)


# -- reductions ------------------------------------------------------------------------------------------------------


@composed("ReduceSum", "ReduceMean", "ReduceProd")
def _reduced(ops: Any, primitive: Any, x: Any, dim: Any = (), keepdim: bool | None = None, *_: Any) -> Any:
    """Legacy reductions carry ``keep_dims`` as an attribute."""
    if getattr(primitive, "skip_mode", False) and dim == ():
        return x
    keep = bool(getattr(primitive, "keep_dims", False) if keepdim is None else keepdim)
    op = {"ReduceSum": ops.sum, "ReduceMean": ops.mean, "ReduceProd": ops.prod}[primitive.name]
    return op(x, None if dim == () else dim, keep)


@composed("ArgMaxWithValue")
def _places_of_maxima(ops: Any, primitive: Any, x: Any, *args: Any) -> Any:
    """``ops.max(x, axis)``: the place first, then the value."""
    return _placed(ops.max_along, primitive, x, args)


@composed("ArgMinWithValue")
def _places_of_minima(ops: Any, primitive: Any, x: Any, *args: Any) -> Any:
    """``ops.min(x, axis)`` likewise."""
    return _placed(ops.min_along, primitive, x, args)


def _placed(along: Any, primitive: Any, x: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
    axis, keep = args or (primitive.axis, primitive.keep_dims)
    values, places = along(x, axis, keep)
    return places, values


@composed("Argmax")
def _argmax(ops: Any, primitive: Any, x: Any, *args: Any) -> Any:
    return _argument(ops, ops.argmax, primitive, x, args)


@composed("Argmin")
def _argmin(ops: Any, primitive: Any, x: Any, *args: Any) -> Any:
    return _argument(ops, ops.argmin, primitive, x, args)


def _argument(ops: Any, op: Any, primitive: Any, x: Any, args: tuple[Any, ...]) -> Any:
    """The legacy primitives give int32."""
    axis = args[0] if args else primitive.axis
    kind = args[1] if len(args) > 1 else getattr(primitive, "output_type", mindspore.int32)
    found = op(x, axis, False)
    return found if BY_NUMBER.get(kind, kind) == mindspore.int64 else ops.cast(found, dtype=mindspore.int32)


@composed("LayerNormExt")
def _layer_norm_ext(
    ops: Any, _: Any, x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """Behind ``mint.nn.functional.layer_norm``; with the mean and the deviation."""
    weight, bias = unless(weight, 1), unless(bias, 0)
    if weight is None or bias is None:
        return ops.layer_norm(x, tuple(shape), weight, bias, eps), None, None
    return ops.native_layer_norm(x, tuple(shape), weight, bias, eps)


@composed("GroupNorm")
def _group_norm(ops: Any, _: Any, x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """The mean and the deviation, which no caller in MindSpore uses, are not computed."""
    return ops.group_norm(x, groups, unless(weight, 1), unless(bias, 0), eps), None, None


def unless(given: Any, constant: int) -> Any:
    """None for the constant tensor that MindSpore's Python layer makes of a missing weight or bias."""
    if given is None or isinstance(given, (DTensor, Parameter)) or given._requires_grad:  # noqa: SLF001 - no public spelling
        return given
    return None if bool((given.asnumpy() == constant).all()) else given


@composed("LogSigmoid")
def _log_sigmoid(ops: Any, _: Any, x: Any) -> Any:
    """With the buffer that MindSpore keeps for backward, which nothing here needs."""
    return ops.logsigmoid(x), None


@composed("RmsNorm")
def _rms_norm(ops: Any, _: Any, x: Any, gamma: Any, eps: float = 1e-6) -> Any:
    """With the reciprocal root of the mean square, as MindSpore returns it."""
    dims = tuple(range(-len(gamma.shape), 0))
    scale = ops.rsqrt(ops.add(ops.mean(ops.square(x), dims, True), eps))
    return ops.mul(ops.mul(x, scale), gamma), scale


# -- dropout ---------------------------------------------------------------------------------------------------------


@composed("FuncDropoutExt")
def _dropout(ops: Any, _: Any, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False, *__: Any) -> Any:
    """MindSpore's seed and offset play no part: the numbers depend on the global index of the element."""
    dropped = ops.dropout(x, p, training)
    return x.copy_(dropped) if inplace else dropped


@composed("Dropout")
def _dropout_with_mask(ops: Any, primitive: Any, x: Any, *_: Any) -> Any:
    """The legacy primitive returns the mask as well; layers throw it away."""
    mask = ops.dropout(ops.ones_like(x), 1 - primitive.keep_prob, True)
    return ops.mul(x, mask), ops.cast(ops.ne(mask, 0), dtype=x.dtype)
