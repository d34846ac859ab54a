"""``context_parallel_attention``: attention over a sequence that is sharded over a mesh axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hyper_parallel.core.context_parallel.plan import TILE, check_positions, ring_plan
from hyper_parallel.core.context_parallel.ring import Ring, ring_function
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import Placement, Replicate, Shard
from hyper_parallel.errors import LayoutError, PlanError
from hyper_parallel.platform.select import platform_of_argument

__all__ = ["context_parallel_attention"]

_NAME = "context_parallel_attention"
_FORMS = ("gather", "all_to_all", "ring")
_SEQUENCE, _HEADS = 2, 1


def context_parallel_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    axis: str,
    form: str = "all_to_all",
    attn_mask: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    positions: Sequence[int] | None = None,
) -> Any:
    """Return the attention of one device, with the sequence sharded over ``axis``.

    - ``gather``: every rank gathers all keys and values; their gradients are reduce-scattered. A rank holds the
      keys and values of the complete sequence.
    - ``all_to_all``: all tensors are resharded from the sequence to the heads, and back (Ulysses; Jacobs et al.,
      2023). A rank holds the complete sequence of some heads, and their scores where no fused kernel avoids them.
    - ``ring``: keys and values travel from rank to rank, while each rank computes with the previous shard (Ring
      Attention; Liu et al., 2023). A rank holds two parts of keys and values, and the scores of a tile of 1,024
      queries by as many keys.

    Neither the length nor the number of heads needs to be divisible by the size of the axis. There may be fewer heads
    of keys than of queries (grouped query attention) and than ranks. Other axes may shard batch or heads. ``ring``
    computes bfloat16 and float16 inputs in float32, keeps no scores for backward, and has no second gradient.

    The same call works on plain tensors, on one device.

    Args:
        query: DTensor [B, H, S, E], floating, sharded by dim 2 over ``axis``.
        key: DTensor [B, Hk, S, E] of the same layout; ``Hk`` divides ``H``.
        value: DTensor [B, Hk, S, F] of the same layout.
        axis: name of the mesh axis.
        form: ``gather``, ``all_to_all`` (the fastest while there are heads for every rank) or ``ring``.
        attn_mask: tensor that broadcasts to [B, H, S, S], boolean (true: seen) or added to the scores; plain (the same
            on all ranks) or a DTensor of any layout. In ``ring`` it gets no gradient.
        is_causal: whether a query sees only the keys up to its own position.
        scale: scale of the scores; ``E ** -0.5`` by default.
        positions: position of each element of the sequence, a permutation of ``range(S)``, in ``ring`` only: with
            :func:`balanced_order` causal work is even over the ranks. By default the elements are in order.

    Returns:
        [B, H, S, F], in the layout of ``query``.

    Raises:
        LayoutError: (a ValueError) layouts other than those above; the message contains the line that fixes it.
        PlanError: (a ValueError) shapes, an axis, a form, a mask or positions do not match.
        UnsupportedOnBackend: a second gradient of ``ring``.
    """
    return _attention(query, key, value, axis, form, attn_mask, is_causal, scale, positions)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    axis: str,
    form: str,
    attn_mask: Any,
    is_causal: bool,
    scale: float | None,
    positions: Sequence[int] | None,
) -> Any:
    """Return the attention: a function of its own that ``prove plan`` observes as one call."""
    platform = platform_of_argument(query, f"{_NAME}: query")
    if form not in _FORMS:
        raise PlanError(f"{_NAME}: form is {form!r}; it must be {', '.join(map(repr, _FORMS[:-1]))} or {_FORMS[-1]!r}")
    if is_causal and attn_mask is not None:
        raise PlanError(f"{_NAME}: attn_mask and is_causal exclude each other")
    if positions is not None and form != "ring":
        raise PlanError(f"{_NAME}: positions are for form='ring'; form={form!r} takes the sequence in order")
    if not any(isinstance(tensor, DTensor) for tensor in (query, key, value, attn_mask)):
        return _plain(platform, (query, key, value), attn_mask, is_causal, scale, positions)
    layout = _layout(query, key, value, axis)
    _check_shapes(query, key, value)
    mask = _mask(attn_mask, query, layout)
    if form == "ring":
        return _ring(platform, (query, key, value), mask, axis, is_causal, scale, positions)
    attention = platform.dispatcher.ops.scaled_dot_product_attention
    place = _place(layout, axis)
    grouped = tuple(query.shape)[_HEADS] != tuple(key.shape)[_HEADS]
    if form == "gather":
        key, value = (_placed(tensor, place, Replicate()) for tensor in (key, value))
        result = attention(query, key, value, mask, is_causal, scale, grouped)
    else:
        if grouped and tuple(key.shape)[_HEADS] % _parts_of_heads(layout, place):
            key, value = (_repeated(platform, tensor, query) for tensor in (key, value))
            grouped = False
        query, key, value = (_placed(tensor, place, Shard(_HEADS)) for tensor in (query, key, value))
        result = attention(query, key, value, mask, is_causal, scale, grouped)
    return result.redistribute(placements=list(layout.placements))


def _plain(
    platform: Any,
    tensors: tuple[Any, Any, Any],
    mask: Any,
    is_causal: bool,
    scale: float | None,
    positions: Sequence[int] | None,
) -> Any:
    """Return the attention of plain tensors, on one device."""
    for name, tensor in zip(("query", "key", "value"), tensors, strict=True):
        _check_ndim(name, tensor)
    _check_shapes(*tensors)
    q, k, v = tensors
    if is_causal and positions is not None:
        order = np.asarray(check_positions(positions, int(q.shape[_SEQUENCE])))
        mask, is_causal = platform.from_numpy(order[None] <= order[:, None], device=platform.device_of(q)), False
    grouped = int(q.shape[_HEADS]) != int(k.shape[_HEADS])
    attention = platform.local_op("scaled_dot_product_attention")
    return attention(q=q, k=k, v=v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)


def _ring(
    platform: Any,
    tensors: tuple[Any, Any, Any],
    mask: Any,
    axis: str,
    is_causal: bool,
    scale: float | None,
    positions: Sequence[int] | None,
) -> Any:
    query, key, value = tensors
    layout, length = query.layout, int(query.shape[_SEQUENCE])
    _check_heads(query, key)
    place = _place(layout, axis)
    if mask is not None and platform.grad_enabled() and platform.needs_grad(mask.to_local()):
        raise PlanError(f"{_NAME}: attn_mask has no gradient in form='ring'; use form='gather', or detach it")
    ranks = tuple(layout.mesh.ranks_along((place,)))
    chosen = None if positions is None else check_positions(positions, length)
    plan = ring_plan(ranks, layout.mesh.rank, length, is_causal, chosen, TILE)
    number = float(query.shape[-1]) ** -0.5 if scale is None else float(scale)
    ring = Ring(platform, plan, number, None if mask is None else mask.to_local())
    local = ring_function(platform).apply(*(tensor.to_local() for tensor in tensors), ring)
    shape = (*(int(size) for size in query.shape[:-1]), int(value.shape[-1]))
    return DTensor.from_local(local, layout.mesh, list(layout.placements), shape=shape)


def _place(layout: Layout, axis: str) -> int:
    return (layout.mesh.mesh_dim_names or ()).index(axis)


def _layout(query: Any, key: Any, value: Any, axis: str) -> Layout:
    """Return the layout of all three, sharded by the sequence over ``axis``."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, DTensor):
            msg = (
                f"{_NAME}: {name} is a plain tensor; give a DTensor that is sharded by its sequence, such as "
                f"distribute_tensor({name}, mesh, [Shard({_SEQUENCE})])"
            )
            raise LayoutError(msg)
        _check_ndim(name, tensor)
    layout: Layout = query.layout
    names = layout.mesh.mesh_dim_names or ()
    if axis not in names:
        raise PlanError(
            f"{_NAME}: axis {axis!r} is not in the mesh; its axes are {', '.join(map(repr, names)) or 'unnamed'}"
        )
    place = names.index(axis)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        placements = list(tensor.placements)
        wrong = [
            other
            for other, placement in enumerate(placements)
            if placement not in ((Shard(_SEQUENCE),) if other == place else (Shard(0), Shard(_HEADS), Replicate()))
        ]
        if tensor.device_mesh != layout.mesh or placements != list(layout.placements) or wrong:
            wanted = [
                Shard(_SEQUENCE) if other == place else placement if other not in wrong else Replicate()
                for other, placement in enumerate(layout.placements if not wrong else placements)
            ]
            msg = (
                f"{_NAME}: {name} is placed {placements}; query, key and value must be sharded by dim {_SEQUENCE} "
                f"over axis {axis!r}, and have the same placements over every other axis (sharded by batch or heads, "
                f"or replicated); call {name}.redistribute(placements={wanted})"
            )
            raise LayoutError(msg)
    return layout


