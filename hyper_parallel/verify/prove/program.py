"""Records a run as expressions over the parameters and the batch, so that two runs can be compared.

The library's own operations keep the global value of a tensor: redistributions, ``to_local``, wrappers, and the gather
of ``fully_shard``. The result has the expression of the tensor that it was made from. All other results are those of
the program's calls. Values of two runs with equal expressions are therefore equal, and so are the gradients of
parameters, unless a hook changes them. Hooks are recorded as functions of the gradient that they receive.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hyper_parallel._tree import leaves, unflatten
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import module_path
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.frameworks.contract.replacing import LIBRARY, called_from
from hyper_parallel.verify.frameworks.contract.training import first_paths
from hyper_parallel.verify.prove.expressions import TREES, Expression, Expressions
from hyper_parallel.verify.prove.paired import complete_text

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["RETURNED", "Program", "arguments_text", "library_borders"]

RETURNED = "the loss that step= returns"
"""Name of the end for the loss that the user's ``step`` function returns."""

_COPIES = ("clone", "contiguous")
"""Functions whose result and gradient are those of the operand."""

_KEPT = (*_COPIES, "detach")
"""Functions whose result has the operand's value; used before the step and in the library, where no gradient passes."""

_READS = (".grad", ".data")
"""Attributes of a tensor whose access is not recorded as a call."""

_OF_RANKS = ("get_local_rank", "get_rank", "get_coordinate")
"""Methods of a mesh whose results differ between ranks."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def arguments_text(args: Any) -> str:
    """Return arguments as text without addresses of objects; different arguments have different texts."""
    text = repr(args)
    return _ADDRESS.sub("", complete_text(args)) if "array(" in text or " at 0x" in text else text


def _local(tensor: Any) -> Any:
    return tensor._local if isinstance(tensor, DTensor) else tensor


def library_borders(program: Program) -> dict[tuple[Any, str], Any]:
    """Return replacements of the library's functions that make a tensor with the global value of another tensor.

    Functions that only wrap the tensor need no replacement. The global norm of clipping, and attention over a split
    sequence, are each recorded as one call, because they compute what one device computes.
    """
    from hyper_parallel.core.context_parallel import attention
    from hyper_parallel.core.dtensor import module
    from hyper_parallel.core.tensor_parallel import clip

    def keeping(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(source: Any, *args: Any, **kwargs: Any) -> Any:
            result = function(source, *args, **kwargs)
            program.same(result, source)
            return result

        return call

    def second(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(platform: Any, source: Any, *args: Any) -> Any:
            result = function(platform, source, *args)
            program.same(result, source)
            return result

        return call

    def whole(function: Callable[..., Any], name: str, at: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with program.paused():
                result = function(*args, **kwargs)
            program.called(function, name, args[at:], kwargs, result)
            return result

        return call

    def reading(name: str) -> Callable[..., Any]:
        method = vars(DeviceMesh)[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            if not called_from(LIBRARY):
                program.noted(f"{name}(), of which only the first rank's result is followed", name)
            return method(*args, **kwargs)

        return call

    methods = ("redistribute", "redistribute_to", "to_local", "full_tensor")
    return {
        **{(DTensor, name): keeping(vars(DTensor)[name]) for name in methods},
        (DTensor, "from_local"): staticmethod(keeping(DTensor.from_local)),
        **{(DeviceMesh, name): reading(name) for name in _OF_RANKS},
        (module, "_own_shard"): second(vars(module)["_own_shard"]),
        (module, "redistribute"): keeping(vars(module)["redistribute"]),
        (clip, "_global_norm"): whole(vars(clip)["_global_norm"], "the norm of all gradients", 1),
        (attention, "_attention"): whole(vars(attention)["_attention"], "context_parallel_attention", 0),
    }


@dataclass
class _Entry:
    """The value of a tensor, valid as long as its local tensor and that tensor's write count do not change."""

    local: Any
    version: int
    number: int


@dataclass(frozen=True)
class _Write:
    """A write by a recorded call: the range in the storage, the new value, and the version after the write."""

    start: int
    stop: int
    number: int
    version: int


@dataclass(frozen=True)
class _Call:
    """A recorded call: function, arguments without tensors, operands, and whether an operand needs a gradient."""

    func: Any
    name: str
    args: Any
    places: tuple[int, ...]
    operands: tuple[int, ...]
    text: str
    needs_grad: bool


