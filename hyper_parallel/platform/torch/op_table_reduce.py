"""PyTorch's spellings of reductions, softmaxes and running sums."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.core.shard.entry import OpEntry
from hyper_parallel.core.shard.rule import find_rule
from hyper_parallel.core.shard.rules import reduce
from hyper_parallel.platform.torch.op_table_pointwise import keyword_call, routed

__all__ = ["LOCAL", "add_functions", "add_overloads"]

assert reduce.__name__  # noqa: S101 - imported for the rules that it registers

Spell = Callable[..., None]
aten = torch.ops.aten

SAME_NAME = [
    "sum", "nansum", "count_nonzero", "mean", "any", "all", "amax", "amin", "prod", "argmax", "argmin", "logsumexp",
    "cumsum", "cumprod", "logcumsumexp", "max", "min", "median", "nanmedian",
]  # fmt: skip
DECOMPOSED = ("max", "min", "median", "nanmedian")
AS_THEY_ARE = ("hash_tensor", "mode", "aminmax", "trace", "dist", "renorm", "cummax", "cummin")
VARIANCES = ("var", "std", "var_mean", "std_mean")


def _local_functions() -> dict[str, Callable[..., Any]]:
    plain = {name: getattr(torch, name) for name in SAME_NAME if name not in DECOMPOSED}
    local = {name: _without_none(keyword_call(func, find_rule(name).signature), func) for name, func in plain.items()}  # type: ignore[union-attr] # the family is loaded
    local.update((name, _variance(getattr(torch, name))) for name in VARIANCES)
    local["max_along"] = lambda x, dim, keepdim: torch.max(x, dim, keepdim)
    local["min_along"] = lambda x, dim, keepdim: torch.min(x, dim, keepdim)
    local["median_along"] = lambda x, dim, keepdim: torch.median(x, dim, keepdim)
    local["nanmedian_along"] = lambda x, dim, keepdim: torch.nanmedian(x, dim, keepdim)
    local["median_all"] = lambda x, skip_nan: torch.nanmedian(x) if skip_nan else torch.median(x)
    local["extreme_all"] = lambda x, largest: torch.max(x) if largest else torch.min(x)
    local["vector_norm"] = lambda x, ord, dim, keepdim, dtype: torch.linalg.vector_norm(  # noqa: A006 - its name
        x, ord, dim, keepdim, dtype=dtype
    )
    local["softmax"] = lambda x, dim, dtype: torch.softmax(x, dim, dtype)
    local["softmin"] = lambda x, dim, dtype: torch.softmax(-x, dim, dtype)
    for name in ("hash_tensor", "mode", "aminmax", "renorm", "cummax", "cummin"):
        local[name] = _given(getattr(torch, name), find_rule(name).signature)  # type: ignore[union-attr] # the family is loaded
    local["safe_softmax"] = lambda x, dim, dtype: aten._safe_softmax(x, dim, dtype)  # noqa: SLF001 - an operator's name
    backward = (aten._softmax_backward_data, aten._log_softmax_backward_data)  # noqa: SLF001 - operators' names
    for name, func in zip(("softmax_backward", "log_softmax_backward"), backward, strict=True):
        local[name] = keyword_call(func, find_rule(name).signature)  # type: ignore[union-attr] # as above
    local["log_softmax"] = lambda x, dim, dtype: torch.log_softmax(x, dim, dtype)
    return local


def _given(func: Callable[..., Any], signature: str) -> Callable[..., Any]:
    """``func`` by canonical names; it takes no None for a dim that is not given."""
    by_name = keyword_call(func, signature)
    short = keyword_call(func, ", ".join(part for part in signature.split(", ") if not part.startswith("dim=")))
    return lambda **given: short(**given) if given.get("dim", 0) is None else by_name(**given)


def _without_none(by_name: Callable[..., Any], func: Callable[..., Any]) -> Callable[..., Any]:
    """Some of PyTorch's reductions take no ``dim=None``, and then no ``keepdim`` either."""

    def call(x: Any, dim: Any = None, **rest: Any) -> Any:
        if dim is None:
            return _all_dims(func, x, rest)
        return by_name(x=x, dim=dim, **rest)

    return call


