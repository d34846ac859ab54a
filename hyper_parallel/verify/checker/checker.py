"""Checks a function on distributed tensors: compares its values and gradients with those of one device.

Every operand is placed, and the function and its backward run on every rank under random cotangents. Results are
gathered, and each output and the gradient of each operand is compared. Values must be exact or within the rounding
bound of :mod:`hyper_parallel.verify.checker.difference`; a wrong scale factor fails.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.boxes import coordinates
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.transition import average_divisor, dual
from hyper_parallel.errors import CollectiveMismatchError, HyperParallelError, ShardMismatchError
from hyper_parallel.platform.select import platform_of
from hyper_parallel.verify.checker.difference import difference, rounding_bound
from hyper_parallel.verify.checker.shards import extremum_gradients, local_box, local_shards
from hyper_parallel.verify.frameworks import harness_of

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.core.dtensor.placements import Placement
    from hyper_parallel.platform.contract.platform import Platform

__all__ = [
    "EXTREMA",
    "UNDIFFERENTIATED",
    "Checked",
    "DTensors",
    "DistributedTensors",
    "Expected",
    "Operand",
    "PlacementChecker",
    "Places",
    "Problem",
    "on_other_device",
    "seedable",
]

EXTREMA = ("max", "min")
UNDIFFERENTIATED = ("prod", "all", "any")
Places = tuple[tuple["Placement", ...], ...]
"""For each operand, one placement per axis."""


@dataclass(frozen=True)
class Expected:
    """The results of one device.

    Attributes:
        outputs: arrays.
        cotangents: arrays per output; None for an output without cotangent.
        grads: arrays per operand; None if no gradient is compared.
        exact: whether nothing was rounded; values are then compared bitwise, unless the placements themselves round.
        eps: rounding unit of the coarsest dtype in the computation.
        tolerance: relative tolerance instead of the default.
        output_scales: per output, the magnitude to which the tolerance is relative; None derives it from the values.
        grad_scales: the same per operand, for gradients.
    """

    outputs: Sequence[Any]
    cotangents: Sequence[Any]
    grads: Sequence[Any]
    exact: bool = False
    eps: float = 0.0
    tolerance: float | None = None
    output_scales: Sequence[float] | None = None
    grad_scales: Sequence[float] | None = None


@dataclass(frozen=True)
class Operand:
    """One operand in one placement.

    Attributes:
        layout: layout of the operand on the mesh.
        shards: local array of every rank.
        wanted: whether its gradient is compared.
    """

    layout: Layout
    shards: Sequence[Any]
    wanted: bool


@dataclass(frozen=True)
class Problem:
    """One wrong value.

    Attributes:
        index: index of the output, or of the operand whose gradient is wrong; -1 for all outputs.
        gradient: whether the wrong value is a gradient.
        text: the difference.
    """

    index: int
    gradient: bool
    text: str

    def __str__(self) -> str:
        """Return the name of the wrong value and the difference."""
        if self.index < 0:
            return self.text
        return f"{'gradient of operand' if self.gradient else 'output'} {self.index} {self.text}"


@dataclass(frozen=True)
class Checked:
    """The result of one tuple of placements on one rank.

    Attributes:
        problems: wrong values.
        gradients: number of gradients that were compared.
        refusal: message of the error with which the library refused the placements; empty if it did not refuse them.
        refused_by: name of the class of that error.
    """

    problems: tuple[Problem, ...] = ()
    gradients: int = 0
    refusal: str = ""
    refused_by: str = ""


class DistributedTensors(abc.ABC):
    """Interface of a kind of distributed tensor, on one rank.

    Attributes:
        rank: position of this rank in the mesh, row-major.
    """

    rank: int

    @abc.abstractmethod
    def results(
        self, call: Callable[[Sequence[Any]], list[Any]], operands: Sequence[Operand], cotangents: Sequence[Any]
    ) -> Iterator[list[Any]]:
        """Yield the outputs, each as a pair of gathered array and placements, and then the gradients.

        A gradient is None, or an array that is compared with :meth:`expected_gradient`. If no output can be
        differentiated, only the outputs are yielded.
        """

    @abc.abstractmethod
    def expected_gradient(self, gradient: Any, operand: Operand) -> Any:
        """Return the expected gradient of an operand on this rank; ``gradient`` is the gradient on one device."""


class DTensors(DistributedTensors):
    """This library's DTensors on a mesh.

    Args:
        platform: the framework.
        mesh: mesh of the operands.
        outputs: number of outputs of the function.
    """

    def __init__(self, platform: Platform, mesh: DeviceMesh, outputs: int) -> None:
        self.platform, self.mesh, self.outputs = platform, mesh, outputs
        self.coordinate = mesh.coordinate
        assert self.coordinate is not None
        self.rank = list(coordinates(mesh)).index(self.coordinate)

    def results(
        self, call: Callable[[Sequence[Any]], list[Any]], operands: Sequence[Operand], cotangents: Sequence[Any]
    ) -> Iterator[list[Any]]:
        """Differentiate with respect to local shards, and yield outputs and gradients."""
        platform = self.platform
        outputs: list[Any] = []

        def on_locals(*leaves: Any) -> list[Any]:
            pairs = zip(leaves, operands, strict=True)
            outputs[:] = seedable(call([platform.wrap(leaf, operand.layout) for leaf, operand in pairs]))
            if len(outputs) != self.outputs:
                msg = f"gives {len(outputs)} outputs, should give {self.outputs}"
                raise WrongOutputError(msg)
            locals_ = [out._local for out in outputs]
            if elsewhere := on_other_device(locals_, self.mesh.device_type):
                msg = f"output {elsewhere}"
                raise WrongOutputError(msg)
            return locals_

        def local_cotangents(_: Sequence[Any]) -> list[Any]:
            return [
                None if cotangent is None else platform.from_numpy(np.array(self._box(cotangent, out.layout)))
                for cotangent, out in zip(cotangents, outputs, strict=True)
            ]

        leaves = [platform.from_numpy(operand.shards[self.rank]) for operand in operands]
        wanted = [operand.wanted for operand in operands]
        _, grads = harness_of(platform).vjp(on_locals, leaves, local_cotangents, wanted)
        yield [(platform.tensor_to_numpy(platform.detach(out.full_tensor())), out.placements) for out in outputs]
        yield [None if grad is None else platform.tensor_to_numpy(grad) for grad in grads]

    def expected_gradient(self, gradient: Any, operand: Operand) -> Any:
        """Return the local shard in the dual layout; for an average or extremum, this rank's share of the gradient."""
        layout = operand.layout
        if any(op in EXTREMA for _, op in layout.partials):
            return extremum_gradients(gradient, layout, operand.shards)[self.rank]
        return np.asarray(self._box(gradient, layout) / average_divisor(layout), gradient.dtype)

    def _box(self, array: Any, layout: Layout) -> Any:
        """Return this rank's shard of a cotangent or gradient of a tensor with ``layout``."""
        assert self.coordinate is not None
        return local_box(array, dual(layout), self.coordinate)


