"""Layouts of an expert-parallel region: the axes of tokens and of experts, and the layouts of inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout, chunk_bounds
from hyper_parallel.core.dtensor.placements import Partial, Placement, Replicate, Shard
from hyper_parallel.errors import LayoutError

__all__ = ["RegionLayouts", "region_layouts"]


@dataclass(frozen=True)
class RegionLayouts:
    """The layouts of tokens and experts.

    Attributes:
        tokens: layout of ``x``, None if all tensors are plain.
        expert_axis: mesh axis that shards the experts, None if none does.
        tensor_axes: mesh axes that split each expert; the result is a partial sum along them.
    """

    tokens: Layout | None
    expert_axis: int | None
    tensor_axes: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        """Return this rank, 0 on plain tensors."""
        return 0 if self.tokens is None else self.tokens.mesh.rank

    @property
    def token_axes(self) -> tuple[int, ...]:
        """Return the axes that shard tokens."""
        return () if self.tokens is None else self.tokens.dim_axes[0]

    @property
    def expert_ranks(self) -> tuple[int, ...]:
        """Return the ranks of this rank's expert axis, in the order of their tokens and experts."""
        if self.tokens is None or self.expert_axis is None:
            return (self.rank,)
        return tuple(self.tokens.mesh.ranks_along((self.expert_axis,)))

    def counted_ranks(self, everywhere: bool) -> tuple[int, ...]:
        """Return the ranks whose counts are needed, in the order of tokens: those of the expert axis, or all."""
        if self.tokens is None or not everywhere:
            return self.expert_ranks
        layout = self.tokens
        ranks = layout.mesh.ranks_along(tuple(sorted(self.token_axes)))
        return tuple(
            sorted(ranks, key=lambda rank: [layout.mesh.coordinate_of(rank)[axis] for axis in self.token_axes])
        )

    def expert_bounds(self, count: int) -> list[tuple[int, int]]:
        """Return the range of experts of each of ``expert_ranks``."""
        parts = len(self.expert_ranks)
        return [chunk_bounds(count, parts, index) for index in range(parts)]

    def enter(self, x: Any, weights: Any, parameters: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
        """Return the local tensors; gradients of parameters are partial sums along axes that shard only tokens."""
        if self.tokens is None:
            return x, weights, list(parameters)
        summed = self._with_sums(x.placements)
        return x.to_local(summed), weights.to_local(summed), [self._entered(stacked) for stacked in parameters]

    def _with_sums(self, placements: Sequence[Placement]) -> list[Placement]:
        """Return the placements with a partial sum along the axes that split each expert."""
        return [Partial() if axis in self.tensor_axes else each for axis, each in enumerate(placements)]

    def _entered(self, stacked: Any) -> Any:
        partial = [
            Partial() if axis in self.token_axes and placement == Replicate() else placement
            for axis, placement in enumerate(stacked.placements)
        ]
        return stacked.to_local(partial)

    def leave(self, local: Any, x: Any) -> Any:
        """Return the result in the layout of ``x``, a partial sum along the axes that split each expert."""
        if self.tokens is None:
            return local
        shape = (int(x.shape[0]), int(local.shape[1]))
        return DTensor.from_local(local, self.tokens.mesh, self._with_sums(x.placements), shape=shape)


def region_layouts(
    x: Any, experts: Any, weights: Any, parameters: Sequence[Any], *, partial_sums: bool = False
) -> RegionLayouts:
    """Check the layouts of a call.

    Raises:
        LayoutError: plain tensors among DTensors, tensors on several meshes, tokens or experts in a layout that the
            region does not support.
    """
    names = ["x", "experts", "weights", *(f"parameters[{index}]" for index in range(len(parameters)))]
    tensors = [x, experts, weights, *parameters]
    plain = [name for name, tensor in zip(names, tensors, strict=True) if not isinstance(tensor, DTensor)]
    if len(plain) == len(tensors):
        return RegionLayouts(None, None)
    if plain:
        msg = (
            f"routed_experts: plain tensors among DTensors: {', '.join(plain)}; use distribute_tensor(tensor, mesh, "
            "placements) or DTensor.from_local"
        )
        raise LayoutError(msg)
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.device_mesh is not x.device_mesh:
            msg = f"routed_experts: {name} is on {tensor.device_mesh!r}, x on {x.device_mesh!r}; use one mesh"
            raise LayoutError(msg)
    _check_tokens(x, experts, weights)
    kinds = [_kind(x, parameters, axis, partial_sums=partial_sums) for axis in range(x.device_mesh.ndim)]
    sharding = [axis for axis, kind in enumerate(kinds) if kind == "experts"]
    if len(sharding) > 1:
        axes = " and ".join(repr(x.device_mesh.names[axis]) for axis in sharding)
        msg = f"routed_experts: experts are sharded over {axes}; shard them over one axis, Shard(0) on it alone"
        raise LayoutError(msg)
    split = tuple(axis for axis, kind in enumerate(kinds) if kind == "features")
    return RegionLayouts(x.layout, sharding[0] if sharding else None, split)


def _check_tokens(x: Any, experts: Any, weights: Any) -> None:
    layout = x.layout
    if layout.is_partial() or layout.dim_axes[1]:
        msg = (
            f"routed_experts: x is {layout.notation(x.dtype)}; only its tokens, dim 0, may be sharded: "
            "x.redistribute(placements=...) with Shard(0) or Replicate() on each axis"
        )
        raise LayoutError(msg)
    for name, tensor in (("experts", experts), ("weights", weights)):
        if tensor.placements != x.placements:
            msg = (
                f"routed_experts: {name} is {tensor.layout.notation(tensor.dtype)}, x is {layout.notation(x.dtype)}; "
                f"{name}.redistribute(placements={list(x.placements)})"
            )
            raise LayoutError(msg)


def _kind(x: Any, parameters: Sequence[Any], axis: int, *, partial_sums: bool) -> str:
    """Return how the parameters are sharded along ``axis``: by ``experts``, ``features`` or ``nothing``."""
    own = x.placements[axis]
    placements = [stacked.placements[axis] for stacked in parameters]
    if all(placement == Replicate() for placement in placements):
        return "nothing"
    name = x.device_mesh.names[axis]
    if all(isinstance(placement, Shard) and placement.dim == 0 for placement in placements):
        if isinstance(own, Shard):
            return "experts"
        expected = [Shard(0) if index == axis else each for index, each in enumerate(x.placements)]
        msg = (
            f"routed_experts: experts are sharded over {name!r}, and x is {x.layout.notation(x.dtype)}; its tokens "
            f"must be sharded over that axis too: x.redistribute(placements={expected}), and the same for experts and "
            "weights"
        )
        raise LayoutError(msg)
    features = all(isinstance(placement, Shard) and placement.dim > 0 for placement in placements)
    if features and partial_sums and own == Replicate():
        return "features"
    msg = (
        f"routed_experts: on axis {name!r} parameters are {placements} and x is {own}; there, parameters must be all "
        "Replicate(), or all Shard(0) with x Shard(0), or all sharded along other dims with x Replicate() and "
        "partial_sums=True, if compute returns this rank's term of the sum"
    )
    raise LayoutError(msg)
