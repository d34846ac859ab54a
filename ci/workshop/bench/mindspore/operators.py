"""Host cost of operators and of a training step on DTensors, compared with plain MindSpore in the same run.

Everything runs in one process, as rank 0 of a world of two whose other rank does not exist: collectives are checked and
move nothing, so that the times are the host's. Plain and distributed calls take turns one by one: MindSpore's operators
run a third slower after any other code than in a loop of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.mint.nn import functional as F

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.transport.base import use_transport
from hyper_parallel.transport.host.numpy_ops import NumpyOps
from hyper_parallel.transport.real.mindspore.transport import NumpyBridge
from hyper_parallel.transport.simulated.single_process import FakeTransport
from workshop.bench import turns as benchmark
from workshop.bench.call_profile import CallProfile
from workshop.bench.mindspore.step import training_steps
from workshop.bench.turns import BenchmarkCase, BenchmarkRow

__all__ = ["ROWS", "profile", "run", "world"]

WORLD = 2
BUDGET = 1.5
VIEW_BUDGET = 3.0
"""Of calls that only make a view, which takes MindSpore 5 µs; to ask a subclass and to make one takes as long again."""
STEP_BUDGET = 1.3

ROWS = 24
"""The number of rows of :func:`run`."""

Pair = tuple[Any, Any]  # plain, ours
Operator = Callable[[int], Any]  # by the index of a pair


def run(repeats: int = 1000, rounds: int = 7, device: str = "cpu") -> Iterator[BenchmarkRow]:
    """Measure everything, row by row; the median of the operators comes last.

    Args:
        repeats: four times the calls of an operator per round, a hundred times those of a step.
        rounds: see :func:`workshop.bench.turns.measured`.
        device: that this process computes on; on a device, too, what is measured is the host's time.
    """
    operators = []
    for case in _cases(repeats, device):
        row = benchmark.measured(case, rounds, one_by_one=True)
        yield row
        if not row.by_hand:
            operators.append(row)
    yield benchmark.median_operator(operators, BUDGET)


def profile(name: str, repeats: int = 1000, device: str = "cpu") -> CallProfile:
    """Profile this library's call of one row.

    Args:
        name: of the row.
        repeats: as for :func:`run`.
        device: likewise.

    Raises:
        ValueError: there is no such row.
    """
    return benchmark.profile(name, _cases(repeats, device))


@contextmanager
def world(device: str = "cpu") -> Iterator[Any]:
    """A mesh of two ranks on ``device``, of which this process is the first."""
    fake = FakeTransport(WORLD, NumpyOps(), lambda like, shape: np.zeros(shape, like.dtype))
    with use_transport(NumpyBridge(fake)):
        yield init_device_mesh(device, (WORLD,), mesh_dim_names=("tp",))


def _cases(repeats: int, device: str) -> Iterator[BenchmarkCase]:
    """Every row but the median; each is measured before the next one is asked for."""
    with world(device) as mesh:
        count = max(repeats // 4, 2)
        for name, operator in _computing(mesh).items():
            yield _case(name, BUDGET, operator, count)
        for name, operator in _viewing(mesh).items():
            yield _case(name, VIEW_BUDGET, operator, count)
        calls = training_steps(mesh)
        yield BenchmarkCase("training step of an MLP", STEP_BUDGET, calls, max(repeats // 100, 2), by_hand=True)


def _case(name: str, budget: float, operator: Operator, count: int) -> BenchmarkCase:
    return BenchmarkCase(name, budget, [lambda: operator(0), lambda: operator(1)], count)


def _pair(mesh: Any, placement: Any, *shape: int) -> Pair:
    """The same local values plain and as a DTensor."""
    local = Tensor(np.random.default_rng(0).standard_normal(shape).astype(np.float32))
    return local, DTensor.from_local(local, mesh, [placement])


def _computing(mesh: Any) -> dict[str, Operator]:
    """Operators that compute, by name."""
    x, y = _pair(mesh, Shard(0), 8, 8), _pair(mesh, Shard(0), 8, 8)
    weight, scale = _pair(mesh, Replicate(), 8, 8), _pair(mesh, Replicate(), 8)
    layer_norm = ops.LayerNorm(1, 1)
    return {
        "add": lambda i: x[i] + y[i],
        "mint.add": lambda i: mint.add(x[i], y[i]),
        "multiply by a number": lambda i: x[i] * 2.0,
        "subtract": lambda i: x[i] - y[i],
        "exp": lambda i: mint.exp(x[i]),
        "relu": lambda i: F.relu(x[i]),
        "silu": lambda i: F.silu(x[i]),
        "softmax": lambda i: F.softmax(x[i], -1),
        "sum": lambda i: mint.sum(x[i], 1),
        "linear": lambda i: F.linear(x[i], weight[i]),
        "matmul": lambda i: mint.matmul(x[i], weight[i]),
        "LayerNorm": lambda i: layer_norm(x[i], scale[i], scale[i]),
        "cat": lambda i: mint.cat([x[i], y[i]], 1),
    }


def _viewing(mesh: Any) -> dict[str, Operator]:
    """Operators that make views, by name."""
    x = _pair(mesh, Shard(0), 8, 8)
    shapes = (8, 2, 4), (WORLD * 8, 2, 4)
    return {
        "mint.reshape": lambda i: mint.reshape(x[i], shapes[i]),
        "reshape": lambda i: x[i].reshape(shapes[i]),
        "view": lambda i: x[i].view(shapes[i]),
        "transpose": lambda i: mint.transpose(x[i], 0, 1),
        "permute": lambda i: mint.permute(x[i], (1, 0)),
        "unsqueeze": lambda i: mint.unsqueeze(x[i], 0),
        "x[:, 0:4]": lambda i: x[i][:, 0:4],
        "x[:, 0]": lambda i: x[i][:, 0],
        "chunk": lambda i: mint.chunk(x[i], 2, 1),
    }
