"""Fused kernels of optimizers and of ``GradScaler``: one call for many parameters, on this rank's shards.

A step is elementwise: if a parameter, its gradient and its state have the same layout, every rank updates its own
shard, whatever the layouts of the list's other parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hyper_parallel.core.dtensor.dtensor import DTensor, to_local
from hyper_parallel.core.dtensor.events import Cause
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.errors import LayoutError, UnsupportedOperatorError, notation
from hyper_parallel.platform.torch.ops.registry import decomposition
from hyper_parallel.platform.torch.versions import amp_unscale

# -- optimizers --------------------------------------------------------------------------------------------------------

_STEPS = "state_steps"  # plain counters


def _optimizer(name: str, signature: str) -> None:
    function = getattr(torch, name, None)
    if function is None:  # in older releases
        return

    @decomposition(function, signature=signature)
    def step(_ops: Any, **arguments: Any) -> None:
        lists = {key: value for key, value in arguments.items() if isinstance(value, (list, tuple)) and value}
        state = {key: tensors for key, tensors in lists.items() if key != _STEPS}
        for index, parameter in enumerate(lists["self"]):
            _require_one_layout(name, index, parameter, {key: tensors[index] for key, tensors in state.items()})
        function(**{key: _local(value) for key, value in arguments.items()})
        for tensors in state.values():
            _mark_written(tensors)


_ADAM = "self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, *, lr, beta1, beta2, weight_decay, eps"
_SCALED = "maximize, grad_scale=None, found_inf=None"
_optimizer("_fused_adam_", f"{_ADAM}, amsgrad, {_SCALED}")
_optimizer("_fused_adamw_", f"{_ADAM}, amsgrad, {_SCALED}")
_optimizer(
    "_fused_sgd_",
    "self, grads, momentum_buffer_list, *, weight_decay, momentum, lr, dampening, nesterov, is_first_step, " + _SCALED,
)
_optimizer("_fused_adagrad_", f"self, grads, state_sums, state_steps, *, lr, lr_decay, weight_decay, eps, {_SCALED}")


def _require_one_layout(op: str, index: int, parameter: Any, row: dict[str, Any]) -> None:
    """Refuse operands in different layouts, because a step does not redistribute."""
    layout = getattr(parameter, "_layout", None)
    for name, tensor in row.items():
        other = getattr(tensor, "_layout", None)
        if other is not layout or (layout is not None and layout.partials):
            layouts = [f"{key} {_layout_of(value)}" for key, value in (("self", parameter), (name, tensor))]
            msg = (
                f"{op}: parameter {index} cannot be stepped in one kernel: {' and '.join(dict.fromkeys(layouts))}; "
                "give both one layout without partial values, or make the optimizer with foreach=True, not fused=True"
            )
            raise LayoutError(msg)
        if layout is not None and tensor._readonly is not None:
            msg = f"{op}: {name} of parameter {index} cannot be written to: {tensor._readonly}"
            raise UnsupportedOperatorError(msg)


def _layout_of(value: Any) -> str:
    if isinstance(value, DTensor):
        return value._layout.notation(value.dtype)
    return f"plain {notation(value.dtype, value.shape, [()] * value.ndim, ())}"


def _local(value: Any) -> Any:
    """The local tensors of lists; for a DTensor of one number, the number."""
    if isinstance(value, (list, tuple)):
        return [tensor._local if isinstance(tensor, DTensor) else tensor for tensor in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def _mark_written(tensors: Iterable[Any]) -> None:
    """Count the write in the version counters, which the kernel does not do: aliases and copies read them."""
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            tensor.drop_views()
            if not tensor._local.is_inference():
                torch.autograd.graph.increment_version(tensor._local)


# -- GradScaler: only unscaling sees gradients -------------------------------------------------------------------------

_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


@decomposition(_UNSCALE, signature="x, found_inf, inv_scale")
def _unscale(ops: Any, x: Sequence[Any], found_inf: Any, inv_scale: Any) -> None:
    """Scale this rank's shards in place; ``found_inf`` becomes the maximum over all ranks of the gradients' meshes."""
    grads = [grad for grad in x if isinstance(grad, DTensor)]
    for index, grad in enumerate(x):
        if isinstance(grad, DTensor):
            _require_writable(index, grad)
    local_inf = to_local(found_inf)
    amp_unscale([to_local(grad) for grad in x], local_inf, to_local(inv_scale))
    _mark_written(grads)
    meshes = list(dict.fromkeys(grad.device_mesh for grad in grads))
    for mesh in meshes * len(meshes):  # repeat, so that a maximum on one mesh reaches all
        local_inf.copy_(_maximum_over(ops.platform, mesh, local_inf))


def _require_writable(index: int, grad: Any) -> None:
    layout, name = grad.layout, f"{_UNSCALE}: gradient {index}"
    if layout.partials:
        msg = (
            f"{name} is {layout.notation(grad.dtype)}: a partial sum may be finite or not until it is reduced; "
            "use parameter.grad = parameter.grad.reduce_partial() first"
        )
        raise UnsupportedOperatorError(msg)
    if grad._readonly is not None:
        msg = f"{name} cannot be written to: {grad._readonly}"
        raise UnsupportedOperatorError(msg)


def _maximum_over(platform: Any, mesh: DeviceMesh, value: Any) -> Any:
    """The maximum of ``value`` over the ranks of ``mesh``."""
    shape = tuple(value.shape)
    unsharded = ((),) * len(shape)
    pending = Layout.of(mesh, unsharded, tuple((axis, "max") for axis in range(mesh.ndim)), shape)
    target = Layout.of(mesh, unsharded, (), shape)
    return platform.wrap(value.detach(), pending).local_for(target, (), Cause(_UNSCALE, "found_inf"))
