"""Implementation of the fuzz language for MindSpore: public calls and cells by name, their source, differentiation."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import mindspore
import numpy as np
from mindspore import Tensor, mint, nn, ops

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.entry import Binder
from hyper_parallel.core.shard.sample import DType, Sample, between, indices, real, size
from hyper_parallel.platform.mindspore.ops.kernels import copied as copied_plain, requires_grad
from hyper_parallel.platform.mindspore.ops.registry import KEYWORDS, Spelling, handlers
from hyper_parallel.platform.mindspore.versions import pynative_executor
from hyper_parallel.verify.frameworks.contract.call_source import call_source, value_source
from hyper_parallel.verify.frameworks.mindspore.unsound import LEFT_OUT, unsound

__all__ = [
    "ASSERTION",
    "COPY",
    "DTYPES",
    "FUNCTIONS",
    "HEAD",
    "LEFT_OUT",
    "MODES",
    "body_source",
    "call_named",
    "copied",
    "detached_source",
    "forms",
    "gradients",
    "leaf",
    "leaf_source",
    "literal",
    "may_have_gradient",
    "modules",
    "moved",
    "settle",
    "shares_memory",
    "source",
    "state",
    "unsound",
    "values_of",
]

MODES = ("forward", "backward", "grad")
"""How the results of a program are differentiated: not at all, by ``GradOperation`` with cotangents (seeds), or by
``value_and_grad`` of the sum of outputs times seeds. Nothing is differentiated twice: MindSpore 2.10 computes some
second derivatives wrongly on plain tensors, so a single device cannot be the reference."""

DTYPES = ("float64", "float64", "float32", "float32", "float16")
"""The dtypes of programs, without bfloat16, which few CPU kernels support; repeated ones are chosen more often."""

FUNCTIONS = {"cat": "mint.cat", "stack": "ops.stack", "maximum": "mint.maximum"}
"""Functions that idioms (fixed sequences of calls in random programs) call."""

HEAD = "import mindspore, numpy, operator; from mindspore import Tensor, mint, nn, ops"
"""The imports of a program."""

COPY = "(lambda y: mint.logical_or(y, y) if y.dtype == mindspore.bool_ else y * 1)({})"
"""Source of a copy of a tensor."""

ASSERTION = (
    "assert (y.dtype, y.shape) == (z.dtype, z.shape) and "
    "numpy.allclose(y.asnumpy(), z.asnumpy(), {bound}, {bound}, equal_nan=True), (y, z)"
)
"""Source that compares a DTensor's values ``y`` with those of a plain tensor ``z``."""

_HOMES = {"mint": mint, "mint.nn.functional": mint.nn.functional, "ops": ops, "Tensor": Tensor}

_CELLS: dict[str, tuple[int, int, tuple[str, ...], tuple[Sample, ...]]] = {
    # name: arguments of the constructor, inputs, names of the parameters, and samples of all three in that order
    "nn.Dense": (2, 1, ("weight", "bias"), (
        Sample((size("b"), size("c"), real("ab"), real("cb"), real("c"))),
        Sample((size("c"), size("d"), real("abc"), real("dc"), real("d"))),
    )),
    "mint.nn.Linear": (2, 1, ("weight", "bias"), (
        Sample((size("b"), size("c"), real("ab"), real("cb"), real("c"))),
        Sample((size("c"), size("d"), real("abc"), real("dc"), real("d"))),
    )),
    "nn.LayerNorm": (1, 1, ("gamma", "beta"), (
        Sample(([size("b")], real("ab"), real("b"), real("b"))),
        Sample(([size("c")], real("abc"), real("c"), real("c"))),
    )),
    "nn.GroupNorm": (2, 1, ("gamma", "beta"), (Sample((1, size("b"), real("abcd"), real("b"), real("b"))),)),
    "nn.PReLU": (1, 1, ("w",), (Sample((size("b"), real("ab"), between(0.1, 0.9, "b"))),)),
    "nn.Embedding": (2, 1, ("embedding_table",), (
        Sample((size("a"), size("b"), indices("a", "cd"), real("ab"))),
        Sample((size("a"), size("b"), indices("a", "c"), real("ab"))),
    )),
    "nn.Conv1d": (3, 1, ("weight",), (Sample((size("b"), size("c"), 1, real("abd"), real("cb11"))),)),
    "nn.Conv2d": (3, 1, ("weight",), (Sample((size("b"), size("c"), 2, real("ab45"), real("cb22"))),)),
    "nn.Flatten": (0, 1, (), (Sample((real("abc"),)),)),
    "nn.GELU": (0, 1, (), (Sample((real("ab"),)), Sample((real("abc"),)))),
    "nn.SiLU": (0, 1, (), (Sample((real("ab"),)),)),
    "nn.ReLU": (0, 1, (), (Sample((real("ab"),)), Sample((real("abc"),)))),
    "nn.Softmax": (1, 1, (), (Sample((-1, real("ab"))), Sample((0, real("abc"))))),
    "nn.MSELoss": (0, 2, (), (Sample((real("ab"), real("ab"))), Sample((real("abc"), real("abc"))))),
    "nn.L1Loss": (0, 2, (), (Sample((real("ab"), real("ab"))),)),
}  # fmt: skip


