"""What a program computes with plain tensors: placements, found by proving each call, and gradients left unreduced.

A plain tensor leaves a DTensor, is a parameter, or comes from the batch. The program runs once as one device and once
as the first rank of an axis. Both call the same functions; the placements of a call's operands and its two sets of
sizes decide that of its results (:mod:`~hyper_parallel.verify.prove.paired`). Nobody reduces a gradient among plain
tensors: an operand that ranks have whole, used with others that differ, has a gradient that is only a rank's share.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
from hyper_parallel.verify.prove.checker import prove_row
from hyper_parallel.verify.prove.laws import UnprovenError
from hyper_parallel.verify.prove.paired import conditions_met, paired

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["PlainCalls", "PlainProof", "prove_plain"]

_TREES = (list, tuple, dict)
_MOST_RESULTS = 3
_SOFT = ("not traced", "it has many results", "its result is split")
"""How reasons begin that say nothing of the value: no law was asked."""


@dataclass(frozen=True)
class _Value:
    """A plain tensor: what a proof needs of it."""

    shape: tuple[int, ...]
    dtype: Any
    needs_grad: bool


@dataclass(frozen=True)
class _Event:
    """One thing that happens to plain tensors.

    Attributes:
        kind: ``call``; ``given``: a parameter or an array of the batch; ``leaves``: a DTensor's local tensor, given
            away; ``enters``: it becomes that of a DTensor; ``loss``.
        module: that runs.
        results: numbers of values.
        operands: likewise.
        func: that is called.
        args: its arguments, positional and named, with None in place of tensors.
        layout: of the DTensor.
        reduced: whether the library reduces the gradient.
        name: of the function, the parameter, or the border.
    """

    kind: str
    module: str
    results: tuple[int, ...] = ()
    operands: tuple[int, ...] = ()
    func: Callable[..., Any] | None = None
    args: Any = None
    layout: Layout | None = None
    reduced: bool = False
    name: str = ""


@dataclass
class PlainCalls:
    """A record of what one run does with plain tensors, up to its loss."""

    platform: Platform
    batch: Sequence[Any] = ()
    model: Any = None
    clips: bool = False
    events: list[_Event] = field(default_factory=list)
    values: list[_Value] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)  # an id belongs to one object only while that lives
    _done: bool = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what the program does inside the block."""
        patched = {**self._tensor_borders(), **self._style_borders(), **self._region_borders()}
        before = {(owner, name): vars(owner)[name] for owner, name in patched}
        for (owner, name), function in patched.items():
            setattr(owner, name, function)
        try:
            with harness_of(self.platform).observed_calls(self._called):
                yield
        finally:
            for (owner, name), function in before.items():
                setattr(owner, name, function)

    def _tensor_borders(self) -> dict[tuple[Any, str], Any]:
        to_local, from_local = DTensor.to_local, DTensor.from_local

        def leaving(value: DTensor, grad_placements: Any = None) -> Any:
            local = to_local(value, grad_placements)
            self._leaves(local, value.layout, "its plain output", reduced=grad_placements is not None)
            return local

        def entering(local: Any, *args: Any, **kwargs: Any) -> DTensor:
            number = self._numbers.get(id(local))
            result = from_local(local, *args, **kwargs)
            self._enters(number, result.layout, "from_local")
            return result

        return {(DTensor, "to_local"): leaving, (DTensor, "from_local"): staticmethod(entering)}

    def _style_borders(self) -> dict[tuple[Any, str], Any]:
        def entered(enters: Callable[..., DTensor]) -> Callable[..., DTensor]:
            def run(edge: Boundary, value: Any, *args: Any, **kwargs: Any) -> DTensor:
                number = None if isinstance(value, DTensor) else self._numbers.get(id(value))
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
                    self._leaves(local, next(layouts), f"local_map({region.name})", reduced=True)
            return prepared

        def ending(region: Any, output: Any, prepared: Any) -> Any:
            for where, value, layout in region._outputs(output, region.out, prepared, ""):  # noqa: SLF001
                if layout is not None:
                    number = self._numbers.get(id(value))
                    self._enters(number, layout.of_ndim(len(value.shape)), f"local_map({region.name}), output{where}")
            return end(region, output, prepared)

        return {(regions, "_enter"): beginning, (regions, "_wrapped"): ending}

    def finish(self, loss: Any) -> None:
        """Note the loss; what runs afterwards is not recorded."""
        if not isinstance(loss, DTensor) and not self._done:
            number = self._numbers.get(id(loss))
            self.events.append(_Event("loss", "(loss)", operands=() if number is None else (number,)))
        self._done = True

    def _new(self, tensor: Any) -> int:
        number = len(self.values)
        self._kept.append(tensor)
        self._numbers[id(tensor)] = number
        self.values.append(_Value(tuple(tensor.shape), tensor.dtype, bool(self.platform.needs_grad(tensor))))
        return number

    def _leaves(self, local: Any, layout: Layout, name: str, *, reduced: bool) -> None:
        if not self._done:
            results = (self._new(local),)
            self.events.append(_Event("leaves", module_path(), results, layout=layout, reduced=reduced, name=name))

    def _enters(self, number: int | None, layout: Layout, name: str) -> None:
        if number is not None and not self._done:
            self.events.append(_Event("enters", module_path(), operands=(number,), layout=layout, name=name))

    def _called(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        platform, given = self.platform, leaves([args, kwargs], _TREES)
        results = leaves([result], (list, tuple))
        if self.model is None or self._done or any(isinstance(each, DTensor) for each in (*given, *results)):
            return
        if not results or not all(platform.is_tensor(each) for each in results):
            return
        operands = []
        for each in given:
            if platform.is_tensor(each):
                number = self._numbers.get(id(each))
                operands.append(self._given(each) if number is None else number)
        empty = unflatten([args, kwargs], [None if platform.is_tensor(each) else each for each in given], _TREES)
        places = tuple(index for index, each in enumerate(given) if platform.is_tensor(each))
        name = getattr(func, "__name__", str(func))
        event = _Event("call", module_path(), (), tuple(operands), func, (empty, places), name=name)
        self.events.append(_replaced(event, tuple(self._new(each) for each in results)))

    def _given(self, tensor: Any) -> int:
        """Return the number of a tensor that no recorded call made."""
        number = self._new(tensor)
        stored = {**self.platform.parameters_dict(self.model), **harness_of(self.platform).buffers(self.model)}
        name = next((path for path, each in stored.items() if each is tensor), "")
        if any(tensor is each for each in self.batch):
            name = "the batch"
        self.events.append(_Event("given", name.rpartition(".")[0], (number,), name=name))
        return number


def _replaced(event: _Event, results: tuple[int, ...]) -> _Event:
    return _Event(event.kind, event.module, results, event.operands, event.func, event.args, name=event.name)


def _choices(own: Sequence[int], one: Sequence[int]) -> list[Placement]:
    """Return the placements that a result may have, by its sizes on a rank and on one device."""
    dims = [dim for dim, (size, full) in enumerate(zip(own, one, strict=False)) if size != full]
    if len(own) != len(one) or len(dims) > 1:
        msg = "its result is split along several dims"
        raise UnprovenError(msg)
    return [Shard(dims[0])] if dims else [Replicate(), Partial("sum")]


@dataclass
class PlainProof:
    """What the laws say of the plain tensors of a run, on one axis.

    Attributes:
        proven: number of calls whose placements and gradients are proven.
        followed: whether every call is.
        wrong: what is not reduced, or laid out otherwise than declared, with the module.
        open: calls that no law proves, with the module.
    """

    proven: int = 0
    followed: bool = True
    wrong: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)


