"""Proves a program's calls on plain tensors: derives their placements, and finds gradients that are not reduced.

A plain tensor is the local tensor of a DTensor, a parameter, or part of the batch. The program runs once as one device
and once as the first rank of an axis. Both runs call the same functions. The placements of a call's results follow from
the placements of its operands, and from the sizes in both runs (:mod:`~hyper_parallel.verify.prove.paired`). Gradients
of plain tensors are not reduced automatically: if a replicated operand is used with operands that differ between ranks,
its gradient on a rank is only that rank's term of a sum.

After backward, clipping and the optimizer's step are followed in the same way, on the local tensors of weights,
gradients and state, including all-reduces. A tensor that is written must have the placement of the DTensor that it is
the local tensor of.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from hyper_parallel._tree import CONTAINERS, leaves, unflatten
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import module_path
from hyper_parallel.core.dtensor.placements import Partial, Placement, Replicate, Shard
from hyper_parallel.core.shard.custom import function_map
from hyper_parallel.core.shard.rule import Row
from hyper_parallel.core.tensor_parallel.styles.boundary import Boundary
from hyper_parallel.core.tensor_parallel.styles.head_norm import HeadNorm
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.frameworks.contract.primitives import Opaque
from hyper_parallel.verify.frameworks.contract.replacing import replaced
from hyper_parallel.verify.prove.checker import prove_row
from hyper_parallel.verify.prove.laws import UnprovenError
from hyper_parallel.verify.prove.paired import conditions_met, paired
from hyper_parallel.verify.prove.program import Program, arguments_text, library_borders

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.frameworks.contract.primitives import Graph

__all__ = ["PlainCalls", "PlainProof", "prove_plain"]

_TREES = (list, tuple, dict)
_MOST_RESULTS = 3
_LOCAL = attrgetter("_local")
_SOFT = ("not traced", "it has many results", "its result is split")
"""Beginnings of reasons that say nothing about the value, because no law was applied."""


@dataclass(frozen=True)
class _Value:
    """Shape, dtype and need of a gradient of a plain tensor."""

    shape: tuple[int, ...]
    dtype: Any
    needs_grad: bool


@dataclass(frozen=True)
class _Event:
    """One event on plain tensors.

    Attributes:
        kind: ``call``: a function call; ``given``: a parameter or an array of the batch; ``leaves``: the program takes
            the local tensor of a DTensor; ``enters``: a tensor becomes the local tensor of a DTensor; ``loss``: a loss;
            ``reduces``: an all-reduce; ``written``: a parameter, a gradient or the local tensor of a DTensor has a new
            value, whose number is the operand; ``dispatched``: an operator on DTensors has written a parameter.
        module: path of the running module.
        results: numbers of the result values.
        operands: numbers of the operand values.
        func: function that is called.
        args: positional and named arguments, with None in place of tensors.
        layout: layout of the DTensor.
        reduced: names of the mesh axes along which the library sums the gradient; None if all that are needed.
        name: name of the function, the parameter, the tensor that enters or leaves a DTensor, or the reduction.
        ranks: ranks that take part in an all-reduce.
    """

    kind: str
    module: str
    results: tuple[int, ...] = ()
    operands: tuple[int, ...] = ()
    func: Callable[..., Any] | None = None
    args: Any = None
    layout: Layout | None = None
    reduced: Collection[str] | None = ()
    name: str = ""
    ranks: tuple[int, ...] = ()

    @cached_property
    def text(self) -> str:
        """The arguments as text; different arguments have different texts."""
        return arguments_text(self.args)


@dataclass
class _Border:
    """A tensor that outlives the step: the local tensor of a DTensor, or a plain parameter or gradient.

    Attributes:
        tensor: the tensor.
        name: name of the tensor.
        layout: layout of the DTensor; None for a plain tensor, which is replicated.
        place: position of the tensor in its storage.
        version: write count of the storage when the tensor was last used.
    """

    tensor: Any
    name: str
    layout: Layout | None
    place: tuple[Any, ...]
    version: int


@dataclass
class PlainCalls:
    """Records the events on plain tensors of one run, up to the last loss and after the last backward.

    Attributes:
        platform: the framework.
        program: records the values of all calls, including those of DTensors; None if values are not compared.
        like: record of the same plan on one rank. ``program`` gets the arguments of its calls, because local sizes
            among the arguments would otherwise differ from those on one device.
        batch: arrays that the model is called with.
        model: the parallel model, once it is built.
        events: the events in order.
        values: shape, dtype and need of a gradient of each value, by number.
        after: number of events up to the last loss.
        trained: paths of the parameters that have a gradient.
    """

    platform: Platform
    program: Program | None = None
    like: PlainCalls | None = None
    batch: Sequence[Any] = ()
    model: Any = None
    events: list[_Event] = field(default_factory=list)
    values: list[_Value] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)
    _writes: list[int] = field(default_factory=list)  # per value, the write count of its tensor when it had the value
    _kept: list[Any] = field(default_factory=list)  # ids are unique only among live objects
    after: int = -1
    _differentiable: int = 0  # number of values up to the last loss
    trained: tuple[str, ...] = ()
    _borders: dict[int, _Border] = field(default_factory=dict)
    _versions: dict[str, tuple[int, int]] = field(default_factory=dict)
    _owners: dict[int, tuple[Any, str, Layout | None]] = field(default_factory=dict)
    _summed: dict[int, list[str]] = field(default_factory=dict)  # by id, the axes over which a gradient is summed
    _text: str = ""  # the arguments of the running call, as in the run on one rank

    @property
    def _done(self) -> bool:
        """Whether the loss has been recorded."""
        return self.after >= 0

    @property
    def reductions(self) -> list[_Event]:
        """The all-reduces after backward in which several ranks take part."""
        return [event for event in self.events if event.kind == "reduces" and len(event.ranks) > 1]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the program's events inside the block."""
        transport = self.platform.transport()
        every = None if self.program is None else self._recorded
        with contextlib.ExitStack() as stack:
            for borders in (self._tensor_borders, self._style_borders, self._region_borders):
                stack.enter_context(replaced(borders()))
            if self.program is not None:
                stack.enter_context(replaced(library_borders(self.program)))
            vars(transport)["all_reduce"] = self._reducing(transport.all_reduce)
            stack.callback(vars(transport).pop, "all_reduce", None)
            with harness_of(self.platform).observed_calls(self._called, self._stepped, every, self.program):
                yield
            self._close()

    def _tensor_borders(self) -> dict[tuple[Any, str], Any]:
        to_local, local_for, from_local = DTensor.to_local, DTensor.local_for, DTensor.from_local

        def leaving(value: DTensor, grad_placements: Any = None) -> Any:
            local = to_local(value, grad_placements)
            self._leaves(local, value.layout, "its plain output", reduced=self._summed.get(id(local), ()))
            return local

        def summing(value: DTensor, target: Layout, varying: tuple[int, ...], *cause: Any) -> Any:
            local = local_for(value, target, varying, *cause)
            self._summed[id(local)] = [target.mesh.names[axis] for axis in varying]
            self._kept.append(local)
            return local

        def entering(local: Any, *args: Any, **kwargs: Any) -> DTensor:
            number = self._number(local)
            result = from_local(local, *args, **kwargs)
            self._enters(number, result.layout, "from_local")
            return result

        return {
            (DTensor, "to_local"): leaving,
            (DTensor, "local_for"): summing,
            (DTensor, "from_local"): staticmethod(entering),
        }

    def _style_borders(self) -> dict[tuple[Any, str], Any]:
        def entered(enters: Callable[..., DTensor]) -> Callable[..., DTensor]:
            def run(edge: Boundary, value: Any, *args: Any, **kwargs: Any) -> DTensor:
                number = None if isinstance(value, DTensor) else self._number(value)
                result = enters(edge, value, *args, **kwargs)
                self._enters(number, result.layout, edge.style)
                return result

            return run

        return {(Boundary, name): entered(getattr(Boundary, name)) for name in ("enter", "enter_whole")}

    def _region_borders(self) -> dict[tuple[Any, str], Any]:
        regions = function_map._LocalMap  # noqa: SLF001 - its function runs on plain tensors
        begin, end = regions._enter, regions._wrapped  # noqa: SLF001

        def beginning(region: Any, first: Any, arguments: Any, *rest: Any) -> Any:
            prepared = begin(region, first, arguments, *rest)
            given = [*leaves(prepared.args, CONTAINERS), *leaves(prepared.kwargs, CONTAINERS)]
            layouts = iter(prepared.targets)
            for (_, value), local in zip(arguments, given, strict=True):
                if isinstance(value, DTensor):
                    reduced = self._summed.get(id(local), ())
                    self._leaves(local, next(layouts), f"local_map({region.name})", reduced=reduced)
                    if self.program is not None:
                        self.program.same(local, value)
            return prepared

        def ending(region: Any, output: Any, prepared: Any) -> Any:
            for where, value, layout in region._outputs(output, region.out, prepared, ""):  # noqa: SLF001
                if layout is not None:
                    number = self._number(value)
                    self._enters(number, layout.of_ndim(len(value.shape)), f"local_map({region.name}), output{where}")
            return end(region, output, prepared)

        return {(regions, "_enter"): beginning, (regions, "_wrapped"): ending}

    def _reducing(self, all_reduce: Callable[..., Any]) -> Callable[..., Any]:
        def reducing(x: Any, op: str, ranks: Any) -> Any:
            number = self._number(x) if self._done else None
            result = all_reduce(x, op, ranks)
            if self.program is not None:
                self.program.same(result, x, known=True)
            if number is not None:
                results = (self._new(result),)
                self.events.append(_Event("reduces", module_path(), results, (number,), name=op, ranks=tuple(ranks)))
            return result

        return reducing

    def finish(self, loss: Any) -> None:
        """Record a loss; after the last loss, calls outside of backward belong to clipping or the optimizer's step."""
        if self._done:
            if any(event.kind in ("written", "dispatched") for event in self.events[self.after :]):
                self.events.insert(self.after, _Event("written", "", name="a weight, between two losses,"))
        else:
            self._versions = self._weights()
        number = None if isinstance(loss, DTensor) else self._number(loss)
        if not isinstance(loss, DTensor):
            self.events.append(_Event("loss", "(loss)", operands=() if number is None else (number,)))
        self.after, self._differentiable = len(self.events), len(self.values)
        self._numbers.clear()  # tensors of the step are looked up again, because it may write them
        self._owners.clear()
        if number is not None:
            self._numbers[id(loss)] = number

    def _stepped(self, values: Sequence[DTensor]) -> None:
        """Record DTensors whose local tensors an optimizer uses."""
        if self._done and any(id(_LOCAL(each)) not in self._owners for each in values):
            self._note_owners(map(_LOCAL, values))
        for value in values:
            self._leaves(_LOCAL(value), value.layout, "an optimizer's tensor", reduced=None)

    def _close(self) -> None:
        """Record the tensors that calls wrote without being recorded, and the parameters that have gradients."""
        for path, (memory, version) in self._weights().items() if self._done else ():
            if memory not in self._borders:
                self._note_dispatched(path, memory, version)
        for border in self._borders.values():
            if harness_of(self.platform).memory_of(border.tensor)[2] != border.version:
                self.events.append(_Event("written", "", name=border.name))
        for number in range(self._differentiable, len(self.values)):
            self.values[number] = replace(self.values[number], needs_grad=False)
        trained = harness_of(self.platform).trainable(self.model) if self.model is not None else {}
        self.trained = tuple(path for path, each in trained.items() if self.platform.gradient_of(each) is not None)

    def _note_dispatched(self, path: str, memory: int, version: int) -> None:
        """Record parameters that operators on DTensors have written since the loss, if no local tensor was taken."""
        before = self._versions.get(path, (memory, version))
        if before[0] == memory and before[1] < version:
            self.events.append(_Event("dispatched", "", name=path))

    def _weights(self) -> dict[str, tuple[int, int]]:
        """Return the storage of each DTensor parameter, and its number of writes."""
        found = {}
        for path, each in self.platform.parameters_dict(self.model).items():
            if isinstance(each, DTensor):
                memory, _, version = harness_of(self.platform).memory_of(_LOCAL(each))
                found[path] = memory, version
        return found

    def _new(self, tensor: Any) -> int:
        number = len(self.values)
        self._kept.append(tensor)
        self._numbers[id(tensor)] = number
        self._writes.append(self.platform.version(tensor))
        self.values.append(_Value(tuple(tensor.shape), tensor.dtype, bool(self.platform.needs_grad(tensor))))
        return number

    def _number(self, tensor: Any, *, by_call: bool = False) -> int | None:
        """Return the number of a tensor's value; None if the tensor is not known.

        A tensor that has changed otherwise than by a recorded call gets a new number: after writes through views or by
        calls without a result, and after functions with a backward of their own.

        Args:
            tensor: the tensor.
            by_call: whether the call that is being recorded has written it.
        """
        number = self._numbers.get(id(tensor))
        if number is None:
            return None
        changed = not self.values[number].needs_grad and bool(self.platform.needs_grad(tensor))
        writes = self.platform.version(tensor) - self._writes[number]
        if writes <= by_call and (by_call or not changed):
            return number
        return self._unknown(tensor)

    def _unknown(self, tensor: Any) -> int:
        number = self._new(tensor)
        self.events.append(_Event("given", module_path(), (number,)))
        return number

    def _leaves(self, local: Any, layout: Layout, name: str, *, reduced: Collection[str] | None) -> None:
        results = (self._new(local),)
        name = self._border(local, layout, name)
        self.events.append(_Event("leaves", module_path(), results, layout=layout, reduced=reduced, name=name))

    def _border(self, tensor: Any, layout: Layout | None, name: str) -> str:
        """Record a tensor that may be written after the loss, and return its name."""
        if not self._done:
            return name
        memory, place, version = harness_of(self.platform).memory_of(tensor)
        known = self._borders.get(memory)
        if known is not None and known.version != version:
            self.events.append(_Event("written", "", name=known.name))
        name = self._owner(tensor)[0] or name
        if known is None:
            self._note_dispatched(name, memory, version)
        self._borders[memory] = _Border(tensor, name, layout, place, version)
        return name

    def _enters(self, number: int | None, layout: Layout, name: str) -> None:
        if number is not None:
            self.events.append(_Event("enters", module_path(), operands=(number,), layout=layout, name=name))

    def _recorded(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any, by_program: bool) -> None:
        """Record the value of a call."""
        text, self._text = self._text, ""
        program = self.program
        if program is None or self.model is None:
            return
        name = getattr(func, "__name__", str(func))
        if name == "__set__" and getattr(getattr(func, "__self__", None), "__name__", "") == "data":
            program.set(args[0], program.number(args[1]))
            return
        if name == "__get__":
            func = getattr(func, "__self__", func)
            name = f".{getattr(func, '__name__', name)}"
        program.called(func, name, args, kwargs, result, text, by_program=by_program)

    def _called(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any, in_backward: bool) -> None:
        self._text = ""
        if self.model is None or (self._done and in_backward):
            return
        given, results = leaves([args, kwargs], _TREES), leaves([result], (list, tuple))
        if any(isinstance(each, DTensor) for each in (*given, *results)):
            return
        is_tensor = self.platform.is_tensor
        if not results or not all(map(is_tensor, results)):
            for each in filter(is_tensor, results):
                self._unknown(each)
            return
        places = tuple(index for index, each in enumerate(given) if is_tensor(each))
        tensors = [given[place] for place in places]
        operands = []
        for each in tensors:
            number = self._number(each, by_call=any(each is result for result in results))
            operands.append(self._given(each) if number is None else number)
        for place in places:
            given[place] = None
        empty = unflatten([args, kwargs], given, _TREES)
        made = tuple(map(self._new, results))
        name = getattr(func, "__name__", str(func))
        self.events.append(_Event("call", module_path(), made, tuple(operands), func, (empty, places), name=name))
        if self._done:
            self._note_writes(tensors, results)
        if self.like is not None and len(self.events) <= len(self.like.events):
            other = self.like.events[len(self.events) - 1]
            self._text = other.text if (other.kind, other.func) == ("call", func) else ""

    def _note_writes(self, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """Record the tensors that a call has written and that outlive the step."""
        for tensor in operands:
            memory, place, version = harness_of(self.platform).memory_of(tensor)
            border = self._borders.get(memory)
            if border is None or (version == border.version and not any(tensor is each for each in results)):
                continue
            border.version = version
            made = next((each for each in results if each is tensor), None)
            if made is not None and place == border.place:
                number = self._numbers[id(border.tensor)] = self._numbers[id(made)]
                self.events.append(_Event("written", "", operands=(number,), layout=border.layout, name=border.name))
            else:
                self.events.append(_Event("written", "", name=border.name))

    def _owner(self, tensor: Any) -> tuple[str, Layout | None]:
        """Return path and layout of the parameter or buffer that is ``tensor``, or whose gradient it is.

        Before the loss, local tensors of DTensors are not searched.
        """
        if id(tensor) not in self._owners:
            self._note_owners([tensor])
        return self._owners[id(tensor)][1:] if id(tensor) in self._owners else ("", None)

    def _note_owners(self, asked: Iterable[Any]) -> None:
        """Look up all owners at once, because each search iterates over all parameters.

        Args:
            asked: tensors that are recorded as without an owner if they are not found.
        """
        stored = {**self.platform.parameters_dict(self.model), **harness_of(self.platform).buffers(self.model)}
        if not self._done:
            for path, each in stored.items():
                self._owners.setdefault(id(each), (each, path, None))
            return
        gradients = {f"the gradient of {path}": self.platform.gradient_of(each) for path, each in stored.items()}
        for path, each in (*gradients.items(), *stored.items()):
            local, layout = (_LOCAL(each), each.layout) if isinstance(each, DTensor) else (each, None)
            self._owners[id(local)] = local, path, layout
        for each in asked:
            self._owners.setdefault(id(each), (each, "", None))

    def _given(self, tensor: Any) -> int:
        """Return the number of a tensor that is not the result of a recorded call."""
        name, layout = self._owner(tensor)
        if layout is not None:
            self._leaves(tensor, layout, name, reduced=None)
            return self._numbers[id(tensor)]
        number = self._new(tensor)
        name = "the batch" if any(tensor is each for each in self.batch) else name
        if name:
            self._border(tensor, None, name)
        self.events.append(_Event("given", name.rpartition(".")[0], (number,), name=name))
        return number


def _choices(own: Sequence[int], one: Sequence[int]) -> list[Placement]:
    """Return the possible placements of a result, given its sizes on a rank and on one device."""
    dims = [dim for dim, (size, full) in enumerate(zip(own, one, strict=False)) if size != full]
    if len(own) != len(one) or len(dims) > 1:
        msg = "its result is split along several dims"
        raise UnprovenError(msg)
    return [Shard(dims[0])] if dims else [Replicate(), Partial("sum")]


@dataclass
class PlainProof:
    """Proofs of the plain tensors of a run, on one axis.

    Attributes:
        proven: number of calls whose placements and gradients are proven.
        followed: whether every call up to the loss is proven, so that there are no gaps.
        wrong: missing reductions, and layouts that differ from the declared ones, with the module.
        open: calls that no law proves, with the module.
        written: names of tensors, such as parameters, whose new values are proven.
        step: the reason why clipping and the optimizer's step are not proven, or empty.
    """

    proven: int = 0
    written: set[str] = field(default_factory=set)
    step: str = ""
    followed: bool = True
    wrong: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)


