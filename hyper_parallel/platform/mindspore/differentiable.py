"""Facet *differentiable* on MindSpore."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore
from mindspore import Tensor, mint, ops
from mindspore.common._grad_function import _Function

from hyper_parallel.platform.contract.differentiable import DifferentiableFacet
from hyper_parallel.platform.mindspore.ops.kernels import requires_grad

__all__ = ["MindSporeDifferentiable"]


class _Seeded(_Function):
    """A scalar whose gradient with respect to each of several tensors is exactly a seed."""

    @staticmethod
    def forward(ctx: Any, seeds: list[Tensor], *outs: Tensor) -> Tensor:
        """Return zero; the value does not matter."""
        del outs
        ctx.seeds = seeds
        return mint.zeros((), dtype=mindspore.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the seeds."""
        del grad
        return (None, *ctx.seeds)


class MindSporeDifferentiable(DifferentiableFacet):
    """Differentiation by MindSpore's function transform."""

    def vjp(
        self,
        fn: Callable[..., Sequence[Any]],
        inputs: Sequence[Any],
        seeds: Sequence[Any] | Callable[[Sequence[Any]], Sequence[Any]],
        wanted: Sequence[bool],
    ) -> tuple[list[Any], list[Any]]:
        """Differentiate one scalar that pulls every seed back at once: forward and backward run once."""
        leaves = [ops.stop_gradient(tensor) for tensor in inputs]
        positions = tuple(index for index, want in enumerate(wanted) if want)
        outs: list[Any] = []

        def seeded(*xs: Any) -> Any:
            outs[:] = fn(*xs)
            cotangents = seeds(outs) if callable(seeds) else seeds
            pairs = [
                (out, seed)
                for out, seed in zip(outs, cotangents, strict=True)
                if seed is not None and requires_grad(out)
            ]
            return _Seeded.apply([seed for _, seed in pairs], *(out for out, _ in pairs))

        if not positions:
            seeded(*leaves)
            return outs, [None] * len(leaves)
        gradients = mindspore.grad(seeded, positions)(*leaves)
        grads: list[Any] = [None] * len(leaves)
        for position, grad in zip(positions, gradients if len(positions) > 1 else (gradients,), strict=True):
            grads[position] = grad
        return outs, grads

    def _awaited_on_use(self, output: Any, pending: Any) -> Any:
        """``output``, complete: on Ascend waiting only orders streams, on CPU it finishes what was launched."""
        pending.wait()
        return output