def _all_dims(func: Callable[..., Any], x: Tensor, rest: dict[str, Any]) -> Tensor:
    options = {} if rest.get("dtype") is None else {"dtype": rest["dtype"]}
    out = func(x, **options)
    return out.reshape((1,) * x.ndim) if rest.get("keepdim") else out


def _variance(func: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dim, correction, keepdim: func(x, dim=dim, correction=correction, keepdim=keepdim)


def add_functions(table: dict[Any, OpEntry], spell: Spell) -> None:
    """Add every spelling of the Python API."""
    for name in SAME_NAME:
        spell(name, getattr(torch, name), canonical=True)
        if hasattr(Tensor, name):
            spell(name, getattr(Tensor, name), canonical=True)
    for name, home in itertools.product(AS_THEY_ARE, (torch, Tensor)):
        if hasattr(home, name):
            spell(name, getattr(home, name))
    spell("renorm", Tensor.renorm_, in_place=True)
    for name, home in itertools.product(VARIANCES, (torch, Tensor)):
        if hasattr(home, name):
            _add_variance(table, home, name)
    for func in (torch.softmax, Tensor.softmax):
        spell("softmax", func, canonical=True)
    for func in (torch.log_softmax, Tensor.log_softmax):
        spell("log_softmax", func, canonical=True)
    for name in ("softmax", "log_softmax", "softmin"):
        spell(name, getattr(F, name), "x, dim, _stacklevel=3, dtype=None", canonical=False)
    spell("vector_norm", torch.linalg.vector_norm, canonical=True)
    spell("norm", torch.norm)
    spell("norm", Tensor.norm)


def _add_variance(table: dict[Any, OpEntry], home: Any, name: str) -> None:
    """Old calls say ``unbiased``, also as the first positional argument; new ones say ``correction``."""

    def run(ops: Any, x: Any, dim: Any, unbiased: Any, keepdim: Any, correction: Any) -> Any:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        if correction is None:
            correction = 1 if unbiased is None else int(unbiased)
        return getattr(ops, name)(x, dim, correction=correction, keepdim=keepdim)

    routed(table, getattr(home, name), "x, dim=None, unbiased=None, keepdim=False, *, correction=None", run)


OVERLOADS = {
    "sum": ("default", "dim_IntList"), "mean": ("default", "dim"), "any": ("default", "dim", "dims"),
    "all": ("default", "dim", "dims"), "amax": ("default",), "amin": ("default",), "argmax": ("default",),
    "argmin": ("default",), "logsumexp": ("default",), "cumsum": ("default",), "prod": ("default", "dim_int"),
    "count_nonzero": ("default", "dim_IntList"), "nansum": ("default",), "cumprod": ("default",),
    "logcumsumexp": ("default",), "max": ("default", "dim", "other"), "min": ("default", "dim", "other"),
    "median": ("default", "dim"), "nanmedian": ("default", "dim"), "mode": ("default",), "aminmax": ("default",),
    "trace": ("default",), "dist": ("default",), "renorm": ("default",), "cummax": ("default",),
    "cummin": ("default",), "hash_tensor": ("default",),
}  # fmt: skip


def add_overloads(spell: Spell) -> None:
    """Add what arrives from C++."""
    for name, overloads in OVERLOADS.items():
        for one in overloads:
            spell(name, getattr(getattr(aten, name), one), canonical=name not in AS_THEY_ARE)
    spell("safe_softmax", aten._safe_softmax.default)  # noqa: SLF001 - the same
    for one in ("ScalarOpt_dim", "Scalar", "ScalarOpt_dim_dtype", "ScalarOpt_dtype"):
        spell("norm", getattr(aten.norm, one), "x, p, dim=None, keepdim=False, *, dtype=None")
    spell("vector_norm", aten.linalg_vector_norm.default, canonical=True)
    spell("softmax", aten._softmax.default, "x, dim, half_to_float=False")  # noqa: SLF001 - an operator's name
    spell("log_softmax", aten._log_softmax.default, "x, dim, half_to_float=False")  # noqa: SLF001


LOCAL = _local_functions()