def modules() -> dict[str, tuple[Sample, ...]]:
    """Return the samples of cells by name of the call: the constructor's arguments, inputs and parameters, in order."""
    return {name: samples for name, (_, _, _, samples) in _CELLS.items()}


# -- calls -------------------------------------------------------------------------------------------------------------


def forms(
    op: str, arguments: Mapping[str, Any], canonical: Binder, *, writes: bool
) -> list[tuple[str, Callable[[Mapping[str, Any]], tuple[list[Any], dict[str, Any]]]]]:
    """Return the public calls of a canonical operator.

    The signatures of MindSpore's functions are incomplete, so several ways to pass the arguments are tried.

    Args:
        op: canonical name.
        arguments: arguments of the call by canonical name, including defaults.
        canonical: the operator's parameters.
        writes: whether to return calls that write their first operand.

    Returns:
        pairs of a name for :func:`call_named`, and a function that maps arguments by canonical name to the call's.
    """
    if writes:
        return []  # on the CPU, MindSpore has no kernel for in-place calls, or leaves the tensor unchanged
    ways = _ways(arguments, canonical)
    return [
        (f"{home}.{name}", way)
        for home, where in _HOMES.items()
        for name in _public_names(op)
        if callable(getattr(where, name, None)) and not isinstance(getattr(where, name), type)
        for way in ways
    ]


@cache
def _public_names(op: str) -> tuple[str, ...]:
    """Return possible MindSpore names of an operator: the canonical name, or the names under which it is dispatched."""
    names = [op]
    for name, handler in handlers().items():
        if isinstance(handler, Spelling) and handler.entry.rule.op == op:
            plain = re.sub(r"(Ext|View|Tensor|Scalar)*$", "", name.removeprefix("Tensor."))
            names.append(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plain).lower())
    return tuple(dict.fromkeys(names))


