"""Differentiation in one spelling, and collectives whose backward follows the algebra without scale factors."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.platform.contract.identity import IdentityFacet

__all__ = ["DifferentiableFacet"]


class DifferentiableFacet(IdentityFacet):
    """Facet *differentiable*."""

    @abc.abstractmethod
    def vjp(
        self,
        fn: Callable[..., Sequence[Any]],
        inputs: Sequence[Any],
        seeds: Sequence[Any] | Callable[[Sequence[Any]], Sequence[Any]],
        wanted: Sequence[bool],
    ) -> tuple[list[Any], list[Any]]:
        """Run ``fn`` on plain tensors and pull cotangents back.

        Args:
            fn: takes the inputs, returns a sequence of plain tensors.
            inputs: plain tensors.
            seeds: cotangent per output (None where it has none), or a function that gives them once outputs exist.
            wanted: which inputs need a gradient.

        Returns:
            the outputs, and per input its gradient (zeros where it does not matter), None where it is not wanted.
        """
