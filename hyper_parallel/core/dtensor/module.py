"""Distributing tensors and modules: values come from one rank, or each rank takes a shard of its own values."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from hyper_parallel.core.dtensor.boxes import volume, whole_box
from hyper_parallel.core.dtensor.dtensor import DTensor, require_dense, resolve_mesh, takes_no_part, to_local
from hyper_parallel.core.dtensor.exchange import pack
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import ravel
from hyper_parallel.core.dtensor.parameter_paths import (
    module_label,
    note_replacement,
    replacing_parameters,
    untying_problems,
)
from hyper_parallel.core.dtensor.placements import Replicate
from hyper_parallel.core.dtensor.redistribute import redistribute
from hyper_parallel.core.dtensor.steps import narrow_box
from hyper_parallel.core.dtensor.transition import plan_transition
from hyper_parallel.errors import ArgumentTypeError, LayoutError, MeshError, ModuleError
from hyper_parallel.platform.select import platform_of, platform_of_argument
from hyper_parallel.transport.base import Parts

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Box
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["distribute_module", "distribute_tensor", "local_data_for", "place_parameter", "replicate_module"]

ModuleT = TypeVar("ModuleT")

_APPLIED = "_distribute_module_applied"
_HOOK_ARGUMENTS = 3


def distribute_tensor(
    tensor: Any,
    device_mesh: DeviceMesh | None = None,
    placements: Any = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Distribute a tensor over a mesh.

    Args:
        tensor: the global tensor; every rank passes one of the same shape and dtype.
        device_mesh: the mesh, by default the current one.
        placements: placements or aliases; all Replicate by default. Along a Partial(sum) axis the first rank
            holds the values and the others hold zeros.
        src_data_rank: row-major index in the mesh of the rank whose values are distributed; with None every rank
            takes its shard of its own values, without communication.

    Returns:
        a leaf DTensor with storage of its own and the ``requires_grad`` of ``tensor``. On a rank outside of the mesh
        its local tensor is empty, and reading its values is an error.

    Raises:
        LayoutError: (a ValueError) placements that do not fit, or a DTensor of another layout.
        MeshMismatchError: (a RuntimeError and a ValueError) the placements are a layout of another mesh.
        MeshError: (a ValueError) ``src_data_rank`` is not a valid index into the mesh.
        MeshLookupError: (a MeshError) on MindSpore, this rank is not in the mesh.
        ArgumentTypeError: (a TypeError and a RuntimeError) ``tensor`` is sparse, is not a tensor, or is the result of a
            computation that needs its gradient, which a leaf would not pass on (:meth:`DTensor.from_local` does).
    """
    mesh = resolve_mesh(device_mesh)
    platform = platform_of_argument(tensor, "distribute_tensor: tensor")
    placements = [Replicate()] * mesh.ndim if placements is None else placements
    layout = Layout.place(mesh, placements, tuple(tensor.shape))
    if isinstance(tensor, DTensor):
        return _require_layout(tensor, layout)
    require_dense(tensor, "distribute_tensor: tensor")
    if platform.passes_gradient(tensor):
        raise ArgumentTypeError(_not_a_leaf_message(tensor, layout))
    if takes_no_part(platform, mesh):
        local = platform.zeros(layout.local_shape, dtype=tensor.dtype, device=mesh.device_type)
    else:
        whole = platform.to_device(platform.detach(tensor), mesh.device_type)
        reduced = Layout.of(mesh, layout.dim_axes, (), layout.shape)
        local = redistribute(
            _own_shard(platform, whole, reduced, src_data_rank), plan_transition(reduced, layout), platform
        )
    result: DTensor = platform.wrap(local, layout)
    if platform.needs_grad(tensor):
        platform.set_tensor_requires_grad(result)
    return result


