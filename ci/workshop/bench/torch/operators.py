"""Host cost of operations on DTensors, compared with plain PyTorch and PyTorch's own DTensor in the same run.

Everything runs in one process over PyTorch's fake process group, which moves nothing, as rank 0 of a world of two, for
redistributions also of worlds of 8, 64 and 512: the times are the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed
from torch.distributed import tensor as peer
from torch.distributed.device_mesh import init_device_mesh as init_peer_mesh

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from workshop.bench import turns as benchmark
from workshop.bench.call_profile import CallProfile
from workshop.bench.torch import optimizers as optimizer_benchmark, redistributions as redistribution_benchmark
from workshop.bench.torch.block import blocks, compiled_block
from workshop.bench.torch.optimizers import optimizer_steps
from workshop.bench.torch.redistributions import redistributions
from workshop.bench.turns import BenchmarkCase, BenchmarkRow

__all__ = ["profile", "run"]

WORLD = 2
SIZES = (2, 8, 64, 512)
"""Worlds in which redistributions are measured."""
BLOCK_SIZES = (2, 8, 64)
"""Worlds in which a transformer block with sequence parallelism is measured."""
LIGHT_BUDGET = 0.6
MEDIAN_BUDGET = 0.3
"""Of the light operations: each one's ratio, and the median."""
Triple = tuple[Any, Any, Any]  # plain, PyTorch's DTensor, ours


ROWS = 42 + optimizer_benchmark.CASES + redistribution_benchmark.CASES * len(SIZES) + 2 * len(BLOCK_SIZES)
"""The number of rows of :func:`run`."""


def run(repeats: int = 1000, rounds: int = 7, device: str = "cpu") -> Iterator[BenchmarkRow]:
    """Measure everything, row by row, the median of the light operations last; about a minute per thousand repeats.

    Args:
        repeats: calls of a light operation per round.
        rounds: see :func:`workshop.bench.turns.measured`.
        device: of the tensors; on a device, too, what is measured is the host's time.
    """
    light = []
    for case in _cases(repeats, device):
        row = benchmark.measured(case, rounds)
        yield row
        if row.budget == LIGHT_BUDGET:
            light.append(row)
    yield benchmark.median_operator(light, MEDIAN_BUDGET)


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


def _cases(repeats: int, device: str) -> Iterator[BenchmarkCase]:
    """Every row, each in its world; it is measured before the next one is asked for."""
    with _world(WORLD, device):
        bench = _Bench(repeats, WORLD, device)
        yield from bench.forward()
        yield from bench.forward_backward()
        yield bench.block()
        yield from bench.optimizers()
        yield from bench.rest()
        yield from bench.chain()
        yield from bench.of_world()  # here, since PyTorch keeps the mesh of an operator, with its group
    for size in SIZES[1:]:
        with _world(size, device):
            yield from _Bench(repeats, size, device).of_world()


