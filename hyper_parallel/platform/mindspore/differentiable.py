"""Facet *differentiable* on MindSpore."""

from __future__ import annotations

from typing import Any

from hyper_parallel.platform.contract.differentiable import DifferentiableFacet

__all__ = ["MindSporeDifferentiable"]


class MindSporeDifferentiable(DifferentiableFacet):
    """Collectives with gradients, on MindSpore."""

    def _awaited_on_use(self, output: Any, pending: Any) -> Any:
        """``output``, complete: on Ascend waiting only orders streams, on CPU it finishes what was launched."""
        pending.wait()
        return output
