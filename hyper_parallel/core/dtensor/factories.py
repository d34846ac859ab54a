"""Tensors made where they are held: every rank fills its own piece, nothing travels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor import random, sampling
from hyper_parallel.core.dtensor.dtensor import resolve_mesh
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import Replicate
from hyper_parallel.core.dtensor.redistribute import redistribute
from hyper_parallel.core.dtensor.transition import plan_transition
from hyper_parallel.errors import short_dtype
from hyper_parallel.platform.select import current_platform

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.core.dtensor.sampling import Distribution

__all__ = ["empty", "full", "ones", "rand", "randn", "zeros"]

_DIGITS = {"f32": 24, "f16": 11, "bf16": 8}


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
    platform = current_platform()

    def constant(held: Layout) -> Any:
        device = held.mesh.device_type
        return platform.full(held.local_shape, fill_value, dtype=dtype, device=device)

    return _made(_size((size,), {}), constant, requires_grad, device_mesh, placements)


def zeros(*size: Any, **options: Any) -> Any:
    """Zeros; ``size`` as ints, one sequence or by keyword, options as :func:`full`."""
    return full(_size(size, options), 0.0, **options)


def ones(*size: Any, **options: Any) -> Any:
    """Ones; ``size`` as ints, one sequence or by keyword, options as :func:`full`."""
    return full(_size(size, options), 1.0, **options)


def empty(*size: Any, **options: Any) -> Any:
    """Values nobody promised anything about (they are zeros); ``size`` and options as :func:`zeros`."""
    return zeros(*size, **options)


def rand(*size: Any, dtype: Any = None, **options: Any) -> Any:
    """Uniform in ``[0, 1)``, the same for every layout, mesh and framework; :func:`manual_seed` starts the stream.

    ``size`` as ints, one sequence or by keyword, options as :func:`full`.
    """
    return _random(_size(size, options), sampling.uniform, dtype, **options)


def randn(*size: Any, dtype: Any = None, **options: Any) -> Any:
    """Standard normal, otherwise as :func:`rand`."""
    return _random(_size(size, options), sampling.normal, dtype, **options)


def _random(size: tuple[int, ...], draw: Callable[[int], Distribution], dtype: Any, **options: Any) -> Any:
    platform = current_platform()

    def values(held: Layout) -> Any:
        like = platform.zeros((), dtype=dtype, device=held.mesh.device_type)
        drawn = random.sample(held, draw(_DIGITS.get(short_dtype(like.dtype), 53)))
        return platform.local_op("make_like")(like, drawn, None)

    return _made(size, values, **options)


def _made(
    shape: tuple[int, ...],
    fill: Callable[[Layout], Any],
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Any = None,
) -> Any:
    """A leaf whose shards ``fill`` makes; along Partial axes the first rank keeps them, the others hold zeros."""
    mesh, platform = resolve_mesh(device_mesh), current_platform()
    layout = Layout.place(mesh, [Replicate()] * mesh.ndim if placements is None else placements, shape)
    held = Layout.of(mesh, layout.dim_axes, (), shape)
    made = platform.wrap(redistribute(fill(held), plan_transition(held, layout), platform), layout)
    return platform.set_tensor_requires_grad(made) if requires_grad else made


def _size(size: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, ...]:
    """The size as it was given: ints, one sequence, or by keyword, which is taken out of ``options``."""
    if "size" in options:
        if size:
            msg = f"size: given twice, by position {size} and by keyword {options['size']!r}"
            raise TypeError(msg)
        size = (options.pop("size"),)
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)