def _extent(place: tuple[Any, ...]) -> tuple[int, int]:
    """Return the range of a storage that contains all elements of a tensor."""
    shape, stride, offset = place
    if 0 in shape:
        return offset, offset
    return offset, offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


@dataclass
class Program:
    """The expressions of one run.

    Attributes:
        platform: the framework.
        table: the expressions, which several runs share.
        single: whether this run is on one device, where all calls are the program's.
        ends: values that the step computes, by name: losses, effects of hooks, new weights, gradients.
        unhooked: the gradients that hooks receive, by the names of the hooks' effects.
        first: position and module of the first call with each value.
    """

    platform: Platform
    table: Expressions
    single: bool = False
    batch: Sequence[Any] = ()
    ends: dict[str, int] = field(default_factory=dict)
    unhooked: dict[str, int] = field(default_factory=dict)
    first: dict[int, tuple[int, str]] = field(default_factory=dict)
    _model: Any = None
    _running: bool = False  # whether the step has begun
    _entries: dict[int, _Entry] = field(default_factory=dict)
    _places: dict[Any, _Entry] = field(default_factory=dict)  # by place in memory, before the step
    _written: dict[int, list[_Write]] = field(default_factory=dict)  # by storage
    _paths: dict[int, str] = field(default_factory=dict)
    _values: dict[str, int] = field(default_factory=dict)  # of parameters and buffers
    _owned: dict[str, Any] = field(default_factory=dict)  # the last local tensor of each parameter and buffer
    _initial: dict[str, int] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)  # ids are unique only among live objects
    _gradients: dict[str, int] = field(default_factory=dict)
    _shared: dict[int, list[Any]] = field(default_factory=dict)  # tensors whose ``data`` was read, by storage
    _in_backward: bool = False
    _paused: bool = False
    _set_in_backward: set[int] = field(default_factory=set)
    _pass: int = 0

    # -- values ------------------------------------------------------------------------------------------------------

    def number(self, tensor: Any) -> int:
        """Return the number of a tensor's value."""
        entry = self._found(tensor)
        if entry is None:
            return self._unknown(tensor)
        local = _local(tensor)
        version = self.platform.version(local)
        if entry.local is local and entry.version == version:
            return entry.number
        return self._changed(entry, local, version)

    def _changed(self, entry: _Entry, local: Any, version: int) -> int:
        """Return the value of a tensor that was written through an alias, or by the library."""
        others = self._writes_by_others(entry, local)[0]
        path = self._paths.get(id(local), "")
        if others:
            entry.number = self.table.number(Expression("after a write", operands=(entry.number, *others)))
        elif path and self._owned.get(path) is local:
            entry.number = self._values[path]
        entry.local, entry.version = local, version
        return entry.number

    def _writes_by_others(self, entry: _Entry, local: Any) -> tuple[tuple[int, ...], int]:
        """Return the values written through aliases since the entry was made, and the version after the last write.

        Writes to ranges of the storage that do not overlap the tensor are left out.
        """
        storage, place, _ = harness_of(self.platform).memory_of(local)
        writes = self._written.get(storage)
        if writes is None:
            return (), -1
        start, stop = _extent(place)
        others = tuple(
            each.number for each in writes if each.version > entry.version and each.start < stop and start < each.stop
        )
        return others, writes[-1].version

    def _found(self, tensor: Any) -> _Entry | None:
        entry = self._entries.get(id(_local(tensor)))
        return self._entries.get(id(tensor)) if entry is None else entry

    def set(self, tensor: Any, number: int) -> None:
        """Record that a tensor has the value with this number."""
        local = _local(tensor)
        entry = self._found(tensor) or _Entry(local, -1, 0)
        entry.local, entry.version, entry.number = local, self.platform.version(local), number
        for each in (tensor, local):
            if self._entries.get(id(each)) is not entry:
                self._kept.append(each)
                self._entries[id(each)] = entry
        if self._in_backward:
            self._set_in_backward.add(id(local))
        path = self._paths.get(id(local))
        if path is not None:
            self._values[path] = number
        if not self._running:
            self._places[harness_of(self.platform).memory_of(local)[:2]] = entry

    def same(self, result: Any, source: Any, *, known: bool = False) -> None:
        """Record that the library has made ``result`` from ``source``, with the same global value.

        Args:
            result: the result.
            source: the tensor from which ``result`` was made.
            known: True to record nothing if the value of ``source`` is unknown; before the step, this is always so.
        """
        if self._model is None or _local(result) is _local(source):
            return
        if (known or not self._running) and not self._is_known(source):
            return
        self.set(result, self.number(source))

    def _is_known(self, tensor: Any) -> bool:
        if self._found(tensor) is not None:
            return True
        place = () if self._running else harness_of(self.platform).memory_of(_local(tensor))[:2]
        return place in self._places

    def _unknown(self, tensor: Any) -> int:
        """Return the value of a tensor that no recorded call has made."""
        local = _local(tensor)
        if self._model is not None:
            place = None if self._running else self._places.get(harness_of(self.platform).memory_of(local)[:2])
            if place is not None:
                self.set(tensor, place.number)
                return place.number
            if id(local) not in self._paths and self._running:
                self._note_paths(self._running_module())
            if id(local) not in self._paths:
                self._note_paths(self._stored())
            if id(local) in self._paths:
                number = self._values[self._paths[id(local)]]
                self.set(tensor, number)
                return number
            for path, each in self._stored().items() if self._running else ():
                gradient = self.platform.gradient_of(each)
                if gradient is not None and _local(gradient) is local:
                    number = self._gradients.get(path) or self._gradient(path, 0)
                    self.set(tensor, number)
                    return number
        unknown = Expression("a tensor that no followed call makes", tuple(tensor.shape), tensor.dtype)
        number = self.table.number(unknown, f"{unknown.shape} {id(tensor)}")
        self.set(tensor, number)
        return number

    def _stored(self) -> dict[str, Any]:
        """Return parameters and buffers, shared ones by their first path."""
        return first_paths({**self.platform.parameters_dict(self._model), **self._buffers()})

    def _buffers(self) -> dict[str, Any]:
        return dict(harness_of(self.platform).buffers(self._model))

    def _running_module(self) -> dict[str, Any]:
        """Return the parameters of the running module by their paths in the model."""
        module, path = self._model, module_path()
        for name in path.split("."):
            module = getattr(module, name, None)
        if module is None or not isinstance(module, self.platform.Module):
            return {}
        return {f"{path}.{name}": each for name, each in self.platform.parameters_dict(module).items()}

    def _note_paths(self, stored: Mapping[str, Any]) -> None:
        """Record the parameters that the model has now; ``fully_shard`` replaces parameters during the step."""
        for path, each in stored.items():
            local = _local(each)
            if id(local) not in self._paths or id(local) not in self._entries:
                self._paths[id(local)] = path
                self._owned[path] = local
                self._kept.append(local)
                self._values.setdefault(path, self._leaf(path, each))
                self.set(each, self._values[path])

    def _leaf(self, path: str, tensor: Any) -> int:
        kind = "trained" if self.platform.needs_grad(_local(tensor)) else "fixed"
        return self.table.number(Expression(path, tuple(tensor.shape), tensor.dtype), f"{kind} {tuple(tensor.shape)}")

    # -- phases ------------------------------------------------------------------------------------------------------

    def built(self, model: Any) -> None:
        """Record the parameters of the new model as leaves: their initialisation is not part of the step."""
        self._model = model
        self._entries.clear()
        self._places.clear()
        self._note_paths(self._stored())
        self._initial = dict(self._values)

    def begin(self, model: Any) -> None:
        """Record the parameters of the parallel model; if one has lost its initial value, the runs' ends differ."""
        self._model = model
        for path, each in self._stored().items():
            place = harness_of(self.platform).memory_of(_local(each))[:2]
            entry = self._found(each) or self._places.get(place)
            known = self._initial.get(path, 0) if entry is None else entry.number
            changed = {known, self._values.get(path, known)} - {self._initial.get(path, 0)}
            number = changed.pop() if changed else self._leaf(path, each)
            self.ends[f"{path} before the step"] = number
            self._paths[id(_local(each))] = path
            self._owned[path] = _local(each)
            self._kept.append(_local(each))
            self._values[path] = number
            self.set(each, number)
        for index, array in enumerate(self.batch):
            self.set(array, self.table.leaf(f"array {index} of the batch", array.shape, array.dtype))
        self._running = True
        self._places.clear()

    def finish(self) -> None:
        """Record the gradients and the new weights as ends."""
        for path, each in self._stored().items():
            gradient = self.platform.gradient_of(each)
            if gradient is not None:
                self.ends[f"the gradient of {path}"] = self.number(gradient)
        for path, each in self._stored().items():
            self.number(each)
            self.ends[path] = self._values[path]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record no calls inside the block; the caller records them as one call."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # -- calls -------------------------------------------------------------------------------------------------------

    def called(  # noqa: C901 - one branch per kind of call
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        result: Any,
        text: str = "",
        *,
        by_program: bool = True,
    ) -> None:
        """Record a call.

        Args:
            func: function that is called.
            name: its name.
            args: positional arguments.
            kwargs: named arguments.
            result: its result.
            text: the arguments as text; by default, the text of ``args`` and ``kwargs``.
            by_program: whether the program makes the call; calls by the library do not change global values.
        """
        if self._paused or self._model is None:
            return
        of_library = not by_program and not self.single
        if name in _KEPT and (of_library or not self._running):
            self.same(result, args[0], known=True)
            return
        if of_library:
            return
        given, is_tensor = leaves([args, kwargs], TREES), self.platform.is_tensor
        places = tuple(index for index, each in enumerate(given) if is_tensor(each))
        tensors = [given[place] for place in places]
        made = [(index, each) for index, each in enumerate(leaves([result], TREES)) if is_tensor(each)]
        before = [self._operand(tensor) for tensor in tensors]
        operands, written = tuple(number for number, _ in before), [at for at, (_, wrote) in enumerate(before) if wrote]
        if name == ".data":
            self.share(tensors[0], made[0][1])
        if name in _READS or not (made or written):
            return
        if name in _COPIES:
            self.set(made[0][1], operands[0])
            return
        for place in places:
            given[place] = None
        empty = unflatten([args, kwargs], given, TREES)
        needs = any(self.platform.needs_grad(_local(each)) for each in tensors)
        call = _Call(func, name, empty, places, operands, text or arguments_text((empty, places)), needs)
        for at in written:
            self._write(tensors[at], self._value(call, tensors[at], -1 - at))
        for index, each in made:
            if not any(each is tensor for tensor in tensors):
                self.set(each, self._value(call, each, index))

    def _value(self, call: _Call, tensor: Any, part: int) -> int:
        """Return the number of a result of a call, or of a tensor that it has written."""
        cut = call.needs_grad and not self.platform.needs_grad(_local(tensor))
        shape = tuple(tensor.shape)
        made_by = Expression(call.name, shape, tensor.dtype, call.operands, call.func, call.args, call.places, part)
        number = self.table.number(made_by, f"{call.text} cut" if cut else call.text)
        self.first.setdefault(number, (len(self.first), module_path()))
        return number

    def _write(self, tensor: Any, number: int) -> None:
        """Record the new value of a tensor that a call has written."""
        self.set(tensor, number)
        storage, place, version = harness_of(self.platform).memory_of(_local(tensor))
        shared = self._shared.get(storage)
        if shared is None:
            self._written.setdefault(storage, []).append(_Write(*_extent(place), number, version))
        for other in shared or ():
            self.set(other, number)

    def share(self, tensor: Any, data: Any) -> None:
        """Record that ``data`` has value and storage of ``tensor``, whose version does not count writes to ``data``."""
        if self._model is None:
            return
        self.set(data, self.number(tensor))
        self._shared.setdefault(harness_of(self.platform).memory_of(_local(data))[0], []).append(tensor)

    def _operand(self, tensor: Any) -> tuple[int, bool]:
        """Return the value that an operand had before the call that has just run, and whether the call wrote it."""
        entry = self._found(tensor)
        if entry is None:
            return self._unknown(tensor), False
        local = _local(tensor)
        version = self.platform.version(local)
        if entry.local is local and entry.version == version:
            return entry.number, False
        others, before = self._writes_by_others(entry, local)
        base = entry.number
        if others:
            base = self.table.number(Expression("after a write", operands=(entry.number, *others)))
        return base, entry.local is not local or version > max(before, entry.version)

    # -- backward ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def backward(self, roots: Sequence[Any], seeds: Sequence[Any], *, by_library: bool) -> Iterator[None]:
        """Record the gradients that one backward adds, except a backward that the library runs inside another one."""
        if self._model is None or not self._running or (self._in_backward and by_library):
            yield
            return
        numbers = tuple(map(self.number, roots))
        given = tuple(0 if each is None else self.number(each) for each in seeds)
        self._pass = self.table.number(Expression("backward", operands=(*numbers, *given)))
        for index, number in enumerate(numbers):
            count = sum(name.startswith("the loss") for name in self.ends)
            self.ends["the loss" if not count else f"the loss of backward {count + 1}"] = number
            self.first.setdefault(number, (len(self.first), module_path()))
            if given[index : index + 1] not in ((), (0,)):
                self.ends[f"the gradient of loss {count + 1}"] = given[index]
        stored = self._stored()
        before = {
            path: 0 if (gradient := self.platform.gradient_of(each)) is None else self.number(gradient)
            for path, each in stored.items()
        }
        states = {path: self._state(each) for path, each in stored.items()}
        self._set_in_backward.clear()
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False
        for path, each in stored.items():
            gradient = self.platform.gradient_of(each)
            if gradient is None or (self._state(each) == states[path] and before[path]):
                continue
            if id(_local(gradient)) not in self._set_in_backward:
                self.set(gradient, self._gradient(path, before[path]))
            self._gradients[path] = self.number(gradient)

    def _state(self, tensor: Any) -> Any:
        gradient = self.platform.gradient_of(tensor)
        return None if gradient is None else (id(_local(gradient)), self.platform.version(_local(gradient)))

    def _gradient(self, path: str, before: int) -> int:
        """Return the value of a gradient after the current or last backward, given its value before that backward."""
        leaf = self.table.items[self._values.get(path, 0)]
        made_by = Expression(f"the gradient of {path}", leaf.shape, leaf.dtype, (self._pass, before))
        return self.table.number(made_by)

    def hooked(self, tensor: Any, hook: Callable[..., Any], observing: Callable[[], Any]) -> Callable[..., Any]:
        """Wrap a hook of a tensor's gradient so that its effect is recorded."""
        owner = self._owner(tensor)

        def run(gradient: Any) -> Any:
            arrives = self._arriving(f"the gradient that arrives at {owner}", gradient)
            self.set(gradient, arrives)
            with observing():
                result = hook(gradient)
            self._effect(owner, arrives, self.number(gradient if result is None else result))
            return result

        return run

    def hooked_after(self, tensor: Any, hook: Callable[..., Any], observing: Callable[[], Any]) -> Callable[..., Any]:
        """Wrap a hook that runs after a gradient was accumulated so that its calls are recorded."""
        owner = self._owner(tensor)

        def run(leaf: Any) -> Any:
            gradient = self.platform.gradient_of(leaf)
            if gradient is not None:
                self.set(gradient, self._gradient(owner, self._gradients.get(owner, 0)))
            with observing():
                return hook(leaf)

        return run

    def hooked_module(self, module: Any, hook: Callable[..., Any], observing: Callable[[], Any]) -> Callable[..., Any]:
        """Wrap a hook of the gradients of a module's inputs or outputs so that its effect is recorded."""
        paths = {id(each): path for path, each in self._model.named_modules()} if self._model is not None else {}
        owner = paths.get(id(module)) or "(model)"

        def run(of: Any, *gradients: Any) -> Any:
            arrive = []
            for index, each in enumerate(leaves(list(gradients), TREES)):
                if self.platform.is_tensor(each):
                    number = self._arriving(f"gradient {index} that arrives at {owner}", each)
                    self.set(each, number)
                    arrive.append((each, number))
            with observing():
                result = hook(of, *gradients)
            for each, number in arrive:
                self._effect(owner, number, self.number(each))
            for index, each in enumerate(leaves([result], TREES)):
                if self.platform.is_tensor(each):
                    self._effect(owner, arrive[index][1] if index < len(arrive) else 0, self.number(each))
            return result

        return run

    def noted(self, what: str, key: Any) -> None:
        """Note something of the program that may change gradients; the other run must have it as well.

        Args:
            what: name of it, for messages.
            key: its text differs if it does.
        """
        if self._model is not None:
            count = sum(name.startswith(what) for name in self.ends)
            self.ends[f"{what} {count + 1}"] = self.table.number(Expression(what), repr(key))

    def _arriving(self, name: str, gradient: Any) -> int:
        return self.table.number(Expression(name, tuple(gradient.shape), gradient.dtype))

    def _effect(self, owner: str, arrives: int, leaves_as: int) -> None:
        if arrives == leaves_as:
            return
        count = sum(name.startswith(f"a hook of {owner}") for name in self.ends)
        name = f"a hook of {owner}" + (f" ({count + 1})" if count else "")
        self.ends[name], self.unhooked[name] = leaves_as, arrives

    def _owner(self, tensor: Any) -> str:
        local = _local(tensor)
        path = self._paths.get(id(local))
        of_call = self._running and self._found(tensor) is not None
        if path is None and not of_call and self._model is not None:
            path = next((path for path, each in self._stored().items() if _local(each) is local), None)
        return path or f"{self.table.text_of(self.number(tensor))} in {module_path() or '(model)'}"
