"""Implementation of the fuzz language for PyTorch: public calls and modules by name, their source, differentiation."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch.func import functional_call
from torch.overrides import resolve_name

from hyper_parallel.core.shard.entry import Binder
from hyper_parallel.core.shard.sample import DType, Sample, between, indices, real, size
from hyper_parallel.verify.frameworks.contract.call_source import call_source, value_source
from hyper_parallel.verify.frameworks.torch.torch_dtensor_audit import Form, public_calls

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

MODES = ("forward", "backward", "grad", "double")
"""How the results of a program are differentiated: not at all, by ``backward()``, by ``autograd.grad``, or by it twice.
"""

DTYPES = ("float64", "float64", "float32", "float32", "bfloat16")
"""The dtypes of programs; repeated ones are chosen more often."""

FUNCTIONS = {"cat": "torch.cat", "stack": "torch.stack", "maximum": "torch.maximum"}
"""Functions that idioms (fixed sequences of calls in random programs) call."""

LEFT_OUT: Mapping[str, str] = {}
"""Idioms that are skipped, with the reason; ``write add`` is the key of the idiom ``add`` among the in-place writes."""

HEAD = "import operator, torch"
"""The imports of a program."""

COPY = "({}).clone()"
"""Source of a copy of a tensor."""

ASSERTION = "torch.testing.assert_close(y, z, rtol={bound}, atol={bound}, equal_nan=True)"
"""Source that compares a DTensor's values ``y`` with those of a plain tensor ``z``."""

_MODULES: dict[str, tuple[int, int, tuple[str, ...], tuple[Sample, ...]]] = {
    # name: arguments of the constructor, inputs, names of the parameters, and samples of all three in that order
    "Linear": (2, 1, ("weight", "bias"), (
        Sample((size("b"), size("c"), real("ab"), real("cb"), real("c"))),
        Sample((size("c"), size("d"), real("abc"), real("dc"), real("d"))),
    )),
    "Bilinear": (3, 2, ("weight", "bias"), (
        Sample((size("b"), size("c"), size("d"), real("ab"), real("ac"), real("dbc"), real("d"))),
    )),
    "LayerNorm": (1, 1, ("weight", "bias"), (
        Sample((size("b"), real("ab"), real("b"), real("b"))),
        Sample((size("c"), real("abc"), real("c"), real("c"))),
    )),
    "RMSNorm": (1, 1, ("weight",), (Sample((size("b"), real("ab"), real("b"))),)),
    "GroupNorm": (2, 1, ("weight", "bias"), (Sample((1, size("b"), real("abc"), real("b"), real("b"))),)),
    "PReLU": (1, 1, ("weight",), (Sample((size("b"), real("ab"), between(0.1, 0.9, "b"))),)),
    "Embedding": (2, 1, ("weight",), (
        Sample((size("a"), size("b"), indices("a", "cd"), real("ab"))),
        Sample((size("a"), size("b"), indices("a", "c"), real("ab"))),
    )),
    "Conv1d": (3, 1, ("weight", "bias"), (Sample((size("b"), size("c"), 1, real("abd"), real("cb1"), real("c"))),)),
    "Conv2d": (3, 1, ("weight", "bias"), (Sample((size("b"), size("c"), 2, real("ab45"), real("cb22"), real("c"))),)),
    "Flatten": (0, 1, (), (Sample((real("abc"),)),)),
    "GELU": (0, 1, (), (Sample((real("ab"),)), Sample((real("abc"),)))),
    "SiLU": (0, 1, (), (Sample((real("ab"),)),)),
    "Softmax": (1, 1, (), (Sample((-1, real("ab"))), Sample((0, real("abc"))))),
    "MSELoss": (0, 2, (), (Sample((real("ab"), real("ab"))), Sample((real("abc"), real("abc"))))),
    "CrossEntropyLoss": (0, 2, (), (Sample((real("ab"), indices("b", "a"))),)),
}  # fmt: skip


_UNSOUND_IF_EMPTY = {
    "pixel_shuffle": "its gradient does not have the shape of the operand",
    "pixel_unshuffle": "the result has the shape of the operand",
    "addmv": "a bias of one element is not broadcast to no rows",
    "conv": "without channels the result has the shape of the operand",
    "Conv": "without channels the result has the shape of the operand",
    "pdist": "its gradient ends the process",
    "multi_margin_loss": "the mean of no elements is memory that was never written",
    "multilabel_margin_loss": "the mean of no elements is memory that was never written",
}
"""Calls with wrong or undefined results for empty operands in PyTorch 2.13, by a substring of the name."""

