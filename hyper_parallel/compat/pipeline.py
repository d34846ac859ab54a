"""Pipeline parallelism over modules: stages, three schedules and micro-batches, with ``backward()`` of tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any

from hyper_parallel.compat.schedules import (
    FORWARD,
    Step,
    gpipe,
    interleaved,
    one_forward_one_backward,
    rounds_of,
)
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.errors import PlanError
from hyper_parallel.platform.contract.pipeline import MicroBatch
from hyper_parallel.platform.select import get_platform

__all__ = [
    "CommComputeOverlap",
    "HookCoordinator",
    "HookRole",
    "MetaStepType",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "_MicroBatch",
]

_WHOLE = -1


class HookRole(Enum):
    """Kinds of work that hooks of an overlapping schedule wait for."""

    COMPUTE = auto()
    COMM = auto()


class HookCoordinator:
    """Placeholder for the coordinator of computing and communicating threads; nothing overlaps here."""

    def is_enabled(self) -> bool:
        """Return False, since no other thread runs."""
        return False

    def rendezvous(self, role: Any, phase: str = "forward") -> None:
        """Return at once."""

    def notify_dispatched(self, role: Any) -> None:
        """Return at once."""


class CommComputeOverlap:
    """Runs a backward and a forward of different micro-batches one after the other."""

    def __init__(self) -> None:
        self.coordinator = HookCoordinator()

    def run(self, fwd_fn: Callable[[], Any], bwd_fn: Callable[[], Any]) -> None:
        """Call both functions, backward first, since backward frees activations."""
        bwd_fn()
        fwd_fn()


class MetaStepType(Enum):
    """Kinds of steps of a schedule for which a program may register a function."""

    OVERLAP_B_F = auto()


class PipelineStage:
    """One stage of a pipeline: a module whose first arguments are the results of the previous stage.

    Args:
        submodule: module; the first stage calls it with the arguments of the micro-batch, later stages with the results
            of the previous stage and the keyword arguments.
        stage_index: index of the stage, from 0.
        stage_num: number of stages over all ranks; stage ``s`` is on rank ``s % ranks`` of the pipeline.
        device: unused; tensors are on the module's device.
        group: unused; messages go from rank to rank.
        mesh: mesh of the pipeline's ranks, with one axis.
        has_backward: whether the stage runs backward.
        dyn_shape: unused; shapes are sent with the first micro-batch of a run.
    """

    def __init__(
        self,
        submodule: Any,
        stage_index: int,
        stage_num: int,
        device: Any = None,
        group: Any = None,
        mesh: Any = None,
        has_backward: bool = True,
        dyn_shape: bool = False,
    ) -> None:
        del device, dyn_shape
        if mesh is None or mesh.ndim != 1:
            raise PlanError(f"PipelineStage: mesh is {mesh!r}; it must have the ranks of the pipeline as its one axis")
        if not 0 <= stage_index < stage_num or stage_index % mesh.size() != mesh.get_local_rank():
            msg = (
                f"PipelineStage: stage {stage_index} of {stage_num} is not on rank {mesh.get_local_rank()} of {mesh!r}"
            )
            raise PlanError(msg)
        self.submodule, self.stage_index, self.stage_num = submodule, stage_index, stage_num
        self.group, self.mesh, self.has_backward = group, mesh, has_backward
        self._entered: dict[int, tuple[Any, ...]] = {}
        self._computed: dict[int, tuple[Any, tuple[Any, ...]]] = {}
        self._gradients: dict[int, tuple[Any, ...]] = {}

    def forward_one_chunk(
        self, micro_index: int, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the module on a micro-batch; return its result and keep it for backward."""
        entered = self._entered.pop(micro_index, ()) if self.stage_index else tuple(args)
        outputs = self.submodule(*entered, **(kwargs or {}))
        if self.has_backward:
            self._computed[micro_index] = (outputs, entered if self.stage_index else ())
        return outputs

    def backward_one_chunk(self, micro_index: int) -> None:
        """Run the backward of a micro-batch with the gradients that the next stage has sent."""
        if not self.has_backward:
            return
        outputs, entered = self._computed.pop(micro_index)
        results = _tensors(outputs, self)
        if self.stage_index == self.stage_num - 1:
            seeds = self.get_last_stage_sens(outputs)
            seeds = tuple(seeds) if isinstance(seeds, (list, tuple)) else (seeds,)
        else:
            seeds = self._gradients.pop(micro_index)
        pairs = [(result, seed) for result, seed in zip(results, seeds, strict=True) if _has_graph(result)]
        for place, (result, seed) in enumerate(pairs):
            result.backward(seed, retain_graph=place < len(pairs) - 1)
        self._gradients[micro_index] = tuple(_gradient(each) for each in entered)

    def recompute_one_chunk(self, micro_index: int) -> None:
        """Do nothing: :meth:`backward_one_chunk` recomputes activations itself."""

    def get_last_stage_sens(self, last_stage_outputs: Any) -> Any:
        """Return the gradients that backward starts with: ones; for a DTensor, divided by its number of replicas."""
        results = _tensors(last_stage_outputs, self)
        seeds = [self._ones(each) for each in results]
        return seeds if isinstance(last_stage_outputs, (list, tuple)) else seeds[0]

    def bwd_send_specs(self, micro_index: int) -> list[Any]:
        """Return the gradients of the inputs from the previous stage, and drop them."""
        return list(self._gradients.pop(micro_index)) if self.has_backward else []

    def receive(self, step: Step, values: tuple[Any, ...]) -> None:
        """Store the tensors that another stage sent for a step: activations, which then require grad, or gradients."""
        if step.kind != FORWARD:
            self._gradients[step.micro_index] = values
            return
        for value in values:
            if self.has_backward and get_platform().is_floating(value):
                value.requires_grad = True
        self._entered[step.micro_index] = values

    def gradient_shapes(self, micro_index: int) -> list[tuple[tuple[int, ...], Any]]:
        """Return shapes and dtypes of the gradients from the next stage, which are those of the results."""
        results = _tensors(self._computed[micro_index][0], self)
        return [(tuple(each.shape), each.dtype) for each in results]

    def _ones(self, output: Any) -> Any:
        ones = get_platform().ones_like(output)
        return ones / output.layout.repeat_num() if isinstance(output, DTensor) else ones

    def _get_layout_rank_list(self, layout: Any, sender_rank: int | None = None) -> tuple[int, ...]:
        """Return the ranks of an activation; activations are plain tensors."""
        del sender_rank
        return tuple(layout.rank_list)