@contextmanager
def _world(size: int, device: str) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    backend = "fake" if device == "cpu" else f"cpu:fake,{device}:fake"  # the name alone does not stand for npu
    distributed.init_process_group(backend, store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        distributed.destroy_process_group()
        torch.set_num_threads(threads)


def attention(x: Any) -> Any:
    """Self-attention of ``x`` without masks. PyTorch's DTensor takes half a minute to plan it the first time."""
    return F.scaled_dot_product_attention(x, x, x)


class _Bench:
    """The rows of one world."""

    def __init__(self, repeats: int, size: int, device: str) -> None:
        self.repeats, self.size, self.device = repeats, size, device
        self.ours = init_device_mesh(device, (size,), mesh_dim_names=("tp",))
        self.peer = init_peer_mesh(device, (size,), mesh_dim_names=("tp",))

    def tensors(self, dim: int | None, *shape: int, grad: bool = False) -> Triple:
        """The same local values plain, in PyTorch's DTensor and in ours; sharded along ``dim``, or replicated."""
        local = torch.randn(shape, device=self.device)
        theirs = peer.Replicate() if dim is None else peer.Shard(dim)
        placement = Replicate() if dim is None else Shard(dim)
        leaves = [local.clone().requires_grad_(grad) for _ in range(3)]
        return (
            leaves[0],
            peer.DTensor.from_local(leaves[1], self.peer, [theirs], run_check=False),
            DTensor.from_local(leaves[2], self.ours, [placement]),
        )

    def case(
        self,
        name: str,
        budget: float,
        calls: list[Callable[[], Any]],
        repeats: int | None = None,
        *,
        by_hand: bool = False,
    ) -> BenchmarkCase:
        """One row."""
        return BenchmarkCase(name, budget, calls, repeats or self.repeats, by_hand)

    def optimizers(self) -> Iterator[BenchmarkCase]:
        """Optimizer steps, against those on the local tensors alone."""
        for name, budget, calls in optimizer_steps(self.peer, self.ours):
            yield self.case(name, budget, calls, max(self.repeats // 10, 2), by_hand=True)

    def redistributions(self) -> Iterator[BenchmarkCase]:
        """Redistributions in this world, against the same collectives written by hand."""
        # PyTorch's DTensor takes milliseconds for an all-to-all of many ranks.
        count = max(self.repeats // (4 + self.size // 5), 2)
        for name, calls in redistributions(self.size, self.peer, self.ours):
            yield self.case(name, 1.5, calls, count, by_hand=True)

    def forward(self) -> Iterator[BenchmarkCase]:
        """Light operations without gradients."""
        x, y, weight, scale = (
            self.tensors(0, 8, 8),
            self.tensors(0, 8, 8),
            self.tensors(None, 8, 8),
            self.tensors(None, 8),
        )
        q, matrix = self.tensors(1, 2, 2, 8, 4), self.tensors(0, 8, 8)
        mask = tuple(value > 0 for value in matrix)
        shapes = ((8, 2, 4), (16, 2, 4), (16, 2, 4))
        cases: dict[str, Callable[[int], Any]] = {
            "add": lambda i: x[i] + y[i],
            "multiply by a number": lambda i: x[i] * 2.0,
            "linear": lambda i: F.linear(x[i], weight[i]),
            "view": lambda i: x[i].view(shapes[i]),
            "layer_norm": lambda i: F.layer_norm(x[i], (8,), scale[i], scale[i]),
            "relu": lambda i: F.relu(x[i]),
            "x[:, 0:4]": lambda i: x[i][:, 0:4],
            "x[:, 0]": lambda i: x[i][:, 0],
            "chunk": lambda i: x[i].chunk(2, 1),
            "cat": lambda i: torch.cat([x[i], y[i]], 1),
            "subtract": lambda i: x[i] - y[i],
            "divide": lambda i: x[i] / y[i],
            "negate": lambda i: -x[i],
            "exp": lambda i: torch.exp(x[i]),
            "tanh": lambda i: torch.tanh(x[i]),
            "sigmoid": lambda i: torch.sigmoid(x[i]),
            "gelu": lambda i: F.gelu(x[i]),
            "silu": lambda i: F.silu(x[i]),
            "softmax": lambda i: torch.softmax(x[i], -1),
            "sum": lambda i: x[i].sum(-1),
            "mean": lambda i: x[i].mean(-1),
            "matmul": lambda i: x[i] @ weight[i],
            "compare": lambda i: x[i] > y[i],
            "where": lambda i: torch.where(mask[i], x[i], y[i]),
            "transpose": lambda i: x[i].transpose(0, 1),
            "permute": lambda i: q[i].permute(0, 2, 1, 3),
            "unsqueeze": lambda i: x[i].unsqueeze(1),
            "clone": lambda i: x[i].clone(),
        }
        for name, case in cases.items():
            yield self.case(name, LIGHT_BUDGET, [_at(case, index) for index in range(3)])
        yield self.case("attention", 0.5, [_at(lambda i: attention(q[i]), index) for index in range(3)])

    def forward_backward(self) -> Iterator[BenchmarkCase]:
        """The same with a backward from a given cotangent."""
        x, y = self.tensors(0, 8, 8, grad=True), self.tensors(0, 8, 8, grad=True)
        weight, scale = self.tensors(None, 8, 8, grad=True), self.tensors(None, 8, grad=True)
        seed, seed_view = self.tensors(0, 8, 8), self.tensors(0, 8, 2, 4)
        shapes = ((8, 2, 4), (16, 2, 4), (16, 2, 4))
        cases: dict[str, Callable[[int], Any]] = {
            "add": lambda i: (x[i] + y[i]).backward(seed[i]),
            "multiply by a number": lambda i: (x[i] * 2.0).backward(seed[i]),
            "linear": lambda i: F.linear(x[i], weight[i]).backward(seed[i]),
            "view": lambda i: x[i].view(shapes[i]).backward(seed_view[i]),
            "layer_norm": lambda i: F.layer_norm(x[i], (8,), scale[i], scale[i]).backward(seed[i]),
        }
        for name, case in cases.items():
            yield self.case(f"{name} + backward", 0.25, [_at(case, i) for i in range(3)], self.repeats // 4)

    def rest(self) -> Iterator[BenchmarkCase]:
        """Entering and leaving the library, and ``torch.autograd.grad``, which has no method of a DTensor."""
        x, seed = self.tensors(0, 8, 8, grad=True), self.tensors(0, 8, 8)
        local, theirs, ours = x[0].detach(), [peer.Shard(0)], [Shard(0)]
        cases: dict[str, tuple[float, list[Callable[[], Any]]]] = {
            "from_local": (0.5, [
                lambda: local,
                lambda: peer.DTensor.from_local(local, self.peer, theirs, run_check=False),
                lambda: DTensor.from_local(local, self.ours, ours),
            ]),
            "redistribute to the same": (0.5, [
                lambda: x[0],
                lambda: x[1].redistribute(placements=theirs),
                lambda: x[2].redistribute(placements=ours),
            ]),
            "detach": (0.5, [_at(lambda i: x[i].detach(), index) for index in range(3)]),
            "grad of a product": (0.5, [
                _at(lambda i: torch.autograd.grad(x[i] * 2.0, x[i], seed[i]), index) for index in range(3)
            ]),
        }  # fmt: skip
        for name, (budget, calls) in cases.items():
            yield self.case(name, budget, calls, self.repeats // 2)

    def chain(self) -> Iterator[BenchmarkCase]:
        """Light operations one after the other, against those on local tensors."""
        x, y, seed = self.tensors(0, 8, 8, grad=True), self.tensors(0, 8, 8), self.tensors(0, 8, 8)

        def forward(i: int) -> Any:
            z = x[i]
            for _ in range(6):
                z = torch.tanh((z + y[i]) * 0.5 - y[i])
            return z

        def backward(i: int) -> None:
            forward(i).backward(seed[i])

        count = max(self.repeats // 10, 2)
        for name, budget, case in (("chain of 24", 2.3, forward), ("chain of 24 + backward", 1.6, backward)):
            yield self.case(name, budget, [_at(case, index) for index in range(3)], count, by_hand=True)

    def block(self) -> BenchmarkCase:
        """Forward and backward of a transformer block, tensor parallel."""
        calls = blocks(self.size, self.tensors)
        return self.case("block", 1.3, calls, max(self.repeats // 20, 5), by_hand=True)

    def of_world(self) -> Iterator[BenchmarkCase]:
        """What is measured in worlds of several sizes."""
        yield from self.redistributions()
        if self.size in BLOCK_SIZES:
            yield self.sequence_parallel_block()
            yield self.compiled_block()

    def sequence_parallel_block(self) -> BenchmarkCase:
        """The same with activations sharded along the sequence between the tensor-parallel regions."""
        name = f"block, sequence parallel, {self.size} ranks"
        calls = blocks(self.size, self.tensors, sequence_parallel=True)
        return self.case(name, 1.15, calls, max(self.repeats // (20 + self.size), 5), by_hand=True)

    def compiled_block(self) -> BenchmarkCase:
        """The same by ``hyper_parallel.compile``."""
        name = f"block, sequence parallel, compiled, {self.size} ranks"
        calls = compiled_block(self.size, self.tensors)
        return self.case(name, 1.02, calls, max(self.repeats // (20 + self.size), 5), by_hand=True)


def _at(case: Callable[[int], Any], index: int) -> Callable[[], Any]:
    return lambda: case(index)
