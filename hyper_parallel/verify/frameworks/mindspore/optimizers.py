"""Wraps MindSpore's optimizers in the verifier's optimizer interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mindspore

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.verify.frameworks.contract.training import StepResult, TrainingOptimizer

__all__ = ["MindSporeOptimizer"]


class MindSporeOptimizer(TrainingOptimizer):
    """An optimizer of ``mindspore.nn``, ``mint.optim`` or ``experimental.optim``, on local gradients.

    Args:
        optimizer: optimizer of MindSpore.
        parameters: parameters that the optimizer trains, by path.
    """

    def __init__(self, optimizer: Any, parameters: Mapping[str, Any]) -> None:
        self.optimizer, self.parameters = optimizer, parameters
        self.engine = _Engine(self._step, list(parameters.values()))
        self._before: list[Callable[[dict[str, Any]], None]] = []

    def __call__(self, result: StepResult) -> None:
        """Apply one step with the gradients of ``result``."""
        self._step([result.gradients[path] for path in self.parameters])

    def watch(self, before: Callable[[dict[str, Any]], None]) -> None:
        """Watch the gradients; on MindSpore they are arguments of the step."""
        self._before.append(before)

    def state(self) -> dict[str, Any]:
        """Return the optimizer's own parameters; one named after a sharded parameter is returned as a DTensor."""
        trained = {parameter.name: (path, parameter) for path, parameter in self.parameters.items()}
        own = {id(parameter) for parameter in self.parameters.values()}
        values: dict[str, Any] = {}
        for state in self.optimizer.get_parameters():
            if id(state) in own or state.name in trained:
                continue
            name = next((name for name in trained if state.name.endswith(f".{name}")), None)
            if name is None:
                values[state.name] = state
                continue
            path, parameter = trained[name]
            values[f"{path}.{state.name.removesuffix(f'.{name}')}"] = _like(parameter, state)
        return values

    def _step(self, gradients: Sequence[Any]) -> bool:
        """Apply one step with ``gradients`` in the order of the parameters; return True like MindSpore's optimizers."""
        by_path = dict(zip(self.parameters, gradients, strict=True))
        for before in self._before:
            before(by_path)
        local = (grad.to_local() if isinstance(grad, DTensor) else grad for grad in by_path.values())
        self.optimizer(tuple(local))
        for value in self.parameters.values():
            if isinstance(value, DTensor):
                value.drop_views()
        return True


class _Engine:
    """A watched optimizer; it is called with gradients, by the user's code or by a ``TrainOneStepCell``."""

    def __init__(self, step: Callable[[Sequence[Any]], bool], parameters: list[Any]) -> None:
        self._step = step
        self.parameters = parameters

    def __call__(self, gradients: Sequence[Any]) -> bool:
        """Apply one step with ``gradients``, in the order of :attr:`parameters`."""
        return self._step(gradients)


def _like(parameter: Any, state: Any) -> Any:
    """Return the ``state`` of ``parameter``, as a DTensor if it has the shape of the parameter's local shard."""
    if not isinstance(parameter, DTensor) or isinstance(state, DTensor):
        return state
    if state.ndim and tuple(state.shape) == tuple(parameter.layout.local_shape):
        return parameter._platform.wrap(mindspore.Tensor(state), parameter.layout)
    return state
