"""Operators on spatial dims: convolution, pooling, padding, interpolation, sampling on grids, windows as columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.shard.labels import Labels, nonempty_rows
from hyper_parallel.core.shard.rule import (
    LocalCall,
    OpCall,
    Row,
    Rule,
    Strategies,
    decomposition,
    register_rule,
    replicated_row,
    rule,
)
from hyper_parallel.core.shard.sample import between, exempt, real, sample, shuffled, size

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout

__all__ = ["inner_dims", "spread", "window_count"]


def spread(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Return one number per spatial dim; a single number is repeated."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


def window_count(size: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> int:
    """The number of positions of a window in a padded dim."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


@rule("convolution", "x, weight, bias, stride, padding, dilation, transposed, output_padding, groups")
def convolution(call: OpCall) -> Strategies:
    """``nc…, oc…, o -> no…`` (a transposed weight is ``co…``).

    A sharded ``c`` leaves Partial(sum), to which the bias is added once. A group of channels is never split.
    """
    x, weight, groups = call["x"], call["weight"], call["groups"]
    out, inner = (1, 0) if call["transposed"] else (0, 1)
    _check(call, inner)
    windows = (None,) * (x.ndim - 2)
    channels = weight.shape[out] * (groups if call["transposed"] else 1)
    count = len(call.operands)
    kernel = [None, None, *windows]
    if groups == 1:
        kernel[out], kernel[inner] = "o", "c"
    inputs = (("n", "c" if groups == 1 else None, *windows), tuple(kernel), ("o" if groups == 1 else None,))[:count]
    output = ("n", "o" if groups == 1 else None, *windows)
    joins = (2,) if count > 2 else ()
    if not x.shape[1]:
        # PyTorch's result has no channels either, for any weight and even with a bias.
        return Strategies((replicated_row(count),), ((x.shape[0], 0, *_sizes(call)),))
    rows = nonempty_rows(Labels(inputs, (output,), each=(0, 1), joins=joins))
    if groups > 1:
        rows = (*rows, Row((Shard(1), Shard(0), Shard(0))[:count], (Shard(1),), sizes=((0, 1, groups),)))
    return Strategies(rows, ((x.shape[0], channels, *_sizes(call)),), _local_groups if groups > 1 else None)


def _check(call: OpCall, inner: int) -> None:
    x, weight, groups = call["x"], call["weight"], call["groups"]
    if x.ndim != weight.ndim or x.ndim < 3:
        msg = f"x has {x.ndim} dims and weight {weight.ndim}; both need the same number of dims, at least 3"
        raise ValueError(msg)
    wanted = weight.shape[inner] * (1 if call["transposed"] else groups)
    if x.shape[1] != wanted or x.shape[1] % groups:
        msg = f"x has {x.shape[1]} channels, weight {list(weight.shape)} with {groups} group(s) needs {wanted}"
        raise ValueError(msg)


def _sizes(call: OpCall) -> tuple[int, ...]:
    """Sizes of the spatial dims of the output."""
    x, kernel = call["x"].shape[2:], call["weight"].shape[2:]
    stride, padding, dilation, more = (
        spread(call[name], len(x)) for name in ("stride", "padding", "dilation", "output_padding")
    )
    if not call["transposed"]:
        return tuple(map(window_count, x, kernel, stride, padding, dilation))
    return tuple(
        (size - 1) * step - 2 * pad + wide * (window - 1) + rest + 1
        for size, window, step, pad, wide, rest in zip(x, kernel, stride, padding, dilation, more, strict=True)
    )


