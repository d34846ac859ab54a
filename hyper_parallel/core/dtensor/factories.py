"""Tensors made where they are held: every rank fills its own piece, nothing travels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.dtensor import resolve_mesh
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import Replicate
from hyper_parallel.core.dtensor.redistribute import redistribute
from hyper_parallel.core.dtensor.transition import plan
from hyper_parallel.platform.select import current_platform

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.core.dtensor.mesh import DeviceMesh

__all__ = ["empty", "full", "ones", "zeros"]


def full(
    size: Sequence[int] | int,
    fill_value: Any,
    *,
    dtype: Any = None,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Any = None,
) -> Any:
    """A DTensor of global shape ``size`` filled with ``fill_value``.

    Args:
        size: global shape.
        fill_value: a Python number.
        dtype: element type; the framework's default for ``fill_value`` otherwise.
        requires_grad: whether it is a leaf that takes part in differentiation.
        device_mesh: the mesh, by default the current one.
        placements: placements or aliases; all Replicate by default.
    """
    mesh, platform = resolve_mesh(device_mesh), current_platform()
    shape = (size,) if isinstance(size, int) else tuple(size)
    layout = Layout.place(mesh, [Replicate()] * mesh.ndim if placements is None else placements, shape)
    held = Layout.of(mesh, layout.dim_axes, (), shape)
    local = platform.full(held.local_shape, fill_value, dtype=dtype, device=mesh.device_type)
    made = platform.wrap(redistribute(local, plan(held, layout), platform), layout)
    return platform.set_tensor_requires_grad(made) if requires_grad else made


def zeros(*size: Any, **options: Any) -> Any:
    """Zeros; ``size`` as ints or one sequence, options as :func:`full`."""
    return full(_size(size), 0.0, **options)


def ones(*size: Any, **options: Any) -> Any:
    """Ones; ``size`` as ints or one sequence, options as :func:`full`."""
    return full(_size(size), 1.0, **options)


def empty(*size: Any, **options: Any) -> Any:
    """Values nobody promised anything about (they are zeros); ``size`` and options as :func:`zeros`."""
    return zeros(*size, **options)


def _size(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)
