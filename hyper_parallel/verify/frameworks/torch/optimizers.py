"""Wraps PyTorch's optimizers in the verifier's optimizer interface."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.verify.frameworks.contract.training import StepResult, TrainingOptimizer

__all__ = ["CountersOnHost", "TorchOptimizer"]

_OF_THREAD = threading.local()


class CountersOnHost(TorchFunctionMode):
    """Creates an optimizer's step counters on the CPU, although other new tensors are on the meta device.

    An optimizer reads the value of its counter. Adam of PyTorch 2.13 creates its counter on the CPU; earlier versions,
    NAdam and RAdam do not.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function; if it creates a step counter, create it on the CPU."""
        del types
        named = kwargs or {}
        if func is torch.tensor and getattr(_OF_THREAD, "steps", False) and isinstance(args[0], Number):
            named = {"device": "cpu", **named}
        return func(*args, **named)


class TorchOptimizer(TrainingOptimizer):
    """A ``torch.optim.Optimizer``; it reads gradients from the parameters.

    Args:
        engine: the optimizer.
        parameters: parameters that the optimizer trains, by path.
    """

    def __init__(self, engine: torch.optim.Optimizer, parameters: Mapping[str, Any]) -> None:
        self.engine, self.parameters = engine, parameters

    def __call__(self, result: StepResult) -> None:
        """Call ``step()``."""
        del result
        _OF_THREAD.steps = True
        try:
            self.engine.step()
        finally:
            _OF_THREAD.steps = False

    def watch(self, before: Callable[[dict[str, Any]], None]) -> None:
        """Call ``before`` from a hook of the optimizer."""

        def hook(*_: Any) -> None:
            before({path: value.grad for path, value in self.parameters.items()})

        self.engine.register_step_pre_hook(hook)

    def state(self) -> dict[str, Any]:
        """Return the ``state`` of every parameter; a plain tensor of a shard's shape is returned as a DTensor."""
        values: dict[str, Any] = {}
        for path, parameter in self.parameters.items():
            for name, value in self.engine.state.get(parameter, {}).items():
                if isinstance(value, (torch.Tensor, int, float)):
                    values[f"{path}.{name}"] = _like(parameter, value)
        return values


def _like(parameter: Any, value: Any) -> Any:
    """Return the state ``value`` of ``parameter``, as a DTensor if it has the shape of the parameter's local shard."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or not isinstance(value, torch.Tensor):
        return value
    if value.ndim and tuple(value.shape) == tuple(parameter.layout.local_shape):
        return parameter._platform.wrap(value, parameter.layout)
    return value
