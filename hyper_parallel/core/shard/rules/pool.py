"""Pooling: samples and channels may be sharded, the dims that are pooled may not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hyper_parallel.core.shard.labels import Labels, nonempty_rows
from hyper_parallel.core.shard.rule import OpCall, Rule, Strategies, register_rule
from hyper_parallel.core.shard.rules.conv import spread, window_count
from hyper_parallel.core.shard.sample import between, real, sample, shuffled

__all__ = ["inner_dims"]

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
    """Strategies of an operator that resizes the last dims; only the dims before (``b0``, ``b1``) may be sharded."""
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
    # As PyTorch: with ceil_mode, a window that would start in the padding on the right is left out.
    return count - 1 if (count - 1) * stride >= size + padding else count


def _average(count: int) -> Callable[[OpCall], Strategies]:
    return lambda call: inner_dims(call, _pooled(call, count), joint=(0,))


def _maximum(count: int) -> Callable[[OpCall], Strategies]:
    # Indices count within one channel of one sample, so local indices equal global ones.
    return lambda call: inner_dims(call, _pooled(call, count), outputs=2)


def _adaptive(count: int, *, maximum: bool) -> Callable[[OpCall], Strategies]:
    def strategies(call: OpCall) -> Strategies:
        sizes = spread(call["output_size"], count)
        return inner_dims(call, sizes, outputs=2) if maximum else inner_dims(call, sizes, joint=(0,))

    return strategies


def _fractional(count: int) -> Callable[[OpCall], Strategies]:
    def strategies(call: OpCall) -> Strategies:
        """One random number per sample, channel and pooled dim decides where the windows are."""
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
