"""DTensors created on the ranks that hold them: every rank fills its own shard, without communication."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor import random, sampling
from hyper_parallel.core.dtensor.dtensor import DTensor, resolve_mesh, takes_no_part
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

# Bits of the significand, including the implicit one.
_SIGNIFICAND_BITS = {"f32": 24, "f16": 11, "bf16": 8}


def full(
    size: Sequence[int] | int,
    fill_value: Any,
    *,
    dtype: Any = None,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Any = None,
) -> DTensor:
    """Return a DTensor filled with ``fill_value``.

    Args:
        size: global shape.
        fill_value: a Python number.
        dtype: element type; by default the framework's for ``fill_value``.
        requires_grad: whether autograd records operations on the tensor.
        device_mesh: the mesh, by default the current one.
        placements: placements or aliases; all Replicate by default. Along a Partial(sum) axis the first rank holds
            the values and the others hold zeros.

    Raises:
        LayoutError: (a ValueError) placements that do not fit the mesh or the size.
        MeshError: (a ValueError) no mesh is given and there is no current mesh.
    """
    platform = current_platform()

    def constant(layout: Layout) -> Any:
        return platform.full(layout.local_shape, fill_value, dtype=dtype, device=layout.mesh.device_type)

    return _create(_size((size,), {}), constant, requires_grad, device_mesh, placements)


def zeros(*size: Any, **options: Any) -> DTensor:
    """Return a DTensor of zeros; ``size`` as ints, one sequence or by keyword, options as for :func:`full`."""
    return full(_size(size, options), 0.0, **options)


def ones(*size: Any, **options: Any) -> DTensor:
    """Return a DTensor of ones; ``size`` as ints, one sequence or by keyword, options as for :func:`full`."""
    return full(_size(size, options), 1.0, **options)


def empty(*size: Any, **options: Any) -> DTensor:
    """Return a DTensor with unspecified values (currently zeros); ``size`` and options as for :func:`zeros`."""
    return zeros(*size, **options)


def rand(*size: Any, dtype: Any = None, **options: Any) -> DTensor:
    """Return a DTensor of values uniform in ``[0, 1)``, which are the same for every layout, mesh and framework.

    :func:`manual_seed` starts the stream of random numbers. ``size`` as ints, one sequence or by keyword, options as
    for :func:`full`.
    """
    return _random(_size(size, options), sampling.uniform, dtype, **options)


def randn(*size: Any, dtype: Any = None, **options: Any) -> DTensor:
    """Return a DTensor of standard normal values; otherwise as :func:`rand`."""
    return _random(_size(size, options), sampling.normal, dtype, **options)


def _random(size: tuple[int, ...], distribution: Callable[[int], Distribution], dtype: Any, **options: Any) -> DTensor:
    platform = current_platform()

    def fill(layout: Layout) -> Any:
        like = platform.zeros((), dtype=dtype, device=layout.mesh.device_type)
        sample = random.sample(layout, distribution(_SIGNIFICAND_BITS.get(short_dtype(like.dtype), 53)))
        return platform.local_op("make_like")(like, sample, None)

    return _create(size, fill, **options)


def _create(
    shape: tuple[int, ...],
    fill: Callable[[Layout], Any],
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Any = None,
) -> DTensor:
    """Return a leaf whose shards ``fill`` creates; along Partial axes the first rank keeps them, others hold zeros."""
    mesh, platform = resolve_mesh(device_mesh), current_platform()
    takes_no_part(platform, mesh)
    layout = Layout.place(mesh, [Replicate()] * mesh.ndim if placements is None else placements, shape)
    reduced = Layout.of(mesh, layout.dim_axes, (), shape)
    tensor: DTensor = platform.wrap(redistribute(fill(reduced), plan_transition(reduced, layout), platform), layout)
    return platform.set_tensor_requires_grad(tensor) if requires_grad else tensor


def _size(size: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, ...]:
    """Return the size, given as ints, as one sequence, or by keyword, which is removed from ``options``."""
    if "size" in options:
        if size:
            msg = f"size: given both by position {size} and by keyword {options['size']!r}"
            raise TypeError(msg)
        size = (options.pop("size"),)
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)