def _require_layout(tensor: DTensor, layout: Layout) -> DTensor:
    if tensor.layout is layout:
        return tensor
    msg = (
        f"distribute_tensor: the tensor is a DTensor {tensor.layout.notation(tensor.dtype)} on "
        f"{tensor.device_mesh!r}; to change its layout call "
        f"tensor.redistribute(placements={list(layout.placements)})"
    )
    raise LayoutError(msg)


def _not_a_leaf_message(tensor: Any, layout: Layout) -> str:
    whole = ", ".join(["Replicate()"] * layout.mesh.ndim)
    return (
        f"distribute_tensor: the tensor {list(tensor.shape)} is part of a graph, and the result would be a leaf, so "
        f"no gradient would come back; hyper_parallel.DTensor.from_local(tensor, mesh, [{whole}])"
        f".redistribute(placements={list(layout.placements)}) keeps the gradient if every rank holds the same values; "
        "detach the tensor if no gradient is needed"
    )


def _own_shard(platform: Platform, whole: Any, layout: Layout, source: int | None) -> Any:
    """Return this rank's shard of ``whole``, in its own storage, with the values of the rank at ``source``."""
    full_box = whole_box(layout.shape or ())
    if source is None or len(layout.mesh.ranks) == 1 or platform.is_meta(whole):
        own = narrow_box(whole, full_box, layout.local_box(), platform)
        return platform.contiguous(platform.empty_like(own) if platform.is_meta(whole) else platform.copy(own))
    ranks = layout.mesh.ranks
    if not 0 <= source < len(ranks):
        msg = f"src_data_rank {source} is out of range for {layout.mesh!r}, which has {len(ranks)} ranks"
        raise MeshError(msg)
    if layout.is_replicated:
        return platform.transport().broadcast(platform.contiguous(whole), ranks[source], ranks)
    return _scatter(platform, whole, layout, ranks[source])


def _scatter(platform: Platform, whole: Any, layout: Layout, source: int) -> Any:
    """Send every rank its shard of the tensor of rank ``source``.

    The source scatters along the axes that split the tensor, to the ranks that share its position on the others; these
    broadcast along the others. So the source sends each piece once, however many ranks hold it.
    """
    mesh = layout.mesh
    splitting = {axis for axes in layout.dim_axes for axis in axes}
    scattered = tuple(axis for axis in range(mesh.ndim) if axis in splitting)
    repeated = tuple(axis for axis in range(mesh.ndim) if axis not in splitting)
    start, here = mesh.coordinate_of(source), mesh.own_coordinate()
    shard = None
    if all(start[axis] == here[axis] for axis in repeated):
        shard = _scatter_to(platform, whole, layout, source, mesh.ranks_along(scattered))
    holders = mesh.ranks_along(repeated)
    if len(holders) == 1:
        return shard
    first = holders[ravel(tuple(start[axis] for axis in repeated), tuple(mesh.shape[axis] for axis in repeated))]
    if shard is None:
        shard = platform.empty_like(narrow_box(whole, whole_box(layout.shape or ()), layout.local_box(), platform))
    return platform.transport().broadcast(platform.contiguous(shard), first, holders)


def _scatter_to(platform: Platform, whole: Any, layout: Layout, source: int, ranks: tuple[int, ...]) -> Any:
    """Scatter the shards of ``ranks`` from rank ``source`` by an all-to-all in which only ``source`` sends."""
    full_box, size = whole_box(layout.shape or ()), (math.prod(layout.local_shape),)
    boxes = [layout.local_box(rank) for rank in ranks] if layout.mesh.rank == source else []
    if boxes and _follow_each_other(boxes, full_box):
        flat = platform.contiguous(platform.reshape(whole, (-1,)))
    else:
        flat = pack([narrow_box(whole, full_box, box, platform) for box in boxes], whole, platform)
    sends = Parts.of([(volume(box),) for box in boxes] or [(0,)] * len(ranks))
    expects = Parts.of([size if rank == source else (0,) for rank in ranks])
    shard = platform.transport().all_to_all(flat, ranks, sends, expects)
    # Not a view: a framework recreates a view when its base is written, and an empty one then has no second gradient.
    return platform.detach(platform.reshape(shard, layout.local_shape))


