"""Fourier transforms of MindSpore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Tensor, ops

from hyper_parallel.platform.mindspore.ops.kernels import single_precision
from hyper_parallel.platform.mindspore.ops.registry import decomposition, kernel, spellings
from hyper_parallel.platform.mindspore.versions import op_enum

__all__: list[str] = []

spellings("""
FFT fft  IFFT ifft  HFFT hfft  IHFFT ihfft  RFFT rfft  IRFFT irfft  FFT2 fft2  IFFT2 ifft2  HFFT2 hfft2
IHFFT2 ihfft2  RFFT2 rfft2  IRFFT2 irfft2  FFTN fftn  IFFTN ifftn  HFFTN hfftn  IHFFTN ihfftn  RFFTN rfftn
IRFFTN irfftn
""")

# -- kernels -----------------------------------------------------------------------------------------------------------


# MindSpore's Python layer passes norms by number.
_NORMS = {op_enum.str_to_enum("FFT", "norm", name): name for name in ("backward", "forward", "ortho")}


def _one_dim(name: str) -> Callable[..., Tensor]:
    func = getattr(ops, name)
    return lambda x, n=None, dim=-1, norm=None: func(x, n, dim, _NORMS.get(norm, norm))


def _several_dims(name: str) -> Callable[..., Tensor]:
    func, default = getattr(ops, name), (-2, -1) if name.endswith("2") else None
    return lambda x, s=None, dim=default, norm=None: func(x, s, dim, _NORMS.get(norm, norm))


# The kernels of hfft and ihfft are wrong in every second call, so both are computed by irfft and rfft.
OPPOSITE_NORM = {None: "forward", "backward": "forward", "forward": "backward", "ortho": "ortho"}


def _from_half(transform: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def compute(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        sizes, norm = _sizes_and_norm(args, kwargs)
        return transform(ops.conj(single_precision(x)), *sizes, norm=norm, **kwargs)

    return compute


def _to_half(transform: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def compute(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        sizes, norm = _sizes_and_norm(args, kwargs)
        return ops.conj(transform(x, *sizes, norm=norm, **kwargs))

    return compute


def _sizes_and_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], str]:
    """Return the arguments for size and dim, and the opposite norm; the norm may be the third argument."""
    norm = args[2] if len(args) > 2 else kwargs.pop("norm", None)
    return args[:2], OPPOSITE_NORM[_NORMS.get(norm, norm)]


for _dims in ("", "2", "n"):
    _by_name = {
        name: (_several_dims if _dims else _one_dim)(f"{name}{_dims}") for name in ("fft", "ifft", "rfft", "irfft")
    }
    for _name, _transform in _by_name.items():
        kernel(f"{_name}{_dims}")(_transform)
    kernel(f"hfft{_dims}")(_from_half(_by_name["irfft"]))
    kernel(f"ihfft{_dims}")(_to_half(_by_name["rfft"]))

# -- decompositions ----------------------------------------------------------------------------------------------------


@decomposition("FFTShift")
def _shift(ops: Any, _: Any, x: Any, dim: Any = None) -> Any:
    """Swap the halves of each dim."""
    dims = _all_dims(x, dim)
    return ops.roll(x, tuple(x.shape[index] // 2 for index in dims), dims)


@decomposition("IFFTShift")
def _shift_back(ops: Any, _: Any, x: Any, dim: Any = None) -> Any:
    dims = _all_dims(x, dim)
    return ops.roll(x, tuple(-(x.shape[index] // 2) for index in dims), dims)


def _all_dims(x: Any, dim: Any) -> tuple[int, ...]:
    if dim is None:
        return tuple(range(x.ndim))
    return (dim,) if isinstance(dim, int) else tuple(dim)
