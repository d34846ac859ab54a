"""Loss scaling and overflow checks of ``mindspore.amp`` and ``nn.TrainOneStepWithLossScaleCell``.

Steps of optimizers that MindSpore runs as operators are here, too. Functions that ``mindspore.amp`` compiles run
uncompiled for DTensors. The compiled functions themselves are not replaced, because programs may call them inside of
functions that they compile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import mindspore
from mindspore import Tensor, ops

from hyper_parallel._tree import leaves
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate
from hyper_parallel.platform.mindspore.ops.pointwise import into
from hyper_parallel.platform.mindspore.ops.registry import computes_on_cpu, decomposition
from hyper_parallel.platform.mindspore.versions import all_finite, grad_scale_map, grad_unscale_map, no_grad

__all__ = ["UNCOMPILED", "overflow_by_values", "scaled_step"]


def _all_finite(inputs: Any, check_overflow_mode: Any = None, enable_allfinite: Any = None) -> Tensor:
    """Return True on every rank if no element overflowed on any rank; one collective per mesh."""
    del check_overflow_mode, enable_allfinite  # options for Ascend's status registers
    tensors = leaves((inputs,))
    meshes = dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
    finite_by_mesh = dict.fromkeys(meshes, True)
    for tensor in tensors:
        whole = tensor.reduce_partial() if isinstance(tensor, DTensor) else tensor
        mesh, local = (whole.device_mesh, whole._local) if isinstance(whole, DTensor) else (next(iter(meshes)), whole)
        finite_by_mesh[mesh] &= 0 in local.shape or bool(ops.isfinite(local).all())
    decisions = [_on_all_ranks(mesh, finite) for mesh, finite in finite_by_mesh.items()]
    return Tensor(all(decisions), mindspore.bool_)


def _on_all_ranks(mesh: DeviceMesh, flag: bool) -> bool:
    return bool(DTensor.from_local(Tensor(flag), mesh, [Partial("all")] * mesh.ndim).full_tensor())


def _scaled(scale: Tensor, values: Any) -> Any:
    """Multiply each tensor of a nest of tuples and lists by ``scale``, which is equal on all ranks."""
    if isinstance(values, (tuple, list)):
        return (list if isinstance(values, list) else tuple)(_scaled(scale, value) for value in values)
    factor = ops.cast(scale, values.dtype)
    if isinstance(values, DTensor):
        mesh = values.device_mesh
        factor = DTensor.from_local(factor, mesh, [Replicate()] * mesh.ndim)
    return values * factor


def _unscaled(scale: Tensor, values: Any) -> Any:
    """Divide each tensor of a nest of tuples and lists by ``scale``, as a product with the reciprocal."""
    return _scaled(ops.reciprocal(scale), values)


# -- nn.TrainOneStepWithLossScaleCell ----------------------------------------------------------------------------------


def overflow_by_values(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the overflow check, so that it reads gradients where it cannot read the status registers of an NPU.

    That is so for DTensors on any device, and for all gradients on CPU. Ranks get the same result: it is reduced over
    the meshes of DTensors and, if the parallel mode is distributed, over all ranks.
    """

    @wraps(plain)
    def get_overflow_status(self: Any, status: Any, compute_output: Any) -> Any:
        tensors = [leaf for leaf in leaves((compute_output,)) if isinstance(leaf, Tensor)]
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            finite = bool(_all_finite(tensors))
        elif computes_on_cpu():
            finite = all(bool(ops.isfinite(tensor).all()) for tensor in tensors)
        else:
            return plain(self, status, compute_output)
        if self.is_distributed:
            finite = float(self.allreduce(Tensor(float(not finite), mindspore.float32))) == 0
        return Tensor(not finite, mindspore.bool_)

    return get_overflow_status


def scaled_step(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a training step with a loss scale, so that it trains DTensors although the scale is a plain tensor."""

    @wraps(plain)
    def construct(self: Any, *inputs: Any) -> Any:
        if not any(isinstance(leaf, DTensor) for leaf in leaves((inputs, tuple(self.weights)))):
            return plain(self, *inputs)
        loss, scale = self.network(*inputs), self.scale_sense
        factor = ops.stop_gradient(scale).reshape(())
        seeds = _scaled(factor, ops.ones_like(loss))
        gradients = self.grad_reducer(_unscaled(factor, self.grad(self.network, self.weights)(*inputs, seeds)))
        overflowed = self.get_overflow_status(None, gradients)
        if not self.process_loss_scale(overflowed):
            self.optimizer(gradients)
        return loss, overflowed, scale

    return construct


UNCOMPILED: dict[Any, Callable[..., Any]] = {
    all_finite.__wrapped__: _all_finite,  # called by the public functions
    grad_scale_map.__wrapped__: _scaled,
    grad_unscale_map.__wrapped__: _unscaled,
}
"""Implementations, for DTensor arguments, of functions that MindSpore compiles."""


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