def prove_plain(
    platform: Platform, local: PlainCalls, whole: PlainCalls, name: str, ranks: int, graphs: dict[Any, Graph | str]
) -> PlainProof:
    """Return the proofs of the plain tensors of a program.

    Args:
        platform: the framework.
        local: record of the first rank of an axis; the other axes have one rank.
        whole: record of one device.
        name: name of the axis.
        ranks: size of the axis.
        graphs: cache of traced calls, shared by axes and layers: equal calls are traced once.
    """
    walk = _Walk(platform, local, whole, name, ranks, graphs)
    kinds = [[(each.kind, each.func, each.operands, each.results) for each in run.events] for run in (local, whole)]
    if kinds[0][: local.after] != kinds[1][: local.after] or local.after != whole.after:
        walk.found.open.append(f"plain tensors on {name}: a rank does not call what one device calls")
        walk.found.followed, walk.found.step = False, "the forward is not followed"
        return walk.found
    for number in range(local.after):
        walk.forward(number)
    for number in reversed(range(local.after)):
        walk.backward(number)
    if kinds[0] != kinds[1]:
        walk.found.step = f"on {name} a rank does not call what one device calls"
        return walk.found
    for number in range(local.after, len(local.events)):
        walk.forward(number)
    missing = [path for path in local.trained if path not in walk.found.written]
    if missing and not walk.found.wrong:
        walk.later(f"on {name} nothing that is followed writes {missing[0]}")
    return walk.found


