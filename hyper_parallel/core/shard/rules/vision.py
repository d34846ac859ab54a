"""Images: padding, interpolation, sampling on grids, windows as columns, and shuffles of channels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.shard.labels import Labels, nonempty_rows
from hyper_parallel.core.shard.rule import LocalCall, OpCall, Strategies, decomposition, rule
from hyper_parallel.core.shard.rules.conv import spread, window_count
from hyper_parallel.core.shard.rules.pool import inner_dims
from hyper_parallel.core.shard.sample import between, exempt, real, sample, size

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout


@rule("pad", "x, pad, value=0")
def pad(call: OpCall) -> Strategies:
    """A padded dim must be whole, the others may be sharded; linear unless the padding value is a nonzero number."""
    x, amounts = call["x"], tuple(call["pad"])
    if len(amounts) % 2 or len(amounts) > 2 * x.ndim:
        msg = f"pad {list(amounts)} needs two numbers per dim, from the last of {x.ndim} dims on"
        raise ValueError(msg)
    pairs = [*zip(amounts[::2], amounts[1::2], strict=True), *((0, 0),) * (x.ndim - len(amounts) // 2)][::-1]
    names = tuple(None if any(pair) else f"d{dim}" for dim, pair in enumerate(pairs))
    shape = tuple(size + before + after for size, (before, after) in zip(x.shape, pairs, strict=True))
    linear = call["value"] in (0, None)
    return Strategies(nonempty_rows(Labels((names,), (names,), joint=(0,) if linear else ())), (shape,))


@rule("upsample", "x, output_size")
def upsample(call: OpCall) -> Strategies:
    """``nc[…] -> nc[…]``: samples and channels may be sharded; every interpolation is linear."""
    return inner_dims(call, spread(call["output_size"], call["x"].ndim - 2), joint=(0,))


@rule("grid_sample", "x, grid, interpolation_mode=0, padding_mode=0, align_corners=False")
def grid_sample(call: OpCall) -> Strategies:
    """``nc[…], n…[2] -> nc…``: the points of the grid may be sharded, the image may not; linear in ``x``."""
    x, grid = call["x"], call["grid"]
    positions = tuple(f"p{dim}" for dim in range(x.ndim - 2))
    if grid.ndim != x.ndim or grid.shape[0] != x.shape[0] or grid.shape[-1] != x.ndim - 2:
        msg = f"grid has shape {list(grid.shape)}; x of {list(x.shape)} needs [{x.shape[0]}, …, {x.ndim - 2}]"
        raise ValueError(msg)
    inputs = (("n", "c", *(None for _ in positions)), ("n", *positions, None))
    rows = nonempty_rows(Labels(inputs, (("n", "c", *positions),), each=(0,)))
    return Strategies(rows, ((*x.shape[:2], *grid.shape[1:-1]),))


@rule("affine_grid", "theta, size, align_corners=False")
def affine_grid(call: OpCall) -> Strategies:
    """``n[…] -> n[…]``, linear; the local call gets the local number of samples as ``size``."""
    size = tuple(call["size"])
    rows = nonempty_rows(Labels((("n", None, None),), (("n", *(None,) * (len(size) - 1)),), joint=(0,)))
    return Strategies(rows, ((size[0], *size[2:], len(size) - 2),), _own_samples)


def _own_samples(call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall:
    del targets
    return LocalCall({"size": [outputs[0].local_shape[0], *call["size"][1:]]})


# -- windows as columns ------------------------------------------------------------------------------------------------


@rule("im2col", "x, kernel_size, dilation, padding, stride")
def im2col(call: OpCall) -> Strategies:
    """``n[c…] -> n[kl]``, linear: each window becomes a column."""
    x = call["x"]
    kernel, dilation, padding, stride = (
        spread(call[name], 2) for name in ("kernel_size", "dilation", "padding", "stride")
    )
    count = math.prod(map(window_count, x.shape[-2:], kernel, stride, padding, dilation))
    return _columns(call, (x.shape[-3] * math.prod(kernel), count), 3)


@rule("col2im", "x, output_size, kernel_size, dilation, padding, stride")
def col2im(call: OpCall) -> Strategies:
    """``n[kl] -> n[c…]``, linear: columns are added at the positions of their windows."""
    channels = call["x"].shape[-2] // math.prod(spread(call["kernel_size"], 2))
    return _columns(call, (channels, *spread(call["output_size"], 2)), 2)


def _columns(call: OpCall, shape: tuple[int, ...], whole: int) -> Strategies:
    x = call["x"]
    batch = tuple(f"b{dim}" for dim in range(x.ndim - whole))
    labels = Labels(((*batch, *(None,) * whole),), ((*batch, *(None for _ in shape)),), joint=(0,))
    return Strategies(nonempty_rows(labels), ((*x.shape[: len(batch)], *shape),))


# -- shuffles ----------------------------------------------------------------------------------------------------------
# Their results are memory of their own, also where nothing moves (a factor of 1, images of one pixel, one row per rank)
# and the view of the permuted tensor is one of ``x``.


@decomposition("pixel_shuffle", "x, factor")
def pixel_shuffle(ops: Any, x: Any, factor: int) -> Any:
    """Channels become pixels (Shi et al., 2016): ``…(c f f) h w -> …c (h f) (w f)``."""
    *batch, channels, height, width = tuple(x.shape)
    if factor < 1 or channels % (factor * factor):
        msg = f"pixel_shuffle: {channels} channels have no {factor} by {factor} blocks"
        raise ValueError(msg)
    count, lead = channels // factor**2, len(batch)
    split = ops.view(x, (*batch, count, factor, factor, height, width))
    order = (*range(lead + 1), lead + 3, lead + 1, lead + 4, lead + 2)
    return ops.clone(ops.view(ops.permute(split, order), (*batch, count, height * factor, width * factor)))


@decomposition("pixel_unshuffle", "x, factor")
def pixel_unshuffle(ops: Any, x: Any, factor: int) -> Any:
    """Pixels become channels, the inverse of ``pixel_shuffle``: ``…c (h f) (w f) -> …(c f f) h w``."""
    *batch, channels, height, width = tuple(x.shape)
    if factor < 1 or height % factor or width % factor:
        msg = f"pixel_unshuffle: {height} by {width} has no {factor} by {factor} blocks"
        raise ValueError(msg)
    lead = len(batch)
    split = ops.view(x, (*batch, channels, height // factor, factor, width // factor, factor))
    order = (*range(lead + 1), lead + 2, lead + 4, lead + 1, lead + 3)
    shape = (*batch, channels * factor**2, height // factor, width // factor)
    return ops.clone(ops.view(ops.permute(split, order), shape))


@decomposition("channel_shuffle", "x, groups")
def channel_shuffle(ops: Any, x: Any, groups: int) -> Any:
    """Channels are interleaved between groups (ShuffleNet, Zhang et al., 2018)."""
    batch, channels, *spatial = tuple(x.shape)
    if groups < 1 or channels % groups:
        msg = f"channel_shuffle: {channels} channels do not make {groups} groups"
        raise ValueError(msg)
    split = ops.view(x, (batch, groups, channels // groups, *spatial))
    return ops.clone(ops.view(ops.transpose(split, 1, 2), (batch, channels, *spatial)))


# -- samples -----------------------------------------------------------------------------------------------------------

exempt("upsample", "each interpolation has a kernel with arguments of its own; their spellings are checked instead")
sample("affine_grid", real("n", 2, 3), (size("n"), 2, 4, 5))
sample("channel_shuffle", real("n", 6, "hw"), 3)
sample("col2im", real("n", 8, 6), (4, 3), (2, 2), (1, 1), (0, 0), (1, 1))
sample("grid_sample", real("nc", 4, 5), between(-0.9, 0.9, "n", 3, 6, 2))
sample("im2col", real("nc", 5, 4), (2, 2), (1, 1), (0, 0), (1, 1))
sample("pad", real("abc"), (1, 2))
sample("pad", real("abc"), (0, 0, 2, 1), 1.5)
sample("pixel_shuffle", real("n", 8, "hw"), 2)
sample("pixel_unshuffle", real("nc", 4, 6), 2)
