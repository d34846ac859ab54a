"""Generates random programs step by step; each step is tried on a single device before it is kept.

A program depends only on its seed, its number and the number of ranks.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hyper_parallel.core.shard.sample import DType, Value
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.attempt import Raised, attempt
from hyper_parallel.verify.checker.choices import random_placements
from hyper_parallel.verify.fuzz import idioms
from hyper_parallel.verify.fuzz.catalogue import Catalogue
from hyper_parallel.verify.fuzz.execution import call_step, execute, plain_leaves, returned
from hyper_parallel.verify.fuzz.language import language_of
from hyper_parallel.verify.fuzz.program import Leaf, Program, Step, TensorRef, operands
from hyper_parallel.verify.ops.values import Slot, fill, substitute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.verify.fuzz.catalogue import Call
    from hyper_parallel.verify.ops.values import FilledSample

__all__ = ["Generator", "meshes_of"]

_SIZES = (0, 1, 1, 2, 2, 3, 3, 4, 5, 5, 6, 7)
_MODES = ("forward", "backward", "backward", "grad", "double")
_KINDS = ("operator",) * 11 + ("view",) * 3 + ("arithmetic",) * 3 + ("write",) * 2 + ("writing operator", "move")
_FEWEST, _MOST = 3, 12
_TRIES = 5  # per step
_REUSED = 0.75  # share of operands that are results of earlier steps, if a suitable result exists
_KEPT_REFUSALS = 0.01
_LARGEST_SIZE, _LARGEST_VALUE, _SMALLEST_VALUE = 600, 1e4, 1e-30
_MOST_OUTPUTS = 2
_MOST_ADAPTED = 3  # maximum number of views that give a tensor the dims of an operand
_NO_NUMPY = ("complex32", "bcomplex32")  # complex numbers in half precision, as results of float16 and bfloat16
_OTHER_DTYPE = 0.3  # share of leaves with a dtype other than the program's, if dtypes are chosen


class _Refused(NamedTuple):
    """A step that raises an error on the single device.

    Attributes:
        step: the step.
        leaves: leaves that were created for the step.
    """

    step: Step
    leaves: dict[int, Leaf]


def meshes_of(world_size: int) -> list[tuple[int, ...]]:
    """Return the meshes of one to three axes with this number of ranks; one axis may have a single rank."""
    sizes = range(1, world_size + 1)
    meshes: list[tuple[int, ...]] = [(world_size,)]
    meshes += [(a, b) for a in sizes for b in sizes if a * b == world_size]
    meshes += [(a, b, c) for a in sizes for b in sizes for c in sizes if a * b * c == world_size and min(a, b, c) > 1]
    return meshes


class Generator:
    """Generates the programs of a framework.

    Args:
        framework: name of the framework.
        dtypes: names of dtypes that programs mix, integers and booleans among them; empty if each program has one
            floating-point dtype, from ``DTYPES`` of the framework's ``Language``.
    """

    def __init__(self, framework: str, dtypes: tuple[str, ...] = ()) -> None:
        self.platform, self.language = platform_named(framework), language_of(framework)
        self.catalogue, self.dtypes = Catalogue(framework, self.language), dtypes

    def program(self, seed: int, number: int, world_size: int) -> Program:
        """Return program ``number`` of ``seed``, for this number of ranks."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Maker(self, seed, number, world_size).make()