class _Walk:
    def __init__(
        self,
        platform: Platform,
        local: PlainCalls,
        whole: PlainCalls,
        name: str,
        ranks: int,
        graphs: dict[Any, Graph | str],
    ) -> None:
        self.platform, self.local, self.whole, self.graphs = platform, local, whole, graphs
        self.name, self.ranks = name, ranks
        self.found = PlainProof()
        self.places: dict[int, Placement | None] = {}
        self.shares: set[int] = set()  # values whose gradient on a rank is only that rank's term of a sum
        self.differs: set[int] = set()  # calls whose operands are not all replicated
        self.reasons: dict[int, str] = {}
        self.refused: set[int] = set()  # values that, by a law, differ from those of one device
        self.heads: dict[str, Placement] = {}  # by module: placement of the operand of a norm over each head
        self.known: dict[Any, tuple[tuple[Placement, ...] | None, str]] = {}

    def forward(self, at: int) -> None:
        """Derive the placements of one event's results, and compare them with declared ones."""
        event, other = self.local.events[at], self.whole.events[at]
        if event.kind == "leaves" and event.layout is not None:
            place = self._placed(event.layout)
            self.places[event.results[0]] = self.heads.pop(event.module, place)
        elif event.kind == "given":
            number = event.results[0]
            equal = self.local.values[number].shape == self.whole.values[number].shape
            self.places[number] = Replicate() if event.name and equal else None
        elif event.kind == "call":
            self._call(at, event, other)
        elif event.kind == "enters" and event.layout is not None:
            self._enters(event)
        elif event.kind == "loss":
            self._loss(event)
        elif event.kind == "reduces":
            self._reduces(event)
        elif event.kind == "written":
            self._written(event)
        else:
            self.found.written.add(event.name)

    @staticmethod
    def _placed(layout: Layout) -> Placement:
        """Return the placement on the only axis with several ranks; replicate if the layout's mesh lacks this axis."""
        axis = next((axis for axis, size in enumerate(layout.mesh.shape) if size > 1), None)
        return Replicate() if axis is None else layout.placement_on(axis)

    def _reduces(self, event: _Event) -> None:
        """Derive the result of an all-reduce, which reduces a pending value over the axis, or has a single rank."""
        (number,), (result,) = event.operands, event.results
        place, count = self.places.get(number), len(event.ranks)
        done = count == self.ranks and isinstance(place, Partial) and place.reduce_op == event.name
        same = count == 1 or (count == self.ranks and place == Replicate() and event.name in ("avg", "max", "min"))
        self.places[result] = Replicate() if done else place if same else None
        if done or same:
            return
        self.reasons[result] = self.reasons.get(number, "")
        if place is not None:
            what = "what every rank has whole" if place.is_replicate() else f"{place!r}"
            self.reasons[result] = f"an all-reduce over {self.name} takes the {event.name} of {what}"
            self.refused.add(result)

    def _written(self, event: _Event) -> None:
        """Compare the placement of a tensor's new value with the layout of its DTensor."""
        if not event.operands:
            self.later(f"{event.name} is written by a call that is not followed")
            return
        own = self.places[event.operands[0]]
        declared = Replicate() if event.layout is None else self._placed(event.layout)
        if own == declared:
            self.found.written.add(event.name)
        elif event.operands[0] in self.refused:
            self._wrong(event, f"{event.name} is written with what is not proven: {self.reasons[event.operands[0]]}")
        elif own is None:
            self.later(f"{event.name} is written: {self.reasons.get(event.operands[0]) or 'its value is not followed'}")
        else:
            self._wrong(event, f"{event.name} is {declared!r} on {self.name}, and is written with {own!r}")

    def later(self, why: str) -> None:
        """Record the reason why the part after backward is not proven."""
        self.found.step = self.found.step or why

    def _enters(self, event: _Event) -> None:
        """Compare a declared placement with the derived one.

        The declared placement of a norm over heads may leave open which dim has the heads.
        """
        number, layout = event.operands[0], event.layout
        own = self.places[number]
        declared = None if layout is None else self._placed(layout)
        if number in self.refused:
            self._wrong(event, f"{event.name} declares {declared!r} on {self.name}, not proven: {self.reasons[number]}")
        if own is None:
            self.found.followed = False
        if own is None or own == declared or declared is None:
            return
        if event.name == HeadNorm.__name__ and isinstance(own, Shard) and isinstance(declared, Shard):
            self.heads[event.module] = own
            return
        itself = own.is_replicate() and isinstance(declared, Partial) and declared.reduce_op in ("avg", "max", "min")
        if not itself:
            self._wrong(event, f"{event.name} declares {declared!r} on {self.name}, but the plain tensor is {own!r}")

    def _loss(self, event: _Event) -> None:
        place = self.places[event.operands[0]] if event.operands else None
        if place is None:
            self.found.followed = self.found.followed and not event.operands
            if event.operands and event.operands[0] in self.refused:
                self._wrong(event, f"the loss is not proven: {self.reasons[event.operands[0]]}")
        elif not place.is_replicate():
            self._wrong(event, f"the loss is {place!r} on {self.name}, not reduced")

    def _call(self, at: int, event: _Event, other: _Event) -> None:
        places = [self.places.get(number) for number in event.operands]
        results: tuple[Placement, ...] | None = None
        why = next((self.reasons[number] for number in event.operands if number in self.reasons), "")
        refused = any(number in self.refused for number in event.operands)
        if all(place is not None for place in places):
            inputs = tuple(place for place in places if place is not None)
            shapes = [[run.values[number].shape for number in (*event.operands, *event.results)]
                      for run in (self.local, self.whole)]  # fmt: skip
            grads = tuple(self.local.values[number].needs_grad for number in event.operands)
            key = (event.func, inputs, grads, repr(shapes), event.text, other.text)
            if key not in self.known:
                self.known[key] = self._proven(event, other, inputs)
            results, why = self.known[key]
            refused = results is None and not why.startswith(_SOFT)
            if why:
                why = f"{event.name} on {self.name}: {why}"
            if at < self.local.after:
                self._count(event, why)
            if results is not None and any(not place.is_replicate() for place in inputs):
                self.differs.add(at)
        if at < self.local.after:
            self.found.followed = self.found.followed and results is not None and not why
        for index, number in enumerate(event.results):
            self.places[number] = None if results is None else results[index]
            if results is None and why:
                self.reasons[number] = why
                self.refused |= {number} if refused else set()

    def _count(self, event: _Event, why: str) -> None:
        """Count a call of the forward as proven, or list it as not proven."""
        line = f"{event.module or '(model)'}: {why}"
        if not why:
            self.found.proven += 1
        elif line not in self.found.open:
            self.found.open.append(line)

    def _proven(
        self, event: _Event, other: _Event, inputs: tuple[Placement, ...]
    ) -> tuple[tuple[Placement, ...] | None, str]:
        """Return the placements of the results, and the reason why they or the gradients are not proven."""
        sizes = [(self.local.values[number].shape, self.whole.values[number].shape) for number in event.results]
        same = event.text == other.text
        replicated = all(place.is_replicate() for place in inputs)
        if same and replicated and all(own == one for own, one in sizes):
            return tuple(Replicate() for _ in sizes), ""
        if replicated:
            return None, "not traced: a rank calls it with other numbers"
        if len(sizes) > _MOST_RESULTS:
            return None, "it has many results"
        try:
            choices = [_choices(own, one) for own, one in sizes]
            graph = paired(*(self._graph(run, each) for run, each in ((self.whole, other), (self.local, event))))
        except UnprovenError as error:
            return None, str(error) if str(error).startswith(_SOFT) else f"not traced: {error}"
        shapes = [self.whole.values[number].shape for number in event.operands]
        reasons = []
        for outputs in itertools.product(*choices):
            proof = prove_row(graph, conditions_met(Row(inputs, outputs), shapes, self.ranks))
            if not proof.forward:
                return outputs, proof.backward and f"backward: {proof.backward}"
            reasons.append(proof.forward)
        opaque = [step.does.reason for step in graph.steps if isinstance(step.does, Opaque)]
        unknown = next((reason for reason in opaque if reason in reasons[0]), "")
        unknown = unknown or ("" if same else "a rank calls it with other numbers")
        return None, f"not traced: {unknown}" if unknown else reasons[0]

    def _graph(self, run: PlainCalls, event: _Event) -> Graph:
        """Return the trace of a call, cached by function, arguments, and the operands' shapes and dtypes."""
        values = tuple(run.values[number] for number in event.operands)
        key = (event.func, event.text, values)
        if key not in self.graphs:
            self.graphs[key] = self._traced(event, values)
        graph = self.graphs[key]
        if isinstance(graph, str):
            raise UnprovenError(graph)
        return graph

    def _traced(self, event: _Event, values: Sequence[_Value]) -> Graph | str:
        """Return the trace of a call, or the reason why there is none."""
        empty, places = event.args
        fixed = leaves(empty, _TREES)

        def call(tensors: Sequence[Any], _: Any) -> Any:
            filled = list(fixed)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            args, kwargs = unflatten(empty, filled, _TREES)
            return event.func(*args, **kwargs) if event.func is not None else None

        try:
            return harness_of(self.platform).primitives(
                call,
                [(each.shape, each.dtype) for each in values],
                [each.needs_grad for each in values],
                lambda _: None,
            )
        except Exception as error:  # noqa: BLE001 - any function may fail on sizes alone in its own way
            return f"not traced: {(str(error) or type(error).__name__).splitlines()[0]}"

    def backward(self, at: int) -> None:
        """Find operands of one event whose gradient is only a rank's term of a sum, given this for the results."""
        event = self.local.events[at]
        if event.kind == "call":
            share = any(number in self.shares for number in event.results)
            for number in event.operands:
                place = self.places.get(number)
                whole = place is not None and place.is_replicate()
                if whole and self.local.values[number].needs_grad and (share or at in self.differs):
                    self.shares.add(number)
        elif event.kind in ("given", "leaves") and event.results[0] in self.shares and not self._is_reduced(event):
            self._wrong(event, f"the gradient of {event.name} is a pending sum over {self.name}, not reduced")

    def _is_reduced(self, event: _Event) -> bool:
        return event.reduced is None or self.name in event.reduced

    def _wrong(self, event: _Event, text: str) -> None:
        line = f"{event.module or '(model)'}: {text}"
        if line not in self.found.wrong:
            self.found.wrong.append(line)
