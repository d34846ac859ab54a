"""A rank picks its tokens by its rank in another group; equal group sizes hid it. Reported in torchtitan 2842."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import create_group, get_group_size, get_rank, init

MESH = {"ep": 2, "tp": 3}
DIFFERS = ("output", "moe*")
CAUSE = "permuted"
SAMPLES, TOKENS, WIDTH, HIDDEN = 4, 9, 5, 7


class Pair(nn.Cell):
    def __init__(self, ahead: Any, back: Any) -> None:
        super().__init__()
        self.ahead, self.back = ahead, back

    def construct(self, x: Tensor) -> Tensor:
        return self.ahead(x)

    def bprop(self, *values: Tensor) -> Any:
        return (self.back(values[-1]),)


class Linear(nn.Cell):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(weight), name="weight")

    def construct(self, x: Tensor) -> Tensor:
        return ops.matmul(x, self.weight.T)


class SGD(nn.Optimizer):
    def construct(self, gradients: Any) -> Any:
        pairs = zip(self.parameters, gradients, strict=True)
        return [ops.assign(parameter, parameter - self.get_lr() * gradient) for parameter, gradient in pairs]


class Experts(nn.Cell):
    def __init__(self, draw: Any, tp: int, group: str, chunk: int) -> None:
        super().__init__()
        self.up, self.down = Linear(draw((HIDDEN, WIDTH))), Linear(draw((WIDTH, HIDDEN)))
        gather = ops.AllGather(group=group)
        self.cut = Pair(lambda full: full.chunk(tp)[chunk].copy(), gather)
        self.gather = Pair(gather, lambda full: full.chunk(tp)[get_rank() % tp].copy())

    def construct(self, x: Tensor) -> Tensor:
        return self.gather(self.down(ops.tanh(self.up(self.cut(x)))))


class Model(nn.Cell):
    def __init__(self, embed: nn.Cell, moe: nn.Cell) -> None:
        super().__init__()
        self.embed, self.moe = embed, moe

    def construct(self, x: Tensor) -> Tensor:
        return self.moe(self.embed(x))


def train(bug: bool) -> None:
    init()
    ep, tp = MESH.values() if get_group_size() > 1 else (1, 1)
    batch, place = divmod(get_rank(), tp)
    create_group(f"tp-{batch}", [batch * tp + rank for rank in range(tp)])
    create_group(f"ep-{place}", [rank * tp + place for rank in range(ep)])
    draw = np.random.default_rng(2842).standard_normal
    model = Model(Linear(draw((WIDTH, WIDTH))), Experts(draw, tp, f"tp-{batch}", batch if bug else place))
    optimizer = SGD(0.1, model.trainable_params())
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).mean(), None, optimizer.parameters)
    for _ in range(3):
        gradients = step(*(Tensor(v) for v in np.split(draw((2, TOKENS, SAMPLES, WIDTH)), ep, 2)[batch]))[1]
        embed, *experts = (ops.AllReduce(group=f"ep-{place}")(gradient) / ep for gradient in gradients)
        optimizer((embed, *(ops.AllReduce(group=f"tp-{batch}")(gradient) for gradient in experts)))
