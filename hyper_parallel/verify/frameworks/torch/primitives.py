"""PyTorch's operators as primitives over symbolic sizes: traced with their backward."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from hyper_parallel.core.dtensor.random import record_sampling
from hyper_parallel.core.dtensor.sampling import LocalRandomNumbers
from hyper_parallel.platform.torch import optimizer_steps
from hyper_parallel.platform.torch.region_numbers import RecordedArray, RecordedNumbers
from hyper_parallel.platform.torch.versions import (
    ConstantSource,
    FakeTensorMode,
    FunctionalTensorMode,
    decompositions,
    dispatch_functionalize,
    enable_python_dispatcher,
)
from hyper_parallel.verify.frameworks.contract.primitives import (
    Constant,
    Graph,
    Input,
    Opaque,
    Primitive,
    Step,
)
from hyper_parallel.verify.frameworks.torch.modules import recomputes
from hyper_parallel.verify.frameworks.torch.primitive_table import (
    REWRITTEN,
    SIZED,
    describe,
    is_kept,
    name_of,
    shape_of,
    unread,
)

__all__ = ["ObservedCalls", "observed_steps", "traced"]

_LIBRARY = str(Path(__file__).parents[3])
_PLATFORM, _CLIP = f"{_LIBRARY}/platform", f"{_LIBRARY}/core/tensor_parallel/clip.py"


def _table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of functions that are not described here."""
    return {function: run for function, run in decompositions.items() if not is_kept(function)} | REWRITTEN