def _follow_each_other(boxes: Sequence[Box], full: Box) -> bool:
    """Return whether the boxes, in their order, are consecutive rows of the tensor, so that no copy is needed."""
    if not full or any(box[1:] != full[1:] for box in boxes):
        return False
    edges = [full[0][0], *(edge for box in boxes for edge in box[0]), full[0][1]]
    return edges[::2] == edges[1::2]


def place_parameter(
    platform: Platform,
    module: Any,
    name: str,
    mesh: DeviceMesh,
    placements: Any,
    *,
    src_data_rank: int | None = 0,
) -> None:
    """Replace a module's own parameter or buffer by a DTensor.

    Args:
        platform: the framework of ``module``.
        module: the owner.
        name: name of the parameter or buffer; a DTensor on the mesh is redistributed.
        mesh: the mesh.
        placements: placements, aliases or a layout.
        src_data_rank: as for :func:`distribute_tensor`.

    Raises:
        LayoutError: (a ValueError) placements that do not fit.
    """
    parameters = platform.direct_parameters(module)
    value = parameters[name] if name in parameters else platform.direct_buffers(module)[name]
    layout = Layout.place(mesh, placements, tuple(value.shape))
    if isinstance(value, DTensor) and value.layout is layout:
        return
    if name in parameters:
        platform.check_unhooked(value, f"{name} of {module_label(module)}", "it was placed on the mesh")
    if isinstance(value, DTensor):
        moved = platform.detach(value).redistribute(mesh, layout)
    else:
        moved = distribute_tensor(platform.detach(value), mesh, layout, src_data_rank=src_data_rank)
    if name in parameters:
        moved = platform.new_parameter(moved, requires_grad=platform.needs_grad(to_local(value)))
        note_replacement(value, moved, module, name)
    platform.set_parameter(module, name, moved)


def local_data_for(parameter: Any, data: Any) -> Any:
    """Return the plain tensor of ``data`` to be written to this rank's shard of ``parameter``.

    Args:
        parameter: the destination, a plain tensor or a DTensor.
        data: a DTensor of any layout on the parameter's mesh, this rank's shard, or the complete tensor.

    Raises:
        LayoutError: (a ValueError) the shape of ``data`` is neither the local nor the global shape of ``parameter``.
    """
    if isinstance(data, DTensor):
        data = (
            data.redistribute_to(parameter.layout).to_local() if isinstance(parameter, DTensor) else data.full_tensor()
        )
    local = tuple(parameter.local_shape if isinstance(parameter, DTensor) else parameter.shape)
    if tuple(data.shape) == local:
        return data
    if isinstance(parameter, DTensor) and tuple(data.shape) == tuple(parameter.shape):
        return narrow_box(data, whole_box(data.shape), parameter.layout.local_box(), platform_of(data))
    whole = (
        f"{list(parameter.shape)}, of which this rank holds {list(local)}"
        if isinstance(parameter, DTensor)
        else list(local)
    )
    msg = f"update_param_data: the parameter has shape {whole}; the data has shape {list(data.shape)}"
    raise LayoutError(msg)


def replicate_module(platform: Platform, module: Any, mesh: DeviceMesh, *, src_data_rank: int | None = 0) -> None:
    """Replace plain parameters and buffers of ``module`` and its children by replicated DTensors."""
    with replacing_parameters(platform, module) as ties:
        for _, child in platform.get_cells_and_names(module):
            for name in _plain_values(platform, child):
                place_parameter(platform, child, name, mesh, [Replicate()] * mesh.ndim, src_data_rank=src_data_rank)
                ties.restore()


