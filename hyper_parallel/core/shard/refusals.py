"""Errors that several callers raise; each includes the line of code that fixes it."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.events import module_path
from hyper_parallel.errors import (
    ArgumentTypeError,
    LayoutError,
    MeshMismatchError,
    MixedTensorError,
    UnsupportedOperatorError,
)
from hyper_parallel.platform.select import framework_of

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.core.dtensor.mesh import DeviceMesh

__all__ = [
    "check_framework",
    "common_mesh",
    "duplicate_rule_error",
    "lost_write_error",
    "missing_shape_error",
    "note_style_output",
    "plain_tensor_error",
    "read_only_error",
    "shard_error",
    "transformed_error",
]

# For errors about mixed tensors: the plan entry whose module returned the last DTensor. It holds the mesh as messages
# show it, and a clause that names the module and its entry. Each rank and thread has its own.
_LAST_OUTPUT: ContextVar[tuple[str, str]] = ContextVar("hyper_parallel_style_output", default=("", ""))


def note_style_output(note: tuple[str, str]) -> None:
    """Record that a style's module returned a DTensor: ``repr`` of the mesh, and the clause for messages."""
    _LAST_OUTPUT.set(note)


def _last_style_output(mesh: DeviceMesh) -> str:
    """Return the recorded clause, or ``""`` if nothing is recorded for ``mesh``."""
    shown, clause = _LAST_OUTPUT.get()
    return clause if shown == repr(mesh) else ""


_CONVERSIONS = {
    "torch": "convert a tensor first, as in torch.as_tensor(value.asnumpy())",
    "mindspore": "convert a tensor first, as in mindspore.Tensor(value.detach().numpy())",
}


def common_mesh(op: str, meshes: Iterable[DeviceMesh]) -> DeviceMesh | None:
    """Return the mesh of all operands of ``op``, or None without operands.

    Raises:
        MeshMismatchError: the operands are on several meshes.
    """
    distinct = list(dict.fromkeys(meshes))
    if len(distinct) > 1:
        first, second, *_ = distinct
        msg = f"{op}: operands are on different meshes, {first!r} and {second!r}; bring them to one mesh first"
        raise MeshMismatchError(msg)
    return distinct[0] if distinct else None


def check_framework(op: str, framework: str, values: Iterable[Any]) -> None:
    """Raise if an argument of ``op``, which runs on ``framework``, belongs to the other framework.

    Raises:
        ArgumentTypeError: (a TypeError) it names both frameworks.
    """
    for value in values:
        other = framework_of(value)
        if other not in ("", framework):
            path = module_path()
            msg = (
                f"{path}{path and ': '}{op} was called with DTensors of {framework} and with a {type(value).__name__} "
                f"of {other}; {_CONVERSIONS[framework]}"
            )
            raise ArgumentTypeError(msg)


def plain_tensor_error(
    argument: str, name: str, shape: Iterable[int], mesh: DeviceMesh, *, parameter: bool = False
) -> MixedTensorError:
    """Return the error for a plain tensor of ``shape`` among DTensors; ``name`` is its variable.

    If events are recorded, the message starts with the path of the running module. It ends with the plan entry that
    made the last DTensor.
    """
    replicated = ", ".join(["Replicate()"] * mesh.ndim)
    path = module_path()
    source = _last_style_output(mesh)
    source = f"; {source}" if source else ""
    if parameter:
        return MixedTensorError(
            f"{path}{path and ': '}{argument} is a plain parameter {list(shape)}, but other operands are DTensors on "
            f"{mesh!r}; give {path or 'its module'} a style in the plan, such as "
            "hyper_parallel.NoParallel(use_local_output=False); hyper_parallel.complete_plan(model, plan) adds the "
            "styles that a plan lacks, and hyper_parallel.distribute_module(model, mesh) replicates every parameter "
            f"that has no style{source}"
        )
    return MixedTensorError(
        f"{path}{path and ': '}{argument} is a plain tensor {list(shape)}, but other operands are DTensors on "
        f"{mesh!r}; "
        f"{name} = hyper_parallel.DTensor.from_local({name}, mesh, [{replicated}]) "
        "if every rank holds the same values; if it is a local shard that a parallel style returned, give that style "
        f"use_local_output=False{source}"
    )


def shard_error(op: str) -> MixedTensorError:
    """Return the error for plain tensors combined with a ``fully_shard`` parameter outside of its module's call."""
    path = module_path()
    return MixedTensorError(
        f"{path}{path and ': '}{op}: an operand is this rank's shard of a parameter, and others are plain tensors; "
        "fully_shard gathers parameters for calls of the module that it was applied to: call that module, or use "
        "register_fsdp_forward_method(module, name) for a method of it"
    )


def transformed_error(argument: str, mesh: DeviceMesh) -> MixedTensorError:
    """Return the error for a tensor inside a function transform combined with DTensors from outside."""
    path = module_path()
    return MixedTensorError(
        f"{path}{path and ': '}{argument} is an argument of a function that torch.func transforms (grad, vjp, vmap), "
        f"or computed from one, but other operands are DTensors on {mesh!r} that are not; pass the function every "
        "DTensor as an argument that is transformed, or differentiate with torch.autograd.grad"
    )


def missing_shape_error(subject: str, layout: Layout, reason: str = "") -> LayoutError:
    """Return the error for a layout of ``subject`` without a global shape."""
    return LayoutError(f"{subject} {layout!r} without a global shape{reason}; use layout.with_shape(...)")


def read_only_error(op: str, operand: str, reason: str) -> UnsupportedOperatorError:
    """Return the error for a write to ``operand``, which is read-only for ``reason``."""
    return UnsupportedOperatorError(f"{op}: {operand} cannot be written to: {reason}")


def lost_write_error(op: str, operand: str, moved: str, fix: str) -> UnsupportedOperatorError:
    """Return the error for a local call that wrote to a redistributed copy of an operand."""
    return UnsupportedOperatorError(
        f"{op}: {operand} was written in place, but had to be {moved} first, so the write is lost; {fix}"
    )


def duplicate_rule_error(op: Any, registrar: str = "") -> ValueError:
    """Return the error of ``registrar`` for an ``op`` that already has a rule."""
    return ValueError(f"{registrar}{registrar and ': '}operator {op!r} already has a rule")