class ObservedCalls(TorchFunctionMode):
    """Notes each function that the program calls; the library's own calls are left out, but for those of clipping.

    Args:
        observe: called with function, arguments, named arguments, result, and whether backward runs.
    """

    def __init__(self, observe: Callable[..., None]) -> None:
        super().__init__()
        self._observe = observe

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call, and note it."""
        del types
        named = kwargs or {}
        caller: Any = sys._getframe(1)  # noqa: SLF001 - the only way to the caller's file
        while caller.f_code.co_filename == "<string>":  # a closure that the library has generated
            caller = caller.f_back
        result = func(*args, **named)
        file = caller.f_code.co_filename
        clips = file.startswith(_PLATFORM) and caller.f_back.f_code.co_filename == _CLIP
        if clips or file == _CLIP or not file.startswith(_LIBRARY):
            self._observe(func, args, named, result, recomputes())
        return result


@contextmanager
def observed_steps(stepped: Callable[[Any], None]) -> Iterator[None]:
    """Call ``stepped`` with each DTensor whose local tensor a step of an optimizer is about to take."""
    before = optimizer_steps.local_lists

    def observed(lists: tuple[Any, ...], options: dict[str, Any]) -> list[Any] | None:
        columns = before(lists, options)
        for values, column in zip(lists, columns or lists, strict=True):
            for each in values if values is not column else ():
                stepped(each)
        return columns

    vars(optimizer_steps)["local_lists"] = observed
    try:
        yield
    finally:
        vars(optimizer_steps)["local_lists"] = before


# -- tracing -----------------------------------------------------------------------------------------------------------


def traced(
    run: Callable[..., Any],
    operands: Sequence[Any],
    requires_grad: Sequence[bool],
    sizes: Callable[[Sequence[Any]], Any] = lambda _: None,
) -> Graph:
    """Return an operator and its backward as primitives.

    It is traced as it is; then, where that leaves something open, with writes as new values; then also with dims of
    operands that have equal sizes as one symbol. The trace that leaves the least open is returned.

    Args:
        run: ``run(tensors, sizes)`` calls it.
        operands: tensors whose sizes are values of the symbols; no two dims that need not be equal are. Or pairs of a
            shape and a dtype, whose sizes stay numbers. The last one's dims are symbols of their own.
        requires_grad: per operand, whether its gradient is wanted.
        sizes: makes what ``run`` needs of the operands' symbolic sizes.

    Raises:
        Exception: whatever the operator raises on symbolic sizes.
    """
    symbolic = not any(isinstance(each, tuple) for each in operands)
    graphs = list[Graph]()
    failure: Exception | None = None
    for functional, alike in ((False, False), (True, False), *([(True, True)] if symbolic else [])):
        try:
            graph = _traced(run, operands, requires_grad, sizes, functional=functional, alike=alike)
        except Exception as error:  # noqa: BLE001 - any operator may fail on symbolic sizes in its own way
            failure = failure or error
            continue
        graphs.append(graph)
        if not _open(graph, symbolic=symbolic):
            break
    if not graphs:
        assert failure is not None
        raise failure
    return min(graphs, key=lambda graph: _open(graph, symbolic=symbolic))


@dataclass(frozen=True)
class _Drawn(RecordedNumbers):
    """Random numbers of a rank in a trace: each is a function of its global index, so they are split as constants."""

    def array(self) -> Any:
        """What stands for them as an array."""
        array = np.zeros(0).view(RecordedArray)
        array.numbers = self
        return array

    def tensor(self, device: Any = None) -> Tensor:
        """A tensor whose elements the program does not define."""
        words = self.distribution.words_per_element
        dtype = self.distribution.transform(np.zeros((0, 8 // words), f"<u{4 * words}")).dtype
        return torch.empty(self.shape, dtype=torch.from_numpy(np.zeros(0, dtype)).dtype, device=device)


def _drawn(numbers: LocalRandomNumbers) -> _Drawn:
    return _Drawn(**{each.name: getattr(numbers, each.name) for each in fields(LocalRandomNumbers)})


def _open(graph: Graph, *, symbolic: bool) -> int:
    """Return the number of things that a graph does not say."""
    steps = [step for step in graph.steps if isinstance(step.does, Opaque)]
    fixed = [size for number in graph.inputs for size in graph.steps[number].shape if not size.symbols]
    return len(steps) + bool(graph.no_backward) + symbolic * len(fixed)


def _traced(
    run: Callable[..., Any],
    operands: Sequence[Any],
    requires_grad: Sequence[bool],
    sizes: Callable[[Sequence[Any]], Any],
    *,
    functional: bool,
    alike: bool,
) -> Graph:
    symbolic = not any(isinstance(each, tuple) for each in operands)
    env = ShapeEnv(duck_shape=alike, specialize_zero_one=False)
    mode = FakeTensorMode(shape_env=env if symbolic else None, allow_non_fake_inputs=True)
    fakes = [_fake(mode, tensor, index, alike=alike and index < len(operands) - 1)
             for index, tensor in enumerate(operands)]  # fmt: skip
    made = len(env.guards)  # of the operands' strides, on which no value depends
    given = sizes([tuple(fake.shape) for fake in fakes])

    def joint(*tensors: Tensor) -> Any:
        leaves = [x.detach().requires_grad_(wanted) for x, wanted in zip(tensors, requires_grad, strict=True)]
        with torch.enable_grad(), record_sampling(_drawn):
            out = run(leaves, given)
        outs = list(out) if isinstance(out, (list, tuple)) else [out]
        differentiable = [each for each in outs if isinstance(each, Tensor) and each.requires_grad]
        cotangents = [torch.empty_like(each) for each in differentiable]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        failure, grads = "", tuple[Tensor, ...]()
        if differentiable and wanted:
            try:
                grads = torch.autograd.grad(differentiable, wanted, cotangents, allow_unused=True)
            except Exception as error:  # noqa: BLE001 - any failure of the backward leaves the forward
                failure = str(error).splitlines()[0]
        shown["failure"] = failure
        return outs, [cotangents.pop(0) if each.requires_grad else None for each in outs], list(grads)

    shown: dict[str, str] = {}
    call = dispatch_functionalize(joint, FunctionalTensorMode()) if functional else joint
    python = enable_python_dispatcher() if functional else nullcontext()
    with mode, sdpa_kernel([SDPBackend.MATH]), python:
        module = make_fx(call, decomposition_table=_table(), _allow_non_fake_inputs=True)(*fakes)
    hints = {
        str(size.node.expr): int(size.node.hint)
        for fake in fakes for size in _sizes(fake) if isinstance(size, torch.SymInt)
    }  # fmt: skip
    return _graph(module, env, env.guards[made:], list(requires_grad), shown["failure"], hints)


def _sizes(tensor: Any) -> Sequence[Any]:
    """Return the sizes of a fake tensor, numbers or symbols, which PyTorch declares as numbers."""
    return tuple(tensor.shape)


def _fake(mode: FakeTensorMode, tensor: Any, index: int, *, alike: bool = False) -> Tensor:
    if isinstance(tensor, tuple):
        shape, dtype = tensor
        with mode:
            return torch.empty(shape, dtype=dtype)
    kind = DimDynamic.DUCK if alike else DimDynamic.DYNAMIC
    context: Any = StatelessSymbolicContext(dynamic_sizes=[kind] * tensor.ndim)
    return mode.from_tensor(tensor.contiguous(), source=ConstantSource(f"x{index}"), symbolic_context=context)


def _graph(
    module: Any,
    env: ShapeEnv,
    guards: Sequence[Any],
    requires_grad: Sequence[bool],
    failure: str,
    hints: dict[str, int],
) -> Graph:
    steps: list[Step] = []
    numbers: dict[Any, Any] = {}
    inputs: list[int] = []
    result: Any = None
    for node in module.graph.nodes:
        if node.op == "placeholder":
            inputs.append(len(steps))
            numbers[node] = len(steps)
            steps.append(Step(node.name, Input(), (), shape_of(node.meta["val"])))
        elif node.op == "output":
            result = node.args[0]
        elif node.op == "get_attr":
            numbers[node] = len(steps)
            does = Constant() if _single(node) else Opaque("a tensor of the program")
            steps.append(Step(node.name, does, (), shape_of(node.meta.get("val"))))
        elif node.target is operator.getitem:
            made = numbers.get(node.args[0])
            if isinstance(made, list):
                numbers[node] = made[node.args[1]]
        elif _writes(node.target):
            msg = f"{name_of(node.target)} writes into a tensor"
            raise ValueError(msg)
        else:
            _add(steps, numbers, node)
    outs, cotangents, grads = result
    for node in cotangents:
        if node is not None:
            steps[numbers[node]] = replace(steps[numbers[node]], does=Input())
    wanted = iter(grads or [])
    gradients = tuple(numbers.get(next(wanted, None)) if needs else None for needs in requires_grad)
    return Graph(
        tuple(steps),
        tuple(inputs),
        tuple(numbers[node] for node in outs),
        tuple(None if node is None else numbers[node] for node in cotangents),
        gradients if not failure else (),
        hints,
        tuple((str(guard.expr), tuple(map(str, guard.expr.free_symbols))) for guard in guards
              if not _follows(guard.expr, env)),
        failure,
    )  # fmt: skip


def _writes(function: Any) -> bool:
    """Whether a function writes into its operands, which are other values afterwards."""
    schema = getattr(function, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _follows(condition: Any, env: ShapeEnv) -> bool:
    """Whether a condition only says that two symbols are one."""
    return bool(env.simplify(condition) == True)  # noqa: E712 - a sympy truth value


def _single(node: Any) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not value.ndim


def _add(steps: list[Step], numbers: dict[Any, Any], node: Any) -> None:
    value = node.meta.get("val")
    if not isinstance(value, (Tensor, list, tuple)):
        return  # a size
    operands = _tensors((node.args, node.kwargs))
    outs = list(value) if isinstance(value, (list, tuple)) else [value]
    made: list[int | None] = []
    for index, out in enumerate(outs):
        if not isinstance(out, Tensor):
            made.append(None)
            continue
        left_out = unread(node.target, index)
        read = [arg for at, arg in enumerate(operands) if at not in left_out]
        try:
            does = describe(node.target, node.args, node.kwargs, [arg.meta["val"] for arg in read], out, index)
            if isinstance(does, Primitive) and name_of(node.target) not in SIZED:
                does = replace(does, numbers=repr(_numbers([*node.args, *node.kwargs.values()])))
        except Exception as error:  # noqa: BLE001 - what cannot be described is opaque
            does = Opaque(f"{name_of(node.target)}: {error}")
        made.append(len(steps))
        taken = () if isinstance(does, Constant) else tuple(numbers[arg] for arg in read)
        steps.append(Step(name_of(node.target), does, taken, shape_of(out)))
    numbers[node] = made if isinstance(value, (list, tuple)) else made[0]


def _numbers(tree: Any) -> list[Any]:
    """Return the numbers in arguments."""
    if isinstance(tree, (list, tuple)):
        return [each for item in tree for each in _numbers(item)]
    return [tree] if isinstance(tree, (int, float, complex, str)) else []


def _tensors(tree: Any) -> list[Any]:
    """Return the nodes of tensors in arguments, in order."""
    if isinstance(tree, torch.fx.Node):
        return [tree] if isinstance(tree.meta.get("val"), Tensor) else []
    if isinstance(tree, (list, tuple)):
        return [each for item in tree for each in _tensors(item)]
    if isinstance(tree, Mapping):
        return [each for item in tree.values() for each in _tensors(item)]
    return []