_UNSOUND = {
    "unique_consecutive": "with counts and without inverse, by position, the counts are empty",
    "cov": "with weights it writes to its operand",
    "eig": "the order of eigenvalues and the sign of eigenvectors follow the last bits of the operand",
    "matrix_exp": "its gradient in bfloat16 is infinite",
    "unsafe_": "its parts share memory with the operand, and gradients do not follow writes to either",
}
"""Calls whose results are never a valid reference."""


def unsound(name: str, shapes: Sequence[Sequence[int]], dtype: str) -> str:
    """Return why PyTorch's own result of a call is not a valid reference; empty if it is valid.

    Args:
        name: name of the call.
        shapes: shapes of the operands.
        dtype: dtype of the program.
    """
    del dtype
    tables = [_UNSOUND, _UNSOUND_IF_EMPTY] if any(0 in shape for shape in shapes) else [_UNSOUND]
    return next((reason for table in tables for part, reason in table.items() if part in name), "")


def modules() -> dict[str, tuple[Sample, ...]]:
    """Return the samples of modules by name of the call: the constructor's arguments, inputs, parameters, in order."""
    return {f"torch.nn.{name}": samples for name, (_, _, _, samples) in _MODULES.items()}


def forms(
    op: str, arguments: Mapping[str, Any], canonical: Binder, *, writes: bool
) -> list[tuple[str, Callable[[Mapping[str, Any]], tuple[list[Any], dict[str, Any]]]]]:
    """Return the public calls of a canonical operator.

    Args:
        op: canonical name.
        arguments: arguments of the call by canonical name, including defaults.
        canonical: the operator's parameters.
        writes: whether to return calls that write their first operand.

    Returns:
        pairs of a name for :func:`call_named`, and a function that maps arguments by canonical name to the call's.
    """
    found: list[tuple[str, Callable[[Mapping[str, Any]], tuple[list[Any], dict[str, Any]]]]] = []
    for _, form in public_calls(op, arguments, canonical, writes=writes):
        if not isinstance(form, Form):
            continue
        name = (resolve_name(form.function) or "").replace("torch.functional.", "torch.")
        if name and _is_named(name, form.function):
            found.append((name, form.arguments))
    return found


def _is_named(name: str, function: Any) -> bool:
    with suppress(AttributeError):
        return call_named(name) is function
    return False


@cache
def call_named(name: str) -> Callable[..., Any]:
    """Return a function, method, operator or module by its name in programs."""
    home, _, rest = name.partition(".")
    if name.startswith("torch.nn.") and rest.removeprefix("nn.") in _MODULES:
        return _module_call(rest.removeprefix("nn."))
    if home == "operator":
        return getattr(operator, rest)
    value: Any = torch.Tensor if home == "Tensor" else torch
    for part in rest.split("."):
        value = getattr(value, part)
    return value


def _module_call(name: str) -> Callable[..., Any]:
    made, inputs, parameters, _ = _MODULES[name]

    def call(*args: Any) -> Any:
        module = getattr(torch.nn, name)(*args[:made], **_options(parameters))
        return functional_call(module, dict(zip(parameters, args[made + inputs :], strict=True)),
                               tuple(args[made : made + inputs]))  # fmt: skip

    return call


def _options(parameters: Sequence[str]) -> dict[str, Any]:
    return {"device": "meta"} if parameters else {}  # the module's parameters are replaced and need no values


def settle() -> None:
    """Do nothing: a call is complete when it returns."""


def source(name: str, args: Sequence[str], kwargs: Mapping[str, str]) -> str:
    """Return the source of a call, from the sources of its arguments."""
    rest = name.removeprefix("torch.nn.")
    if rest == name or rest not in _MODULES:
        return call_source(name, args, kwargs, ("torch.Tensor.",))
    made, inputs, parameters, _ = _MODULES[rest]
    named = ", ".join(f"{key!r}: {value}" for key, value in zip(parameters, args[made + inputs :], strict=True))
    taken = ", ".join(args[made : made + inputs])
    module = f"{name}({', '.join(args[:made])})"
    return f"torch.func.functional_call({module}, {{{named}}}, ({taken},))" if named else f"{module}({taken})"


def literal(value: Any) -> str:
    """Return the source of an argument that is not a tensor."""
    return f"torch.{value.name}" if isinstance(value, DType) else value_source(value)


def values_of(array: Any, dtype: str) -> str:
    """Return the source of a tensor's values."""
    numbers = repr(array.tolist()).replace("nan", "torch.nan").replace("inf", "torch.inf")
    shaped = f".reshape({tuple(array.shape)})" if 0 in array.shape else ""
    return f"torch.tensor({numbers}, dtype=torch.{dtype}){shaped}"


