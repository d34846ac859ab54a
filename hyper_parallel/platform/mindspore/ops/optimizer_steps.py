"""Steps of optimizers that MindSpore runs as operators, not compiled."""

from __future__ import annotations

from typing import Any

from hyper_parallel.platform.mindspore.ops.pointwise import into
from hyper_parallel.platform.mindspore.ops.registry import decomposition
from hyper_parallel.platform.mindspore.versions import no_grad

__all__: list[str] = []


@decomposition("ApplyAdadelta")
def _adadelta(
    ops: Any, _: Any, weight: Any, squares: Any, updates: Any, rate: Any, rho: Any, epsilon: Any, gradient: Any
) -> Any:
    """The step of ``nn.Adadelta``, written into the weight and both running means."""
    rate, rho, epsilon = (float(number) for number in (rate, rho, epsilon))
    with no_grad():
        into(squares, ops.add(ops.mul(squares, rho), ops.mul(ops.square(gradient), 1 - rho)))
        roots = (ops.sqrt(ops.add(each, epsilon)) for each in (updates, squares))
        update = ops.mul(ops.div(*roots), gradient)
        into(updates, ops.add(ops.mul(updates, rho), ops.mul(ops.square(update), 1 - rho)))
        return into(weight, ops.sub(weight, ops.mul(update, rate))), squares, updates
