"""``LatentKV``: the first projection of multi-head latent attention (MLA), and the one key that all heads share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.placements import Replicate
from hyper_parallel.core.tensor_parallel.styles.base import ReplicatedStyle, options
from hyper_parallel.core.tensor_parallel.styles.boundary import parallel_axis
from hyper_parallel.core.tensor_parallel.styles.kv_heads import output_features
from hyper_parallel.errors import UnsupportedModuleError
from hyper_parallel.platform.select import platform_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.core.dtensor.dtensor import DTensor
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.core.tensor_parallel.styles.base import BoundaryLayout
    from hyper_parallel.core.tensor_parallel.styles.boundary import Boundary

__all__ = ["LatentKV"]

_SHARED = "_hyper_parallel_shared_key"
_ATTRIBUTE = "qk_rope_head_dim"
"""Name under which attention modules, or their configurations, keep the features of the shared key."""


class LatentKV(ReplicatedStyle):
    """Replicate the first projection of multi-head latent attention (DeepSeek-V2), whose last features all heads use.

    ::

        x_BLD     [B, L, D]        @tp Replicate
        w_FD      [C + R, D]       @tp Replicate
        y_BLC     [B, L, C]        @tp Replicate       latent keys and values, for a column-wise layer
        k_BLR     [B, L, R]        @tp Replicate       a key that each rank uses in its own heads

    For ``kv_a_proj_with_mqa``, which returns y and k next to each other, as a local tensor. The column-wise layer
    reduces the gradient of y; that of k is partial on each rank and is summed here: one all-reduce in backward.

    Args:
        shared: R; by default the ``qk_rope_head_dim`` of the attention module, or of its ``config``.

    Example:
        >>> plan = {"q": "colwise", "kv_a": LatentKV(), "kv_b": "colwise", "o": "rowwise"}
    """

    use_local_output = True

    def __init__(self, *, shared: int | None = None) -> None:
        self.shared = shared

    def unsupported_reason(self, module: Any) -> str | None:
        """The reason why the style does not apply, or None; it applies to linear layers."""
        if platform_of(module).is_linear_module(module):
            return "it is already parallelized by LatentKV" if _SHARED in module.__dict__ else None
        return f"LatentKV supports linear layers, not {type(module).__name__}"

    def problem_within(self, owner: Any, module: Any, size: int) -> str | None:
        """The reason why the shared key does not match the layer, or None."""
        del size
        shared, features = self._features(owner), output_features(module)
        if shared is None:
            return (
                f"LatentKV: {type(owner).__name__} does not keep the features of the shared key ({_ATTRIBUTE}, itself "
                "or in its config); pass LatentKV(shared=...)"
            )
        if 0 < shared < features:
            return None
        return (
            f"LatentKV: the shared key has {shared} features; it must have at least 1 of the {features} output "
            "features, not all"
        )

    def _features(self, owner: Any) -> int | None:
        """The given features, or by default those of ``owner``."""
        kept = getattr(owner, _ATTRIBUTE, getattr(getattr(owner, "config", None), _ATTRIBUTE, None))
        return kept if self.shared is None else self.shared

    def outputs(self) -> Sequence[BoundaryLayout]:
        """The latent keys and values, and the shared key."""
        return ((Replicate(), True),)

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Parallelize a layer without its attention module; the features of the shared key must have been given.

        Raises:
            UnsupportedModuleError: (a NotImplementedError and ValueError) they do not match the layer, or the module is
                not a linear layer.
        """
        return self.apply_within(None, module, device_mesh)

    def apply_within(self, owner: Any, module: Any, device_mesh: DeviceMesh) -> Any:
        """Parallelize a layer of the attention module ``owner``.

        Raises:
            UnsupportedModuleError: (a NotImplementedError and ValueError) the module is not a linear layer, or the
                shared key does not match it.
        """
        size = device_mesh.shape[parallel_axis(device_mesh)]
        reason = self.unsupported_reason(module) or self.problem_within(owner, module, size)
        if reason is not None:
            raise UnsupportedModuleError(reason)
        module.__dict__[_SHARED] = self._features(owner)
        return super().apply(module, device_mesh)

    def _enter(self, edge: Boundary, value: Any, name: str) -> DTensor:
        return edge.move(edge.enter(value, Replicate(), name), Replicate(), name)

    def _leave(self, edge: Boundary, value: Any, *, local: bool) -> Any:
        del local
        whole, platform = edge.move(value, Replicate(), "output"), platform_of(value)
        shared, dim = edge.cell.__dict__[_SHARED], len(whole.shape) - 1
        latent = int(whole.shape[dim]) - shared
        key = platform.narrow(whole.to_local(), dim, latent, shared)
        key = platform.wrap(key, whole.layout.with_shape((*whole.shape[:dim], shared)))
        # Each rank uses it in different heads, so its gradient is a sum over the ranks.
        summed = key.local_for(key.layout, (edge.axis,))
        return platform.cat([platform.narrow(whole.to_local(), dim, 0, latent), summed], dim)

    def __repr__(self) -> str:
        """Return the style with its option."""
        return options(self, "shared")
