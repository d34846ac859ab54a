"""The forward of a compiled module: it finds, or traces, the graph for the layouts that it is called with."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.random import record_sampling, take_calls
from hyper_parallel.errors import ArgumentTypeError, PlanError, UnsupportedOperatorError
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.platform.torch.dtensor import TorchDTensor, wrap
from hyper_parallel.platform.torch.region_collectives import TracingTransport
from hyper_parallel.platform.torch.region_graph import INDUCTOR, Backend, Region
from hyper_parallel.platform.torch.region_numbers import recorder
from hyper_parallel.platform.torch.region_state import (
    SHARDED,
    HookRefusal,
    ModuleState,
    ModuleTensors,
    content,
    has_fields,
    is_observed,
    modes,
)
from hyper_parallel.platform.torch.versions import pytree
from hyper_parallel.transport.base import use_transport

__all__ = ["MOST_GRAPHS", "CompiledForward"]

MOST_GRAPHS = 64
"""Number of graphs that one module keeps, the last ones used; they differ in shapes, layouts, dtypes or modes."""

_NO_STREAM = torch.zeros(2, dtype=torch.int64)
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)


@dataclass
class _Graph:
    """A traced graph.

    Attributes:
        run: takes the stream of random numbers and the local tensors, returns the local outputs.
        calls: random calls of one run.
        rebuild: builds the output of forward from the local outputs.
        exchanges: objects that decided what was traced, with the ranks that exchanged them and the result.
    """

    run: Callable[..., Any]
    calls: int = 0
    rebuild: Callable[[Any], Any] = tuple
    exchanges: list[tuple[Any, Any, list[Any]]] = field(default_factory=list)


class CompiledForward:
    """Replaces a module's forward.

    Args:
        module: the module, with its plan applied.
        backend: compiles the graphs, or "inductor"; None: they run operator by operator.

    Raises:
        ArgumentTypeError: ``backend`` is something else.
        PlanError: a submodule is compiled or fully sharded, or has hooks of the program.
    """

    _graphs: Any = None
    _state: ModuleState
    _numbers: dict[Any, int]
    """Number of each state of the module: keys of graphs contain the number, which is cheap to hash."""
    _number: int
    _tensors: ModuleTensors
    _layouts: dict[str, Any]

    def __init__(self, module: nn.Module, backend: Backend | str | None) -> None:
        if not (backend is None or backend == INDUCTOR or callable(backend)):
            msg = f"compile: backend {backend!r} is not known; pass {INDUCTOR!r}, or a function of a graph and examples"
            raise ArgumentTypeError(msg)
        self.module, self._backend = module, backend
        self._forward = vars(module).get("forward")
        self.__signature__ = inspect.signature(module.forward)
        self._begin()

    def _begin(self) -> None:
        self._graphs, self._numbers = OrderedDict(), {}
        self._read()
        sharded = SHARDED in vars(self.module)  # then forward gets the gathered parameters of fully_shard
        self._layouts = {} if sharded else {path: _layout(home[name]) for path, home, name in self._tensors.places}

    def _read(self) -> None:
        self._state, self._tensors = ModuleState(self.module), ModuleTensors.of(self.module)
        self._number = self._numbers.setdefault(self._state.key, len(self._numbers))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or a pickle, without graphs: it traces again."""
        return {name: vars(self)[name] for name in ("module", "_backend", "_forward", "__signature__")}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward as a graph, or uncompiled where something observes single calls."""
        if is_observed():
            return self._uncompiled(*args, **kwargs)
        graphs = self._graphs
        if graphs is None:
            self._begin()
            graphs = self._graphs
        if not (self._state.holds() and self._tensors.hold()):
            self._read()
        leaves, spec = _flat(args, kwargs)
        tensors = [home[name] for _, home, name in self._tensors.places]
        constants: list[Any] = []
        for leaf in leaves:
            (tensors if isinstance(leaf, torch.Tensor) else constants).append(leaf)
        locals_, facts = _locals_and_facts(tensors)
        if facts is None:
            return self._uncompiled(*args, **kwargs)
        if constants:
            facts += map(_constant, constants)
        key = (spec, *facts, self._number, *modes(locals_[0].device.type if locals_ else "cpu"))
        graph, known = graphs.get(key), []
        if graph is not None and graph.exchanges:
            known = _exchanged(graph)
            graph = graph if len(known) == len(graph.exchanges) and known[-1] == graph.exchanges[-1][2] else None
        if graph is None:
            return self._trace(key, leaves, spec, tensors, locals_, known)
        stream = torch.tensor(_taken_calls(graph.calls)) if graph.calls else _NO_STREAM
        return graph.rebuild(graph.run(stream, *locals_))

    def _uncompiled(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._forward
        return type(self.module).forward(self.module, *args, **kwargs) if forward is None else forward(*args, **kwargs)

    # -- tracing ---------------------------------------------------------------------------------------------------

    def _trace(
        self,
        key: Any,
        leaves: Sequence[Any],
        spec: Any,
        tensors: Sequence[Any],
        locals_: Sequence[Any],
        known: list[Any],
    ) -> Any:
        """Trace the graph for these arguments, and run it."""
        self._check_layouts()
        transport = TracingTransport(get_torch_platform().transport(), known)
        graph, first_call = (
            _Graph(tuple),
            np.zeros(2, np.int64),
        )  # an array, because PyTorch would trace writes to a tensor
        own, name = len(self._tensors.places), type(self.module).__name__

        def function(stream: Any, *traced: Any) -> list[Any]:
            transport.rewind()
            versions = [each._version for each in traced]
            mine = [
                wrap(local, tensor._layout) if isinstance(tensor, DTensor) else local
                for local, tensor in zip(traced, tensors, strict=True)
            ]
            with self._holding(mine[:own]), HookRefusal(name), record_sampling(recorder(stream)) as sampling:
                args, kwargs = _arguments(leaves, spec, mine[own:])
                output = self._uncompiled(*args, **kwargs)
                graph.calls = sampling()
            if any(traced[index]._version != versions[index] for index in range(own, len(traced))):
                msg = f"compile: forward of {name} writes to one of its arguments; clone() it first"
                raise UnsupportedOperatorError(msg)
            flat, graph.rebuild = _rebuilding(output)
            return flat

        while_tracing = ExitStack()
        region = Region(function, self._backend, while_tracing)
        with while_tracing:
            while_tracing.callback(lambda: np.copyto(first_call, _taken_calls(graph.calls) if graph.calls else 0))
            while_tracing.enter_context(use_transport(transport))
            with _explained(name):
                outputs = region.first(torch.from_numpy(first_call), *locals_)
        self._check_unchanged()
        graph.run, graph.exchanges = region.run, transport.exchanges
        graphs = self._graphs
        assert graphs is not None  # noqa: S101 - for the type checker
        graphs[key] = graph
        while len(graphs) > MOST_GRAPHS:
            graphs.popitem(last=False)
        return graph.rebuild(outputs)

    def _check_layouts(self) -> None:
        """Refuse a plan that was applied after the module was compiled."""
        for path, home, name in self._tensors.places:
            layout = _layout(home[name])
            before = self._layouts.setdefault(path, layout)
            if before is not layout:
                msg = (
                    f"compile: {path} of {type(self.module).__name__} was {_notation(before)} when the module was "
                    f"compiled, and is {_notation(layout)} now; apply the plan first, then compile"
                )
                raise PlanError(msg)

    def _check_unchanged(self) -> None:
        """Refuse a forward that assigns attributes, because its graph would not assign them."""
        before = self._state
        if before.holds() and self._tensors.hold():
            return
        self._read()
        changed = before.difference(self._state) or "a parameter or buffer"
        msg = (
            f"compile: forward of {type(self.module).__name__} assigns {changed}, which a graph would do once only; "
            "return the value, or write to a buffer in place"
        )
        raise UnsupportedOperatorError(msg)

    @contextmanager
    def _holding(self, tensors: Sequence[Any]) -> Iterator[None]:
        """Replace the parameters and buffers with ``tensors``."""
        tied = self._tensors.tied
        before = [home[name] for _, home, name in self._tensors.places]
        self._put(tensors)
        for home, name, other, first in tied:
            home[name] = other[first]
        try:
            yield
        finally:
            replaced = [
                home[name] is not tensor for (_, home, name), tensor in zip(self._tensors.places, tensors, strict=True)
            ]
            self._put(before)
            for home, name, other, first in tied:
                home[name] = other[first]
        if any(replaced):
            path = self._tensors.places[replaced.index(True)][0]
            msg = (
                f"compile: forward of {type(self.module).__name__} assigns {path}, which a graph would do once only; "
                "return the value, or write to a buffer in place"
            )
            raise UnsupportedOperatorError(msg)

    def _put(self, tensors: Sequence[Any]) -> None:
        for (_, home, name), tensor in zip(self._tensors.places, tensors, strict=True):
            home[name] = tensor


def _layout(tensor: Any) -> Any:
    return tensor._layout if isinstance(tensor, DTensor) else None


def _notation(layout: Any) -> str:
    return "a plain tensor" if layout is None else f"{layout.notation()} on {layout.mesh!r}"


# -- arguments and results ---------------------------------------------------------------------------------------------


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[Any], Any]:
    """Return the leaves of a call, and its structure; None if all arguments are tensors and none is named."""
    if not kwargs and all(isinstance(arg, torch.Tensor) for arg in args):
        return args, None
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return leaves, spec


def _locals_and_facts(tensors: Sequence[Any]) -> tuple[list[Any], list[Any] | None]:
    """Return local tensors, and the facts on which a graph depends; None if a tensor's type intercepts calls."""
    locals_: list[Any] = []
    facts: list[Any] = []
    for tensor in tensors:
        of = type(tensor)
        if of is TorchDTensor or isinstance(tensor, DTensor):
            local = tensor._local
            facts.append((tensor._layout, local.dtype, local.requires_grad, local.stride()))
            locals_.append(local)
        elif of in _PLAIN_TENSORS:
            facts.append((tensor.shape, tensor.dtype, tensor.requires_grad, tensor.stride(), tensor.device))
            locals_.append(tensor)
        else:
            return locals_, None
    if len(set(map(id, locals_))) < len(locals_):  # one tensor in two places has one gradient
        first: dict[int, Any] = {}
        facts.append(tuple(first.setdefault(id(local), index) for index, local in enumerate(locals_)))
    return locals_, facts


