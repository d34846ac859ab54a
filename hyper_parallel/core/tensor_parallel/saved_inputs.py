"""``input_reshard``: replicated inputs that backward needs are kept as shards, and gathered when they are needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

from hyper_parallel._tree import CONTAINERS, leaves
from hyper_parallel.core.dtensor.dtensor import DTensor, resolve_mesh
from hyper_parallel.core.dtensor.events import Cause
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.core.dtensor.redistribute import redistribute
from hyper_parallel.core.dtensor.transition import plan_transition
from hyper_parallel.core.shard.custom.several_meshes import is_replicated_over
from hyper_parallel.errors import ArgumentTypeError, MeshError, PlanError
from hyper_parallel.platform.contract.memory import Offloaded
from hyper_parallel.platform.select import platform_of, platform_of_argument

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.core.dtensor.transition import Transition
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["input_reshard"]

ModuleT = TypeVar("ModuleT")

_CAUSE = Cause("input_reshard", "input")


def input_reshard(module: ModuleT, tp_device_mesh: DeviceMesh, input_reshard_dim: int | None = None) -> ModuleT:
    """Keep the inputs that ``module`` saves for backward as shards, and gather them in backward.

    Tensor parallelism replicates the input of a column-wise layer, so that each rank saves the complete tensor for the
    gradient of its weight. After this call each rank saves only its shard, and the backward of each operator that needs
    it starts with an all-gather. Values and gradients are bitwise the same. It applies to arguments of ``module``, or
    of a module inside, that are DTensors replicated along the mesh, and to views of all their elements. It does not
    apply to copies in another dtype, such as those of autocast. Inside recomputation (``checkpoint`` around the module)
    the shards are kept, too.

    Args:
        module: the module, which is changed in place; a plan was applied to it or to modules inside.
        tp_device_mesh: the mesh of one axis over which to shard, such as ``mesh["tp"]``.
        input_reshard_dim: the dim that is sharded, evenly or not; tensors that lack it, or whose dim is shorter than
            the axis, are saved unchanged. None does nothing.

    Returns:
        ``module``.

    Raises:
        ArgumentTypeError: (a TypeError) ``input_reshard_dim`` is not an integer.
        MeshError: (a ValueError) the mesh has several axes.
        PlanError: (a ValueError) no parameter of ``module`` is a DTensor.
        UnsupportedOnBackend: (a NotImplementedError) on MindSpore.
    """
    if input_reshard_dim is None:
        return module
    untyped: object = input_reshard_dim  # callers may not be type-checked
    if not isinstance(untyped, int) or isinstance(untyped, bool):
        msg = f"input_reshard: input_reshard_dim must be an integer or None, not {untyped!r}"
        raise ArgumentTypeError(msg)
    platform, mesh = platform_of_argument(module, "input_reshard: module", module=True), resolve_mesh(tp_device_mesh)
    if mesh.ndim != 1:
        msg = f"input_reshard: {mesh!r} has {mesh.ndim} axes; pass one of them, such as mesh[{mesh.names[-1]!r}]"
        raise MeshError(msg)
    parameters = [value for value in platform.parameters_dict(module).values() if isinstance(value, DTensor)]
    if not parameters:
        msg = (
            f"input_reshard: no parameter of {type(module).__name__} is a DTensor, so nothing in it is known to be "
            "replicated; call parallelize_module first"
        )
        raise PlanError(msg)
    platform.storage_key(parameters[0]._local)  # refuse here rather than in the first forward
    saving = _Saving(mesh, input_reshard_dim)
    platform.register_forward_pre_hook(module, saving.enter)
    for _, inside in platform.get_cells_and_names(module):
        platform.register_forward_pre_hook(inside, saving.note, with_kwargs=True)
    platform.register_forward_hook(module, saving.leave, always_call=True)
    return module


class _Saving:
    """The hooks of one module: they decide what is saved between the start and the end of its forward."""

    def __init__(self, mesh: DeviceMesh, dim: int) -> None:
        self.mesh, self.dim = mesh, dim
        self.calls: list[_Call] = []  # the module may call itself

    def enter(self, module: Any, args: Any) -> None:
        """Start to keep shards."""
        del args
        call = _Call(platform_of(module))
        call.hooks.__enter__()
        self.calls.append(call)

    def note(self, module: Any, args: Any, kwargs: Any) -> None:
        """Note the replicated tensors among the arguments of a module."""
        del module
        if self.calls:
            for value in leaves((args, kwargs), CONTAINERS):
                if isinstance(value, DTensor) and is_replicated_over(value.layout, self.mesh):
                    self.calls[-1].note(value._local, self.mesh, self.dim)

    def leave(self, module: Any, args: Any, output: Any) -> None:
        """Stop, in case of an error too."""
        del module, args, output
        if self.calls:
            self.calls.pop().hooks.__exit__(None, None, None)


class _Call:
    """One forward with its replicated inputs; each is sharded once, when it is first saved."""

    def __init__(self, platform: Platform) -> None:
        self.platform, self.hooks = platform, platform.replace_saved(self.replace)
        self.inputs: dict[Any, _Input] = {}

    def note(self, local: Any, mesh: DeviceMesh, dim: int) -> None:
        """Note a local tensor that is the same on every rank of ``mesh``."""
        key, shape = self.platform.storage_key(local), tuple(local.shape)
        if key is not None and -len(shape) <= dim < len(shape) and shape[dim] >= mesh.size():
            shards = plan_transition(Layout.place(mesh, [Replicate()], shape), Layout.place(mesh, [Shard(dim)], shape))
            self.inputs[key] = _Input(ref(local), self.platform.version(local), shards)

    def replace(self, tensor: Any) -> Offloaded | None:
        """Return the shard that replaces a saved tensor; None if it is not an input, or was written since."""
        found = self.inputs.get(self.platform.storage_key(tensor))
        local = None if found is None else found.local()
        if found is None or local is None or self.platform.version(tensor) != found.version:
            return None
        if found.shard is None:
            found.shard = redistribute(self.platform.detach(local), found.sharding, self.platform)
        return _Resharded(self.platform, found.shard, found.sharding, tuple(tensor.shape))


@dataclass
class _Input:
    """A replicated local tensor, held by a weak reference, and its shard, which is kept alive.

    Attributes:
        local: weak reference to the tensor.
        version: number of writes to the tensor when it was noted.
        sharding: transition to this rank's shard.
        shard: the shard, once something saves the tensor.
    """

    local: ref[Any]
    version: int
    sharding: Transition
    shard: Any = None


class _Resharded(Offloaded):
    """A shard of a saved tensor."""

    def __init__(self, platform: Platform, shard: Any, sharding: Transition, shape: tuple[int, ...]) -> None:
        self._platform, self._shard, self._sharding, self._shape = platform, shard, sharding, shape

    def restore(self) -> Any:
        """Gather the shards, in the shape of the saved tensor, which is the input or a view of it."""
        gathering = plan_transition(self._sharding.target, self._sharding.source)
        return self._platform.reshape(redistribute(self._shard, gathering, self._platform, _CAUSE), self._shape)
