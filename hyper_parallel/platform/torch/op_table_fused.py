"""``torch._fused_adamw_`` and its like: one kernel steps many parameters, each on this rank's piece.

A step is element by element: where a parameter, its gradient and its state lie alike, every rank steps its own piece,
whatever the other parameters of the list do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.entry import OpEntry
from hyper_parallel.errors import LayoutError, UnsupportedOperatorError, notation
from hyper_parallel.platform.torch.op_table_pointwise import routed

__all__ = ["add_routes", "wrote"]

_ADAM = "self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, *, lr, beta1, beta2, weight_decay, eps, "
_SCALED = "maximize, grad_scale=None, found_inf=None"
SIGNATURES = {
    "_fused_adam_": f"{_ADAM}amsgrad, {_SCALED}",
    "_fused_adamw_": f"{_ADAM}amsgrad, {_SCALED}",
    "_fused_sgd_": (
        "self, grads, momentum_buffer_list, *, weight_decay, momentum, lr, dampening, nesterov, is_first_step, "
        f"{_SCALED}"
    ),
    "_fused_adagrad_": f"self, grads, state_sums, state_steps, *, lr, lr_decay, weight_decay, eps, {_SCALED}",
}
_STEPS = "state_steps"


def add_routes(table: dict[Any, OpEntry]) -> None:
    """Add the kernels that this release of PyTorch has."""
    for name, signature in SIGNATURES.items():
        func = getattr(torch, name, None)
        if func is not None:
            routed(table, func, signature, partial(_step, func, name))


def _step(func: Callable[..., Any], op: str, ops: Any, **given: Any) -> None:
    del ops
    lists = {name: value for name, value in given.items() if isinstance(value, (list, tuple)) and value}
    for index, parameter in enumerate(lists["self"]):
        _refuse_unlike(op, index, parameter, {name: one[index] for name, one in lists.items() if name != _STEPS})
    func(**{name: _local(value) for name, value in given.items()})
    wrote(one for name, values in lists.items() if name != _STEPS for one in values)


def wrote(values: Iterable[Any]) -> None:
    """Tell of a write by a kernel that leaves version counters as they were: aliases and copies ask those."""
    for one in values:
        if isinstance(one, DTensor):
            one.drop_views()
            if not one._local.is_inference():
                torch.autograd.graph.increment_version(one._local)


def _refuse_unlike(op: str, index: int, parameter: Any, row: dict[str, Any]) -> None:
    """Nothing moves here: what is written has to be where it is."""
    layout = getattr(parameter, "_layout", None)
    for name, one in row.items():
        other = getattr(one, "_layout", None)
        if other is not layout or (layout is not None and layout.partials):
            seen = [f"{key} {_seen(value)}" for key, value in (("self", parameter), (name, one))]
            msg = (
                f"{op}: parameter {index} cannot be stepped in one kernel: {' and '.join(dict.fromkeys(seen))}; lay "
                "both out alike, with nothing pending, or make the optimizer with foreach=True in place of fused=True"
            )
            raise LayoutError(msg)
        if layout is not None and one._readonly is not None:
            msg = f"{op}: {name} of parameter {index} cannot be written to: {one._readonly}"
            raise UnsupportedOperatorError(msg)


def _seen(value: Any) -> str:
    if isinstance(value, DTensor):
        return value._layout.notation(value.dtype)
    return f"plain {notation(value.dtype, value.shape, [()] * value.ndim, ())}"


def _local(value: Any) -> Any:
    """This rank's pieces of lists; of a number held as a DTensor, the number."""
    if isinstance(value, (list, tuple)):
        return [one._local if isinstance(one, DTensor) else one for one in value]
    return value.full_tensor() if isinstance(value, DTensor) else value
