"""Optimizers of PyTorch with the verifier's interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.verify.frameworks.contract.training import StepResult, TrainingOptimizer

__all__ = ["TorchOptimizer"]


class TorchOptimizer(TrainingOptimizer):
    """A ``torch.optim.Optimizer``; it reads gradients from the parameters.

    Args:
        engine: the optimizer.
        parameters: parameters that it trains, by path.
    """

    def __init__(self, engine: torch.optim.Optimizer, parameters: Mapping[str, Any]) -> None:
        self.engine, self.parameters = engine, parameters

    def __call__(self, result: StepResult) -> None:
        """Call ``step()``."""
        del result
        self.engine.step()

    def watch(self, before: Callable[[dict[str, Any]], None]) -> None:
        """Watch by a hook of the optimizer."""

        def hook(*_: Any) -> None:
            before({path: value.grad for path, value in self.parameters.items()})

        self.engine.register_step_pre_hook(hook)

    def state(self) -> dict[str, Any]:
        """Return the ``state`` of every parameter; a plain tensor of a shard's shape is sharded like its parameter."""
        values: dict[str, Any] = {}
        for path, parameter in self.parameters.items():
            for name, value in self.engine.state.get(parameter, {}).items():
                if isinstance(value, (torch.Tensor, int, float)):
                    values[f"{path}.{name}"] = _like(parameter, value)
        return values


def _like(parameter: Any, value: Any) -> Any:
    """Return the state ``value`` of ``parameter`` as a DTensor if it is a shard of one."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or not isinstance(value, torch.Tensor):
        return value
    if value.ndim and tuple(value.shape) == tuple(parameter.layout.local_shape):
        return parameter._platform.wrap(value, parameter.layout)
    return value
