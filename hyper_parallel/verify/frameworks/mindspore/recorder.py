"""Records what the cells and optimizers of a MindSpore program compute, on one rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn
from mindspore.mint import nn as mint_nn

from hyper_parallel._tree import CONTAINERS, named_leaves, tree_map
from hyper_parallel.platform.mindspore.ops.kernels import HALF
from hyper_parallel.platform.mindspore.saved_parameters import entries_of
from hyper_parallel.platform.mindspore.versions import ClipByGlobalNorm, Function, pynative_executor
from hyper_parallel.transport.frontends.mindspore_comm.world import active_world
from hyper_parallel.transport.real.mindspore.transport import to_host
from hyper_parallel.verify.frameworks.contract.record_log import ProgramStopped, RecordLog, user_site
from hyper_parallel.verify.frameworks.contract.records import HALF_BITS, LocalValue, used_bits
from hyper_parallel.verify.frameworks.mindspore.case_changes import AppliedChanges
from hyper_parallel.verify.frameworks.mindspore.local_values import read_tensor, write_tensor
from hyper_parallel.verify.frameworks.mindspore.modules import ModelNames, is_wrapper

__all__ = ["Recorder"]

_FRAMEWORK = str(Path(str(mindspore.__file__)).parent)
_BEFORE = -1  # step number of weights before training
_RECOMPUTED = "._recompute_cell"  # the child of a recomputed cell that does its computation
_NO_PART = (nn.Identity,)  # TrainOneStepCell passes gradients through an Identity
_Change = Callable[[Any], Any]
_DROPOUTS = (nn.Dropout, mint_nn.Dropout)


class Recorder:
    """Fills the log of one rank; MindSpore's functions call it through ``hooks.py``.

    Attributes:
        log: log of the rank.
    """

    def __init__(self, log: RecordLog) -> None:
        self.log = log
        self._names = ModelNames()
        self._open: list[str] = []
        self._evaluates = False
        self._inputs = 0
        self._rounded = 0
        self._cast_to = ""  # the dtype of operators inside rewritten cells, which return float32
        self._differentiating = 0
        self._in_backward = False
        self._initial: dict[str, int] = {}
        self._perturbed: set[str] = set()
        self._moved = 0  # number of steps that were complete when weights were last perturbed
        self._steps: dict[int, int] = {}
        self._stepped_at = ""
        self._unrecorded: int | None = None  # the step whose weights are recorded when the program continues
        self._stepped: set[int] = set()  # optimizers that have made a step since weights were last recorded
        self._optimizers: list[Any] = []
        self._in_step = False
        self._changed = AppliedChanges(log)
        self._observes = log.limits.observe
        log.take = read_tensor

    # -- cells ---------------------------------------------------------------------------------------------------------

    def call(self, plain: Callable[..., Any], cell: nn.Cell, args: Any, kwargs: Any) -> Any:
        """Call a cell and record its output; cells inside a backward or an optimizer do not belong to the model."""
        if self._in_backward or self._in_step:
            return plain(cell, *args, **kwargs)
        if isinstance(cell, ClipByGlobalNorm):
            self._record_norm(args[0], float(cell.clip_norm))
            self._in_step = True
            try:
                return plain(cell, *args, **kwargs)
            finally:
                self._in_step = False
        if not self._open:
            args, kwargs = self._enter_model(cell, args, kwargs)
        wrapper = is_wrapper(cell)
        path = "" if wrapper else self._names.path_of(cell, self._open[-1] if self._open else "")
        self._open.append(path)
        try:
            output = plain(cell, *args, **kwargs)
        finally:
            self._open.pop()
        if not (wrapper or isinstance(cell, _NO_PART) or _RECOMPUTED in path):
            self._record_output(cell, path, output)
            output = self._rounded_output(path, self._changed.output(self._output_name(path), output))
        return output

    def _enter_model(self, cell: nn.Cell, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._names.add(cell)
        self._end_step()
        recorded = self._differentiating or pynative_executor.requires_grad()  # the second is for Tensor.backward
        self._evaluates = not (recorded or is_wrapper(cell))
        if not self._steps:
            self._changed.write_weights(self._names.parameters())
            self._perturb_weights()
            self._record_initial()
        if self._observes:
            self._observe_inputs(args, kwargs)
            return args, kwargs
        self._move_doubles()
        args, kwargs = self._changed.inputs(args, kwargs, evaluates=self._evaluates)
        if self.log.perturbation is None:
            return args, kwargs
        self._inputs += 1
        changed: tuple[Any, Any] = tree_map(self._perturbed_input, (args, kwargs), CONTAINERS)
        return changed

    def _observe_inputs(self, args: Any, kwargs: Any) -> None:
        """Record the data that a model is called with, except outside of differentiation: it may then be gradients."""
        for name, value in named_leaves("", {**dict(enumerate(args)), **kwargs}, CONTAINERS):
            taken = read_tensor(value) if type(value) is Tensor and not self._evaluates else None
            if taken is not None:
                self.log.add("input", name, taken)

    def _output_name(self, path: str) -> str:
        return (path or "(model)") + (" (no_grad)" if self._evaluates else "")

    def _record_output(self, cell: nn.Cell, path: str, output: Any) -> None:
        if not self.log.records_outputs(path or "(model)"):
            return
        if not self._observes and isinstance(cell, _DROPOUTS) and cell.training and (getattr(cell, "p", None) or 0) > 0:
            self.record_mask(path, output)
        for leaf_name, value in named_leaves(self._output_name(path), output, CONTAINERS):
            taken = read_tensor(value)
            if taken is not None:
                if taken.region is None and self.log.place is not None:
                    taken = taken._replace(region=self.log.place(cell, value))
                self.log.add("output", leaf_name, taken, module=path, site=user_site(_FRAMEWORK))

    def record_mask(self, path: str, output: Any) -> None:
        """Record the mask of a dropout."""
        taken = read_tensor(output)
        if taken is not None:
            self.log.add("mask", path or "(model)", taken._replace(array=taken.array != 0, dtype=""), module=path)

    # -- saved files ---------------------------------------------------------------------------------------------------

    def save(self, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record floating-point tensors that the program saves under names that end with a parameter's name; save them.

        Only here are averages of weights, and other copies outside of cells and optimizers, visible.
        """
        known = set() if self._observes else set(self._parameters())
        for name, value in entries_of(args[0] if args else kwargs.get("save_obj")):
            parts = str(name).split(".")
            if not any(".".join(parts[at:]) in known for at in range(len(parts))):
                continue
            taken = LocalValue(value.copy()) if isinstance(value, np.ndarray) else read_tensor(value)
            if taken is not None and taken.array.dtype.kind == "f":
                step = max(self.log.step - 1, _BEFORE)
                self.log.add("saved", name, taken, module=_owner(name), step=step, site=user_site(_FRAMEWORK))
        return plain(*args, **kwargs)

    # -- differentiation and clipping ----------------------------------------------------------------------------------

    def forward(self, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function that is being differentiated, and record its loss."""
        outermost = not self._differentiating and not self._in_backward
        self._differentiating += 1
        try:
            outputs = plain(*args, **kwargs)
        finally:
            self._differentiating -= 1
        if outermost:
            self._record_loss(outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs)
        return outputs

    def _record_loss(self, loss: Any) -> None:
        taken = read_tensor(loss)
        if taken is not None and taken.array.size == 1:
            self.log.add("loss", "loss", taken, site=user_site(_FRAMEWORK))

    def backward(self, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a backward without recording the cells that it recomputes."""
        before, self._in_backward = self._in_backward, True
        try:
            gradients = plain(*args, **kwargs)
        finally:
            self._in_backward = before
        if not self._observes:
            self._changed.note_gradients(gradients)
        return gradients

    def imperative_backward(self, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``Tensor.backward``, and record the differentiated tensor as a loss."""
        self._record_loss(args[0][0])
        before, self._in_backward = self._in_backward, True
        try:
            return plain(*args, **kwargs)
        finally:
            self._in_backward = before

    def _record_norm(self, gradients: Sequence[Any], largest: float) -> None:
        """Record the norm of the gradients that this rank clips, and the clipping factor."""
        squares = [np.sum(np.square(taken.array.astype(np.float64))) for taken in map(read_tensor, gradients) if taken]
        total = np.sqrt(np.sum(squares))
        site = user_site(_FRAMEWORK)
        self.log.add("norm", "gradient norm", LocalValue(np.array(total)), site=site)
        if self._observes:
            return
        factor = np.array(min(1.0, largest / total) if total else 1.0)
        self.log.add("norm", "clip factor", LocalValue(factor), site=site)

    # -- optimizers ----------------------------------------------------------------------------------------------------

    def step(self, plain: Callable[..., Any], optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Run an optimizer's step; record gradients and learning rates before it, and the optimizer's state after it.

        Weights and buffers are recorded later: at the program's next forward, or at its end.

        Raises:
            ProgramStopped: the last step to record is complete.
        """
        if self._in_step:
            return plain(optimizer, *args, **kwargs)
        before, self._open = self._open, []
        self._in_step = True
        try:
            args = self._before_step(optimizer, args)
            result = plain(optimizer, *args, **kwargs)
        finally:
            self._in_step = False
            self._open = before
        self._after_step(optimizer)
        return result

    def _before_step(self, optimizer: Any, args: Any) -> Any:
        if id(optimizer) in self._stepped:
            self._end_step()
        if not any(known is optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)
        self._stepped_at = user_site(_FRAMEWORK)
        if not self._steps:
            self._record_initial()
        step = self._steps.setdefault(id(optimizer), 0)
        names = self._names_of(optimizer)
        gradients = list(args[0]) if args and isinstance(args[0], (tuple, list)) else []
        for position, gradient in enumerate(gradients[: len(names)]):
            name = names[position]
            taken = read_tensor(gradient)
            if taken is not None:
                self.log.add("gradient", name, taken, module=_owner(name), step=step, site=self._stepped_at)
            gradients[position] = self._perturbed_gradient(name, step, gradient)
        number = self._optimizers.index(optimizer)
        for position, rate in enumerate(_rates(optimizer)):
            self.log.add("rate", f"optimizer {number}, group {position}", LocalValue(np.array(rate)), step=step)
        self._note_unknown()
        return (type(args[0])(gradients), *args[1:]) if gradients else args

    def _after_step(self, optimizer: Any) -> None:
        step = self._steps[id(optimizer)]
        for name, taken in () if self._observes else self._state_of(optimizer):
            owner = _owner(name.partition(":")[0])
            self.log.add("state", name, taken, module=owner, step=step, site=self._stepped_at)
        self._unrecorded = step
        self._stepped.add(id(optimizer))
        self._steps[id(optimizer)] = step + 1
        self.log.step = max(self._steps.values())
        limit = self.log.limits.steps
        if limit is not None and min(self._steps.values()) >= limit:
            self._end_step()
            raise ProgramStopped  # not inside a differentiated function, which would stay in gradient mode

    def _end_step(self) -> None:
        """Record the weights of the last step, now that the program has continued and completed its changes to them."""
        if self._unrecorded is None:
            return
        step, self._unrecorded = self._unrecorded, None
        self._stepped.clear()
        self._record_weights(step)
        if self._observes:
            self.log.forget(step)

    def _names_of(self, optimizer: Any) -> list[str]:
        """Return the names of an optimizer's parameters, in its order.

        If the model's parameters were replaced after the optimizer was created, the optimizer has parameters that are
        not in a model any more. Each gets the name of the current parameter with the same ``Parameter.name``.
        """
        named = self._names.parameters()
        names = {id(value): name for name, value in named.items()}
        replaced = {value.name: name for name, value in named.items()}
        number = next(i for i, known in enumerate(self._optimizers) if known is optimizer)
        return [
            names.get(id(value)) or replaced.get(value.name) or f"optimizer {number}, parameter {position}"
            for position, value in enumerate(optimizer.parameters)
        ]

    def _state_of(self, optimizer: Any) -> list[tuple[str, Any]]:
        """Return the optimizer's state of each parameter, as ``weight:moment1``."""
        own = {value.name: name for value, name in zip(optimizer.parameters, self._names_of(optimizer), strict=True)}
        ids = {id(value) for value in optimizer.parameters}
        state = []
        for value in optimizer.get_parameters():
            owner = next((name for name in own if value.name.endswith(f".{name}")), None)
            taken = read_tensor(value) if owner is not None and id(value) not in ids else None
            if taken is not None:
                state.append((f"{own[str(owner)]}:{value.name.removesuffix(f'.{owner}')}", taken))
        return state

    def _note_unknown(self) -> None:
        named = self._names.parameters()
        everyone = {id(value) for optimizer in self._optimizers for value in optimizer.parameters}
        lost = [name for name, value in named.items() if value.requires_grad and id(value) not in everyone]
        names = {id(value) for value in named.values()}
        foreign = [
            list(value.shape)
            for optimizer in self._optimizers
            for value in optimizer.parameters
            if id(value) not in names
        ]
        self.log.notes.update({"parameters that no optimizer has": lost} if lost else {})
        self.log.notes.update({"parameters that no model has": foreign} if lost and foreign else {})

    # -- weights -------------------------------------------------------------------------------------------------------

    def _record_initial(self) -> None:
        """Record weights and buffers before training; record them again if the program then shards the model."""
        identities = {name: id(value) for name, value in self._parameters().items()}
        if identities != self._initial:
            self._initial = identities
            for kind in ("weight", "buffer"):
                self.log.drop(kind, _BEFORE)
            self._record_weights(_BEFORE)

    def _record_weights(self, step: int) -> None:
        parameters = self._parameters()
        for kind, tensors in (("weight", parameters), ("buffer", self._names.buffers())):
            for name, value in tensors.items():
                taken = read_tensor(value)
                if taken is not None:
                    self.log.add(kind, name, taken, module=_owner(name), step=step, site=self._stepped_at)
        frozen = [name for name, value in parameters.items() if not value.requires_grad]
        self.log.notes.update({"frozen parameters": frozen} if frozen else {})

    def _parameters(self) -> dict[str, Any]:
        """Return the parameters of the models, and those that only an optimizer has."""
        named: dict[str, Any] = self._names.parameters()
        for optimizer in self._optimizers:
            for name, value in zip(self._names_of(optimizer), optimizer.parameters, strict=True):
                named.setdefault(name, value)
        return named

    # -- perturbation of a reference -----------------------------------------------------------------------------------

    def _perturb_weights(self) -> None:
        perturbation = self.log.perturbation
        if perturbation is None:
            return
        for name, parameter in self._names.parameters().items():
            taken = read_tensor(parameter)
            if name not in self._perturbed and taken is not None and _is_perturbable(parameter):
                self._perturbed.add(name)
                write_tensor(parameter, perturbation.perturbed_input(f"weight {name}", taken.array, taken.dtype))

    def _move_doubles(self) -> None:
        """Perturb float64 weights in every step, because optimizers round them to float32 and lose the perturbation."""
        perturbation, step = self.log.perturbation, self.log.step
        if perturbation is None or self._moved >= step:
            return
        self._moved = step
        for name, parameter in self._names.parameters().items():
            if parameter.dtype == mindspore.float64:
                taken = read_tensor(parameter)
                if taken is not None:
                    write_tensor(parameter, perturbation.perturbed_input(f"weight {name}, step {step}", taken.array))

    def _perturbed_gradient(self, name: str, step: int, gradient: Any) -> Any:
        perturbation = self.log.perturbation
        if perturbation is None or type(gradient) is not Tensor or not _is_perturbable(gradient):
            return gradient
        return Tensor(perturbation.perturbed_gradient(name, step, np.array(to_host(gradient))))

    def _perturbed_input(self, value: Any) -> Any:
        perturbation = self.log.perturbation
        if perturbation is None or type(value) is not Tensor or not _is_perturbable(value):
            return value
        array = np.array(to_host(value))
        # The perturbation is added, not assigned, so that the gradient still reaches the call that made the tensor.
        return value + Tensor(perturbation.perturbed_input(f"input {self._inputs}", array) - array)

    def rewrite(self, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Rewrite a network so that its operators compute in half precision, as ``amp_level="O1"`` does."""
        made = plain(*args, **kwargs)
        dtype = args[1] if len(args) > 1 else kwargs["dtype"]
        self._cast_to = "bfloat16" if dtype == mindspore.bfloat16 else "float16"
        return made

    def _half_of(self, tensor: Any) -> str:
        """Return the half-precision dtype to which the numbers of a cell's output were rounded; empty if none."""
        if tensor.dtype in HALF:
            return "bfloat16" if tensor.dtype == mindspore.bfloat16 else "float16"
        if not self._cast_to or type(tensor) is not Tensor or tensor.dtype != mindspore.float32:
            return ""
        used = used_bits(to_host(tensor))
        return self._cast_to if used and not used & ((1 << HALF_BITS[self._cast_to]) - 1) else ""

    def _rounded_output(self, path: str, output: Any) -> Any:
        """Record half-precision tensors of a cell's output, and perturb them and their gradients."""
        tensors = [value for _, value in named_leaves(path, output, CONTAINERS) if isinstance(value, Tensor)]
        if self._observes or not any(map(self._half_of, tensors)):
            return output
        self.log.notes["half precision"] = True
        perturbation = self.log.perturbation
        if perturbation is None:
            return output
        self._rounded += 1
        names = (f"{place} {path}, call {self._rounded}" for place in ("output", "gradient of output"))
        forward, backward = (partial(perturbation.rounded, name) for name in names)

        def change(value: Any) -> Any:
            half = self._half_of(value) if type(value) is Tensor else ""
            return _Rounded.apply(value, partial(forward, dtype=half), partial(backward, dtype=half)) if half else value

        return tree_map(change, output, CONTAINERS)

    # -- the end -------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Complete the log when the program has ended."""
        self._end_step()
        world = active_world()
        if world is not None:
            self.log.groups.setdefault(tuple(range(world.size)), "world")
            for name, group in world.groups.items():
                if world.rank in group.ranks:
                    self.log.groups[group.ranks] = _group_name(name, group.ranks)
        self.log.notes["optimizers"] = [type(optimizer).__name__ for optimizer in self._optimizers]
        self.log.notes["optimizer steps"] = self.log.step
        self.log.move_to_start(("weight", "buffer"), _BEFORE)


class _Rounded(Function):
    """Perturbs the output of a cell, and its gradient, within rounding error."""

    @staticmethod
    def forward(ctx: Any, value: Any, forward: _Change, backward: _Change) -> Any:
        """Return the output."""
        ctx.change = backward
        return _changed(value, forward)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None, None]:
        """Return the gradient of the output."""
        return _changed(gradient, ctx.change), None, None


def _changed(tensor: Any, change: _Change) -> Any:
    taken = read_tensor(tensor)
    assert taken is not None
    return Tensor(change(taken.array)).astype(tensor.dtype)


def _group_name(name: str, ranks: tuple[int, ...]) -> str:
    """Return the name that the program gave a group, without the number that makes it unique: ``dp`` for ``dp-3``.

    A name that ``new_group`` derived from a hash is not used.
    """
    axis = re.sub(r"([-_.]?\d+)+$", "", name)
    made_up = name.startswith(("hccl_", "mccl_")) and re.fullmatch("[0-9a-f]{40}", name.rpartition("_")[2])
    return f"group {'-'.join(map(str, ranks))}" if made_up or not axis else axis


def _is_perturbable(tensor: Any) -> bool:
    return tensor.dtype in (mindspore.float32, mindspore.float64)


def _rates(optimizer: Any) -> list[float]:
    """Return the learning rate of each parameter group."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is not None:  # the optimizers of mint and of mindspore.experimental
        return [float(group["lr"]) for group in groups]
    rates = optimizer.learning_rate
    rates = list(rates) if isinstance(rates, (list, tuple, nn.CellList)) else [rates]
    return [float(rate(optimizer.global_step)) if isinstance(rate, nn.Cell) else float(rate) for rate in rates]


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
