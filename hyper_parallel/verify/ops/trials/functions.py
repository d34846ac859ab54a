"""Functions of tensors, each on plain ones and on DTensors: few, and of every kind that the dispatcher tells apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.check import check_function

__all__ = ["FUNCTIONS", "Function", "functions_noticed"]


@dataclass(frozen=True)
class Function:
    """A function of tensors.

    Attributes:
        name: for the report.
        call: takes canonical operators, then the tensors.
        shapes: of the tensors.
    """

    name: str
    call: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]

    def __call__(self, *tensors: Any) -> Any:
        """On whatever tensors."""
        return self.call(platform_named("torch").dispatcher.ops, *tensors)


FUNCTIONS = (
    Function("operators and numbers", lambda _, x, y: (2.0 * x - y / 3 + 1) * (x > 0), ((5, 3), (5, 3))),
    Function("broadcast", lambda _, x, y: x * y - y, ((5, 3), (1, 3))),
    Function("one tensor twice", lambda _, x: x * x + x.add(x, alpha=2), ((5, 3),)),
    Function("matmul", lambda _, x, y: x @ y, ((5, 3), (3, 4))),
    Function("linear", lambda ops, x, w, b: ops.linear(x, w, bias=b), ((5, 3), (4, 3), (4,))),
    Function("layer_norm", lambda ops, x, w, b: ops.layer_norm(x, (3,), w, b), ((5, 3), (3,), (3,))),
    Function("softmax and sums", lambda _, x: x.softmax(-1).sum(dim=1) + x.sum(1, keepdim=True).mean(), ((5, 4),)),
    Function("cat and split", lambda ops, x, y: ops.cat([x, y, x], dim=0).split([4, 5], dim=0), ((3, 2), (3, 2))),
    Function("views", lambda _, x: x.view(2, 3, 5).transpose(0, 2)[1:4, 0].reshape(-1), ((6, 5),)),
    Function("in place", lambda _, x: (x * 1.0).mul_(2.0).add_(x), ((5, 3),)),
    Function("extrema", lambda _, x: next(iter(x.max(dim=1))) + x.amax(0).sum(), ((5, 3),)),
    Function("0-d operand", lambda _, x, y: x * y.sum(), ((5, 3), (4,))),
    Function("where", lambda ops, x, y: ops.where(x > 0, x, y), ((5, 3), (5, 3))),
)
_MESHES: tuple[tuple[tuple[int, ...], int], ...] = (((3,), 12), ((2, 2), 8))


def functions_noticed() -> Iterator[str]:
    """What differs on drawn placements, function by function; a function that is refused everywhere differs too."""
    for mesh, limit in _MESHES:
        for seed, function in enumerate(FUNCTIONS):
            arrays = [np.random.default_rng([seed, at]).standard_normal(one) for at, one in enumerate(function.shapes)]
            found = check_function(function, arrays, mesh, platform="torch", limit=limit, seed=seed)
            if not found.ok or found.rejected:
                said = (*found.wrong, *found.rejected, "nothing was compared")[0]
                yield f"{function.name} on {mesh}: {said}"
