"""Records what the modules and optimizers of a PyTorch program compute, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined] # missing in its stubs

from hyper_parallel._tree import CONTAINERS, named_leaves, paths, tree_map
from hyper_parallel.platform.torch.versions import c10d_world
from hyper_parallel.verify.frameworks.contract.record_log import ProgramStopped, RecordLog, user_site
from hyper_parallel.verify.frameworks.contract.records import OWN_GRADIENTS, LocalValue, Region
from hyper_parallel.verify.frameworks.torch.backward_gradients import StepsByHand, noting_contributions
from hyper_parallel.verify.frameworks.torch.case_changes import AppliedChanges, OwnGradients
from hyper_parallel.verify.frameworks.torch.decided import Decided
from hyper_parallel.verify.frameworks.torch.draws import Draws
from hyper_parallel.verify.frameworks.torch.half_precision import HalfPrecision, changed
from hyper_parallel.verify.frameworks.torch.local_values import local_of, read_part, read_tensor
from hyper_parallel.verify.frameworks.torch.modules import ModelNames, infers_shapes, is_wrapper, recomputes
from hyper_parallel.verify.frameworks.torch.partitions import (
    Pieces,
    is_partitioned,
    overwrite,
    overwrite_weight,
    pieces_in,
    read_weight,
)
from hyper_parallel.verify.frameworks.torch.upcast import widened

__all__ = ["Recorder"]

_FRAMEWORK = str(Path(str(torch.__file__)).parent)
_WITHOUT = "parameters without a gradient"
_BEFORE = -1  # step number of weights before training
_HAND = 0  # stands for the optimizer's id in steps that the program makes without a PyTorch optimizer


class Recorder:
    """Fills the log of one rank; PyTorch's functions call it through ``hooks.py``.

    Attributes:
        log: log of the rank.
        inner: the module whose forward just returned a DTensor, and that DTensor, before the module's own hooks.
        drops: whether a dropout is running.
        sides: whether an operator with a threshold is running.
        decided: records the program's random draws and choices.
        half: records computations and reductions in half precision.
        draws: records the samples that the program's data loaders draw; None if they are not recorded.
    """

    def __init__(self, log: RecordLog) -> None:
        self.log = log
        self.inner: tuple[Any, Any] = (None, None)
        self.drops = self.sides = False
        self._names = ModelNames()
        self._open: list[str] = []
        self._evaluates = False
        self._infers = False
        self._inputs = 0
        self._in_backward = False
        self._initial: dict[str, int] = {}
        self._perturbed: set[str] = set()
        self._steps: dict[int, int] = {}
        self._stepped_at = ""
        self._unrecorded: int | None = None
        self._optimizers: list[Any] = []
        self._own_weights: set[int] = set()
        self._nameless: dict[int, list[list[int]]] = {}
        self._in_step = 0
        self._stepped: dict[int, set[int]] = {}
        self._recorded_pieces: set[str] = set()
        self._clips = False
        self._closed: tuple[Any, int] | None = None
        self._changed, self._own = AppliedChanges(log), OwnGradients(log)
        self._by_hand = StepsByHand()
        self._observes = log.limits.observe
        self.decided, self.half = Decided(log, self), HalfPrecision(log)
        self.draws = Draws(log, _FRAMEWORK) if log.limits.draws else None
        log.take = read_tensor

    # -- modules -------------------------------------------------------------------------------------------------------

    def call(self, plain: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module and record its output."""
        if self._infers or recomputes():
            return plain(module, *args, **kwargs)
        if not self._open and infers_shapes():
            self._infers = True
            try:
                return plain(module, *args, **kwargs)
            finally:
                self._infers = False
        if not self._open:
            args, kwargs = self._enter_model(module, args, kwargs)
        path = self._names.path_of(module, self._open[-1] if self._open else "")
        self._open.append(path)
        try:
            output = plain(module, *args, **kwargs)
        finally:
            self._open.pop()
        if not is_wrapper(module):
            self._record_output(module, path, output)
            output = self._changed.output(self._output_name(path), output)
            output = self.half.output(path, output)
        return output

    def _enter_model(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._end_step()
        self._end_step_by_hand()
        if self._in_step:
            self.log.notes["optimizers that call the model"] = True
        self._names.add(module)
        self._evaluates = not torch.is_grad_enabled()
        if self.draws is not None:
            self.draws.called(evaluates=self._evaluates)
        if not self._steps or not self._initial:
            self._changed.write_weights(self._names.parameters())
            self._perturb_weights()
            self._record_initial()
            if not self._observes:
                self._own.watch(self._names.parameters(), module.modules())
        if self._observes:
            self._observe_inputs(args, kwargs)
            return args, kwargs
        args, kwargs = self._changed.inputs(*tree_map(widened, (args, kwargs), CONTAINERS))
        self._note_inputs(args, kwargs)
        self._inputs += 1
        if self.log.perturbation is None:
            return args, kwargs
        return tree_map(self._perturbed_input, (args, kwargs), CONTAINERS)

    def _observe_inputs(self, args: Any, kwargs: Any) -> None:
        """Record the data that a model is called with."""
        for name, _, taken in _samples(args, kwargs):
            self.log.add("input", name, taken)

    def observe_collective(self, name: str, value: Any) -> None:
        """Record the tensor that this rank passes to a collective."""
        taken = read_tensor(value) if type(value) is torch.Tensor else None
        if taken is not None:
            self.log.add("collective", name, taken, module=self.inside, site=user_site(_FRAMEWORK))

    def _note_inputs(self, args: Any, kwargs: Any) -> None:
        """Record the data with which models are called in the first step, before the model computes anything."""
        if self.log.step or self._evaluates:
            return
        for name, value, taken in _samples(args, kwargs):
            self.log.notes.setdefault("inputs", []).append((self._inputs, name, taken.array))
            if value.dim() > 1:
                contiguous = self.log.notes.get("contiguous inputs", True) and value.is_contiguous()
                self.log.notes["contiguous inputs"] = contiguous

    def _output_name(self, path: str) -> str:
        return (path or "(model)") + (" (no_grad)" if self._evaluates else "")

    def _record_output(self, module: nn.Module, path: str, output: Any) -> None:
        if not self.log.records_outputs(path or "(model)"):
            return
        for leaf_name, value in named_leaves(self._output_name(path), output, CONTAINERS):
            taken = read_tensor(value)
            if taken is not None:
                if taken.region is None and self.log.place is not None:
                    taken = taken._replace(region=self.log.place(module, value))
                if taken.region is None and self.inner[0] is module:
                    taken = taken._replace(region=_region_of_alias(self.inner[1], value))
                self.log.add("output", leaf_name, taken, module=path, site=user_site(_FRAMEWORK))
            elif isinstance(value, torch.Tensor):
                self._note("outputs whose placement has no name", leaf_name)
        self.inner = (None, None)

    @property
    def inside(self) -> str:
        """Path of the innermost module that runs; empty for the model itself, and outside of modules."""
        return self._open[-1] if self._open else ""

    @property
    def infers(self) -> bool:
        """Whether a pipeline stage infers its shapes."""
        return self._infers

    @property
    def is_training(self) -> bool:
        """Whether a module is running, and gradients are recorded."""
        return bool(self._open) and not self._evaluates and not self._infers

    # -- backward and clipping -----------------------------------------------------------------------------------------

    def backward(self, plain: Callable[..., Any], tensors: Any, args: Any, kwargs: Any) -> Any:
        """Record the losses on which backward is called, and run backward."""
        if self._in_backward or recomputes():
            return plain(tensors, *args, **kwargs)
        site, self.half.of_gradients = user_site(_FRAMEWORK), True
        for tensor in (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors):
            taken = read_tensor(tensor)
            if taken is not None and tensor.numel() == 1:
                self.log.add("loss", "loss", taken, site=site)
        self._in_backward = True
        try:
            with noting_contributions(self.log, self._names.parameters):
                result = plain(self._changed.losses(tensors), *args, **kwargs)
        finally:
            self._in_backward = False
        if not self._optimizers and not self._observes:
            self._by_hand.take(self._names.parameters(), backward=True)
            for name, parameter in self._names.parameters().items():
                if parameter.grad is not None:
                    self._displace(name, self.log.step, parameter.grad)
        return result

    def before_zero(self) -> None:
        """Read the gradients of a step without an optimizer before the program sets them to zero."""
        if not self._optimizers and not self._observes:
            self._by_hand.take(self._names.parameters())

    def record_clipping(self, parameters: Any, clip: Callable[[], Any], largest: float, total: Any = None) -> Any:
        """Clip gradients; record the gradients before clipping, their norm, and the clipping factor.

        Args:
            parameters: parameters whose gradients are clipped.
            clip: function that clips the gradients; clipping functions that it calls are not recorded again.
            largest: maximum norm.
            total: norm of the gradients; None if ``clip`` returns it.

        Returns:
            the result of ``clip``.
        """
        if self._clips:
            return clip()
        self._stepped_at = user_site(_FRAMEWORK)
        step = self._unrecorded  # not None while an optimizer makes its step in several calls: see before_step
        # A recording gets its gradients when an optimizer reads them; of clipping it records only the norm.
        if not self._observes or not self._optimizers:
            self._record_clipped(list(parameters), step)
        if total is not None:
            self._record_norm(total, largest, step)
        self._clips = True
        try:
            returned = clip()
        finally:
            self._clips = False
        if total is None:
            self._record_norm(returned, largest, step)
        return returned

    def _record_clipped(self, parameters: list[Any], step: int | None) -> None:
        """Record the gradients of ``parameters``, which are about to be clipped."""
        chosen, named = {id(value) for value in parameters}, self._names.parameters()
        pieces = pieces_in(parameters, named)
        for name, parameter in named.items():
            taken = read_part(parameter, parameter.grad) if id(parameter) in chosen else None
            if name in pieces and pieces[name].parts:
                taken = pieces[name].read(_gradient)
            if taken is not None:
                self.log.add("gradient", name, taken, module=_owner(name), step=step, site=self._stepped_at)

    def _record_norm(self, total: Any, largest: float, step: int | None) -> None:
        taken = read_tensor(total)
        if taken is None:  # a DTensor of PyTorch for a norm that is not reduced yet
            self._note("norms that were not reduced", "gradient norm")
            return
        site = user_site(_FRAMEWORK)
        self.log.add("norm", "gradient norm", taken, step=step, site=site)
        if self._observes:
            return
        factor = taken._replace(array=np.minimum(1.0, largest / (taken.array + 1e-6)))
        self.log.add("norm", "clip factor", factor, step=step, site=site)

    # -- what the program saves ----------------------------------------------------------------------------------------

    def record_saved(self, state: Any) -> None:
        """Record floating-point tensors that the program saves under names that end with a parameter's name.

        Only here are averages of weights, and other copies outside of modules and optimizers, visible. Tensors with
        different names are skipped, because they may be specific to a rank, such as random states or local metrics.
        """
        parameters = {} if self._observes else self._names.parameters()
        for path, value in paths(state, CONTAINERS):
            name = ".".join(map(str, path))
            parts = name.split(".")
            known = any(".".join(parts[start:]) in parameters for start in range(len(parts)))
            taken = read_tensor(value) if known and getattr(value, "is_floating_point", bool)() else None
            if taken is not None:
                step = max(self.log.step - 1, _BEFORE)
                self.log.add("saved", name, taken, module=_owner(name), step=step, site=user_site(_FRAMEWORK))

    # -- optimizers ----------------------------------------------------------------------------------------------------

    def add_optimizer(self, optimizer: Any) -> None:
        """Remember an optimizer when it is created; optimizers are numbered in this order."""
        if not any(known is optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Record gradients and learning rates at the start of an optimizer's step.

        Returns:
            for a step with a closure, the step's arguments with a closure that records gradients after each call; else
            None.
        """
        self._in_step += 1
        if self._in_step > 1:
            return None
        self.add_optimizer(optimizer)
        self._stepped_at = user_site(_FRAMEWORK)
        goes_on = self._goes_on(optimizer)
        if self._steps.get(id(optimizer)) == self.log.step and not goes_on:
            self._end_step()
        closures = [value for value in (*args[1:2], kwargs.get("closure")) if callable(value)]
        if not self._steps and (self._names.parameters() or not closures):  # a closure may call the model first
            self._record_initial()
        self.add_groups()
        self._steps.setdefault(id(optimizer), 0)
        self._steps[id(optimizer)] -= goes_on
        step = self._steps[id(optimizer)]
        if not closures:
            self._record_gradients(optimizer, step)
        number = self._optimizers.index(optimizer)
        for position, group in enumerate(optimizer.param_groups):
            name = f"optimizer {number}, group {position}"
            self.log.add("rate", name, LocalValue(np.array(float(group.get("lr", 0.0)))), step=step)
        if not closures:
            return None
        self._closed = (optimizer, step)

        def closure() -> Any:
            loss = closures[0]()
            self._closed = None
            self._record_gradients(optimizer, step)
            return loss

        return ((args[0], closure), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})

    def _goes_on(self, optimizer: Any) -> bool:
        """Return whether this call continues a step that an optimizer makes in several calls, as in DeepSpeed."""
        held = {id(value) for value in _held(optimizer)}
        stepped = self._stepped.setdefault(id(optimizer), set())
        goes_on = bool(stepped) and self._unrecorded is not None and not held & stepped
        self._stepped[id(optimizer)] = held | stepped if goes_on else held
        return goes_on

    def _record_gradients(self, optimizer: Any, step: int) -> None:
        seen, pieces = self._seen_by(optimizer, self._names.parameters())
        for name, parameter in seen.items():
            if name in pieces:
                self._record_pieces(name, pieces[name], step)
                continue
            if parameter.grad is None:
                if parameter.requires_grad:
                    partitioned = is_partitioned(parameter)
                    self._note("parameters trained by partitions" if partitioned else _WITHOUT, name)
                continue
            taken = read_part(parameter, parameter.grad)
            if taken is not None:
                self.log.add("gradient", name, taken, module=_owner(name), step=step, site=self._stepped_at)
            self._displace(name, step, parameter.grad)

    def _record_pieces(self, name: str, pieces: Pieces, step: int) -> None:
        taken = pieces.read(_gradient) if pieces.parts or name not in self._recorded_pieces else None
        if taken is not None:
            self._recorded_pieces.add(name)
            self.log.add("gradient", name, taken, module=_owner(name), step=step, site=self._stepped_at)
        for part in pieces.parts:
            if part.holder.grad is not None:
                self._displace(name, step, part.of(part.holder.grad))

    def after_step(self, optimizer: Any) -> None:
        """Record the optimizer's state after its step."""
        self._in_step -= 1
        if self._in_step:  # a wrapping optimizer, such as ZeroRedundancyOptimizer, calls this one
            self._record_state(optimizer, max(self._steps.values()))
            return
        self.half.of_gradients = False
        step = self._steps[id(optimizer)]
        if self._closed is not None:  # the optimizer did not call the closure
            self._closed = None
            self._record_gradients(optimizer, step)
        self._record_state(optimizer, step)
        self._unrecorded = step
        self._steps[id(optimizer)] = step + 1
        self.log.step = max(self._steps.values())

    def _record_state(self, optimizer: Any, step: int) -> None:
        if self._observes:
            return
        seen, pieces = self._seen_by(optimizer, self._names.parameters())
        for name, parameter in seen.items():
            own = pieces.get(name)
            holders = [parameter] if own is None else [part.holder for part in own.parts]
            for key, value in optimizer.state.get(holders[0], {}).items() if holders else ():
                taken = _read_state(parameter, value) if own is None else own.read(partial(_state, optimizer, key))
                if taken is not None:
                    full = f"{name}:{key}"
                    self.log.add("state", full, taken, module=_owner(name), step=step, site=self._stepped_at)

    def _end_step(self) -> None:
        """Record the weights of the last step, now that the program has continued and completed its changes to them.

        For example, a program may have one optimizer per rank for some of the parameters, and broadcast these after the
        step.

        Raises:
            ProgramStopped: the step was the last one to record.
        """
        if self._unrecorded is None:
            return
        step, self._unrecorded = self._unrecorded, None
        self._stepped, self._recorded_pieces = {}, set()
        self._record_weights(step)
        if self._observes:
            self.log.forget(step)
        limit = self.log.limits.steps
        if limit is not None and min(self._steps.values()) >= limit:
            raise ProgramStopped

    def _end_step_by_hand(self) -> None:
        """Record a step that the program made without an optimizer: its weights have changed since the last one.

        Raises:
            ProgramStopped: the step was the last one to record.
        """
        if self._observes or self._optimizers or not self._initial:
            return
        named = self._names.parameters()
        if not self._by_hand.has_stepped(named):
            return
        self._by_hand.take(named)
        step = self.log.step
        for name, taken in self._by_hand.gradients.items():
            self.log.add("gradient", name, taken, module=_owner(name), step=step, site=self._stepped_at)
        for name in self._by_hand.own:
            self._note(OWN_GRADIENTS, name)
        self._by_hand.gradients.clear()
        self._by_hand.own.clear()
        self._steps[_HAND] = self.log.step = step + 1
        self._unrecorded = step
        self._end_step()

    def _seen_by(self, optimizer: Any, named: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Pieces]]:
        """Return the parameters whose gradients belong to this optimizer's step, and pieces that it trains instead.

        The parameters are the optimizer's own ones, and the models' parameters that no optimizer has: an optimizer that
        was created before the model was sharded has parameters that are no longer in a model. If parameters outside of
        all models get gradients, they are float32 weights that a program keeps in addition to the model's weights.

        Args:
            optimizer: optimizer that makes a step.
            named: parameters of the models.
        """
        own = {id(value) for value in _held(optimizer)}
        everyone = {id(value) for known in self._optimizers for value in _held(known)}
        pieces = pieces_in(_held(optimizer), self._names.parameters())
        holders = {id(value) for found in pieces.values() for value in found.holders}
        names = {id(value) for value in named.values()} | holders
        unknown = [value for value in _held(optimizer) if id(value) not in names]
        lost = [
            name
            for name, value in named.items()
            if value.requires_grad and id(value) not in everyone and name not in pieces and not is_partitioned(value)
        ]
        self.log.notes.update({"parameters that no optimizer has": lost} if lost else {})
        seen = {name: value for name, value in named.items() if id(value) in own or id(value) not in everyone}
        number = self._optimizers.index(optimizer)
        self._own_weights.update(
            id(value) for value in unknown if not lost or (value.grad is not None and bool(value.grad.any()))
        )
        self._nameless[number] = [list(value.shape) for value in unknown if id(value) not in self._own_weights]
        nameless = [shape for each in self._nameless.values() for shape in each]
        self.log.notes.pop("parameters that no model has", None)
        self.log.notes.update({"parameters that no model has": nameless} if nameless else {})
        for place, value in enumerate(unknown):
            if id(value) in self._own_weights:
                seen[f"optimizer {number}, parameter {place}"] = value
        return seen, pieces

    # -- weights -------------------------------------------------------------------------------------------------------

    def _trained(self) -> dict[str, Any]:
        """Return the parameters of the models, and those that only optimizers have."""
        models = self._names.parameters()
        named = dict(models)
        for optimizer in self._optimizers:
            named.update(self._seen_by(optimizer, models)[0])
        return named

    def _record_initial(self) -> None:
        """Record weights and buffers before training; record them again if the program then shards the model."""
        named = self._trained()
        if any(isinstance(value, UninitializedTensorMixin) for value in named.values()):
            return
        identities = {name: id(value) for name, value in named.items()}
        if identities != self._initial:
            self._initial = identities
            for kind in ("weight", "buffer"):
                self.log.drop(kind, _BEFORE)
            self._record_weights(_BEFORE)

    def _record_weights(self, step: int) -> None:
        named = self._trained()
        if not self._optimizers and not self._observes:
            self._by_hand.remember(named)
        for kind, tensors in (("weight", named), ("buffer", self._names.buffers())):
            for name, value in tensors.items():
                taken = read_weight(value)
                if taken is not None:
                    self.log.add(kind, name, taken, module=_owner(name), step=step, site=self._stepped_at)
        frozen = [name for name, value in named.items() if not value.requires_grad]
        self.log.notes.update({"frozen parameters": frozen} if frozen else {})

    # -- perturbation of a reference -----------------------------------------------------------------------------------

    def _perturb_weights(self) -> None:
        perturbation = self.log.perturbation
        if perturbation is None:
            return
        for name, parameter in self._names.parameters().items():
            if name not in self._perturbed and parameter.is_floating_point():
                self._perturbed.add(name)
                overwrite_weight(parameter, partial(perturbation.perturbed_input, f"weight {name}"))

    def _displace(self, name: str, step: int, gradient: Any) -> None:
        perturbation = self.log.perturbation
        if perturbation is not None and gradient.is_floating_point() and gradient.layout is torch.strided:
            overwrite(gradient, lambda array, _: perturbation.perturbed_gradient(name, step, array))

    def _perturbed_input(self, value: Any) -> Any:
        perturbation = self.log.perturbation
        if perturbation is None or type(value) is not torch.Tensor or not value.is_floating_point():
            return value
        moved = changed(value, partial(perturbation.perturbed_input, f"input {self._inputs}"))
        return value + (moved - value.detach()) if value.requires_grad else moved

    # -- groups and notes ----------------------------------------------------------------------------------------------

    def add_groups(self) -> None:
        """Remember the process groups that exist now."""
        if not torch.distributed.is_initialized():
            return
        for group, ranks in c10d_world.pg_group_ranks.items():
            members = tuple(sorted(ranks))
            description = str(getattr(group, "group_desc", "") or "").removeprefix("mesh_")
            name = "world" if group is torch.distributed.group.WORLD else description
            if name in ("", "undefined", "default"):
                name = f"group {'-'.join(map(str, members))}"
            self.log.groups.setdefault(members, name)

    def add_mesh(self, mesh: Any) -> None:
        """Remember the axes of a device mesh."""
        coordinate = mesh.get_coordinate()
        if coordinate is None or not mesh.mesh_dim_names:
            return
        for axis, name in enumerate(mesh.mesh_dim_names):
            place: list[Any] = list(coordinate)
            place[axis] = slice(None)
            self.log.groups[tuple(sorted(mesh.mesh[tuple(place)].tolist()))] = name

    def finish(self) -> None:
        """Complete the log when the program has ended."""
        with suppress(ProgramStopped):
            self._end_step()
            self._end_step_by_hand()
        self._own.close()
        self.add_groups()
        self.log.notes.setdefault(_WITHOUT, [])
        self.log.notes["optimizers"] = [type(optimizer).__name__ for optimizer in self._optimizers]
        self.log.notes["optimizer steps"] = self.log.step
        self.log.move_to_start(("weight", "buffer"), _BEFORE)

    def _note(self, subject: str, name: str) -> None:
        names = self.log.notes.setdefault(subject, [])
        if name not in names:
            names.append(name)


def _samples(args: Any, kwargs: Any) -> Iterator[tuple[str, torch.Tensor, LocalValue]]:
    """Yield the data that a model is called with, plain tensors without a gradient, as name, tensor and value."""
    for name, value in named_leaves("", {**dict(enumerate(args)), **kwargs}, CONTAINERS):
        taken = read_tensor(value) if type(value) is torch.Tensor and not value.requires_grad else None
        if taken is not None:
            yield name, value, taken


def _region_of_alias(inner: Any, value: torch.Tensor) -> Region | None:
    """Return the region of a plain tensor that is the local tensor of the DTensor ``inner``."""
    taken = read_tensor(inner) if isinstance(inner, TorchDTensor) else None
    if taken is None or value.shape != local_of(inner).shape:
        return None
    return taken.region if _address(value) == _address(local_of(inner)) else None


def _address(tensor: Any) -> int:
    """Return the address of a tensor's values; for the result of a pending collective, of the tensor inside it."""
    address: int = getattr(tensor, "elem", tensor).untyped_storage().data_ptr()
    return address


def _held(optimizer: Any) -> list[Any]:
    """Return the tensors in an optimizer's parameter groups."""
    return [value for group in optimizer.param_groups for value in group["params"]]


def _gradient(holder: Any) -> Any:
    return holder.grad


def _state(optimizer: Any, key: str, holder: Any) -> Any:
    """Return an entry of an optimizer's state for one of its tensors; None if there is none."""
    return optimizer.state.get(holder, {}).get(key)


def _read_state(parameter: Any, value: Any) -> LocalValue | None:
    return read_part(parameter, torch.as_tensor(value) if isinstance(value, (int, float)) else value)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
