"""Fourier transforms: transformed dims must not be sharded, the others may be sharded; linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.shard.labels import nonempty
from hyper_parallel.core.shard.rule import OpCall, Rule, Strategies, register_rule, whole
from hyper_parallel.core.shard.rules.dims import keep_dims_linear, normalize_dim
from hyper_parallel.core.shard.sample import between, complex_, real, sample


def _transformed(call: OpCall, dims: Sequence[int], sizes: Sequence[int]) -> Strategies:
    """Strategies of a transform after which ``dims`` have ``sizes``; kernels refuse empty shards."""
    x = call["x"]
    shape = list(x.shape)
    for dim, size in zip(dims, sizes, strict=True):
        shape[dim] = size
    if any(size < 1 for size in sizes):
        msg = f"a transform over dims {list(dims)} of {list(x.shape)} has no elements"
        raise ValueError(msg)
    kept = [None if dim in dims else dim for dim in range(x.ndim)]
    return Strategies(nonempty(keep_dims_linear(kept)), (tuple(shape),))


def _same(size: int) -> int:
    return size


def _half(size: int) -> int:
    return size // 2 + 1


def _twice(size: int) -> int:
    return 2 * (size - 1)


def _one_dim(resized: Callable[[int], int], *, requested: Callable[[int], int]) -> Callable[[OpCall], Strategies]:
    """Placement function of a transform along one dim.

    Args:
        resized: function from the size of the input to that of the output, if ``n`` is not given.
        requested: function from ``n`` to the size of the output.
    """

    def strategies(call: OpCall) -> Strategies:
        x, points = call["x"], call["n"]
        if not x.ndim:
            msg = "x needs at least 1 dim"
            raise ValueError(msg)
        dim = normalize_dim(call["dim"], x.ndim)
        return _transformed(call, [dim], [resized(x.shape[dim]) if points is None else requested(points)])

    return strategies


def _several_dims(last: Callable[[int], int], *, requested: Callable[[int], int]) -> Callable[[OpCall], Strategies]:
    """Placement function of a transform along several dims, of which only the last may be resized."""

    def strategies(call: OpCall) -> Strategies:
        x, points = call["x"], call["s"]
        dims = _named(call["dim"], points, x.ndim)
        points = [None] * len(dims) if points is None else [points] if isinstance(points, int) else list(points)
        if len(points) != len(dims):
            msg = f"s {points} and dims {dims} must have the same length"
            raise ValueError(msg)
        asked = [None if size in (None, -1) else size for size in points]
        sizes = [x.shape[dim] if size is None else size for dim, size in zip(dims, asked, strict=True)]
        if dims:
            sizes[-1] = last(x.shape[dims[-1]]) if asked[-1] is None else requested(asked[-1])
        return _transformed(call, dims, sizes)

    return strategies


def _named(dim: Any, points: Any, ndim: int) -> list[int]:
    if dim is not None:
        return [normalize_dim(d, ndim) for d in ((dim,) if isinstance(dim, int) else dim)]
    if points is None:
        return list(range(ndim))
    return list(range(ndim))[-(1 if isinstance(points, int) else len(points)) :]


KINDS: dict[str, tuple[Callable[[int], int], Callable[[int], int]]] = {
    "fft": (_same, _same),
    "ifft": (_same, _same),
    "rfft": (_half, _half),
    "ihfft": (_half, _half),
    "irfft": (_twice, _same),
    "hfft": (_twice, _same),
}
for _name, (_out, _requested) in KINDS.items():
    register_rule(Rule(_name, "x, n=None, dim=-1, norm=None", _one_dim(_out, requested=_requested)))
    register_rule(Rule(f"{_name}2", "x, s=None, dim=(-2, -1), norm=None", _several_dims(_out, requested=_requested)))
    register_rule(Rule(f"{_name}n", "x, s=None, dim=None, norm=None", _several_dims(_out, requested=_requested)))


# -- short-time transforms ---------------------------------------------------------------------------------------------

_FRAMES = (
    "x, n_fft, hop_length=None, win_length=None, window=None, center=True, {middle}"
    "normalized=False, onesided=None, {last}"
)


for _name, _signature in {
    "stft": _FRAMES.format(middle="pad_mode='reflect', ", last="return_complex=None, align_to_window=None"),
    "istft": _FRAMES.format(middle="", last="length=None, return_complex=False"),
}.items():
    register_rule(Rule(_name, _signature, whole))


# -- samples -----------------------------------------------------------------------------------------------------------

sample("fft rfft ihfft", real("abc"))
sample("fft rfft ihfft", real("ab"), 7, 0)
sample("fft ifft", complex_("ab"), norm="ortho")
sample("irfft hfft", complex_("ab"), 5)
sample("irfft hfft", complex_("a4c"), dim=1)
sample("fft2 rfft2 ihfft2", real("abc"))
sample("fftn rfftn ihfftn", real("abc"), dim=(1,))
sample("ifft2 ifftn", complex_("abc"), dim=(0, 2))
sample("irfft2 irfftn hfft2 hfftn", complex_("a34"), s=(3, 5), dim=(1, 2))
sample("fftn", real("abc"), s=(3, -1))
sample("stft", real("a", 19), 6, 2, window=between(0.5, 1.0, "6").fixed, return_complex=True)
sample("istft", complex_("a", 4, 7), 6, 2, window=between(0.5, 1.0, "6").fixed)
