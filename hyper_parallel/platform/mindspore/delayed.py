"""Parameters without storage, and the initialization of each rank's own shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore
import numpy as np
from mindspore import Parameter, Tensor
from mindspore.common import initializer as initializers
from mindspore.nn.utils import no_init_parameters

from hyper_parallel.core.dtensor import random, sampling
from hyper_parallel.core.dtensor.dtensor import DTensor, to_local
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.sampling import Distribution
from hyper_parallel.errors import PlanError
from hyper_parallel.platform.mindspore.ops.kernels import constant, sampled
from hyper_parallel.platform.mindspore.versions import calculated_gain, fans

if TYPE_CHECKING:
    from typing_extensions import Self  # of the standard library from Python 3.11 on

__all__ = ["MetaDevice", "Place", "is_delayed", "materialize", "parameters_on", "without_values"]

_DEVICES = ("meta", "cpu", "npu", "ascend", "cuda", "gpu")


class MetaDevice(str):
    """The device name ``meta``, which is also a context: cells built inside are on the meta device."""

    __slots__ = ("_stack",)

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        self._stack.enter_context(no_init_parameters())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def parameters_on(device: Any) -> AbstractContextManager[Any]:
    """Return a context that delays the initialization of parameters on meta; elsewhere MindSpore chooses the device.

    Raises:
        ValueError: ``device`` is not the name of a device.
    """
    if str(device).lower().partition(":")[0] not in _DEVICES:
        msg = f"init_on_device: device {device!r} is not one of {', '.join(_DEVICES)}"
        raise ValueError(msg)
    return no_init_parameters() if str(device) == "meta" else nullcontext()


def is_delayed(data: Any) -> bool:
    """Return True for a tensor whose initialisation is delayed."""
    return bool(getattr(data, "has_init", False))


def without_values(data: Any, shape: tuple[int, ...]) -> Tensor:
    """Return a delayed tensor of ``shape`` with the initializer of ``data``."""
    source = data.init_mode if isinstance(data, Parameter) else data
    return Tensor(shape=shape, dtype=data.dtype, init=source.init)


class Place(NamedTuple):
    """A parameter with its cell, and its name in the cell."""

    cell: Any
    name: str
    parameter: Any


def materialize(places: Sequence[Place], stage_index: int) -> None:
    """Initialize every delayed parameter of ``places``; each rank samples its shard of a DTensor's global values.

    Args:
        places: all parameters of a module.
        stage_index: pipeline stage; each stage samples from its own seed.

    Raises:
        PlanError: the initializer of a DTensor cannot sample a shard.
    """
    places = [place for place in places if is_delayed(to_local(place.parameter))]
    unknown = [f"{place.name} ({type(_init_of(place.parameter)).__name__})" for place in places
               if isinstance(place.parameter, DTensor) and type(_init_of(place.parameter)) not in _VALUES]  # fmt: skip
    if unknown:
        known = ", ".join(sorted(initializer.__name__ for initializer in _VALUES))
        msg = f"init_parameters: cannot sample a shard of {', '.join(unknown)}; initializers that can: {known}"
        raise PlanError(msg)
    initialized: dict[int, Any] = {}
    with _stage(stage_index):
        for cell, name, parameter in places:
            if not isinstance(parameter, DTensor):
                parameter.init_data()
                continue
            if id(parameter) not in initialized:
                initialized[id(parameter)] = _initialized(parameter)
            cell.insert_param_to_cell(name, initialized[id(parameter)], check_name_contain_dot=False)


def _initialized(param: Any) -> Any:
    layout, init = param.layout, _init_of(param)
    values = _VALUES[type(init)](init, layout)
    if isinstance(values, Distribution):
        local = sampled(random.sample(layout, values), param.dtype)
    else:
        local = constant(values, layout.local_shape, param.dtype)
    whole = param._platform.wrap(local, layout)
    return Parameter(whole, name=param.name, requires_grad=param.requires_grad)


def _init_of(param: Any) -> Any:
    local = to_local(param)
    return (local.init_mode if isinstance(local, Parameter) else local).init


def _uniform(low: float, high: float) -> Distribution:
    return sampling.uniform().map(lambda unit: low + (high - low) * unit)


def _scaled(distribution: Distribution, scale: float) -> Distribution:
    return distribution.map(lambda value: value * scale)


def _fan(init: Any, layout: Layout) -> float:
    shape = layout.shape or ()
    fan_in, fan_out = fans(shape)  # computed by MindSpore itself
    return float(fan_in if init.mode == "fan_in" else fan_out)


def _he(init: Any, layout: Layout) -> float:
    gain = calculated_gain(init.nonlinearity, init.negative_slope)
    return float(gain / math.sqrt(_fan(init, layout)))


def _xavier(init: Any, layout: Layout) -> float:
    return float(init.gain * math.sqrt(2.0 / sum(fans(layout.shape or ()))))


def _truncated(init: Any, layout: Layout) -> Distribution:
    """Sample by inverse transform; the bounds are values, not multiples of the standard deviation."""
    from scipy.special import ndtr, ndtri

    del layout
    low, high = (ndtr((bound - init.mean) / init.sigma) for bound in (init.a, init.b))

    def value(unit: Any) -> Any:
        return np.clip(init.mean + init.sigma * ndtri(low + (high - low) * unit), init.a, init.b)

    return sampling.uniform().map(value)


# By class of initializer: a function that returns its constant, or the distribution that it samples.
_VALUES: dict[type, Callable[[Any, Layout], Distribution | float]] = {
    initializers.Zero: lambda *_: 0.0,
    initializers.One: lambda *_: 1.0,
    initializers.Constant: lambda init, _: init.value,
    initializers.Uniform: lambda init, _: _uniform(-init.scale, init.scale),
    initializers.Normal: lambda init, _: sampling.normal().map(lambda value: init.mean + init.sigma * value),
    initializers.TruncatedNormal: _truncated,
    initializers.HeUniform: lambda init, layout: _scaled(_uniform(-1, 1), math.sqrt(3.0) * _he(init, layout)),
    initializers.HeNormal: lambda init, layout: _scaled(sampling.normal(), _he(init, layout)),
    initializers.XavierUniform: lambda init, layout: _scaled(_uniform(-1, 1), math.sqrt(3.0) * _xavier(init, layout)),
    initializers.XavierNormal: lambda init, layout: _scaled(sampling.normal(), _xavier(init, layout)),
}


@contextmanager
def _stage(stage_index: int) -> Iterator[None]:
    """Seed each pipeline stage differently; the first stage uses the program's seed."""
    if not stage_index:
        yield
        return
    seed, calls = random.get_rng_state()
    with random.preserve_state():
        random.set_rng_state((seed + stage_index, calls))
        mindspore.set_seed((mindspore.get_seed() or 0) + stage_index)
        yield