def _check_ndim(name: str, tensor: Any) -> None:
    if len(tensor.shape) != 4:
        raise PlanError(f"{_NAME}: {name} has shape {list(tensor.shape)}; it must be [batch, heads, sequence, width]")


def _check_shapes(query: Any, key: Any, value: Any) -> None:
    q, k, v = (tuple(map(int, tensor.shape)) for tensor in (query, key, value))
    fits = q[0] == k[0] == v[0] and k[1] == v[1] and k[1] and q[1] % k[1] == 0
    if not fits or not q[2] == k[2] == v[2] or q[3] != k[3] or not (q[3] and v[3]):
        msg = (
            f"{_NAME}: query is {list(q)}, key {list(k)}, value {list(v)}; they must be [B, H, S, E], [B, Hk, S, E] "
            "and [B, Hk, S, F], where Hk divides H"
        )
        raise PlanError(msg)
    dtypes = {str(tensor.dtype) for tensor in (query, key, value)}
    if len(dtypes) > 1:
        raise PlanError(
            f"{_NAME}: query, key and value have dtypes {', '.join(sorted(dtypes))}; they must have the same dtype"
        )


def _check_heads(query: Any, key: Any) -> None:
    """Reject shards that have a query head without its key head."""
    layout = query.layout
    parts = _parts_of_heads(layout)
    heads = int(key.shape[_HEADS])
    if int(query.shape[_HEADS]) != heads and heads % parts:
        msg = (
            f"{_NAME}: {int(query.shape[_HEADS])} query heads share {heads} key/value heads, and {heads} is not "
            f"divisible by the {parts} ranks that shard the heads; use form='gather', or redistribute so that heads "
            "are not sharded"
        )
        raise LayoutError(msg)


