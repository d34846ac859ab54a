"""Table that describes ATen functions as primitives.

Proofs assume that the table is right, as they assume the laws. ``tests_unit/verify/prove/test_primitives.py`` compares
the descriptions with the functions on small tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.platform.torch.versions import trilinear
from hyper_parallel.verify.frameworks.contract.primitives import Constant, Primitive, Reshape
from hyper_parallel.verify.frameworks.contract.sizes import Size
from hyper_parallel.verify.frameworks.torch.primitive_indexing import INDEXED, SCATTERED
from hyper_parallel.verify.frameworks.torch.primitive_labels import (
    Describe,
    Labels,
    argument,
    broadcast,
    shape_of,
    size_of,
)

__all__ = ["REWRITTEN", "SIZED", "describe", "is_kept", "name_of", "unread"]

# Functions whose numeric arguments are sizes of the result; proofs compare these with local sizes.
SIZED = ("expand", "broadcast_in_dim", "slice_backward", "select_backward", "embedding_dense_backward")
_ELEMENTWISE = ("_to_copy", "add", "sub", "mul", "div", "neg", "exp", "where", "convert_element_type", "_conj",
                "_conj_physical", "complex", "polar", "copy")  # fmt: skip
_JOINT = ("add", "sub", "rsub", "neg", "real", "imag", "view_as_real", "view_as_complex", "deg2rad", "rad2deg", "_conj",
          "_conj_physical", "conj_physical", "complex")  # fmt: skip
_COPIES = ("clone", "alias", "detach", "lift_fresh_copy", "lift_fresh", "contiguous", "view_of", "positive")
_CONSTANTS = ("full", "empty", "zeros", "ones", "full_like", "empty_like", "zeros_like", "ones_like", "new_full",
              "new_empty", "new_zeros", "new_ones", "empty_strided", "new_empty_strided", "scalar_tensor",
              "empty_permuted", "empty_memory_format", "_efficientzerotensor")  # fmt: skip
_ZEROS = ("zeros", "zeros_like", "new_zeros", "_efficientzerotensor")
_INCREASING = ("relu", "floor", "ceil", "trunc", "round", "sign", "exp", "sigmoid", "tanh", "sqrt", "log", "erf",
               "fill")  # fmt: skip
_REDUCED = {"sum": "sum", "amax": "max", "amin": "min", "any": "any", "all": "all", "prod": "prod", "nansum": "sum"}
# Reductions whose reduced dims are ``whole``: the result is not a sum, maximum or minimum of elements.
_WHOLE_REDUCED = ("argmax", "argmin", "var", "std", "var_mean", "std_mean", "median", "nanmedian", "mode", "kthvalue",
                  "logsumexp", "linalg_vector_norm", "max", "min", "aminmax", "hash_tensor")  # fmt: skip
# Functions along one dim, given by the argument after the operand; all other dims are independent.
_ALONG = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "flip", "roll", "slice")
# Functions of the last dims of every operand, such as matrices; the batch dims before them are independent.
_BATCHED = ("linalg_cholesky_ex", "linalg_inv_ex", "linalg_qr", "_linalg_svd", "_linalg_eigh", "linalg_lu_factor_ex",
            "linalg_lu", "_linalg_det", "_linalg_slogdet", "linalg_eig", "linalg_matrix_exp", "tril", "triu",
            "linalg_householder_product", "cholesky_inverse", "geqrf", "lu_unpack", "linalg_lu_solve",
            "_linalg_solve_ex", "linalg_ldl_solve", "linalg_ldl_factor_ex", "cholesky_solve", "triangular_solve",
            "linalg_solve_triangular", "ormqr", "_pdist_forward")  # fmt: skip
# Functions of images or sequences: the last one, two or three dims are ``whole``.
_LEADING = ("avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices", "_adaptive_avg_pool2d",
            "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d", "upsample_bilinear2d",
            "upsample_nearest2d", "upsample_nearest1d", "upsample_linear1d", "upsample_bicubic2d",
            "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d",
            "avg_pool2d_backward", "avg_pool3d_backward", "max_pool2d_with_indices_backward",
            "max_pool3d_with_indices_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward",
            "adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward", "max_unpool2d", "max_unpool3d",
            "fractional_max_pool2d", "fractional_max_pool3d", "fractional_max_pool2d_backward",
            "fractional_max_pool3d_backward")  # fmt: skip
# Image functions whose operand and result differ in number of dims: number of the operand's ``whole`` dims.
_RESHAPING = {"im2col": 3, "col2im": 2, "affine_grid_generator": 2}
# Functions of the last dims whose first result is linear in one operand, by index of this operand.
_LINEAR_INNER = {
    **dict.fromkeys(("tril", "triu", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
                     "max_unpool2d", "max_unpool3d", "cholesky_solve", "triangular_solve", *_RESHAPING,
                     *(name for name in _LEADING if name.endswith("_backward"))), 0),
    **dict.fromkeys(("linalg_solve_triangular", "_linalg_solve_ex"), 1),
    **dict.fromkeys(("linalg_lu_solve", "linalg_ldl_solve", "ormqr"), 2),
}  # fmt: skip
# Operands whose values do not affect a result, only their sizes; by index of the result.
_UNREAD: dict[str, tuple[tuple[int, ...], ...]] = {
    **dict.fromkeys(("avg_pool2d_backward", "avg_pool3d_backward", "_adaptive_avg_pool2d_backward",
                     "_adaptive_avg_pool3d_backward", "max_pool2d_with_indices_backward",
                     "max_pool3d_with_indices_backward", "adaptive_max_pool2d_backward",
                     "adaptive_max_pool3d_backward", "fractional_max_pool2d_backward",
                     "fractional_max_pool3d_backward"), ((1,),)),
    "copy": ((0,),),
    "convolution_backward": ((1,), (2,), (1, 2)),
    "_linalg_solve_ex": ((), (1,), (1,), (1,)),  # results 1 to 3 (factors, pivots, error codes) need only the matrix
    "grid_sampler_2d_backward": ((1,), ()),
    "grid_sampler_3d_backward": ((1,), ()),
}  # fmt: skip
_TRANSFORMED = ("_fft_c2c", "_fft_r2c", "_fft_c2r")
# Functions whose numeric arguments affect values: if such an argument is a size, the result depends on that size.
_VALUED = ("select", "roll", "tril", "triu", "diagonal", "kthvalue", "topk", "select_backward", "slice_scatter",
           "select_scatter", "diagonal_scatter", "constant_pad_nd", "histc", "linalg_vector_norm", "var", "std",
           "var_mean", "std_mean", "renorm", "_cdist_forward", "_cdist_backward", *SCATTERED)  # fmt: skip
# Elementwise functions that are decomposed although they are elementwise, to find in which operands they are linear.
_DECOMPOSED_POINTWISE = ("lerp", "addcmul", "addcdiv", "threshold_backward", "rsub", "masked_fill", "tanh_backward",
                "sigmoid_backward", "gelu_backward", "silu_backward", "elu_backward", "leaky_relu_backward",
                "hardtanh_backward", "softplus_backward", "logit_backward", "hardswish_backward", "xlogy",
                "hardsigmoid_backward", "native_dropout_backward", "softshrink_backward",
                "hardshrink_backward", "mish_backward", "log_sigmoid_backward", "glu", "glu_backward",
                "masked_scale", "_prelu_kernel_backward")  # fmt: skip
_KEPT = frozenset((
    *_CONSTANTS, *_COPIES, *_REDUCED, *_WHOLE_REDUCED, *_ALONG, *_BATCHED, *_LEADING, "view", "_unsafe_view", "reshape",
    "expand", "permute", "t", "transpose", "squeeze", "unsqueeze", "select", "cat", "mm", "bmm", "constant_pad_nd",
    "stack", "slice_backward", "select_backward", "split", "split_with_sizes", "unbind", "diagonal", "convolution",
    "topk", "_to_copy", "where", "view_as_real", "view_as_complex", "arange", "iota", "unfold", "unfold_backward",
    *_RESHAPING, *_UNREAD, *_TRANSFORMED, *INDEXED, "complex", "polar", "_cdist_forward", "_cdist_backward",
    "grid_sampler_2d", "grid_sampler_3d",
))  # fmt: skip


@cache
def is_kept(function: Any) -> bool:
    """Whether this table describes the function, so that the trace keeps it instead of its decomposition."""
    name = name_of(function)
    if name in {"softmax", "mean", "addmm", "logsumexp"}:
        return False
    return name in _KEPT or (torch.Tag.pointwise in getattr(function, "tags", ()) and name not in _DECOMPOSED_POINTWISE)


def name_of(function: Any) -> str:
    """Return the name of a function without its overload."""
    schema = getattr(function, "_schema", None)
    return schema.name.partition("::")[2] if schema is not None else getattr(function, "__name__", str(function))


def unread(function: Any, index: int) -> tuple[int, ...]:
    """Return the operands whose values do not affect result ``index``."""
    of_results = _UNREAD.get(name_of(function), ((),))
    return of_results[min(index, len(of_results) - 1)]


# -- functions as primitives -------------------------------------------------------------------------------------------


def describe(function: Any, args: Any, kwargs: Any, operands: Sequence[Tensor], out: Tensor, index: int = 0) -> Any:
    """Return the description of result ``index`` of ``function``.

    Args:
        function: an ATen operator.
        args: positional arguments; tensors and symbolic sizes are nodes of the graph.
        kwargs: named arguments.
        operands: the tensor arguments whose values the function reads.
        out: the result.
        index: index of the result.

    Raises:
        LookupError: the function has no description.
    """
    name = name_of(function)
    shapes, shape = [shape_of(operand) for operand in operands], shape_of(out)
    if name in _CONSTANTS or Size(0) in shape:
        return _constant(name, args, shape)
    if name in _COPIES or name in {"view", "_unsafe_view", "reshape"}:
        if out.dtype != operands[0].dtype:
            raise LookupError("the bytes of numbers as numbers of another dtype")
        return Reshape()
    if name in {"iota", "arange", "eye"}:
        numbers = tuple(map(size_of, _sizes_in([*args, *kwargs.values()])))
        return Primitive((), tuple(range(len(shape))), whole=frozenset(range(len(shape))), values=numbers)
    described = _DESCRIBED.get(name)
    if described is not None:
        does = described(name, args, kwargs, operands, shapes, shape, index)
        numbers = args[3:] if name == "select_backward" else args  # earlier arguments are sizes of the result
        places = tuple(map(size_of, _sizes_in([*numbers, *kwargs.values()]))) if name in _VALUED else ()
        return replace(does, values=places) if places else does
    if torch.Tag.pointwise in function.tags or name in _ELEMENTWISE:
        return _elementwise(name, args, kwargs, operands, shapes, out)
    raise LookupError("it has no description")


def _constant(name: str, args: Any, shape: Sequence[Size]) -> Constant | Primitive:
    if Size(0) in shape:  # the operand has no elements
        return Constant(zero=True)
    fill = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}.get(name)
    value = None if fill is None else args[fill]
    if isinstance(value, torch.fx.Node):
        labels = tuple(range(len(shape)))
        return Primitive((), labels, frozenset(labels), values=(size_of(value),))
    return Constant(name in _ZEROS or (fill is not None and value == 0), "" if fill is None else str(value))


def _elementwise(
    name: str, args: Any, kwargs: Any, operands: Sequence[Tensor], shapes: Sequence[Any], out: Tensor
) -> Primitive:
    shape = shape_of(out)
    inputs = tuple(broadcast(each, shape) for each in shapes)
    labels = tuple(range(len(shape)))
    copies = frozenset(label for label in labels if not any(label in dims for dims in inputs))
    symbolic = [arg for arg in [*args, *kwargs.values()] if _is_size(arg)]
    numbers = [arg for arg in args if isinstance(arg, (int, float, complex)) and not isinstance(arg, bool)]
    plain = Primitive(inputs, labels, copies)
    everything = tuple(range(len(operands)))
    if name in {"_to_copy", "copy"}:
        source, target = operands[0].dtype, out.dtype
        numbers_only = all(dtype.is_floating_point or dtype.is_complex for dtype in (source, target))
        # Not every conversion is increasing: -1 becomes True but 0 False, and large integers wrap in a narrow dtype.
        increasing = not source.is_complex and (target.is_floating_point or source in {torch.bool, target})
        moves = name == "copy" and source == target
        return replace(plain, joint=(0,) if numbers_only or moves else (), increasing=increasing or moves, moves=moves)
    if name == "where":
        return replace(plain, joint=everything[1:])
    if name in {"mul", "polar"}:
        return replace(plain, each=everything if name == "mul" else (0,), times=tuple(map(size_of, symbolic)))
    if name == "div" and _is_node(args[0]) and kwargs.get("rounding_mode") is None:
        return replace(plain, each=(0,), per=tuple(map(size_of, symbolic)))
    if name in _JOINT and not numbers and not symbolic:
        return replace(plain, joint=everything)
    increasing = name in _INCREASING and len(operands) == 1
    return replace(plain, values=tuple(map(size_of, symbolic)), increasing=increasing, strict=name == "relu")


def _is_node(arg: Any) -> bool:
    return isinstance(arg, torch.fx.Node) and isinstance(arg.meta.get("val"), Tensor)


def _is_size(arg: Any) -> bool:
    return isinstance(arg, torch.fx.Node) and not isinstance(arg.meta.get("val"), (Tensor, list, tuple))


def _sizes_in(tree: Any) -> list[Any]:
    """Return the symbolic sizes among arguments."""
    if isinstance(tree, (list, tuple)):
        return [each for item in tree for each in _sizes_in(item)]
    return [tree] if _is_size(tree) else []


_DESCRIBED: dict[str, Describe] = dict(INDEXED)


def _of(*names: str) -> Callable[[Describe], Describe]:
    def declare(run: Describe) -> Describe:
        _DESCRIBED.update(dict.fromkeys(names, run))
        return run

    return declare


def _dims(dims: Any, ndim: int) -> tuple[int, ...]:
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return tuple(range(ndim))
    return tuple(dim % max(ndim, 1) for dim in ([dims] if isinstance(dims, int) else dims) if ndim)


@_of(*_REDUCED, *_WHOLE_REDUCED)
def _reduction(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del index
    ndim = len(shapes[0])
    position = 2 if name in {"linalg_vector_norm", "kthvalue"} else 1
    dims = kwargs.get("dim", args[position] if len(args) > position else -1 if name in {"kthvalue", "mode"} else None)
    if len(operands) > 1:
        raise LookupError("not a reduction")
    reduced = _dims(dims, ndim)
    keepdim = len(shape) == ndim and ndim > 0
    labels = tuple(range(ndim))
    out = tuple(None if dim in reduced else dim for dim in labels) if keepdim else tuple(
        dim for dim in labels if dim not in reduced
    )  # fmt: skip
    if len(out) != len(shape):
        raise LookupError("dims that were not understood")
    reduce = _REDUCED.get(name, "")
    return Primitive(
        (labels,), out, whole=frozenset() if reduce else frozenset(reduced), reduce=reduce,
        joint=(0,) if name == "sum" and _sums(operands[0], kwargs) else (), increasing=name in {"amax", "amin"},
    )  # fmt: skip


def _sums(x: Tensor, kwargs: Any) -> bool:
    """Whether sums of ``x`` are linear in ``x``: neither are results rounded to integers, nor integers converted."""
    dtypes = {x.dtype, kwargs.get("dtype") or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)}
    return dtypes == {torch.int64} or all(each.is_floating_point or each.is_complex for each in dtypes)


@_of("expand", "unsqueeze", "squeeze", "permute", "t", "transpose", "select", "diagonal")
def _move(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del kwargs, operands, index
    source = shapes[0]
    labels = tuple(range(len(source)))
    whole: frozenset[int] = frozenset()
    new = len(source)
    if name == "expand":
        first = len(shape) - len(source)
        inputs = tuple(dim if source[dim] == shape[first + dim] else None for dim in labels)
        out: Labels = (
            *range(new, new + first),
            *(dim if dim is not None else new + first + at for at, dim in enumerate(inputs)),
        )
        copies = frozenset(label for label in out if label is not None and label >= new)
        return Primitive((inputs,), out, copies, joint=(0,), increasing=True, moves=True)
    if name == "unsqueeze":
        at = args[1] % (len(source) + 1)
        out = (*labels[:at], new, *labels[at:])
        return Primitive((labels,), out, frozenset({new}), joint=(0,), increasing=True, moves=True)
    if name == "squeeze":
        dropped = _dims(args[1] if len(args) > 1 else None, len(source))
        out = tuple(dim for dim in labels if not (dim in dropped and source[dim] == Size(1)))
    elif name == "permute":
        out = tuple(dim % len(source) for dim in args[1])
    elif name == "t":
        out = labels[::-1]
    elif name == "transpose":
        order = list(labels)
        first, second = args[1] % len(source), args[2] % len(source)
        order[first], order[second] = order[second], order[first]
        out = tuple(order)
    elif name == "select":
        whole = frozenset({args[1] % len(source)})
        out = tuple(dim for dim in labels if dim not in whole)
    else:
        first, second = (dim % len(source) for dim in (*args[2:4], *(0, 1)[max(len(args) - 2, 0) :]))
        whole = frozenset({first, second})
        out = (*(dim for dim in labels if dim not in whole), new)
        whole |= {new}
    if len(out) != len(shape):
        raise LookupError("dims that were not understood")
    return Primitive((labels,), out, whole=whole, joint=(0,), increasing=True, moves=True)


def _along(shapes: Any, shape: Any, changed: Sequence[int], **facts: Any) -> Primitive:
    """Return the description of a function along dims ``changed``; all other dims are independent."""
    labels = tuple(range(len(shape)))
    if any(len(each) != len(shape) for each in shapes):
        raise LookupError("operands of other dims")
    if any(each[dim] != shape[dim] for each in shapes for dim in labels if dim not in changed):
        raise LookupError("operands of other sizes")
    return Primitive(tuple(labels for _ in shapes), labels, whole=frozenset(changed), **facts)


@_of("cat", "split", "split_with_sizes", "slice", "flip", "roll", "constant_pad_nd")
def _moved(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del index
    ndim = len(shape)
    moves: dict[str, Any] = {"joint": tuple(range(len(operands))), "increasing": True, "moves": True}
    if name == "constant_pad_nd":
        pads = args[1]
        dims: Sequence[int] = [ndim - 1 - pair for pair in range(len(pads) // 2) if any(pads[2 * pair : 2 * pair + 2])]
        moves = {"joint": (0,)} if argument(args, kwargs, 2, "value", 0) == 0 else {}
    elif name == "flip":
        dims = _dims(args[1], ndim)
    else:
        position, default = {"cat": (1, 0), "slice": (1, 0), "roll": (2, None)}.get(name, (2, 0))
        dims = _dims(argument(args, kwargs, position, "dim", default), ndim)
    if name == "slice":
        dims = [dim for dim in dims if shapes[0][dim] != shape[dim]]
        moves["values"] = tuple(map(size_of, filter(_is_size, args))) if dims else ()
    return _along(shapes, shape, dims, **moves)


@_of("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "topk")
def _one_dim(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del index
    dim = argument(args, kwargs, 2 if name == "topk" else 1, "dim", -1)
    linear = name == "cumsum" and _sums(operands[0], kwargs)
    return _along(shapes, shape, _dims(dim, len(shape)), joint=(0,) if linear else ())


@_of("slice_backward", "select_backward")
def _put_back(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del kwargs, operands, index
    dim, labels = args[2] % len(shape), tuple(range(len(shape)))
    inputs = labels if name == "slice_backward" else tuple(label for label in labels if label != dim)
    changed = name == "select_backward" or shapes[0][dim] != shape[dim]
    return Primitive((inputs,), labels, whole=frozenset({dim} if changed else ()), joint=(0,))


@_of("view_as_real", "view_as_complex", "broadcast_in_dim")
def _pairs(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del kwargs, operands, index
    labels = tuple(range(len(shapes[0])))
    if name == "broadcast_in_dim":
        placed = dict(zip(args[2], labels, strict=True))
        inputs = tuple(dim if shapes[0][dim] == shape[at] else None for at, dim in placed.items())
        new = len(labels)
        out = tuple(
            new + at if at not in placed or inputs[placed[at]] is None else placed[at] for at in range(len(shape))
        )
        copies = frozenset(label for label in out if label >= new)
        return Primitive((inputs,), out, copies, joint=(0,), increasing=True, moves=True)
    if name == "view_as_real":
        return Primitive((labels,), (*labels, len(labels)), whole=frozenset({len(labels)}), joint=(0,))
    return Primitive((labels,), labels[:-1], whole=frozenset({len(labels) - 1}), joint=(0,))


@_of("unfold", "unfold_backward")
def _windows(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del kwargs, operands, index
    few = min(shapes[0], shape, key=len)
    dim, labels = args[1 if name == "unfold" else 2] % len(few), tuple(range(len(few)))
    own = tuple(label if label != dim else 100 for label in labels)
    parts = (*labels, 101)
    whole = frozenset({dim, 100, 101})
    if name == "unfold":
        return Primitive((own,), parts, whole=whole, joint=(0,), increasing=True, moves=True)
    return Primitive((parts,), own, whole=whole, joint=(0,))


@_of("unbind", "stack")
def _pieces(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    """Describe ``unbind`` and ``stack``: each slice is at one index of a dim, and lacks this dim."""
    del operands, index
    labels = tuple(range(max(len(shapes[0]), len(shape))))
    dim = argument(args, kwargs, 1, "dim", 0) % len(labels)
    rest, whole = tuple(label for label in labels if label != dim), frozenset({dim})
    if name == "unbind":
        return Primitive((labels,), rest, whole=whole, joint=(0,), increasing=True, moves=True)
    if any(each != shapes[0] for each in shapes):
        raise LookupError("operands of other sizes")
    everything = tuple(range(len(shapes)))
    return Primitive((rest,) * len(shapes), labels, whole=whole, joint=everything, increasing=True, moves=True)


@_of("mm", "bmm")
def _product(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del args, kwargs, operands, shapes, shape, index
    batch = (3,) if name == "bmm" else ()
    return Primitive(((*batch, 0, 2), (*batch, 2, 1)), (*batch, 0, 1), reduce="sum", each=(0, 1))


@_of(*_TRANSFORMED)
def _transformed(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del name, kwargs, operands, index
    return _along(shapes, shape, _dims(args[1], len(shape)), joint=(0,))


# -- functions of the last dims ----------------------------------------------------------------------------------------


@_of(*_BATCHED, *_LEADING, *_RESHAPING)
def _inner(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    """Describe a function of the last dims of its operands: matrices, images or sequences."""
    del args, kwargs, operands
    own = _RESHAPING.get(name, 2 if name in _BATCHED or "2d" in name else 3 if "3d" in name else 1)
    batch = len(shapes[0]) - own
    if batch < 0 or any(each[:batch] != shapes[0][:batch] for each in (*shapes, shape)):
        msg = "operands of other dims"
        raise LookupError(msg)
    inputs = tuple(
        (*range(batch), *(100 * (at + 1) + dim for dim in range(len(each) - batch))) for at, each in enumerate(shapes)
    )
    out = (*range(batch), *(10000 + dim for dim in range(len(shape) - batch)))
    whole = frozenset(label for labels in (*inputs, out) for label in labels if label >= batch)
    linear = _LINEAR_INNER.get(name) if index == 0 else None
    does = Primitive(inputs, out, whole=whole, joint=() if linear is None else (linear,))
    return replace(does, increasing=True, moves=True) if name in {"tril", "triu"} else does


@_of("_cdist_forward", "_cdist_backward")
def _distances(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    """Describe the distance of each row of one operand from each row of another, and the gradient of the first one."""
    del args, kwargs, operands, index
    batch = tuple(range(len(shape) - 2))
    if any(each[:-2] != shape[:-2] for each in shapes):
        raise LookupError("operands of other dims")
    first, second, pairs = (*batch, 100, 102), (*batch, 101, 102), (*batch, 100, 101)
    if name == "_cdist_forward":
        return Primitive((first, second), pairs, whole=frozenset({102}))
    return Primitive((pairs, first, second, pairs), first, whole=frozenset({102}), reduce="sum", each=(0,))


# -- convolution and sampling ------------------------------------------------------------------------------------------


@_of("convolution", "convolution_backward")
def _convolved(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    """Describe a convolution ``nc…, oc… -> no…``, which is bilinear, and its gradients.

    If channels are grouped, they are ``whole``.
    """
    del kwargs, operands, shape
    transposed, groups = (args[6], args[8]) if name == "convolution" else (args[7], args[9])
    ndim = len(shapes[0])
    inner = [tuple(range(100 * at, 100 * at + ndim - 2)) for at in (1, 2, 3)]
    x, y = (0, 2, *inner[0]), (0, 1, *inner[2])
    weight = (2, 1, *inner[1]) if transposed else (1, 2, *inner[1])
    labels = frozenset(label for each in inner for label in each)
    if groups != 1:
        weight, labels = (3, 4, *inner[1]), labels | {1, 2, 3, 4}
    inputs, out = {
        ("convolution", 0): ((x, weight), y),
        ("convolution_backward", 0): ((y, weight), x),
        ("convolution_backward", 1): ((y, x), weight),
        ("convolution_backward", 2): ((y,), (1,)),
    }[name, index]
    return Primitive(inputs, out, whole=labels, reduce="sum", each=tuple(range(len(inputs))))


@_of("grid_sampler_2d", "grid_sampler_3d", "grid_sampler_2d_backward", "grid_sampler_3d_backward")
def _sampled(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    """Describe sampling of an image at points, ``nc[…], np[2] -> ncp``, linear in the image, and its gradients."""
    del args, kwargs, operands, shape
    count = len(shapes[0]) - 2
    inner, points = tuple(range(100, 100 + count)), tuple(range(2, 2 + count))
    image, grid, out = (0, 1, *inner), (0, *points, 200), (0, 1, *points)
    whole = frozenset((*inner, 200))
    if not name.endswith("_backward"):
        return Primitive((image, grid), out, whole=whole, each=(0,))
    if index == 0:
        return Primitive((out, grid), image, whole=whole, reduce="sum", each=(0,))
    return Primitive((out, image, grid), grid, whole=whole, reduce="sum", each=(0, 1))


# -- decompositions ----------------------------------------------------------------------------------------------------


def _with_bias(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    if bias is None:
        return NotImplemented
    return torch.ops.aten.convolution(x, weight, None, *rest) + bias.view(-1, *(1,) * (x.ndim - 2))


def _in_time(x: Tensor, weight: Tensor, bias: Tensor, pad: int = 0) -> Tensor:
    channels = torch.ops.aten.convolution(
        x.permute(1, 2, 0), weight.permute(2, 1, 0), None, [1], [pad], [1], False, [0], 1
    )
    return channels.permute(2, 0, 1).contiguous() + bias


def _summed_products(x: Tensor, first: Tensor, second: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return x * beta + first.bmm(second).sum(0) * alpha


def _three_factors(first: Tensor, second: Tensor, third: Tensor, *dims: Sequence[int], unroll_dim: int = 1) -> Tensor:
    del unroll_dim
    *expanded, summed = dims[:4]
    factors = []
    for factor, new in zip((first, second, third), expanded, strict=True):
        wide = factor
        for dim in new:
            wide = wide.unsqueeze(dim)
        factors.append(wide)
    product = factors[0] * factors[1] * factors[2]
    return product.sum(list(summed)) if summed else product


REWRITTEN: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.convolution.default: _with_bias,
    torch.ops.aten.conv_tbc.default: _in_time,
    torch.ops.aten.addbmm.default: _summed_products,
    trilinear.default: _three_factors,
}
"""Decompositions of functions for which PyTorch has none."""
