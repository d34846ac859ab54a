"""Makes constants and random numbers of PyTorch's own Python code replicated DTensors, if it computes with DTensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import distributions
from torch.overrides import TorchFunctionMode

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.factories import rand, randn
from hyper_parallel.core.shard.op_plan import replicated_layout
from hyper_parallel.platform.torch.dtensor import wrap

__all__ = ["DISTRIBUTIONS", "ReplicatedFactories", "draws_alike"]

Call = Callable[..., Any]
_RANDOM = {torch.rand: rand, torch.randn: randn}
_PLAIN = frozenset({torch.empty, torch.eye, torch.ones, torch.zeros})
_CALLERS = ("torch.distributions.", "torch.nn.utils.")
_LOGITS = distributions.relaxed_bernoulli.LogitRelaxedBernoulli
_SCORES = distributions.relaxed_categorical.ExpRelaxedCategorical
DISTRIBUTIONS = (
    distributions.LowRankMultivariateNormal, distributions.MultivariateNormal, distributions.Normal,
    distributions.Uniform, _LOGITS, _SCORES,
)  # fmt: skip
"""Distributions whose ``rsample`` draws numbers and computes with them; the others use one of these, or one operator.
"""


class ReplicatedFactories(TorchFunctionMode):
    """While it is active, tensors that PyTorch's own code creates from sizes alone are replicated DTensors.

    Tensors that an operator of this library creates inside stay plain.

    Args:
        mesh: mesh of the replicated DTensors.
    """

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self._mesh = mesh

    def __torch_function__(
        self, func: Call, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``."""
        del types
        options = kwargs or {}
        here: Any = inspect.currentframe()
        if not str(here.f_back.f_globals.get("__name__")).startswith(_CALLERS):
            return func(*args, **options)
        if func in _RANDOM:
            return _RANDOM[func](*args, dtype=options.get("dtype"), device_mesh=self._mesh)
        result = func(*args, **options)
        return wrap(result, replicated_layout(self._mesh, result.shape)) if func in _PLAIN else result


def draws_alike(rsample: Call) -> Call:
    """``rsample`` of a distribution: where its parameters are DTensors, every rank draws the same numbers."""

    @wraps(rsample)
    def call(distribution: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [value for value in vars(distribution).values() if isinstance(value, DTensor)]
        if not parameters:
            return rsample(distribution, *args, **kwargs)
        with ReplicatedFactories(parameters[0].device_mesh):
            return rsample(distribution, *args, **kwargs)

    return call