def _local_groups(call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall:
    del outputs
    return LocalCall({"groups": call["groups"] * targets[0].local_shape[1] // call["x"].shape[1]})


@rule("conv_tbc", "x, weight, bias, pad=0")
def conv_tbc(call: OpCall) -> Strategies:
    """``[t]bc, [k]co, o -> [t]bo``: time comes first; a sharded ``c`` leaves Partial(sum), the bias is added once."""
    x, weight = call["x"], call["weight"]
    labels = Labels(((None, "b", "c"), (None, "c", "o"), ("o",)), ((None, "b", "o"),), each=(0, 1), joins=(2,))
    times = window_count(x.shape[0], weight.shape[0], 1, call["pad"])
    return Strategies(nonempty_rows(labels), ((times, x.shape[1], weight.shape[2]),))


sample("convolution", real("nc", 7, 6), real("oc", 3, 2), real("o"), (2, 1), (1, 0), (1, 1), False, (0, 0), 1)
sample("convolution", real("nc", 9), real("oc", 3), None, (1,), (1,), (2,), False, (0,), 1)
sample("convolution", real("n", 4, 7), real(6, 2, 3), real(6), (1,), (1,), (1,), False, (0,), 2)
sample("convolution", real("n", 6, 7), real(6, 2, 3), real(6), (1,), (1,), (1,), False, (0,), 3)
sample("convolution", real("nc", 5), real("co", 3), real("o"), (2,), (1,), (1,), True, (1,), 1)
sample("conv_tbc", real(7, "bc"), real(3, "co"), real("o"))


Names = tuple[str | None, ...]


def inner_dims(
    call: OpCall,
    sizes: Sequence[int],
    *,
    others: Sequence[Names] = (),
    outputs: int = 1,
    joint: tuple[int, ...] = (),
    each: tuple[int, ...] = (),
) -> Strategies:
    """Strategies of an operator that resizes the last dims; only the others (``b0``, ``b1``) may be sharded."""
    x = call["x"]
    lead = _leading(call, len(sizes))
    names: Names = (*(f"b{dim}" for dim in range(lead)), *(None for _ in sizes))
    labels = Labels((names, *others), (names,) * outputs, None, joint=joint, each=each)
    shape = (*x.shape[:lead], *sizes)
    return Strategies(nonempty_rows(labels), (shape,) * outputs, many=outputs > 1)


def _leading(call: OpCall, count: int) -> int:
    """The number of dims before the last ``count``."""
    ndim = call["x"].ndim
    if ndim < count:
        msg = f"x has {ndim} dims, at least {count} are needed"
        raise ValueError(msg)
    return int(ndim - count)


def _pooled(call: OpCall, count: int) -> tuple[int, ...]:
    """The sizes of the last ``count`` dims after pooling."""
    lead = _leading(call, count)
    kernel = spread(call["kernel_size"], count)
    stride = spread(call["stride"], count) if call["stride"] not in (None, (), []) else kernel
    padding, dilation = spread(call["padding"], count), spread(call["dilation"] or 1, count)
    sizes = call["x"].shape[lead:]
    return tuple(
        _positions(*window, ceil=call["ceil_mode"])
        for window in zip(sizes, kernel, stride, padding, dilation, strict=True)
    )


def _positions(size: int, kernel: int, stride: int, padding: int, dilation: int, *, ceil: bool) -> int:
    if not ceil:
        return window_count(size, kernel, stride, padding, dilation)
    count = -(-(size + 2 * padding - dilation * (kernel - 1) - 1) // stride) + 1
    # As PyTorch: with ceil_mode, a window that would start in the right padding is left out.
    return count - 1 if (count - 1) * stride >= size + padding else count


def _average(count: int) -> Callable[[OpCall], Strategies]:
    return lambda call: inner_dims(call, _pooled(call, count), joint=(0,))


def _maximum(count: int) -> Callable[[OpCall], Strategies]:
    # Indices count within one channel of one sample, so local and global indices are equal.
    return lambda call: inner_dims(call, _pooled(call, count), outputs=2)


def _adaptive(count: int, *, maximum: bool) -> Callable[[OpCall], Strategies]:
    def strategies(call: OpCall) -> Strategies:
        sizes = spread(call["output_size"], count)
        return inner_dims(call, sizes, outputs=2) if maximum else inner_dims(call, sizes, joint=(0,))

    return strategies


def _fractional(count: int) -> Callable[[OpCall], Strategies]:
    def strategies(call: OpCall) -> Strategies:
        """One random number per sample, channel and pooled dim determines the positions of the windows."""
        batched = call["x"].ndim > count + 1
        samples = ("b0", "b1", None) if batched else (None, "b0", None)
        return inner_dims(call, spread(call["output_size"], count), others=(samples,), outputs=2)

    return strategies


def _unpooled(count: int) -> Callable[[OpCall], Strategies]:
    def strategies(call: OpCall) -> Strategies:
        x = call["x"]
        if call["indices"].shape != x.shape:
            msg = f"indices have shape {list(call['indices'].shape)}, x has {list(x.shape)}"
            raise ValueError(msg)
        names = (*(f"b{dim}" for dim in range(x.ndim - count)), *(None,) * count)
        return inner_dims(call, spread(call["output_size"], count), others=(names,), each=(0,))

    return strategies


_WINDOWS = "x, kernel_size, stride=(), padding=0"
for _count in (2, 3):
    register_rule(
        Rule(
            f"avg_pool{_count}d",
            f"{_WINDOWS}, ceil_mode=False, count_include_pad=True, divisor_override=None",
            _average(_count),
        )
    )
    register_rule(Rule(f"max_pool{_count}d", f"{_WINDOWS}, dilation=1, ceil_mode=False", _maximum(_count)))
    register_rule(Rule(f"adaptive_avg_pool{_count}d", "x, output_size", _adaptive(_count, maximum=False)))
    register_rule(Rule(f"adaptive_max_pool{_count}d", "x, output_size", _adaptive(_count, maximum=True)))
    register_rule(Rule(f"fractional_max_pool{_count}d", "x, kernel_size, output_size, samples", _fractional(_count)))
register_rule(Rule("max_unpool2d", "x, indices, output_size", _unpooled(2)))
register_rule(Rule("max_unpool3d", "x, indices, output_size, stride, padding", _unpooled(3)))


sample("adaptive_avg_pool2d adaptive_max_pool2d", real("nc", 6, 5), (3, 2))
sample("adaptive_avg_pool3d adaptive_max_pool3d", real("nc", 6, 5, 4), (3, 2, 2))
sample("avg_pool2d max_pool2d", real("nc", 7, 6), (3, 2), (2, 1), (1, 0))
sample("avg_pool2d max_pool2d", real("c", 7, 6), (2, 2))
sample("avg_pool3d max_pool3d", real("nc", 5, 6, 4), (2, 3, 2))
sample("fractional_max_pool2d", real("nc", 7, 6), (2, 2), (3, 3), between(0.1, 0.9, "nc", 2).fixed)
sample("fractional_max_pool3d", real("nc", 5, 6, 7), (2, 2, 2), (3, 3, 3), between(0.1, 0.9, "nc", 3).fixed)
sample("max_unpool2d", real("nc", 1, 5), shuffled(24, "nc", 1, 5, dim=3), (6, 4))
sample("max_unpool3d", real("nc", 1, 1, 5), shuffled(24, "nc", 1, 1, 5, dim=4), (2, 3, 4), (1, 1, 1), (0, 0, 0))


@rule("pad", "x, pad, value=0")
def pad(call: OpCall) -> Strategies:
    """A padded dim must not be sharded, the others may; linear unless the padding value is a nonzero number."""
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
    """``nc[…], n…[2] -> nc…``: points of the grid may be sharded, the image must not be; linear in ``x``."""
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
    """``n[…] -> n[…]``, linear; the local call gets the local number of samples in ``size``."""
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
# These always return new memory, even if nothing moves (a factor of 1, images of one pixel, one row per rank) and the
# permuted tensor would be a view of ``x``.


@decomposition("pixel_shuffle", "x, factor")
def pixel_shuffle(ops: Any, x: Any, factor: int) -> Any:
    """Channels become pixels (Shi et al., 2016): ``…(c f f) h w -> …c (h f) (w f)``."""
    *batch, channels, height, width = tuple(x.shape)
    if factor < 1 or channels % (factor * factor):
        msg = f"pixel_shuffle: {channels} channels are not divisible into blocks of {factor} by {factor}"
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
        msg = f"pixel_unshuffle: {height} by {width} pixels are not divisible into blocks of {factor} by {factor}"
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
        msg = f"channel_shuffle: {channels} channels are not divisible into {groups} groups"
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
