"""One training step of a parallel model on one rank, with its communication and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hyper_parallel._caches import empty_layout_caches
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import Event, EventLog, PendingRedistribution, module_path, watching
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.transition import dual
from hyper_parallel.core.shard.op_plan import observing_plans
from hyper_parallel.errors import HyperParallelError, short_dtype
from hyper_parallel.platform.select import current_platform
from hyper_parallel.transport.base import Ranks, Transport
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.model_case import as_case, as_plan
from hyper_parallel.verify.model_training import ParallelRun, build_model
from hyper_parallel.verify.parameter_layouts import parameter_layouts
from hyper_parallel.verify.spec import blame_user, user_line

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.core.shard.op_plan import OpPlan
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.parameter_layouts import ParameterLayout

__all__ = ["Memory", "ParallelStep", "run_parallel_step"]


@dataclass(frozen=True)
class Memory:
    """Memory of a training step on a rank, in bytes.

    Attributes:
        weights: parameters and buffers, of the local shards.
        gradients: gradients of the trained parameters, when the optimizer reads them.
        optimizer: tensors of the optimizer's state, after the step.
        activations: peak of the tensors saved for backward, without weights and without tensors inside checkpointed
            regions. None if the framework does not report them.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int | None

    @property
    def total(self) -> int:
        """The sum of the known numbers."""
        return self.weights + self.gradients + self.optimizer + (self.activations or 0)


@dataclass(frozen=True)
class ParallelStep:
    """One training step of the parallel model on one rank, without a single-device run.

    Attributes:
        parameter_layouts: layouts of the parameters.
        dtypes: short dtypes of the parameters, by path.
        itemsizes: bytes of an element of each parameter, by path.
        events: collectives.
        memory: memory on this rank.
        gradients: number of gradients in the layout that the parameter's layout requires.
        wrong: descriptions of gradients in a different layout.
        notes: descriptions of probably unintended properties.
        plans: the different plans of the operator calls on DTensors.
    """

    parameter_layouts: list[ParameterLayout]
    dtypes: dict[str, str]
    itemsizes: dict[str, int]
    events: list[Event]
    memory: Memory
    gradients: int
    wrong: list[str]
    notes: list[str]
    plans: tuple[OpPlan, ...]


@contextmanager
def _without_values(platform: Platform) -> Iterator[None]:
    """Replace the error of a function that reads values, which the tensors do not have, by an error with advice."""
    try:
        yield
    except Exception as error:
        name = harness_of(platform).reading_values(error)
        if not name:
            raise
        by_mask = " (indexing by a mask calls it)" if name == "nonzero" else ""
        result = "the result" if name == "item" else "the size of the result"
        msg = (
            f"SPEC: the model under PLAN: {result} of {name}{by_mask} depends on values, and here the model runs "
            "without values; use a function whose result has a known size, such as torch.where(mask, x, 0) for "
            f"x[mask], or verify model, which runs on values{user_line(error)}"
        )
        raise InputError(msg) from error


def run_parallel_step(
    make_case: Callable[[], Any],
    make_plan: Callable[[Any], Any],
    mesh_shape: tuple[int, ...],
    mesh_names: tuple[str, ...],
    device: str = "cpu",
) -> ParallelStep:
    """Run the parallel model on this rank for one step, without a comparison.

    Args:
        make_case: SPEC.
        make_plan: PLAN; called with the mesh.
        mesh_shape: sizes of the axes.
        mesh_names: names of the axes.
        device: device of the mesh.

    Raises:
        InputError: SPEC or PLAN cannot be run.
    """
    platform = current_platform()
    case = as_case(make_case())
    mesh = init_device_mesh(device, mesh_shape, mesh_dim_names=mesh_names)
    run = ParallelRun(platform, case, build_model(platform, case, 0), mesh, as_plan(make_plan(mesh), mesh.names), None)
    log = _StepLog(mesh, platform.transport())
    run.training.loss = log.forward_and_backward(run.training.loss)  # type: ignore[method-assign] # of this run
    parameters = run.parameters()
    plans: list[OpPlan] = []
    empty_layout_caches()  # calls with a cached plan of an earlier run are not noted
    recorded = (watching(log), log.calls(), harness_of(platform).saved_for_backward(run.model))
    observed = observing_plans(plans.append)
    blamed = blame_user("SPEC: the model under PLAN", HyperParallelError)
    with recorded[0], recorded[1], recorded[2] as saved, observed, blamed, _without_values(platform):
        run.step(0)
    gradients = {path: value for path, value in run.training.gradients.items() if value is not None}
    wrong = _wrong_duals(parameters, gradients)
    buffers = harness_of(platform).buffers(run.model).values()
    memory = Memory(
        _local_bytes(platform, [*parameters.values(), *buffers]),
        _local_bytes(platform, gradients.values()),
        _local_bytes(platform, filter(platform.is_tensor, run.training.optimizer().state().values())),
        None if saved is None else saved(),
    )
    return ParallelStep(
        parameter_layouts(parameters),
        {path: short_dtype(parameter.dtype) for path, parameter in parameters.items()},
        {path: platform.get_param_type_size(parameter) for path, parameter in parameters.items()},
        log.named(harness_of(platform).collective_owners(run.model)),
        memory,
        len(gradients) - len(wrong),
        wrong,
        [*run.plan_notes, *_without_gradient(harness_of(platform).trainable(run.model), gradients)],
        tuple(plans),
    )


