"""Facet *differentiable* on PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel.platform.contract.differentiable import DifferentiableFacet

__all__ = ["TorchDifferentiable"]


class TorchDifferentiable(DifferentiableFacet):
    """Differentiation by PyTorch's tape."""

    def vjp(
        self,
        fn: Callable[..., Sequence[Any]],
        inputs: Sequence[Any],
        seeds: Sequence[Any] | Callable[[Sequence[Any]], Sequence[Any]],
        wanted: Sequence[bool],
    ) -> tuple[list[Any], list[Any]]:
        """Record ``fn`` and run backward once, from all outputs that have a seed."""
        leaves = [one.detach().requires_grad_(want) for one, want in zip(inputs, wanted, strict=True)]
        outs = list(fn(*leaves))
        given = seeds(outs) if callable(seeds) else seeds
        pairs = [(out, seed) for out, seed in zip(outs, given, strict=True) if seed is not None and out.requires_grad]
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [seed for _, seed in pairs])
        grads = [
            None if not want else torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for leaf, want in zip(leaves, wanted, strict=True)
        ]
        return outs, grads

    def _awaited_on_use(self, output: Any, pending: Any) -> Any:
        """A tensor whose first use waits."""
        from hyper_parallel.platform.torch.lazy import lazy

        return lazy(output, pending)
