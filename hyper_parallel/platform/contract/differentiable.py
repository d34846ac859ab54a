"""Collectives whose backward follows the algebra: the gradient contract, no scale factors."""

from __future__ import annotations

from hyper_parallel.platform.contract.identity import IdentityFacet

__all__ = ["DifferentiableFacet"]


class DifferentiableFacet(IdentityFacet):
    """Facet *differentiable*. Core's redistribution plans carry their own adjoints and need nothing from here yet."""
