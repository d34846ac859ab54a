"""A training step for the benchmark: two MLPs, tensor parallel by hand and by this library's styles.

They are small, so that what is measured is the host's cost. By hand means local parameters, and autograd functions
with the all-reduces at the boundaries of the tensor-parallel regions. Both are differentiated and optimized by
MindSpore.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint, nn
from mindspore.mint.nn import functional as F

from hyper_parallel.core.tensor_parallel.parallelize import parallelize_module
from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
from hyper_parallel.core.tensor_parallel.styles.rowwise import RowwiseParallel
from hyper_parallel.platform.mindspore.versions import Function
from hyper_parallel.transport.base import active_transport_of

__all__ = ["training_steps"]

Boundary = Callable[[Any], Any]

_LAYERS, _BATCH, _WIDTH, _HIDDEN = 2, 16, 32, 64


def training_steps(mesh: Any) -> list[Callable[[], Tensor]]:
    """Return a step by hand and a step of ours, which return the loss before they update the parameters.

    Args:
        mesh: of one axis; this process is its first rank.
    """
    random = np.random.default_rng(0)
    weights = [random.standard_normal((2, _HIDDEN, _WIDTH)).astype(np.float32) / _WIDTH for _ in range(_LAYERS)]
    data, target = (Tensor(random.standard_normal((_BATCH, _WIDTH)).astype(np.float32)) for _ in range(2))
    part = _HIDDEN // mesh.shape[0]
    by_hand = nn.SequentialCell(*(_Mlp(up[:part], down[:part].T, _Copy.apply, _Reduce.apply) for up, down in weights))
    ours = nn.SequentialCell(*(_Mlp(up, down.T, _same, _same) for up, down in weights))
    parallelize_module(ours, mesh, {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})
    return [_step(by_hand, data, target), _step(ours, data, target)]


def _step(model: nn.Cell, data: Tensor, target: Tensor) -> Callable[[], Tensor]:
    parameters = list(model.trainable_params())
    optimizer = nn.Momentum(parameters, 0.01, 0.9)
    differentiated = mindspore.value_and_grad(lambda: mint.mean(mint.square(model(data) - target)), None, parameters)

    def step() -> Tensor:
        loss, gradients = differentiated()
        optimizer(gradients)
        return loss

    return step


class _Mlp(nn.Cell):
    """``x + down(relu(up(x)))`` without biases; ``enter`` and ``leave`` are the boundaries of the parallel region."""

    def __init__(self, up: Any, down: Any, enter: Boundary, leave: Boundary) -> None:
        super().__init__()
        self.up, self.down = _linear(up), _linear(down)
        self.enter, self.leave = enter, leave

    def construct(self, x: Tensor) -> Tensor:
        return x + self.leave(self.down(F.relu(self.up(self.enter(x)))))


def _linear(weight: Any) -> nn.Cell:
    layer = mint.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.set_data(Tensor(np.ascontiguousarray(weight)))
    return layer


def _same(x: Any) -> Any:
    return x


def _summed(x: Tensor) -> Tensor:
    transport = active_transport_of("mindspore")
    return transport.all_reduce(x, "sum", tuple(range(transport.world_size)))  # type: ignore[union-attr] # a fake one


class _Copy(Function):
    """Identity, whose gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        del ctx
        return _summed(grad)


class _Reduce(Function):
    """The sum, whose gradient every rank has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return _summed(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        del ctx
        return grad