class _Schedule:
    """Runs the stages of a rank over the micro-batches of a step.

    Args:
        stages: the stages of this rank, or a single one.
        micro_batch_num: number of micro-batches.
        args_batch_dim: per positional argument, the dim to split along; -1 for an argument that every micro-batch gets
            unsplit.
        kwargs_batch_dim: the same for keyword arguments, by name.

    Attributes:
        exec_order: the steps of each rank of the pipeline.
    """

    def __init__(
        self,
        stages: Any,
        micro_batch_num: int,
        args_batch_dim: Sequence[int] | None = None,
        kwargs_batch_dim: Mapping[str, int] | None = None,
    ) -> None:
        self.stages = list(stages) if isinstance(stages, (list, tuple)) else [stages]
        self.micro_batch_num = micro_batch_num
        self._args_batch_dim, self._kwargs_batch_dim = args_batch_dim, kwargs_batch_dim
        self.split_micro_batch = _MicroBatch(micro_batch_num, args_batch_dim, kwargs_batch_dim)
        self._stage_dict = {stage.stage_index: stage for stage in self.stages}
        first = self.stages[0]
        self._stage_num, self._mesh = first.stage_num, first.mesh
        self._ranks, self._chunks = list(self._mesh.rank_list), len(self.stages)
        if self._chunks * len(self._ranks) != self._stage_num:
            held, all_of_them = len(self.stages), self._stage_num
            msg = f"{type(self).__name__}: {held} stages on each of {len(self._ranks)} ranks are not {all_of_them}"
            raise PlanError(msg)
        self.exec_order: dict[int, list[Step]] = {}
        self._init_round_layout()
        self.build_exec_order()

    def _init_round_layout(self) -> None:
        """Compute the micro-batches per round; call it again after ``micro_batch_num`` has changed."""
        self.n_microbatch_per_round = rounds_of(len(self._ranks), self.micro_batch_num)

    def build_exec_order(self) -> None:
        """Compute the order of every rank; call it again after ``micro_batch_num`` has changed."""
        self.exec_order = dict(enumerate(self._orders()))

    def _orders(self) -> list[list[Step]]:
        raise NotImplementedError

    def register_custom_function(self, kind: MetaStepType, function: Any) -> None:
        """Do nothing: no step of these schedules is both a forward and a backward."""

    def run(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a training step; return the outputs of the last stage, one per micro-batch; empty on other ranks."""
        arguments, named = self.split_micro_batch(args, kwargs)
        messages, outputs = _Messages(self), []
        for step in self.exec_order[self._mesh.get_local_rank()]:
            stage, micro = self._stage_dict[step.stage_index], step.micro_index
            messages.deliver(step)
            if step.kind == FORWARD:
                output = stage.forward_one_chunk(micro, arguments[micro], named[micro])
                messages.send(step, _tensors(output, stage))
                if step.stage_index == self._stage_num - 1:
                    outputs.append(output)
            else:
                stage.backward_one_chunk(micro)
                sent = stage.bwd_send_specs(micro)
                if sent:
                    messages.send(step, sent)
        messages.finish()
        return outputs


class ScheduleGPipe(_Schedule):
    """Runs all forwards, then all backwards; keeps the activations of all micro-batches."""

    def _orders(self) -> list[list[Step]]:
        _one_stage(self)
        return gpipe(len(self._ranks), self.micro_batch_num)


class Schedule1F1B(_Schedule):
    """Runs each backward as soon as possible; a stage stores at most one activation for itself and each later stage."""

    def _orders(self) -> list[list[Step]]:
        _one_stage(self)
        return one_forward_one_backward(len(self._ranks), self.micro_batch_num)


class ScheduleInterleaved1F1B(_Schedule):
    """Runs several stages per rank in turn, which reduces the idle time of ranks."""

    def _orders(self) -> list[list[Step]]:
        return interleaved(len(self._ranks), self._chunks, self.n_microbatch_per_round)


class _Messages:
    """Activations and gradients in flight between the ranks of one run.

    A rank receives the messages of each other rank in the order in which they were sent, and stores those that it does
    not need yet.

    Args:
        schedule: the running schedule.
    """

    def __init__(self, schedule: _Schedule) -> None:
        self._platform = get_platform()
        self._stage_of = {stage.stage_index: stage for stage in schedule.stages}
        first = schedule.stages[0]
        self._own, self._ranks, self._stages = first.mesh.get_local_rank(), list(first.mesh.rank_list), first.stage_num
        self._waiting: list[Any] = []
        self._arrived: dict[Step, tuple[Any, ...]] = {}
        self._shapes: dict[int, list[tuple[tuple[int, ...], Any]]] = {}
        self._coming: dict[int, list[Step]] = defaultdict(list)
        for rank, order in schedule.exec_order.items():
            for step in order:
                fed = step.feeds(self._stages)
                if fed is not None and self._rank_of(fed) == self._own and (first.has_backward or fed.kind == FORWARD):
                    self._coming[rank].append(fed)

    def send(self, step: Step, tensors: Sequence[Any]) -> None:
        """Send the result of a step to the rank that needs it, if any."""
        fed = step.feeds(self._stages)
        if fed is None:
            return
        values = tuple(self._platform.contiguous(self._platform.detach(each)) for each in tensors)
        rank = self._rank_of(fed)
        if rank == self._own:
            self._coming[rank].remove(fed)
            self._arrived[fed] = values
            return
        if fed.kind == FORWARD and fed.stage_index not in self._shapes:
            self._shapes[fed.stage_index] = [(tuple(each.shape), each.dtype) for each in values]
            self._platform.send_object_list([self._shapes[fed.stage_index]], self._ranks[rank])
        for value in values:
            self._waiting.append((self._platform.isend(value, self._ranks[rank]), value))

    def deliver(self, step: Step) -> None:
        """Receive the tensors that a step needs from a different stage, and pass them to the step's stage."""
        stage, before = self._stage_of[step.stage_index], step.needs(self._stages)
        if before is None or (step.kind != FORWARD and not stage.has_backward):
            return
        rank = self._rank_of(before)
        while step not in self._arrived:
            self._receive(rank, self._coming[rank].pop(0))
        stage.receive(step, self._arrived.pop(step))

    def finish(self) -> None:
        """Wait until all messages have been received."""
        for work, _ in self._waiting:
            work.wait()

    def _receive(self, rank: int, step: Step) -> None:
        if step.kind == FORWARD:
            if step.stage_index not in self._shapes:
                sent: list[Any] = [None]
                self._platform.recv_object_list(sent, self._ranks[rank])
                self._shapes[step.stage_index] = sent[0]
            shapes = self._shapes[step.stage_index]
        else:
            shapes = self._stage_of[step.stage_index].gradient_shapes(step.micro_index)
        empty = [
            self._platform.zeros(shape, dtype=dtype, device=self._platform.device_type()) for shape, dtype in shapes
        ]
        self._arrived[step] = tuple(self._platform.irecv(each, self._ranks[rank]).wait() for each in empty)

    def _rank_of(self, step: Step) -> int:
        return step.stage_index % len(self._ranks)


def _one_stage(schedule: _Schedule) -> None:
    if len(schedule.stages) > 1:
        name = type(schedule).__name__
        raise PlanError(
            f"{name}: {len(schedule.stages)} stages on a rank; it takes one, ScheduleInterleaved1F1B several"
        )


def _tensors(outputs: Any, stage: PipelineStage) -> tuple[Any, ...]:
    """Return the results of a stage as plain tensors, which is their form between stages."""
    platform = get_platform()
    results = tuple(outputs) if isinstance(outputs, (list, tuple)) else (outputs,)
    last = stage.stage_index == stage.stage_num - 1
    for each in results:
        if not platform.is_tensor(each) or (isinstance(each, DTensor) and not last):
            msg = (
                f"PipelineStage: stage {stage.stage_index} returns {type(each).__name__}; stages exchange plain tensors"
            )
            raise PlanError(msg)
    return results


def _has_graph(result: Any) -> bool:
    return bool(result.requires_grad)


def _gradient(entered: Any) -> Any:
    """Return the gradient of a stage's input; zeros if the result does not depend on it."""
    gradient = entered.grad if entered.requires_grad else None
    return get_platform().zeros_like(entered) if gradient is None else gradient


def _MicroBatch(  # noqa: N802 - the name that programs import
    micro_batch_num: int, args_batch_dim: Sequence[int] | None = None, kwargs_batch_dim: Mapping[str, int] | None = None
) -> MicroBatch:
    """Return a function that splits inputs into equal micro-batches; see :meth:`.PipelineFacet.micro_batch`.

    Args:
        micro_batch_num: number of micro-batches.
        args_batch_dim: per positional argument, the dim to split along; -1 for an argument that every micro-batch gets
            unsplit.
        kwargs_batch_dim: the same for keyword arguments, by name.
    """
    dims = None if args_batch_dim is None else [_or_all(dim) for dim in args_batch_dim]
    named = None if kwargs_batch_dim is None else {name: _or_all(dim) for name, dim in kwargs_batch_dim.items()}
    return get_platform().micro_batch(micro_batch_num, dims, named)


def _or_all(dim: Any) -> int | None:
    return None if dim == _WHOLE else dim
