"""MindSpore operators that are canonical ones in another shape: transposed flags, attributes, several results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.shard.dispatch import Dispatcher
from hyper_parallel.errors import UnsupportedOperatorError

__all__ = ["COMPOSED"]

MATRIX = 2

COMPOSED: dict[str, Callable[[Dispatcher, Any, tuple[Any, ...], dict[str, Any]], Any]] = {}


def _composed(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register ``run(ops, primitive, *args, **kwargs)`` where ``ops`` are canonical operators on DTensors."""

    def declare(run: Callable[..., Any]) -> Callable[..., Any]:
        def line(dispatcher: Dispatcher, primitive: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return run(dispatcher.ops, primitive, *args, **kwargs)

        COMPOSED.update(dict.fromkeys(names, line))
        return run

    return declare


@_composed("ReduceSum")
def _reduce_sum(ops: Any, primitive: Any, x: Any, dim: Any = (), keepdim: bool | None = None, *_: Any) -> Any:  # noqa: FBT001
    keep = getattr(primitive, "keep_dims", False) if keepdim is None else keepdim
    return ops.sum(x, dim, bool(keep))


@_composed("BiasAdd")
def _bias_add(ops: Any, primitive: Any, x: Any, bias: Any, *_: Any) -> Any:
    """``nn.Dense`` adds its bias this way; the channel of more than two dims is dim 1."""
    del primitive
    if len(x.shape) != MATRIX:
        msg = f"BiasAdd: only matrices have a sharding rule, x has shape {list(x.shape)}; add the reshaped bias instead"
        raise UnsupportedOperatorError(msg)
    return ops.add(x, bias)


@_composed("LayerNorm")
def _layer_norm(ops: Any, primitive: Any, x: Any, weight: Any, bias: Any, begin: int, *rest: Any) -> Any:
    """The mean and the deviation that the primitive also returns are not kept: no layer uses them."""
    del primitive
    eps = rest[1] if len(rest) > 1 else 1e-7
    return ops.layer_norm(x, tuple(x.shape[begin:]), weight, bias, eps), None, None