class _Maker:
    """Builds one program, with its tensors on a single device."""

    def __init__(self, generator: Generator, seed: int, number: int, world_size: int) -> None:
        self.platform, self.language = generator.platform, generator.language
        self.catalogue, self.seed = generator.catalogue, (seed, number)
        self.rng = np.random.default_rng([seed, number])
        meshes = meshes_of(world_size)
        self.mesh = meshes[int(self.rng.integers(len(meshes)))]
        self.mixed = generator.dtypes
        dtypes = self.mixed or self.language.DTYPES
        self.dtype = dtypes[int(self.rng.integers(len(dtypes)))]
        self.integral = bool(self.rng.random() < 1 / 2) or not _is_floating(self.dtype)
        modes = [mode for mode in _MODES if mode in self.language.MODES]
        self.mode = modes[int(self.rng.integers(len(modes)))]
        self.leaves: dict[int, Leaf] = {}
        self.steps: list[Step] = []
        self.tensors: dict[int, Any] = {}
        self.count = 0

    def make(self) -> Program:
        """Return the program."""
        length = int(self.rng.integers(_FEWEST, _MOST + 1))
        refused: _Refused | None = None
        for _ in range(_TRIES * length):
            attempt = getattr(self, f"_{_KINDS[int(self.rng.integers(len(_KINDS)))].replace(' ', '_')}")()
            if isinstance(attempt, _Refused) and self.steps and self.rng.random() < _KEPT_REFUSALS:
                refused = attempt
                break
            if len(self.steps) >= length:
                break
        program = Program(self.seed, self.mesh, dict(self.leaves), tuple(self.steps), integral=self.integral)
        if refused is not None:
            leaves = {**program.leaves, **refused.leaves}
            return replace(program, leaves=leaves, steps=(*program.steps, refused.step), refused=True)
        return self._differentiated(program).with_used_leaves()

    # -- steps -------------------------------------------------------------------------------------------------------

    def _operator(self) -> _Refused | None:
        return self._call(self.catalogue.draw(self.rng, writes=False))

    def _writing_operator(self) -> _Refused | None:
        return self._call(self.catalogue.draw(self.rng, writes=True))

    def _view(self) -> _Refused | None:
        number = self._drawn()
        if number is None:
            return self._operator()
        return self._idiom(idioms.view(TensorRef(number), self._shape(number), self.rng, self.language))

    def _arithmetic(self) -> _Refused | None:
        number = self._drawn(own_dtype=True)
        if number is None:
            return self._operator()
        brought: dict[int, Leaf] = {}
        other = self._like(number, brought)
        shape = self._shape(number)
        return self._idiom(idioms.arithmetic(TensorRef(number), other, shape, self.rng, self.language), brought)

    def _write(self) -> _Refused | None:
        share = len(idioms.served("write", idioms.WRITES, self.language)) / len(idioms.WRITES)
        if share < 1 and self.rng.random() >= share:
            return self._arithmetic()
        number = self._drawn(own_dtype=True, written=True)
        if number is None:
            return self._arithmetic()
        brought: dict[int, Leaf] = {}
        other = self._like(number, brought)
        shape = self._shape(number)
        return self._idiom(idioms.write(TensorRef(number), other, shape, self.rng, self.language), brought)

    def _move(self) -> _Refused | None:
        number = self._drawn()
        if number is None:
            return None
        array = np.zeros(self._shape(number))
        placements = random_placements(array, self.mesh, self.rng, partial=False)
        return self._add(Step(idioms.MOVE, (TensorRef(number), list(placements)), {}, ()), {})

    def _call(self, call: Call | None) -> _Refused | None:
        """Add a step that calls an operator or a module on tensors that exist, and on new leaves."""
        if call is None:
            return None
        values = _values(call.sample)
        chosen, sizes = self._choose(values, written=call.writes)
        if call.writes and 0 not in chosen:
            return None
        seed = int(self.rng.integers(1 << 31))
        floating = self.dtype if _is_floating(self.dtype) and self.dtype != "bfloat16" else "float32"
        try:
            filled = fill(call.sample, sizes, floating, seed, integral=self.integral, to_dtype=DType)
        except ValueError:
            return None
        if filled is None or any(array.size > _LARGEST_SIZE for array in filled.arrays):
            return None
        if self._is_unsound(call.name, [array.shape for array in filled.arrays], {self.dtype}):
            return None
        brought: dict[int, Leaf] = {}
        numbers = [
            chosen[index] if index in chosen else self._bring(array, brought, requires_grad=filled.requires_grad[index])
            for index, array in enumerate(filled.arrays)
        ]
        args, kwargs = _with_numbers(call, filled, numbers)
        return self._add(Step(call.name, tuple(args), kwargs, ()), brought)

    def _idiom(self, idiom: idioms.Idiom, brought: dict[int, Leaf] | None = None) -> _Refused | None:
        return self._add(Step(idiom.call, idiom.args, idiom.kwargs, ()), brought or {})

    def _called(self, step: Step, tensors: dict[int, Any]) -> Any:
        result = call_step(step, tensors, self.platform, self.language)
        self.language.settle()
        return result

    def _add(self, step: Step, brought: dict[int, Leaf]) -> _Refused | None:
        """Try a step on the single device, and keep it if its results are finite and not too large."""
        tensors = {**self.tensors, **self._tensors_of(brought)}
        read = [tensors[number] for number in operands(step)]
        if self._is_unsound(step.call, [tuple(tensor.shape) for tensor in read], {self.dtype, *map(_name, read)}):
            return None
        before = [self.language.state(tensor) for tensor in read]
        result = attempt(self._called, step, tensors)
        if isinstance(result, Raised):  # a single device rejects sizes and dtypes with errors of any type
            return _Refused(step, brought)
        written = [self.language.state(tensor) for tensor in read] != before
        kept = list(returned(result, self.platform))
        if not (kept or written) or not all(self._is_tame(tensor) for tensor in (*kept, *(read if written else ()))):
            if written:
                self.forget_tensors()
            return None
        aliases = written or any(self.language.shares_memory(out, read) for out in kept)
        numbers = tuple(range(self.count, self.count + len(kept)))
        self.count += len(kept)
        self.leaves |= brought
        self.tensors = {**tensors, **dict(zip(numbers, kept, strict=True))}
        self.steps.append(replace(step, outs=numbers, several=isinstance(result, (list, tuple)), aliases=aliases))
        return None

    def forget_tensors(self) -> None:
        """Exclude all tensors from later steps, after a write that made values too large."""
        self.tensors = {}

    # -- operands ----------------------------------------------------------------------------------------------------

    def _choose(self, values: Sequence[Value], *, written: bool) -> tuple[dict[int, int], dict[str, int]]:
        """Return tensors for operands, by index, and sizes of all letters."""
        sizes: dict[str, int] = {}
        chosen: dict[int, int] = {}
        for index, value in enumerate(values):
            first = written and index == 0
            if first or (value.kind in {"real", "booleans"} and self.rng.random() < _REUSED):
                fitting = [number for number in self.tensors if self._fits(number, value, sizes, written=first)]
                if not fitting and not first and value.kind == "real":
                    fitting = self._adapted(value, sizes)
                if fitting:
                    number = fitting[int(self.rng.integers(len(fitting)))]
                    chosen[index] = number
                    sizes.update(_letters(value, self._shape(number)))
        letters = dict.fromkeys(letter for value in values for letter in _dims(value) if letter not in sizes)
        return chosen, {**sizes, **{letter: int(self.rng.choice(_SIZES)) for letter in letters}}

    def _adapted(self, value: Value, sizes: dict[str, int]) -> list[int]:
        """Add views of a tensor until it has the dims of an operand; return its number if it fits."""
        number = self._drawn(own_dtype=True)
        for _ in range(_MOST_ADAPTED):
            if number is None or len(self._shape(number)) == len(value.shape):
                break
            count = len(self.steps)
            self._idiom(idioms.adapted(TensorRef(number), self._shape(number), len(value.shape), self.rng))
            number = self.steps[-1].outs[0] if len(self.steps) > count else None
        return [number] if number is not None and self._fits(number, value, sizes, written=False) else []

    def _fits(self, number: int, value: Value, sizes: dict[str, int], *, written: bool) -> bool:
        tensor, shape = self.tensors[number], self._shape(number)
        right = _name(tensor) == "bool" if value.kind == "booleans" else self._is_own(tensor)
        if len(shape) != len(value.shape) or not right or (written and self._is_leaf(number)):
            return False
        known = dict(sizes)
        for dim, size in zip(value.shape, shape, strict=True):
            if (known.setdefault(dim, size) if isinstance(dim, str) else dim) != size:
                return False
        return True

    def _is_own(self, tensor: Any) -> bool:
        """Whether a tensor has the program's dtype, or one of the dtypes that the program mixes."""
        return _name(tensor) in (self.mixed or (self.dtype,))

    def _is_unsound(self, name: str, shapes: Sequence[Sequence[int]], dtypes: set[str]) -> bool:
        return any(self.language.unsound(name, shapes, dtype) for dtype in (dtypes if self.mixed else {self.dtype}))

    def _is_leaf(self, number: int) -> bool:
        return number in self.leaves

    def _drawn(self, *, own_dtype: bool = False, written: bool = False) -> int | None:
        """Return the number of a random tensor, or None without tensors; later tensors are more likely."""
        numbers = [
            number
            for number, tensor in self.tensors.items()
            if (not own_dtype or self._is_own(tensor)) and not (written and self._is_leaf(number))
        ]
        if not numbers:
            return None
        return numbers[-1 - min(int(self.rng.exponential(3.0)), len(numbers) - 1)]

    def _like(self, number: int, brought: dict[int, Leaf]) -> TensorRef:
        """Return a tensor of the same shape and dtype: a different existing tensor or a new leaf."""
        shape = self._shape(number)
        alike = [
            other
            for other, tensor in self.tensors.items()
            if other != number and self._shape(other) == shape and self._is_own(tensor)
        ]
        if alike and self.rng.random() < _REUSED:
            return TensorRef(alike[int(self.rng.integers(len(alike)))])
        return TensorRef(self._bring(self._values(shape), brought, requires_grad=True))

    def _bring(
        self, array: Any, brought: dict[int, Leaf], *, requires_grad: bool, partial: bool = True, dtype: str = ""
    ) -> int:
        """Add a leaf with the values of ``array``; return its number."""
        array, dtype = self._rounded(array, dtype or self._dtype_of_leaf(array))
        placements = random_placements(array, self.mesh, self.rng, partial=partial)
        requires_grad = requires_grad and self.mode != "forward" and bool(self.rng.random() < 0.85)
        linear = all(getattr(placement, "reduce_op", "sum") == "sum" for placement in placements)
        number = self.count
        self.count += 1
        brought[number] = Leaf(array, dtype, placements, requires_grad and linear and _is_floating(dtype))
        return number

    def _dtype_of_leaf(self, array: Any) -> str:
        if not self.mixed or array.dtype.kind != "f" or self.rng.random() >= _OTHER_DTYPE:
            return self.dtype
        return self.mixed[int(self.rng.integers(len(self.mixed)))]

    def _rounded(self, array: Any, dtype: str) -> tuple[Any, str]:
        """Return values with few digits, or values that the dtype can represent, and the name of their dtype."""
        if array.dtype.kind != "f":
            return array, str(array.dtype)
        if not _is_floating(dtype):
            whole = np.nan_to_num(np.round(array), posinf=3.0, neginf=-3.0)
            whole = whole > 0 if dtype == "bool" else np.abs(whole) if dtype.startswith("uint") else whole
            return whole.astype(dtype), dtype
        if not self.integral:
            array = np.round(array, 2)
        if dtype != "bfloat16":
            return array.astype("complex64" if dtype in _NO_NUMPY else dtype), dtype
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        return bits.view(np.float32).reshape(array.shape), "bfloat16"

    def _values(self, shape: Sequence[int]) -> Any:
        if self.integral:
            return self.rng.integers(-3, 4, tuple(shape)).astype(np.float64)
        return self.rng.standard_normal(tuple(shape))

    # -- single device -----------------------------------------------------------------------------------------------

    def _tensors_of(self, leaves: dict[int, Leaf]) -> dict[int, Any]:
        return plain_leaves(Program(self.seed, self.mesh, leaves, ()), self.platform, self.language)

    def _shape(self, number: int) -> tuple[int, ...]:
        return tuple(self.tensors[number].shape)

    def _is_tame(self, tensor: Any) -> bool:
        """Whether values are finite, few and small."""
        array = self.platform.tensor_to_numpy(self.platform.detach(tensor))
        if array.size > _LARGEST_SIZE:
            return False
        if array.dtype.kind not in "fc" or not array.size:
            return True
        magnitudes = np.abs(array)
        tiny = (magnitudes > 0) & (magnitudes < _SMALLEST_VALUE)  # uninitialized memory often looks like that
        return bool(magnitudes.max() < _LARGEST_VALUE) and not tiny.any()

    # -- differentiation ---------------------------------------------------------------------------------------------

    def _differentiated(self, program: Program) -> Program:
        """Choose outputs that depend on a leaf with a gradient, and leaves that are their cotangents."""
        read = {number for step in program.steps for number in operands(step)}
        last = [number for step in program.steps for number in step.outs if number not in read]
        reached = program.reached()
        outputs = [
            number
            for number in last
            if number in reached and number in self.tensors and self.language.may_have_gradient(self.tensors[number])
        ]
        outputs = outputs[-_MOST_OUTPUTS:]
        if self.mode == "forward" or not outputs or not program.differentiated:
            return program
        leaves = dict(program.leaves)
        cotangents = tuple(self._seed(self._shape(number), _name(self.tensors[number]), leaves) for number in outputs)
        program = replace(program, leaves=leaves, mode=self.mode, outputs=tuple(outputs), cotangents=cotangents)
        return self._differentiated_twice(program) if self.mode == "double" else program

    def _seed(self, shape: Sequence[int], dtype: str, leaves: dict[int, Leaf]) -> int:
        """Add a leaf that serves as a cotangent."""
        array, partial = self._values(shape), bool(self.rng.random() < 0.2)
        number = self._bring(array, leaves, requires_grad=False, partial=partial, dtype=dtype)
        twice = self.mode == "double" and not any(hasattr(p, "reduce_op") for p in leaves[number].placements)
        leaves[number] = replace(leaves[number], requires_grad=twice)
        return number

    def _differentiated_twice(self, program: Program) -> Program:
        """Choose cotangents for the gradients that can be differentiated again."""
        plain = plain_leaves(program, self.platform, self.language)
        results = attempt(execute, program, plain, self.platform, self.language)
        if isinstance(results, Raised):  # the single device raises an error, and so will the run of the program
            return program
        leaves, second = dict(program.leaves), []
        for number in program.differentiated:
            grad = results.get(("gradient", number))
            if grad is not None and self.language.may_have_gradient(grad):
                second.append((number, self._seed(grad.shape, _name(grad), leaves)))
                leaves[second[-1][1]] = replace(leaves[second[-1][1]], requires_grad=False)
        return replace(program, leaves=leaves, second=tuple(second))


