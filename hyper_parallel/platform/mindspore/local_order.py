"""Order, Fourier transforms and linear algebra on plain MindSpore tensors, with canonical names and CPU kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Tensor, mint, ops

__all__ = ["LOCAL"]


def _order(x: Tensor, dim: int, *, descending: bool) -> Tensor:
    """Places in order, found on the host; equal elements keep theirs, and what is no number is the greatest."""
    values = x.asnumpy()
    if not x.ndim:
        return Tensor(np.zeros((), np.int64))
    if not descending:
        return Tensor(np.argsort(values, axis=dim, kind="stable").astype(np.int64))
    back = np.argsort(np.flip(values, dim), axis=dim, kind="stable")
    return Tensor((values.shape[dim] - 1 - np.flip(back, dim)).astype(np.int64))


def _sort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> tuple[Tensor, Tensor]:
    del stable  # always
    places = _order(x, dim, descending=descending)
    return (mint.gather(x, dim, places) if x.ndim else x * 1), places


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:  # noqa: A002
    del sorted  # always
    places = mint.narrow(_order(x, dim, descending=largest), dim, 0, k)
    return mint.gather(x, dim, places), places


def _kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    places = mint.narrow(_order(x, dim, descending=False), dim, k - 1, 1)
    found = mint.gather(x, dim, places)
    if keepdim:
        return found, places
    shape = tuple(size for at, size in enumerate(x.shape) if at != dim % x.ndim)
    return found.reshape(shape), places.reshape(shape)


def _cross(x: Tensor, y: Tensor, dim: int = -1) -> Tensor:
    def turned(one: Tensor, by: int) -> Tensor:
        return mint.cat([mint.narrow(one, dim, by, 3 - by), mint.narrow(one, dim, 0, by)], dim)

    return turned(x, 1) * turned(y, 2) - turned(x, 2) * turned(y, 1)


def _along(name: str) -> Callable[..., Tensor]:
    func = getattr(ops, name)
    return lambda x, n=None, dim=-1, norm=None: func(x, n, dim, norm)


def _over(name: str) -> Callable[..., Tensor]:
    func, every = getattr(ops, name), (-2, -1) if name.endswith("2") else None
    return lambda x, s=None, dim=every, norm=None: func(x, s, dim, norm)


# The kernels of hfft and ihfft are right in every other call only; these are the transforms that they are made of.
TURNED = {None: "forward", "backward": "forward", "forward": "backward", "ortho": "ortho"}


def _from_half(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        sizes, norm = _norm_apart(args, kwargs)
        return compute(ops.conj(x), *sizes, norm=norm, **kwargs)

    return run


def _to_half(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        sizes, norm = _norm_apart(args, kwargs)
        return ops.conj(compute(x, *sizes, norm=norm, **kwargs))

    return run


def _norm_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], str]:
    """Size and dim, and the norm of the transform that this one is made of; it may come third."""
    norm = args[2] if len(args) > 2 else kwargs.pop("norm", None)
    return args[:2], TURNED[norm]


def _matrix_power(x: Tensor, n: int) -> Tensor:
    """By squaring: the kernel's gradient is wrong in float64."""
    if n < 0:
        return _matrix_power(ops.inverse(x), -n)
    found, square = None, x
    while n:
        if n % 2:
            found = square if found is None else mint.matmul(found, square)
        n //= 2
        square = mint.matmul(square, square) if n else square
    if found is not None:
        return found if found is not x else x * 1
    whole = Tensor(np.eye(x.shape[-1])).astype(x.dtype)
    return x * 0 + whole


def _pick(x: Tensor, drawn: Tensor, num_samples: int, replacement: bool) -> Tensor:
    """Places by their weights: the first to arrive, or where each number falls among the weights' running sum."""
    weights, numbers = x.asnumpy().astype(np.float64), drawn.asnumpy()
    positive = weights > 0
    if (weights < 0).any() or not np.isfinite(weights).all() or not positive.any(-1).all():
        msg = "multinomial: weights must be finite, not negative, and not all zero"
        raise RuntimeError(msg)
    if replacement:
        running = weights.cumsum(-1)
        found = (running[..., None, :] <= (numbers * running[..., -1:])[..., None]).sum(-1)
        last = np.where(positive, np.arange(weights.shape[-1]), 0).max(-1, keepdims=True)
        return Tensor(np.minimum(found, last).astype(np.int64))
    if (positive.sum(-1) < num_samples).any():
        msg = f"multinomial: fewer than {num_samples} weights are positive, and none may be drawn twice"
        raise RuntimeError(msg)
    arrivals = np.where(positive, weights / -np.log1p(-numbers), -1.0)
    return Tensor(np.argsort(-arrivals, -1, kind="stable")[..., :num_samples].astype(np.int64))


KINDS = ("fft", "ifft", "rfft", "irfft")
TRANSFORMS: dict[str, Callable[..., Tensor]] = {
    **{name: _along(name) for name in KINDS},
    **{f"{name}{more}": _over(f"{name}{more}") for name in KINDS for more in ("2", "n")},
}

LOCAL: dict[str, Callable[..., Any]] = {
    "sort": _sort,
    "argsort": lambda x, dim=-1, descending=False, stable=False: _order(x, dim, descending=descending),  # noqa: ARG005
    "topk": _topk,
    "kthvalue": _kthvalue,
    "cross": _cross,
    "inv": lambda x: ops.inverse(x),
    "matrix_power": _matrix_power,
    "pick": _pick,
    "cholesky": lambda x, upper=False: ops.cholesky(x, upper),
    "det": lambda x: ops.det(x),
    "slogdet": lambda x: tuple(ops.slogdet(x)),
    **TRANSFORMS,
    **{f"hfft{more}": _from_half(TRANSFORMS[f"irfft{more}"]) for more in ("", "2", "n")},
    **{f"ihfft{more}": _to_half(TRANSFORMS[f"rfft{more}"]) for more in ("", "2", "n")},
}