def _plain_values(platform: Platform, module: Any) -> list[str]:
    """Return the names of the module's own parameters and buffers that are not DTensors."""
    values = {**platform.direct_parameters(module), **platform.direct_buffers(module)}
    return [name for name, value in values.items() if not isinstance(value, DTensor)]


def is_distributed(module: Any) -> bool:
    """Whether ``distribute_module`` was applied to a module."""
    return bool(getattr(module, _APPLIED, False))


def distribute_module(
    module: ModuleT,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, Any, DeviceMesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> ModuleT:
    """Replace a module's parameters and buffers by DTensors, and convert its inputs and outputs.

    Args:
        module: the module, which is changed in place.
        device_mesh: the mesh, by default the current one.
        partition_fn: ``(path, submodule, mesh)``, called for every submodule to replace the parameters to be sharded.
            All others are replicated.
        input_fn: ``(module, inputs, mesh)``; returns new inputs, or None to keep them.
        output_fn: ``(module, outputs, mesh)``; returns a new output, or None to keep it.

    Returns:
        ``module``.

    Raises:
        ModuleError: (a RuntimeError and ValueError) ``module`` is already distributed, has a parameter tied to one
            elsewhere that an earlier call has placed, or a hook takes neither two nor three arguments.
    """
    mesh = resolve_mesh(device_mesh)
    platform = platform_of_argument(module, "distribute_module: module", module=True)
    if is_distributed(module):
        msg = f"distribute_module was applied to this {type(module).__name__} before; apply it once"
        raise ModuleError(msg)
    plain = platform.parameters_dict(module).items()
    _refuse_untying(platform, module, [(path, value) for path, value in plain if not isinstance(value, DTensor)])
    hooks = [_hook(fn, name) for fn, name in ((input_fn, "input_fn"), (output_fn, "output_fn"))]
    if partition_fn is not None:
        with replacing_parameters(platform, module) as ties:
            for path, child in list(platform.get_cells_and_names(module)):
                partition_fn(path, child, mesh)
                ties.restore()
    replicate_module(platform, module, mesh)
    before, after = hooks
    if before is not None:
        platform.register_forward_pre_hook(module, partial(_before, before, mesh))
    if after is not None:
        platform.register_forward_hook(module, partial(_after, after, mesh))
    setattr(module, _APPLIED, True)
    return module


def _refuse_untying(platform: Platform, module: Any, replaced: list[tuple[str, Any]]) -> None:
    problems = list(untying_problems(platform, module, replaced))
    if problems:
        raise ModuleError("\n  - ".join(["distribute_module: parameters would no longer be tied:", *problems]))


def _hook(fn: Callable[..., Any] | None, name: str) -> Callable[..., Any] | None:
    """Return ``fn`` with three arguments; a deprecated two-argument hook is wrapped, with a warning."""
    if fn is None:
        return None
    count = len(_positional(fn))
    if count == _HOOK_ARGUMENTS:
        return fn
    if count == _HOOK_ARGUMENTS - 1:
        warnings.warn(
            f"{name} with two arguments is deprecated; let it take (module, inputs_or_outputs, device_mesh)",
            FutureWarning,
            stacklevel=3,
        )
        return partial(_without_module, fn)
    msg = f"{name} takes {count} arguments, it must take 3: (module, inputs_or_outputs, device_mesh)"
    raise ModuleError(msg)


def _before(fn: Callable[..., Any], mesh: DeviceMesh, module: Any, inputs: Any) -> Any:
    return fn(module, inputs, mesh)


def _after(fn: Callable[..., Any], mesh: DeviceMesh, module: Any, inputs: Any, outputs: Any) -> Any:
    del inputs
    return fn(module, outputs, mesh)


def _without_module(fn: Callable[..., Any], module: Any, values: Any, mesh: DeviceMesh) -> Any:
    del module
    return fn(values, mesh)


def _positional(fn: Callable[..., Any]) -> Sequence[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter for parameter in inspect.signature(fn).parameters.values() if parameter.kind in kinds]
