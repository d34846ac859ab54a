"""What PyTorch's ``GradScaler`` does to gradients: unscale them in place, and tell whether one is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import Cause
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.shard.entry import OpEntry
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.torch.op_table_fused import wrote
from hyper_parallel.platform.torch.op_table_pointwise import routed

__all__ = ["add_routes"]

_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
_NAME = "_amp_foreach_non_finite_check_and_unscale_"


def _unscale(ops: Any, x: Sequence[Any], found_inf: Any, inv_scale: Any) -> None:
    """Each rank scales its pieces; what one finds, all ranks of the gradients' meshes know."""
    for index, one in enumerate(x):
        if isinstance(one, DTensor):
            _require_writable(index, one)
    _UNSCALE([_local(one) for one in x], _local(found_inf), _local(inv_scale))
    written = [one for one in x if isinstance(one, DTensor)]
    wrote(written)
    meshes = list(dict.fromkeys(one.device_mesh for one in written))
    for mesh in meshes * len(meshes):  # what a rank hears over one mesh it tells over the others
        _local(found_inf).copy_(_anywhere(ops.platform, mesh, _local(found_inf)))


def _require_writable(index: int, grad: Any) -> None:
    layout, name = grad.layout, f"{_NAME}: gradient {index}"
    if layout.partials:
        msg = (
            f"{name} is {layout.notation(grad.dtype)}: whether a pending sum is finite is not known before it is done; "
            "use parameter.grad = parameter.grad.reduce_partial() first"
        )
        raise UnsupportedOperatorError(msg)
    if grad._readonly is not None:
        msg = f"{name} cannot be written to: {grad._readonly}"
        raise UnsupportedOperatorError(msg)


def _anywhere(platform: Any, mesh: DeviceMesh, found: Any) -> Any:
    """The largest of what the ranks of ``mesh`` found."""
    shape = tuple(found.shape)
    whole = ((),) * len(shape)
    pending = Layout.of(mesh, whole, tuple((axis, "max") for axis in range(mesh.ndim)), shape)
    return platform.wrap(found.detach(), pending).local_for(
        Layout.of(mesh, whole, (), shape), (), Cause(_NAME, "found_inf")
    )


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def add_routes(table: dict[Any, OpEntry]) -> None:
    """Add the function; its sibling, which moves the scale, sees no gradient."""
    routed(table, _UNSCALE, "x, found_inf, inv_scale", _unscale)