def _ways(
    arguments: Mapping[str, Any], canonical: Binder
) -> list[Callable[[Mapping[str, Any]], tuple[list[Any], dict[str, Any]]]]:
    """Return ways to pass arguments: options by keyword, under each name that MindSpore may use; or all by position."""
    parameters = canonical.parameters
    starred = canonical.starred
    passed = [name for name, value in arguments.items() if not _is_default(value, parameters[name].default)]
    required = [name for name in passed if parameters[name].default is inspect.Parameter.empty]
    options = [name for name in passed if name not in required]
    theirs: dict[str, list[str]] = {}
    for own, name in KEYWORDS.items():
        theirs.setdefault(name, []).append(own)

    def way(named: Mapping[str, str], *, unpacked: bool) -> Callable[..., tuple[list[Any], dict[str, Any]]]:
        def pass_on(values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
            in_order: list[Any] = []
            for name in passed:
                if name not in named:
                    several = name == starred and unpacked
                    in_order.extend(values[name] if several else [values[name]])
            return in_order, {own: values[name] for name, own in named.items()}

        return pass_on

    spelled = [dict(zip(options, options, strict=True))]
    spelled += [{**spelled[0], name: own} for name in options for own in theirs.get(name, ())]
    named = [*spelled, {}] if options else [{}]
    return [way(names, unpacked=unpacked) for names in named for unpacked in ((True, False) if starred else (False,))]


def _is_default(value: Any, default: Any) -> bool:
    plain = isinstance(value, (int, float, str)) and type(value) is type(default)
    return value is default or (plain and value == default)


@cache
def call_named(name: str) -> Callable[..., Any]:
    """Return a function, method, operator or cell by its name in programs."""
    if name in _CELLS:
        return _cell_call(name)
    home, _, rest = name.rpartition(".")
    return getattr(operator if home == "operator" else _HOMES[home], rest)


def _cell_class(name: str) -> Any:
    home, _, rest = name.rpartition(".")
    return getattr(nn if home == "nn" else mint.nn, rest)


def _cell_call(name: str) -> Callable[..., Any]:
    made, inputs, parameters, _ = _CELLS[name]

    def call(*args: Any) -> Any:
        cell = _cell_class(name)(*args[:made])
        # A cell's parameters cannot be results of other computations, so tensors replace them in the cell's registry.
        cell._params.update(zip(parameters, args[made + inputs :], strict=True))
        return cell.construct(*args[made : made + inputs])

    return call


def settle() -> None:
    """Wait for all calls, because some raise their error only when a result is read."""
    pynative_executor.sync()


# -- source ------------------------------------------------------------------------------------------------------------


def source(name: str, args: Sequence[str], kwargs: Mapping[str, str]) -> str:
    """Return the source of a call, from the sources of its arguments."""
    if name not in _CELLS:
        return call_source(name, args, kwargs)
    made, inputs, parameters, _ = _CELLS[name]
    cell, taken = f"{name}({', '.join(args[:made])})", ", ".join(args[made : made + inputs])
    if not parameters:
        return f"{cell}({taken})"
    named = ", ".join(f"{key}={value}" for key, value in zip(parameters, args[made + inputs :], strict=True))
    return f"(lambda cell: cell._params.update({named}) or cell.construct({taken}))({cell})"


def literal(value: Any) -> str:
    """Return the source of an argument that is not a tensor."""
    if isinstance(value, DType):
        return f"mindspore.{value.name}{'_' if value.name == 'bool' else ''}"
    return value_source(value)


def values_of(array: Any, dtype: str) -> str:
    """Return the source of a tensor's values."""
    numbers = repr(array.tolist()).replace("nan", "numpy.nan").replace("inf", "numpy.inf")
    shaped = f".reshape({tuple(array.shape)})" if 0 in array.shape else ""
    return f"Tensor(numpy.array({numbers}, numpy.{dtype}{'_' if dtype == 'bool' else ''}){shaped})"


def leaf_source(text: str, *, requires_grad: bool) -> str:
    """Return ``text`` unchanged: on MindSpore, the call that differentiates names the leaves."""
    del requires_grad
    return text


def detached_source(text: str) -> str:
    """Return ``text`` unchanged: on MindSpore, a tensor has no gradient to detach."""
    return text


def body_source(
    steps: Sequence[str],
    values: Sequence[str],
    mode: str,
    outs: Sequence[str],
    by: Sequence[str],
    seeds: Sequence[str],
    second: Mapping[str, str],
) -> list[str]:
    """See :class:`~hyper_parallel.verify.fuzz.language.Language`. ``second`` is empty."""
    del second
    kept = ", ".join(values)
    if mode == "forward" or not outs:
        return [*steps, f"return {kept},"]
    leaves = ", ".join(by)
    if mode == "backward":
        result, seed = (outs[0], seeds[0]) if len(outs) == 1 else (f"({', '.join(outs)})", f"({', '.join(seeds)})")
        run = f"ops.GradOperation(get_all=True, sens_param=True)(body)({leaves}, {seed})"
    else:
        result = " + ".join(f"({out} * {seed}).sum()" for out, seed in zip(outs, seeds, strict=True))
        positions = ", ".join(map(str, range(len(by))))
        run = f"mindspore.value_and_grad(body, ({positions},))({leaves})[1]"
    inner = [f"    {line}" for line in (*steps, f"kept.extend([{kept}])", f"return {result}")]
    return ["kept = []", f"def body({leaves}):", *inner, f"return [*{run}, *kept]"]


# -- tensors -----------------------------------------------------------------------------------------------------------


def leaf(tensor: Any, *, requires_grad: bool) -> Any:
    """Return the tensor itself: on MindSpore, the call that differentiates names the leaves."""
    del requires_grad
    return tensor


def copied(tensor: Any) -> Any:
    """Return a copy, plain or distributed, through which gradients flow."""
    return copied_plain(tensor) if not isinstance(tensor, DTensor) else cast("Any", tensor).clone()


def state(tensor: Any) -> Any:
    """Return the values of a plain tensor, because MindSpore's write counter misses some writes."""
    return tensor.asnumpy().tobytes()


def may_have_gradient(tensor: Any) -> bool:
    """Whether a plain tensor is floating-point; on MindSpore every such tensor has a gradient, a constant zeros."""
    return bool(tensor.dtype in (mindspore.float16, mindspore.float32, mindspore.float64))


def shares_memory(tensor: Any, others: Sequence[Any]) -> bool:
    """Whether a plain tensor shares memory with one of ``others``."""
    if tensor.numel() == 0:
        return any(other is tensor for other in others)
    start = tensor.untyped_storage().data_ptr()
    return any(other is tensor or (other.numel() and other.untyped_storage().data_ptr() == start) for other in others)


def moved(tensor: Any, array: Any, gradient: Callable[[Any], Any] | None) -> Any:
    """Return a plain tensor plus ``array``; in backward, the result of ``gradient`` is added to the gradient."""
    changed = tensor + Tensor.from_numpy(np.array(array, order="C")).astype(tensor.dtype)
    if gradient is not None and requires_grad(changed):

        def move(grad: Any) -> Any:
            return grad + Tensor.from_numpy(gradient(grad.asnumpy().astype(np.float64))).astype(grad.dtype)

        changed.register_hook(move)
    return changed


# -- differentiation ---------------------------------------------------------------------------------------------------


def gradients(
    body: Callable[[Mapping[int, Any]], Sequence[Any]],
    leaves: Mapping[int, Any],
    differentiated: Sequence[int],
    mode: str,
    cotangents: Sequence[int],
    second: Sequence[tuple[int, int]],
) -> dict[tuple[str, int], Any]:
    """See :class:`~hyper_parallel.verify.fuzz.language.Language`. ``second`` is empty."""
    del second
    if mode == "forward" or not cotangents:
        body(leaves)
        return {}
    seeds, by = tuple(leaves[number] for number in cotangents), [leaves[number] for number in differentiated]

    def outputs(*inputs: Any) -> tuple[Any, ...]:
        return tuple(body({**leaves, **dict(zip(differentiated, inputs, strict=True))}))

    def weighted(*inputs: Any) -> Any:
        total, *others = [(out * seed).sum() for out, seed in zip(outputs(*inputs), seeds, strict=True)]
        for term in others:
            total = total + term
        return total

    def alone(*inputs: Any) -> Any:
        return outputs(*inputs)[0]

    try:
        if mode == "backward":
            function, seed = (outputs, seeds) if len(seeds) > 1 else (alone, seeds[0])
            grads = ops.GradOperation(get_all=True, sens_param=True)(function)(*by, seed)
        else:
            _, grads = mindspore.value_and_grad(weighted, tuple(range(len(by))))(*by)
    except BaseException:
        pynative_executor.clear_res()  # state that a failed run leaves makes the gradients of later runs wrong
        raise
    grads = grads if isinstance(grads, tuple) else (grads,)
    return {("gradient", number): grad for number, grad in zip(differentiated, grads, strict=True)}