def _arguments(leaves: Sequence[Any], spec: Any, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with ``tensors`` instead of its own tensors."""
    if spec is None:
        return tuple(tensors), {}
    rest = iter(tensors)
    args, kwargs = pytree.tree_unflatten(
        [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
    )
    return args, kwargs


def _constant(value: Any) -> Any:
    """The cache key of an argument that is not a tensor."""
    if isinstance(value, (float, complex)):
        return type(value), repr(value)
    try:
        hash(value)
    except TypeError:
        msg = (
            f"compile: an argument of type {type(value).__name__} cannot be compared with that of an earlier call; "
            "pass tensors, numbers, strings, or nested tuples, lists and dicts of them"
        )
        raise ArgumentTypeError(msg) from None
    compares = any("__eq__" in vars(kind) for kind in type(value).__mro__[:-1])
    return type(value), value if compares or not has_fields(value) else repr(content(value))


def _rebuilding(output: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """Return the local tensors of an output, and a function that builds an equal output from other local tensors."""
    if isinstance(output, torch.Tensor):
        if not isinstance(output, DTensor):
            return [output], lambda outputs: outputs[0]
        layout = output._layout
        return [output._local], lambda outputs: wrap(outputs[0], layout)
    flat, spec = pytree.tree_flatten(output)
    layouts = [_layout(leaf) for leaf in flat]
    constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in flat]

    def rebuild(outputs: Any) -> Any:
        rest = iter(outputs)
        leaves = [
            constant if not tensor else next(rest) if layout is None else wrap(next(rest), layout)
            for tensor, layout, constant in zip(is_tensor, layouts, constants, strict=True)
        ]
        return pytree.tree_unflatten(leaves, spec)

    return [
        leaf._local if isinstance(leaf, DTensor) else leaf for leaf in flat if isinstance(leaf, torch.Tensor)
    ], rebuild


def _exchanged(graph: _Graph) -> list[Any]:
    """Exchange again the objects that decided the trace, up to the first result that differs."""
    transport, results = get_torch_platform().transport(), []
    for mine, ranks, before in graph.exchanges:
        results.append(transport.all_gather_object(mine, ranks))
        if results[-1] != before:
            break
    return results


def _taken_calls(calls: int) -> tuple[int, int]:
    """Return the seed, as a signed number, and the first call of a run."""
    seed, first = take_calls(calls)
    return (seed - (1 << 64) if seed >> 63 else seed), first


_VALUES = ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode")
_ITEM, _REAL = "_local_scalar_dense", "Please convert all Tensors to FakeTensors first"


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Translate errors of PyTorch's tracer into what a graph cannot contain."""
    try:
        yield
    except Exception as error:
        text = str(error)
        if type(error).__name__ in _VALUES or _ITEM in text:
            msg = (
                f"compile: forward of {name} depends on values of tensors ({text.splitlines()[0]}), which a graph "
                "cannot; compile the modules around that part"
            )
            raise UnsupportedOperatorError(msg) from error
        if _REAL in text:
            msg = (
                f"compile: forward of {name} reads a tensor that is neither an argument nor a parameter or buffer, and "
                "would be a constant in its graph; register it as a buffer, or pass it"
            )
            raise UnsupportedOperatorError(msg) from error
        raise