def prove_plain(
    platform: Platform, local: PlainCalls, whole: PlainCalls, axis: int, name: str, ranks: int
) -> PlainProof:
    """Return what is proven of the plain tensors of a program.

    Args:
        platform: the framework.
        local: what the first rank of an axis does; the other axes have one rank.
        whole: what one device does.
        axis: of the mesh.
        name: its name.
        ranks: its size.
    """
    walk = _Walk(platform, local, whole, axis, name, ranks)
    kinds = [[(each.kind, each.func, each.operands, each.results) for each in run.events] for run in (local, whole)]
    if kinds[0] != kinds[1]:
        walk.found.open.append(f"plain tensors on {name}: a rank does not call what one device calls")
        walk.found.followed = False
        return walk.found
    for number in range(len(local.events)):
        walk.forward(number)
    for number in reversed(range(len(local.events))):
        walk.backward(number)
    return walk.found


class _Walk:
    def __init__(
        self, platform: Platform, local: PlainCalls, whole: PlainCalls, axis: int, name: str, ranks: int
    ) -> None:
        self.platform, self.local, self.whole = platform, local, whole
        self.axis, self.name, self.ranks = axis, name, ranks
        self.found = PlainProof()
        self.places: dict[int, Placement | None] = {}
        self.shares: set[int] = set()  # values of whose gradient a rank has only its share
        self.differs: set[int] = set()  # calls whose operands are not all whole
        self.reasons: dict[int, str] = {}
        self.refused: set[int] = set()  # values that a law says are not those of one device
        self.heads: dict[str, Placement] = {}  # placements of what a norm of heads is given
        self.known: dict[Any, tuple[tuple[Placement, ...] | None, str]] = {}

    def forward(self, at: int) -> None:
        """Find the placements of what one event makes, and compare those that it declares."""
        event, other = self.local.events[at], self.whole.events[at]
        if event.kind == "leaves" and event.layout is not None:
            place = event.layout.placement_on(self.axis)
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

    def _enters(self, event: _Event) -> None:
        """Compare a declared placement; a norm of heads need not know which dim the heads are."""
        number, layout = event.operands[0], event.layout
        own = self.places[number]
        declared = None if layout is None else layout.placement_on(self.axis)
        if number in self.refused:
            self._wrong(event, f"{event.name} declares {declared!r} on {self.name}, not proven: {self.reasons[number]}")
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
            key = (event.func, inputs, repr(shapes), repr(event.args), repr(other.args))
            if key not in self.known:
                self.known[key] = self._proven(event, other, inputs)
            results, why = self.known[key]
            refused = results is None and not why.startswith(_SOFT)
            if results is not None and not why:
                self.found.proven += 1
            elif why:
                what = f"{event.name} on {self.name}: {why}"
                line = f"{event.module or '(model)'}: {what}"
                if line not in self.found.open:
                    self.found.open.append(line)
                why = what
            if results is not None and any(not place.is_replicate() for place in inputs):
                self.differs.add(at)
        self.found.followed = self.found.followed and results is not None and not why
        for index, number in enumerate(event.results):
            self.places[number] = None if results is None else results[index]
            if results is None and why:
                self.reasons[number] = why
                self.refused |= {number} if refused else set()

    def _proven(
        self, event: _Event, other: _Event, inputs: tuple[Placement, ...]
    ) -> tuple[tuple[Placement, ...] | None, str]:
        """Return the placements of the results, and why they or the gradients are not proven."""
        sizes = [(self.local.values[number].shape, self.whole.values[number].shape) for number in event.results]
        same = repr(event.args) == repr(other.args)
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

    def _graph(self, run: PlainCalls, event: _Event) -> Any:
        empty, places = event.args
        fixed = leaves(empty, _TREES)

        def call(tensors: Sequence[Any], _: Any) -> Any:
            filled = list(fixed)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            args, kwargs = unflatten(empty, filled, _TREES)
            return event.func(*args, **kwargs) if event.func is not None else None

        values = [run.values[number] for number in event.operands]
        try:
            return harness_of(self.platform).primitives(
                call,
                [(each.shape, each.dtype) for each in values],
                [each.needs_grad for each in values],
                lambda _: None,
            )
        except Exception as error:  # noqa: BLE001 - any function may fail on sizes alone in its own way
            msg = f"not traced: {(str(error) or type(error).__name__).splitlines()[0]}"
            raise UnprovenError(msg) from None

    def backward(self, at: int) -> None:
        """Find the gradients of which ranks have only a share, from those of the results."""
        event = self.local.events[at]
        if event.kind == "call":
            share = any(number in self.shares for number in event.results)
            for number in event.operands:
                place = self.places.get(number)
                whole = place is not None and place.is_replicate()
                if whole and self.local.values[number].needs_grad and (share or at in self.differs):
                    self.shares.add(number)
        elif event.kind in ("given", "leaves") and event.results[0] in self.shares and not event.reduced:
            self._wrong(event, f"the gradient of {event.name} is a pending sum over {self.name}, not reduced")

    def _wrong(self, event: _Event, text: str) -> None:
        line = f"{event.module or '(model)'}: {text}"
        if line not in self.found.wrong:
            self.found.wrong.append(line)
