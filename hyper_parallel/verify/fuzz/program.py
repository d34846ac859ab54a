"""A random program as plain data: leaves, steps, differentiation, and the outcome of a run.

Tensors have numbers. A step is one call that a user may write, on existing tensors. Its results get new numbers; a
tensor that is written in place keeps its number, which names the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hyper_parallel.verify.ops.values import substitute

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.placements import Placement

__all__ = ["FINDINGS", "MODES", "OUTCOMES", "Leaf", "Outcome", "Program", "Step", "TensorRef", "filled_in", "operands"]

MODES = ("forward", "backward", "grad", "double")
"""Differentiation after the steps: none, ``backward()``, ``autograd.grad``, or ``autograd.grad`` twice."""


@dataclass(frozen=True)
class TensorRef:
    """Placeholder for tensor ``number`` in the arguments of a step."""

    number: int


@dataclass(frozen=True)
class Leaf:
    """A tensor that the program starts from.

    Attributes:
        array: the global values; bfloat16 is stored as float32.
        dtype: name of the tensor's dtype.
        placements: one placement per axis of the mesh.
        requires_grad: whether the leaf receives a gradient.
    """

    array: Any
    dtype: str
    placements: tuple[Placement, ...]
    requires_grad: bool = False


@dataclass(frozen=True)
class Step:
    """One call.

    Attributes:
        call: name of the call as the user writes it: ``torch.add``, ``Tensor.reshape``, ``operator.getitem``,
            ``nn.Linear``.
        args: positional arguments, with :class:`TensorRef` for tensors and ``DType`` for dtypes.
        kwargs: keyword arguments, in the same form.
        outs: numbers of the tensors that the call returns, in order.
        several: whether the call returns a sequence of tensors.
        aliases: whether the call writes an operand, or its result shares memory with an operand.
    """

    call: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int, ...]
    several: bool = False
    aliases: bool = False


@dataclass(frozen=True)
class Program:
    """A random program: leaves, steps and differentiation.

    Attributes:
        seed: seed and number from which the program was generated.
        mesh: sizes of the mesh's axes.
        leaves: the leaves by tensor number.
        steps: the steps in order.
        mode: one of :data:`MODES`.
        outputs: numbers of the tensors that are differentiated.
        cotangents: leaves that are the cotangents of the outputs, in the same order.
        second: leaf that is the cotangent of a gradient, by number of the leaf that the gradient belongs to.
        integral: whether all values of leaves are small integers.
        refused: whether the single device rejects the program with an error.
    """

    seed: tuple[int, int]
    mesh: tuple[int, ...]
    leaves: dict[int, Leaf]
    steps: tuple[Step, ...]
    mode: str = "forward"
    outputs: tuple[int, ...] = ()
    cotangents: tuple[int, ...] = ()
    second: tuple[tuple[int, int], ...] = ()
    integral: bool = True
    refused: bool = False

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        count = 1
        for size in self.mesh:
            count *= size
        return count

    @property
    def differentiated(self) -> tuple[int, ...]:
        """Numbers of the leaves whose gradient is computed."""
        return tuple(number for number, leaf in self.leaves.items() if leaf.requires_grad)

    def reached(self) -> set[int]:
        """Return the numbers of the tensors that depend on a leaf whose gradient is computed."""
        reached = set(self.differentiated)
        for step in self.steps:
            read = set(operands(step))
            if read & reached:
                reached |= {*step.outs, *(read if step.aliases else ())}
        return reached

    def with_used_leaves(self) -> Program:
        """Return the program without unused leaves."""
        used = {*self.cotangents, *self.outputs, *(leaf for _, leaf in self.second)}
        for step in self.steps:
            used.update(operands(step))
        return replace(self, leaves={number: leaf for number, leaf in self.leaves.items() if number in used})


def operands(step: Step) -> Iterator[int]:
    """Yield the numbers of the tensors that a step reads or writes."""
    numbers: list[int] = []

    def collect(leaf: Any) -> None:
        if isinstance(leaf, TensorRef):
            numbers.append(leaf.number)

    substitute((step.args, step.kwargs), collect)
    yield from numbers


def filled_in(step: Step, replace_leaf: Callable[[Any], Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the arguments of a step with ``replace_leaf`` applied to everything that is not a container."""
    args = [substitute(value, replace_leaf) for value in step.args]
    return args, {name: substitute(value, replace_leaf) for name, value in step.kwargs.items()}


OUTCOMES = ("equal", "refused", "refused by both", "accepted", "wrong", "internal error", "hang")
"""Outcomes of a program.

- ``equal``: results equal those of the single device.
- ``refused``: the library rejects the program with an error of its own types.
- ``refused by both``: the single device and the library reject the program.
- ``accepted``: only the single device rejects the program, so there is no reference.
- ``wrong``: a value differs.
- ``internal error``: an error that is not one of the library's own types.
- ``hang``: ranks wait for each other, call different collectives, or do not end.
"""

FINDINGS = ("wrong", "internal error", "hang")
"""The outcomes that are defects."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one program.

    Attributes:
        kind: one of :data:`OUTCOMES`.
        text: the first difference, or the error.
        compared: number of results that were compared on all ranks.
        gradients: number of gradients among these results.
        exact: whether the results were compared bitwise.
        first: number of the first tensor that differs, -1 if none.
    """

    kind: str
    text: str = ""
    compared: int = 0
    gradients: int = 0
    exact: bool = False
    first: int = -1

    @property
    def is_finding(self) -> bool:
        """Whether the outcome is a defect."""
        return self.kind in FINDINGS
