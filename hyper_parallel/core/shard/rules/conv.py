"""Convolutions: samples and channels may be sharded, the dims that a window slides over may not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.shard.labels import Labels, nonempty_rows
from hyper_parallel.core.shard.rule import LocalCall, OpCall, Row, Strategies, replicated_row, rule
from hyper_parallel.core.shard.sample import real, sample

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout

__all__ = ["spread", "window_count"]


def spread(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """One number per spatial dim; a single number stands for all of them."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


def window_count(size: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> int:
    """The number of positions of a window in a padded dim."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


@rule("convolution", "x, weight, bias, stride, padding, dilation, transposed, output_padding, groups")
def convolution(call: OpCall) -> Strategies:
    """``nc…, oc…, o -> no…`` (a transposed weight is ``co…``).

    A sharded ``c`` leaves Partial(sum), to which the bias is added once. A group of
    channels is never split across ranks.
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
        # PyTorch's result has no channels either, whatever the weight has and although a bias might be added.
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