class WrongOutputError(Exception):
    """The function returned more or fewer outputs than on plain tensors, or an output on a different device."""


class PlacementChecker:
    """Checks one function on one mesh, in many placements.

    Args:
        call: function of a sequence of operands, plain or distributed, that returns a list of tensors.
        arrays: global values of the operands.
        expected: results of one device.
        mesh: mesh of the operands; its axes may have any sizes.
        tensors: the kind of distributed tensor; by default, this library's DTensors.
        integral: whether values, including partial ones, are small integers.
        values: whether to compare values; False compares only shapes and dtypes of outputs.
        first_only: stop at the first wrong value; if it is an output, backward does not run.
    """

    def __init__(
        self,
        call: Callable[[Sequence[Any]], list[Any]],
        arrays: Sequence[Any],
        expected: Expected,
        mesh: DeviceMesh,
        tensors: DistributedTensors,
        *,
        integral: bool = False,
        values: bool = True,
        first_only: bool = False,
    ) -> None:
        self.call, self.arrays, self.expected, self.mesh, self.tensors = call, arrays, expected, mesh, tensors
        self.integral, self.values, self.first_only = integral, values, first_only

    def check(self, places: Places, *seed: int) -> Checked:
        """Check one tuple of placements; ``seed`` draws its partial values."""
        operands = self.operands(places, *seed)
        try:
            return self._checked(operands)
        except (CollectiveMismatchError, ShardMismatchError):
            raise  # ranks called different collectives, or a local result contradicts the rule: not a refusal
        except HyperParallelError as error:
            return Checked(refusal=str(error), refused_by=type(error).__name__)

    def operands(self, places: Places, *seed: int) -> list[Operand]:
        """Return the operands in their placements."""
        operands = []
        for index, (placements, array) in enumerate(zip(places, self.arrays, strict=True)):
            layout = Layout.place(self.mesh, placements, array.shape)
            shards = local_shards(array, layout, np.random.default_rng([*seed, index]), integral=self.integral)
            operands.append(Operand(layout, shards, self.expected.grads[index] is not None))
        if any(op in UNDIFFERENTIATED for operand in operands for _, op in operand.layout.partials):
            return [Operand(operand.layout, operand.shards, wanted=False) for operand in operands]
        return operands

    def _checked(self, operands: Sequence[Operand]) -> Checked:
        results = self.tensors.results(self.call, operands, self.expected.cotangents)
        comparison = _Comparison(self, operands)
        try:
            problems = list(comparison.outputs(next(results)))
        except WrongOutputError as error:
            return Checked((Problem(-1, False, str(error)),))
        grads = None if problems and self.first_only else next(results, None)
        compared = [index for index, operand in enumerate(operands) if operand.wanted and grads is not None]
        for index in compared:
            assert grads is not None
            if self.first_only and problems:
                break
            problems.extend(comparison.gradient(index, grads[index]))
        return Checked(tuple(problems[:1] if self.first_only else problems), len(compared))