class _StepLog(EventLog):
    """The events of one step, including collectives outside redistributions, such as those of ``fully_shard``."""

    def __init__(self, mesh: DeviceMesh, transport: Transport) -> None:
        super().__init__()
        self._mesh, self._transport = mesh, transport
        self._announced = 0  # calls into the transport by a redistribution that is already logged
        self._phase = "forward"
        self._axes: dict[Ranks, tuple[str, ...]] = {}

    def on_redistribution(self, redistribution: PendingRedistribution) -> None:
        """Log the collectives of a redistribution; its calls into the transport follow, and are not logged again."""
        super().on_redistribution(redistribution)
        self._announced = sum(step.launches for step in redistribution.transition.steps)

    def forward_and_backward(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``loss``, with its calls logged as forward, and later calls as backward."""

        def call(*args: Any) -> Any:
            self._phase = "forward"
            try:
                return loss(*args)
            finally:
                self._phase = "backward"

        return call

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Log the calls into the transport inside the block."""
        for name, ranks_at in _COLLECTIVES.items():
            setattr(self._transport, name, self._noting(name, getattr(self._transport, name), ranks_at))
        try:
            yield
        finally:
            for name in _COLLECTIVES:
                delattr(self._transport, name)

    def named(self, owners: Mapping[str, str]) -> list[Event]:
        """Return the events; events of an owner in ``owners`` have the owner's path as their module."""
        return [replace(event, module=owners.get(event.module, event.module)) for event in self]

    def _noting(self, name: str, method: Callable[..., Any], ranks_at: int) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if self._announced:
                self._announced -= 1
                return method(*args)
            ranks = tuple(args[ranks_at])
            result = method(*args)
            if len(ranks) > 1:
                self._add(name.removesuffix("_rows"), ranks, result)
            return result

        return call

    def _add(self, collective: str, ranks: Ranks, result: Any) -> None:
        platform = current_platform()
        parts = result if isinstance(result, list) else [result]
        distinct = {id(part): part for part in parts}.items()  # the zeros of several absent ranks are one tensor
        sizes = {key: math.prod(part.shape) * platform.itemsize(part) for key, part in distinct}
        size = sum(sizes[id(part)] for part in parts)
        # All except the rank's own shard is received; in a reduction, each element once per other rank, or in two
        # rounds.
        others = len(ranks) - 1
        received = {"all_reduce": 2 * size * others // len(ranks), "reduce_scatter": size * others, "broadcast": size}
        sequence = self._transport.sequences.get(tuple(sorted(ranks)))
        running = None if sequence is None else sequence.running
        self._events.append(
            Event(
                step=0,
                module=module_path() if running is None else running.owner,
                op=collective,
                argument="",
                source="",
                target="",
                collective=collective,
                bytes=received.get(collective, size * others // len(ranks)),
                axes=self._axes_of(ranks),
                phase=self._phase,
                implicit=False,
            )
        )

    def _axes_of(self, ranks: Ranks) -> tuple[str, ...]:
        """Return the axes that contain ``ranks``; none if the ranks are not a line or plane of the mesh."""
        known = self._axes.get(ranks)
        if known is None:
            wanted = tuple(sorted(ranks))
            places = [self._mesh.coordinate_of(rank) for rank in ranks]
            axes = tuple(axis for axis in range(self._mesh.ndim) if len({place[axis] for place in places}) > 1)
            whole = tuple(sorted(self._mesh.ranks_along(axes))) == wanted
            known = self._axes[ranks] = tuple(self._mesh.names[axis] for axis in axes) if whole else ()
        return known


_COLLECTIVES = {
    "all_reduce": 2, "all_gather": 1, "reduce_scatter": 2, "all_to_all": 1, "broadcast": 2, "all_gather_rows": 1,
    "reduce_scatter_rows": 2, "all_to_all_rows": 1,
}  # fmt: skip
"""Position of the members among the arguments of a transport's collectives."""


def _local_bytes(platform: Platform, values: Any) -> int:
    """Return the bytes of local tensors, from their shapes: ``prove plan`` would follow tensors that are read."""
    shapes = ((platform.get_param_local_shape(each), platform.get_param_type_size(each)) for each in values)
    return sum(math.prod(shape) * itemsize for shape, itemsize in shapes)


def _wrong_duals(parameters: Mapping[str, Any], gradients: Mapping[str, Any]) -> list[str]:
    """Return descriptions of the gradients whose layouts are not those that their parameters require."""
    notes = []
    for path, gradient in gradients.items():
        layout = getattr(parameters[path], "layout", None) if isinstance(parameters[path], DTensor) else None
        own = gradient.layout if isinstance(gradient, DTensor) else None
        wanted = None if layout is None else dual(layout)
        if own is not wanted:
            texts = ["plain" if each is None else each.notation() for each in (own, wanted)]
            notes.append(f"the gradient of {path} is {texts[0]} and must be {texts[1]}")
    return notes


def _without_gradient(trained: Mapping[str, Any], gradients: Mapping[str, Any]) -> list[str]:
    paths = [path for path in trained if path not in gradients]
    if not paths:
        return []
    more = f" and {len(paths) - 4} others" if len(paths) > 4 else ""
    return [f"the loss does not depend on {', '.join(paths[:4])}{more}, which get no gradient"]
