"""What functions of ATen do, as primitives.

The table is trusted, as the laws are: ``tests_unit/verify/prove/test_primitives.py`` compares it with the functions on
small tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.verify.frameworks.contract.primitives import Constant, Primitive, Reshape
from hyper_parallel.verify.frameworks.contract.sizes import Size

__all__ = ["SIZED", "broadcast", "describe", "is_kept", "name_of", "shape_of"]

Labels = tuple[int | None, ...]

# Their numbers are sizes of the result, which are compared as such.
SIZED = ("expand", "broadcast_in_dim", "slice_backward", "select_backward", "embedding_dense_backward")
_ELEMENTWISE = ("_to_copy", "add", "sub", "mul", "div", "neg", "exp", "where", "convert_element_type")
_JOINT = ("add", "sub", "rsub", "neg", "real", "imag", "view_as_real", "view_as_complex", "deg2rad", "rad2deg")
_COPIES = ("clone", "alias", "detach", "lift_fresh_copy", "lift_fresh", "contiguous", "view_of", "positive")
_CONSTANTS = ("full", "empty", "zeros", "ones", "full_like", "empty_like", "zeros_like", "ones_like", "new_full",
              "new_empty", "new_zeros", "new_ones", "empty_strided", "new_empty_strided", "scalar_tensor",
              "empty_permuted", "empty_memory_format")  # fmt: skip
_ZEROS = ("zeros", "zeros_like", "new_zeros")
_INCREASING = ("relu", "floor", "ceil", "trunc", "round", "sign", "exp", "sigmoid", "tanh", "sqrt", "log", "erf",
               "fill", "copy")  # fmt: skip
_REDUCED = {"sum": "sum", "amax": "max", "amin": "min", "any": "any", "all": "all", "prod": "prod", "nansum": "sum"}
# Reduced dims stay whole: the result is not a sum, maximum or minimum of elements.
_WHOLE_REDUCED = ("argmax", "argmin", "var", "std", "var_mean", "std_mean", "median", "nanmedian", "mode", "kthvalue",
                  "logsumexp", "linalg_vector_norm", "max", "min", "aminmax", "hash_tensor")  # fmt: skip
# Along one dim, the argument after the operand; all other dims are independent.
_ALONG = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "flip", "roll", "slice")
# Functions of matrices, of the last dims of every operand; dims before them are independent.
_BATCHED = ("linalg_cholesky_ex", "linalg_inv_ex", "linalg_qr", "_linalg_svd", "_linalg_eigh", "linalg_lu_factor_ex",
            "linalg_lu", "_linalg_det", "_linalg_slogdet", "linalg_eig", "linalg_matrix_exp", "tril", "triu",
            "linalg_householder_product", "cholesky_inverse", "geqrf", "lu_unpack", "linalg_lu_solve",
            "_linalg_solve_ex", "linalg_ldl_solve", "linalg_ldl_factor_ex", "cholesky_solve", "triangular_solve",
            "linalg_solve_triangular", "ormqr", "_cdist_forward", "_pdist_forward")  # fmt: skip
# Functions of images or sequences: the last one, two or three dims are whole.
_LEADING = ("avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices", "_adaptive_avg_pool2d",
            "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d", "upsample_bilinear2d",
            "upsample_nearest2d", "upsample_nearest1d", "upsample_linear1d", "upsample_bicubic2d",
            "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d",
            "avg_pool2d_backward", "avg_pool3d_backward", "max_pool2d_with_indices_backward",
            "max_pool3d_with_indices_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward",
            "adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward")  # fmt: skip
_LINEAR_INNER = ("tril", "triu", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
                 *(name for name in _LEADING if name.endswith("_backward")))  # fmt: skip
# Decomposed although they are elementwise, because their parts tell where they are linear.
_TAKEN_APART = ("lerp", "addcmul", "addcdiv", "threshold_backward", "rsub", "_conj", "masked_fill", "tanh_backward",
                "sigmoid_backward", "gelu_backward", "silu_backward", "elu_backward", "leaky_relu_backward",
                "hardtanh_backward", "softplus_backward", "logit_backward", "hardswish_backward", "xlogy",
                "hardsigmoid_backward", "native_dropout_backward", "softshrink_backward",
                "hardshrink_backward", "mish_backward", "log_sigmoid_backward", "glu", "glu_backward",
                "masked_scale", "_prelu_kernel_backward")  # fmt: skip
_KEPT = (*_CONSTANTS, *_COPIES, *_REDUCED, *_WHOLE_REDUCED, *_ALONG, *_BATCHED, *_LEADING, "view", "_unsafe_view",
         "reshape", "expand", "permute", "t", "transpose", "squeeze", "unsqueeze", "select", "cat", "gather", "mm",
         "bmm", "embedding", "index_select", "constant_pad_nd", "slice_backward", "select_backward", "split",
         "split_with_sizes", "unbind", "diagonal", "convolution", "topk", "_to_copy", "scatter_add", "index_add",
         "scatter", "where", "embedding_dense_backward", "index", "view_as_real",
         "view_as_complex", "arange", "iota", "unfold", "unfold_backward")  # fmt: skip


def is_kept(function: Any) -> bool:
    """Whether a function is described here, so that no decomposition of it is taken."""
    name = name_of(function)
    if name in {"softmax", "mean", "addmm"}:
        return False
    if name == "logsumexp":
        return False
    return name in _KEPT or (torch.Tag.pointwise in getattr(function, "tags", ()) and name not in _TAKEN_APART)


def name_of(function: Any) -> str:
    """Return the name of a function without its overload."""
    schema = getattr(function, "_schema", None)
    return schema.name.partition("::")[2] if schema is not None else getattr(function, "__name__", str(function))


def shape_of(value: Any) -> tuple[Size, ...]:
    """Return the sizes of a tensor; none of anything else."""
    return tuple(map(size_of, value.shape)) if isinstance(value, Tensor) else ()


def size_of(value: Any) -> Size:
    if isinstance(value, torch.fx.Node):
        value = value.meta["val"]
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return _of_expression(value.node.expr)
    return Size(int(value))


def _of_expression(expression: Any) -> Size:
    if type(expression).__name__ == "ToFloat":
        expression = expression.args[0]
    number, rest = expression.as_coeff_Mul()
    powers = rest.as_powers_dict()
    if number.is_Integer and all((base.is_Symbol and power.is_Integer and power > 0) or base == 1
                                 for base, power in powers.items()):  # fmt: skip
        names = [str(base) for base, power in powers.items() if base != 1 for _ in range(int(power))]
        return Size(int(number), tuple(sorted(names)))
    return Size(0, tuple(sorted(map(str, expression.free_symbols))), str(expression))


# -- functions as primitives -------------------------------------------------------------------------------------------


def describe(function: Any, args: Any, kwargs: Any, operands: Sequence[Tensor], out: Tensor, index: int = 0) -> Any:
    """Return what ``function`` does, of its result number ``index``.

    Args:
        function: an operator of ATen.
        args: its arguments; tensors and symbolic sizes as nodes of the graph.
        kwargs: likewise.
        operands: the tensors among them.
        out: the result.
        index: its number.

    Raises:
        LookupError: it has no description.
    """
    name = name_of(function)
    shapes, shape = [shape_of(operand) for operand in operands], shape_of(out)
    if name in _CONSTANTS:
        fill = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}.get(name)
        value = None if fill is None else args[fill]
        if isinstance(value, torch.fx.Node):
            raise LookupError("a number that is computed")
        return Constant(name in _ZEROS or (fill is not None and value == 0), "" if fill is None else str(value))
    if name in _COPIES or name in {"view", "_unsafe_view", "reshape"}:
        if out.dtype != operands[0].dtype:
            raise LookupError("the bytes of numbers as numbers of another dtype")
        return Reshape()
    if name in {"iota", "arange", "eye"}:
        return Primitive((), tuple(range(len(shape))), whole=frozenset(range(len(shape))))
    described = _DESCRIBED.get(name)
    if described is not None:
        return described(name, args, kwargs, operands, shapes, shape, index)
    if torch.Tag.pointwise in function.tags or name in _ELEMENTWISE:
        return _elementwise(name, args, kwargs, operands, shapes, shape)
    raise LookupError("it has no description")


def broadcast(shape: Sequence[Size], out: Sequence[Size]) -> Labels:
    """Return the labels of an operand that broadcasts to ``out``, whose dims are numbered."""
    first = len(out) - len(shape)
    labels: list[int | None] = []
    for dim, size in enumerate(shape):
        if size == out[first + dim]:
            labels.append(first + dim)
        elif size == Size(1):
            labels.append(None)
        else:
            raise LookupError(f"size {size} where {out[first + dim]} is")
    return tuple(labels)


def _elementwise(
    name: str, args: Any, kwargs: Any, operands: Sequence[Tensor], shapes: Sequence[Any], shape: Sequence[Size]
) -> Primitive:
    inputs = tuple(broadcast(each, shape) for each in shapes)
    labels = tuple(range(len(shape)))
    copies = frozenset(label for label in labels if not any(label in dims for dims in inputs))
    symbolic = [arg for arg in [*args, *kwargs.values()] if _is_size(arg)]
    numbers = [arg for arg in args if isinstance(arg, (int, float, complex)) and not isinstance(arg, bool)]
    plain = Primitive(inputs, labels, copies)
    everything = tuple(range(len(operands)))
    if name == "_to_copy":
        source, target = operands[0].dtype, kwargs.get("dtype", operands[0].dtype)
        floats = source.is_floating_point and target.is_floating_point
        # Not every number is: -1 is true, and 0 is not; large integers wrap in a narrow dtype.
        increasing = not source.is_complex and (target.is_floating_point or source in {torch.bool, target})
        return replace(plain, joint=(0,) if floats else (), increasing=increasing)
    if name == "where":
        return replace(plain, joint=everything[1:])
    if name == "mul":
        return replace(plain, each=everything, times=tuple(map(size_of, symbolic)))
    if name == "div" and _is_node(args[0]) and kwargs.get("rounding_mode") is None:
        return replace(plain, each=(0,), per=tuple(map(size_of, symbolic)))
    if name in _JOINT and not numbers and not symbolic:
        return replace(plain, joint=everything)
    return replace(plain, values=tuple(map(size_of, symbolic)), increasing=name in _INCREASING and len(operands) == 1)


def _is_node(arg: Any) -> bool:
    return isinstance(arg, torch.fx.Node) and isinstance(arg.meta.get("val"), Tensor)


def _is_size(arg: Any) -> bool:
    return isinstance(arg, torch.fx.Node) and not isinstance(arg.meta.get("val"), (Tensor, list, tuple))


_Describe = Callable[[str, Any, Any, Sequence[Tensor], Sequence[Any], Sequence[Size], int], Any]
_DESCRIBED: dict[str, _Describe] = {}


def _of(*names: str) -> Callable[[_Describe], _Describe]:
    def declare(run: _Describe) -> _Describe:
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
    floats = operands[0].dtype.is_floating_point or operands[0].dtype.is_complex
    return Primitive(
        (labels,), out, whole=frozenset() if reduce else frozenset(reduced), reduce=reduce,
        joint=(0,) if name == "sum" and (floats or not shapes[0]) else (), increasing=name in {"amax", "amin"},
    )  # fmt: skip


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
    """Return a function of operands of one shape, along dims ``changed``; all other dims are independent."""
    labels = tuple(range(len(shape)))
    if any(len(each) != len(shape) for each in shapes):
        raise LookupError("operands of other dims")
    if any(each[dim] != shape[dim] for each in shapes for dim in labels if dim not in changed):
        raise LookupError("operands of other sizes")
    return Primitive(tuple(labels for _ in shapes), labels, whole=frozenset(changed), **facts)


def _argument(args: Any, kwargs: Any, position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


@_of("cat", "split", "split_with_sizes", "slice", "flip", "roll", "constant_pad_nd")
def _moved(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del index
    ndim = len(shape)
    moves: dict[str, Any] = {"joint": tuple(range(len(operands))), "increasing": True, "moves": True}
    if name == "constant_pad_nd":
        pads = args[1]
        dims: Sequence[int] = [ndim - 1 - pair for pair in range(len(pads) // 2) if any(pads[2 * pair : 2 * pair + 2])]
        moves = {"joint": (0,)} if _argument(args, kwargs, 2, "value", 0) == 0 else {}
    elif name == "flip":
        dims = _dims(args[1], ndim)
    else:
        position, default = {"cat": (1, 0), "slice": (1, 0), "roll": (2, None)}.get(name, (2, 0))
        dims = _dims(_argument(args, kwargs, position, "dim", default), ndim)
    if name == "slice":
        dims = [dim for dim in dims if shapes[0][dim] != shape[dim]]
    return _along(shapes, shape, dims, **moves)


@_of("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "topk")
def _one_dim(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del index
    dim = _argument(args, kwargs, 2 if name == "topk" else 1, "dim", -1)
    floats = operands[0].is_floating_point() or operands[0].is_complex()
    return _along(shapes, shape, _dims(dim, len(shape)), joint=(0,) if name == "cumsum" and floats else ())


@_of("slice_backward", "select_backward")
def _put_back(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del kwargs, operands, shapes, index
    dim, labels = args[2] % len(shape), tuple(range(len(shape)))
    inputs = labels if name == "slice_backward" else tuple(label for label in labels if label != dim)
    return Primitive((inputs,), labels, whole=frozenset({dim}), joint=(0,))


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


@_of("unbind")
def _unbound(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del name, kwargs, operands, shape, index
    labels = tuple(range(len(shapes[0])))
    dim = (args[1] if len(args) > 1 else 0) % len(labels)
    return Primitive((labels,), tuple(label for label in labels if label != dim), whole=frozenset({dim}), joint=(0,),
                     increasing=True, moves=True)  # fmt: skip


@_of("mm", "bmm")
def _product(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del args, kwargs, operands, shapes, shape, index
    batch = (3,) if name == "bmm" else ()
    return Primitive(((*batch, 0, 2), (*batch, 2, 1)), (*batch, 0, 1), reduce="sum", each=(0, 1))


@_of("embedding", "index_select")
def _looked_up(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del kwargs, operands, index
    dim = 0 if name == "embedding" else args[1] % len(shapes[0])
    ids = tuple(100 + at for at in range(len(shapes[1])))
    source = tuple(range(len(shapes[0])))
    out = (*source[:dim], *ids, *source[dim + 1 :])
    if len(out) != len(shape):
        raise LookupError("dims that were not understood")
    return Primitive((source, ids), out, whole=frozenset({dim}), each=(0,))


@_of("embedding_dense_backward")
def _summed_rows(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del name, kwargs, operands, shape, index
    if args[4]:
        raise LookupError("gradients divided by counts")
    ids = tuple(100 + at for at in range(len(shapes[1])))
    return Primitive(((*ids, 1), ids), (0, 1), whole=frozenset({0}), reduce="sum", each=(0,))


@_of("gather")
def _gathered(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del name, kwargs, operands, index
    dim = args[1] % len(shape)
    own = dim + 100
    source = tuple(label if label != dim else own for label in range(len(shape)))
    if any(shapes[0][at] != shape[at] for at in range(len(shape)) if at != dim):
        raise LookupError("an index of fewer rows")
    return Primitive((source, tuple(range(len(shape)))), tuple(range(len(shape))), whole=frozenset({own}), each=(0,))


@_of("scatter_add", "scatter", "index_add")
def _scattered(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    del index
    if name == "index_add" or len(operands) != 3 or kwargs:
        msg = "it has no description"
        raise LookupError(msg)
    dim = args[1] % len(shape)
    if any(each[at] != shape[at] for each in shapes[1:] for at in range(len(shape)) if at != dim):
        raise LookupError("an index of fewer rows")
    source = tuple(label if label != dim else dim + 100 for label in range(len(shape)))
    labels = tuple(range(len(shape)))
    if name == "scatter":
        return Primitive((labels, source, source), labels, whole=frozenset({dim, dim + 100}), joint=(0, 2))
    return Primitive((labels, source, source), labels, whole=frozenset({dim}), reduce="sum", joint=(0, 2))


@_of(*_BATCHED, *_LEADING)
def _inner(name: str, args: Any, kwargs: Any, operands: Any, shapes: Any, shape: Any, index: int) -> Primitive:
    """Describe a function of the last dims of its operands: matrices, images, sequences."""
    del args, kwargs, operands, index
    own = 2 if name in _BATCHED or "2d" in name else 3 if "3d" in name else 1
    batch = len(shapes[0]) - own
    if batch < 0 or any(each[:batch] != shapes[0][:batch] for each in (*shapes, shape)):
        msg = "operands of other dims"
        raise LookupError(msg)
    inputs = tuple(
        (*range(batch), *(100 * (at + 1) + dim for dim in range(len(each) - batch))) for at, each in enumerate(shapes)
    )
    out = (*range(batch), *(10000 + dim for dim in range(len(shape) - batch)))
    whole = frozenset(label for labels in (*inputs, out) for label in labels if label >= batch)
    return Primitive(inputs, out, whole=whole, joint=(0,) if name in _LINEAR_INNER else ())