class _Comparison:
    """Compares the results for one tuple of placements with those of one device."""

    def __init__(self, checker: PlacementChecker, operands: Sequence[Operand]) -> None:
        self.checker, self.operands, self.expected = checker, operands, checker.expected

    @cached_property
    def exact(self) -> bool:
        """Whether results are compared bitwise: not if an average, or a gradient shared by ranks, may round."""
        rounding = ("avg", *EXTREMA)
        partials = [op for operand in self.operands for _, op in operand.layout.partials]
        return self.expected.exact and not any(op in rounding for op in partials)

    def outputs(self, outputs: Sequence[tuple[Any, Any]]) -> Iterator[Problem]:
        """Yield the problems of gathered outputs."""
        scales = self.expected.output_scales
        for index, ((actual, placements), expected) in enumerate(zip(outputs, self.expected.outputs, strict=True)):
            if self.checker.values:
                packed = np.ascontiguousarray(actual).reshape(actual.shape)
                problem = self._difference(packed, expected, None if scales is None else scales[index])
            else:
                problem = difference(np.zeros(actual.shape), np.zeros(expected.shape))
            if problem:
                yield Problem(index, False, f"{list(placements)} {problem}")

    def gradient(self, index: int, actual: Any) -> Iterator[Problem]:
        """Yield the problems of one gradient."""
        expected = self.checker.tensors.expected_gradient(self.expected.grads[index], self.operands[index])
        scales = self.expected.grad_scales
        if actual is None:
            problem = "is None" if expected.any() else ""
        else:
            problem = self._difference(actual, expected, None if scales is None else scales[index])
        if problem:
            yield Problem(index, True, problem)

    def _difference(self, actual: Any, expected: Any, scale: float | None) -> str:
        if self.exact:
            return difference(actual, expected)
        bound = rounding_bound(expected, eps=self.expected.eps, scale=scale, tolerance=self.expected.tolerance)
        return difference(actual, expected, bound)


def seedable(outs: Sequence[Any]) -> list[Any]:
    """Return a function's output DTensors in layouts whose local cotangent is known on each rank.

    Raises:
        TypeError: an output is not a DTensor.
    """
    for out in outs:
        if not isinstance(out, DTensor):
            msg = f"returned a plain {type(out).__name__} instead of a DTensor"
            raise TypeError(msg)
    # The dual layout does not describe the gradient of an average or extremum (``core/dtensor/README.md``).
    return [out if all(op == "sum" for _, op in out.layout.partials) else out.reduce_partial() for out in outs]


def on_other_device(tensors: Sequence[Any], device: str) -> str:
    """Return the first tensor that is not on a device of this type, as text; empty if there is none.

    Args:
        tensors: tensors of the framework.
        device: type of device; for ``cpu`` nothing is checked, because tensors are on the CPU by default.
    """
    for index, tensor in enumerate(tensors if device != "cpu" else ()):
        elsewhere = platform_of(tensor).differing_device(tensor, device)
        if elsewhere:
            return f"{index} is on {elsewhere}, and --device is {device}"
    return ""