def _values(sample: Any) -> list[Value]:
    values: list[Value] = []

    def collect(leaf: Any) -> None:
        if isinstance(leaf, Value):
            values.append(leaf)

    substitute((sample.args, sample.kwargs), collect)
    return values


def _dims(value: Value) -> list[str]:
    named = [dim for dim in value.shape if isinstance(dim, str)]
    return [letter for letter in (*named, *(value.high if isinstance(value.high, str) else "")) if letter.isalpha()]


def _letters(value: Value, shape: Sequence[int]) -> dict[str, int]:
    return {dim: size for dim, size in zip(value.shape, shape, strict=True) if isinstance(dim, str)}


def _is_floating(dtype: str) -> bool:
    return not dtype.startswith(("bool", "int", "uint"))


def _name(tensor: Any) -> str:
    return str(tensor.dtype).rpartition(".")[2].lower()


def _with_numbers(call: Call, filled: FilledSample, numbers: Sequence[int]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call with tensors in place of slots."""

    def numbered(leaf: Any) -> Any:
        return TensorRef(numbers[leaf.index]) if isinstance(leaf, Slot) else leaf

    args, kwargs = call.arguments(filled)
    return [substitute(value, numbered) for value in args], {
        name: substitute(value, numbered) for name, value in kwargs.items()
    }