def _parts_of_heads(layout: Layout, also: int | None = None) -> int:
    """Return the number of ranks over which heads are sharded, with axis ``also`` included."""
    parts = 1
    for axis, placement in enumerate(layout.placements):
        if placement == Shard(_HEADS) or axis == also:
            parts *= layout.mesh.size(axis)
    return parts


def _mask(mask: Any, query: Any, layout: Layout) -> Any:
    """Return the mask as a DTensor of four dims, each sharded like that of the scores; None if there is no mask."""
    if mask is None:
        return None
    batch, heads, length, _ = (int(size) for size in query.shape)
    shape, scores = tuple(map(int, mask.shape)), (batch, heads, length, length)
    if len(shape) > 4 or any(size not in (1, full) for size, full in zip(shape[::-1], scores[::-1], strict=False)):
        raise PlanError(f"{_NAME}: attn_mask is {list(shape)}; it must broadcast to {list(scores)}")
    placed: Any = mask if isinstance(mask, DTensor) else DTensor.from_local(mask, layout.mesh)
    placed = placed.reshape((1,) * (4 - len(shape)) + shape)
    sizes = tuple(map(int, placed.shape))
    wanted: list[Placement] = [
        placement
        if isinstance(placement, Shard) and sizes[placement.dim] == scores[placement.dim] != 1
        else Replicate()
        for placement in layout.placements
    ]
    return placed.redistribute(placements=wanted)


def _placed(tensor: Any, axis: int, placement: Placement) -> Any:
    placements = list(tensor.placements)
    placements[axis] = placement
    return tensor.redistribute(placements=placements)


def _repeated(platform: Any, tensor: Any, query: Any) -> Any:
    """Return keys with each head repeated for every query head that uses it."""
    times = int(query.shape[_HEADS]) // int(tensor.shape[_HEADS])
    return platform.dispatcher.ops.repeat_interleave(tensor, times, _HEADS)
