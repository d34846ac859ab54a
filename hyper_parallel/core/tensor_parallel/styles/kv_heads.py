"""``ReplicateKV``: key and value projections whose heads are fewer than the ranks, or not divisible by them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.core.tensor_parallel.styles.base import options
from hyper_parallel.core.tensor_parallel.styles.boundary import Boundary, parallel_axis
from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
from hyper_parallel.core.tensor_parallel.styles.heads import HeadCounts, attention_among, groups_of
from hyper_parallel.errors import UnsupportedModuleError
from hyper_parallel.platform.select import platform_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["ReplicateKV", "output_features"]

_KV_HEADS = "_hyper_parallel_kv_heads"


class ReplicateKV(ColwiseParallel):
    """Shard a key or value projection by features; each rank gets the heads that its query heads attend to.

    Each of the K heads, of E features, is repeated until the T ranks of tp have R = lcm(K, T) heads, R / T each. ::

        x_BLD     [B, L, D]          @tp Replicate     (input_layouts -> Replicate)
        w_FD      [K*E@tp, D]        @tp Shard(0)
        b_F       [K*E@tp]           @tp Shard(0)
        y_BLF     [B, L, K*E]        @tp Replicate
        kv_BLF    [B, L, R*E@tp]     @tp Shard(-1)

    One all-gather of y in forward, one reduce-scatter of its gradient in backward; the gradient of a head is the sum
    over the ranks that have it. The number of query heads per key/value head that the attention module keeps
    (``num_key_value_groups``, ``n_rep``) becomes that of the repeated heads, H / R. H must be divisible by T.

    Args:
        heads: H, query heads of the attention module over all ranks; by default its ``num_attention_heads`` (or
            ``num_heads``, ``n_heads``, ``n_head``), or that of its ``config``.
        kv_heads: K, key and value heads; by default ``num_key_value_heads`` (or ``num_kv_heads``, ``n_kv_heads``).
        input_layouts: layout of a plain input along tp; Replicate by default. DTensors keep their own layout.
        use_local_output: return the local tensor instead of a DTensor.

    Example:
        >>> plan = {"q": ColwiseParallel(), "[kv]": ReplicateKV(), "o": RowwiseParallel()}
    """

    def __init__(
        self,
        *,
        heads: int | None = None,
        kv_heads: int | None = None,
        input_layouts: Any = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts=input_layouts, use_local_output=use_local_output)
        self.heads, self.kv_heads = heads, kv_heads

    def unsupported_reason(self, module: Any) -> str | None:
        """The reason why the style does not apply, or None; it applies to linear layers."""
        if platform_of(module).is_embedding_module(module):
            return f"ReplicateKV supports linear layers, not {type(module).__name__}"
        return super().unsupported_reason(module)

    def owner_among(self, ancestors: Sequence[Any]) -> Any:
        """The attention module: the nearest ancestor that keeps numbers of heads (a wrapper of adapters does not)."""
        return attention_among(ancestors, super().owner_among(ancestors))

    def problem_within(self, owner: Any, module: Any, size: int) -> str | None:
        """The reason why the heads of ``owner`` cannot be sharded, or None."""
        counts = self.counts(owner)
        if counts is None:
            return (
                f"ReplicateKV: {type(owner).__name__} does not keep its numbers of heads (num_attention_heads and "
                "num_key_value_heads, itself or in its config); pass ReplicateKV(heads=..., kv_heads=...)"
            )
        reason = counts.problem(size)
        if reason is not None:
            return f"ReplicateKV: {reason}"
        features = output_features(module)
        if features % counts.kv_heads:
            return f"ReplicateKV: {features} output features are not those of {counts.kv_heads} key/value heads"
        for name, groups in groups_of(owner).items():
            if groups not in (counts.groups, counts.repeated_groups(size)):
                return (
                    f"ReplicateKV: {name}={groups} of the attention module, but {counts.heads} query heads and "
                    f"{counts.kv_heads} key/value heads make groups of {counts.groups}"
                )
        return None

    def counts(self, owner: Any) -> HeadCounts | None:
        """Return the given numbers of heads, or by default those of ``owner``."""
        if self.heads is None or self.kv_heads is None:
            return HeadCounts.of(owner)
        return HeadCounts(self.heads, self.kv_heads)

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Parallelize a layer without its attention module; its numbers of heads must have been given.

        Raises:
            UnsupportedModuleError: (a NotImplementedError and ValueError) the numbers do not match the layer, or the
                module is not a linear layer.
        """
        return self.apply_within(None, module, device_mesh)

    def apply_within(self, owner: Any, module: Any, device_mesh: DeviceMesh) -> Any:
        """Parallelize a layer of the attention module ``owner``, and set the size of its groups of query heads.

        Raises:
            UnsupportedModuleError: (a NotImplementedError and ValueError) the heads cannot be sharded, or the module is
                not a linear layer.
        """
        size = device_mesh.shape[parallel_axis(device_mesh)]
        counts, reason = self.counts(owner), self.problem_within(owner, module, size)
        if counts is None or reason is not None:
            raise UnsupportedModuleError(reason)
        super().apply(module, device_mesh)
        module.__dict__[_KV_HEADS] = counts.kv_heads
        for name in groups_of(owner):
            setattr(owner, name, counts.repeated_groups(size))
        return module

    def _after(self, mesh: DeviceMesh, axis: int, module: Any, args: Any, output: Any) -> Any:
        del args
        whole = Boundary(type(self).__name__, module, mesh, axis).move(output, Replicate(), "output")
        kv_heads, size = module.__dict__[_KV_HEADS], mesh.shape[axis]
        repeated = HeadCounts(kv_heads, kv_heads).repeated(size)
        own = range(mesh.get_local_rank(axis) * repeated // size, (mesh.get_local_rank(axis) + 1) * repeated // size)
        width, dim = output_features(module) // kv_heads, len(whole.shape) - 1
        # Each rank uses different heads of the same values, so their gradient is a sum over the ranks.
        local, platform = whole.local_for(whole.layout, (axis,)), platform_of(module)
        heads = [platform.narrow(local, dim, head * kv_heads // repeated * width, width) for head in own]
        mine = platform.cat(heads, dim)
        if self.use_local_output:
            return mine
        shape = (*whole.shape[:dim], repeated * width)
        return platform.wrap(mine, whole.layout.with_shape(shape).with_placement(axis, Shard(dim)))

    def __repr__(self) -> str:
        """Return the style with all its options."""
        return options(self, "heads", "kv_heads", "input_layouts", "use_local_output")


def output_features(module: Any) -> int:
    """Output features of a linear layer, of all ranks."""
    platform: Platform = platform_of(module)
    weight, _ = platform.layer_parameters(module)
    return int(platform.direct_parameters(module)[weight].shape[0])
