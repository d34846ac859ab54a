"""Lists DeepSpeed's and Megatron's functions that clip the gradients of the tensors that their optimizers train."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

__all__ = ["Clipping", "imported_clippings"]


class Clipping(NamedTuple):
    """A function that clips gradients whose norm has been computed.

    Attributes:
        owner: module or class that contains the function.
        name: name of the function in ``owner``.
        parameters: names of the function's parameters, because DeepSpeed's decorators hide the signature.
        read: from a call's arguments by name, returns the tensors whose gradients are clipped, the maximum norm (0 if
            nothing is clipped) and the norm.
    """

    owner: Any
    name: str
    parameters: tuple[str, ...]
    read: Callable[[dict[str, Any]], tuple[list[Any], float, Any]]

    def replaced(self, plain: Callable[..., Any], record: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that passes each clipping call to ``record``.

        Args:
            plain: the function.
            record: called with the tensors, a function that makes the call, the maximum norm, and the norm.
        """

        def clip(*args: Any, **kwargs: Any) -> Any:
            held, largest, total = self.read({**dict(zip(self.parameters, args, strict=False)), **kwargs})
            call = functools.partial(plain, *args, **kwargs)
            return record(held, call, largest, total) if largest > 0 and total is not None else call()

        return clip


def imported_clippings() -> Iterator[Clipping]:
    """Yield the clipping functions of the training stacks that this process has imported."""
    for module, owner, name, parameters, read in _FUNCTIONS:
        found = sys.modules.get(module)
        found = getattr(found, owner, None) if owner else found
        if hasattr(found, name):
            yield Clipping(found, name, parameters, read)


def _by_megatron(call: dict[str, Any]) -> tuple[list[Any], float, Any]:
    return list(call["parameters"]), float(call["max_norm"]), call["total_norm"]


def _by_zero(call: dict[str, Any]) -> tuple[list[Any], float, Any]:
    """Read a call of ZeRO 1 or 2: each group has one flat gradient; the norm is multiplied by the loss scale."""
    optimizer = call["self"]
    clipped = {id(gradient) for gradient in call["grad_groups_flat"]}
    held = [part for part in optimizer.single_partition_of_fp32_groups if id(part.grad) in clipped]
    return held, *_of_zero(optimizer, call["total_norm"])


def _by_zero_3(call: dict[str, Any]) -> tuple[list[Any], float, Any]:
    optimizer = call["self"]
    return [optimizer.fp32_partitioned_groups_flat[call["sub_group_id"]]], *_of_zero(optimizer, call["total_norm"])


def _of_zero(optimizer: Any, total: Any) -> tuple[float, Any]:
    return float(optimizer.clip_grad), None if total is None else total / optimizer.loss_scale


_FUNCTIONS = (
    (
        "megatron.core.optimizer.optimizer", "", "clip_grad_by_total_norm_fp32",
        ("parameters", "max_norm", "total_norm"), _by_megatron,
    ),
    (
        "deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", "unscale_and_clip_grads",
        ("self", "grad_groups_flat", "total_norm"), _by_zero,
    ),
    (
        "deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", "unscale_and_clip_grads",
        ("self", "sub_group_id", "total_norm"), _by_zero_3,
    ),
)  # fmt: skip
"""For each function: module, class, name, parameters, and the function that reads its calls."""