def leaf(tensor: Any, *, requires_grad: bool) -> Any:
    """Return a tensor as a leaf with respect to which the program is differentiated."""
    return tensor.requires_grad_() if requires_grad else tensor


def leaf_source(text: str, *, requires_grad: bool) -> str:
    """Return the source of a tensor as a leaf that receives a gradient."""
    return f"{text}.requires_grad_()" if requires_grad else text


def detached_source(text: str) -> str:
    """Return the source of a leaf's values, detached."""
    return f"{text}.detach()"


def copied(tensor: Any) -> Any:
    """Return a copy, plain or distributed, through which gradients flow."""
    return tensor.clone()


def state(tensor: Any) -> Any:
    """Return a marker that changes with every in-place write to a plain tensor."""
    return tensor._version


def may_have_gradient(tensor: Any) -> bool:
    """Whether a plain tensor that was computed while the program was generated can be differentiated."""
    return bool(tensor.requires_grad)


def shares_memory(tensor: Any, others: Sequence[Any]) -> bool:
    """Whether a plain tensor shares memory with one of ``others``."""
    start = tensor.untyped_storage().data_ptr()
    return any(other is tensor or (start and other.untyped_storage().data_ptr() == start) for other in others)


def moved(tensor: Any, array: Any, gradient: Callable[[Any], Any] | None) -> Any:
    """Return a plain tensor plus ``array``; in backward, the result of ``gradient`` is added to the gradient."""
    changed = tensor + torch.from_numpy(array).to(tensor.dtype)
    if gradient is not None and changed.requires_grad:
        wide = torch.complex128 if changed.is_complex() else torch.float64

        def move(grad: Any) -> Any:
            if grad is None:  # there is no second gradient
                return None
            return grad + torch.from_numpy(gradient(grad.detach().to(wide).numpy(force=True))).to(grad.dtype)

        changed.register_hook(move)
    return changed


def gradients(
    body: Callable[[Mapping[int, Any]], Sequence[Any]],
    leaves: Mapping[int, Any],
    differentiated: Sequence[int],
    mode: str,
    cotangents: Sequence[int],
    second: Sequence[tuple[int, int]],
) -> dict[tuple[str, int], Any]:
    """See :class:`~hyper_parallel.verify.fuzz.language.Language`."""
    outs = list(body(leaves))
    if mode == "forward" or not outs:
        return {}
    seeds, by = [leaves[number] for number in cotangents], [leaves[number] for number in differentiated]
    if mode == "backward":
        torch.autograd.backward(outs, seeds)
        return {("gradient", number): leaves[number].grad for number in differentiated}
    first = torch.autograd.grad(outs, by, seeds, allow_unused=True, create_graph=mode == "double")
    named: dict[tuple[str, int], Any] = {
        ("gradient", number): grad for number, grad in zip(differentiated, first, strict=True)
    }
    again = [(named["gradient", number], leaves[seed]) for number, seed in second]
    if mode == "double" and again:
        found = torch.autograd.grad([grad for grad, _ in again], by, [seed for _, seed in again], allow_unused=True)
        named |= {("second gradient", number): grad for number, grad in zip(differentiated, found, strict=True)}
    return named


def body_source(
    steps: Sequence[str],
    values: Sequence[str],
    mode: str,
    outs: Sequence[str],
    by: Sequence[str],
    seeds: Sequence[str],
    second: Mapping[str, str],
) -> list[str]:
    """See :class:`~hyper_parallel.verify.fuzz.language.Language`."""
    lines, gradients = _gradient_source(mode, outs, by, seeds, second)
    return [*steps, *lines, f"return {', '.join([*values, *gradients])},"]


def _gradient_source(
    mode: str, outs: Sequence[str], by: Sequence[str], seeds: Sequence[str], second: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return the lines that differentiate, and the names of the gradients."""
    if mode == "forward" or not outs:
        return [], []
    outputs, leaves, cotangents = (", ".join(names) for names in (outs, by, seeds))
    if mode == "backward":
        return [f"torch.autograd.backward([{outputs}], [{cotangents}])"], [f"{name}.grad" for name in by]
    first = [f"grad_{name}" for name in by]
    graph = ", create_graph=True" if mode == "double" else ""
    call = f"torch.autograd.grad([{outputs}], [{leaves}], [{cotangents}], allow_unused=True{graph})"
    lines = [f"{', '.join(first)}, = {call}"]
    if mode == "grad" or not second:
        return lines, first
    again = ", ".join(f"grad_{name}" for name in second)
    call = f"torch.autograd.grad([{again}], [{leaves}], [{', '.join(second.values())}], allow_unused=True)"
    names = [f"grad2_{name}" for name in by]
    return [*lines, f"{', '.join(names)}, = {call}"], [*first, *names]
