"""``torch.distributed``'s own collectives, agreed upon before they start."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["guard_functions"]

_OURS = f"{__package__}."  # the transport's own calls are agreed upon before, as what they are part of


def guard_functions(agree: Callable[..., None]) -> None:
    """Let ``torch.distributed``'s own collectives in this process be agreed upon first, too: users call them.

    Args:
        agree: called with the name, the ranks of the group and the facts on which all members must agree, before the
            collective starts; see :class:`hyper_parallel.transport.guarded.GuardedTransport`.
    """
    for name, facts in _GUARDED.items():
        guarded = _guarded(name, getattr(distributed_c10d, name), facts, agree)
        setattr(distributed_c10d, name, guarded)
        setattr(dist, name, guarded)


def _guarded(name: str, plain: Callable[..., Any], facts: Callable[..., Any], agree: Callable[..., None]) -> Any:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = str(sys._getframe(1).f_globals.get("__name__"))  # noqa: SLF001 - the only cheap way to a caller
        if caller != distributed_c10d.__name__ and not caller.startswith(_OURS):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            ranks = tuple(dist.get_process_group_ranks(_group(given)))
            if dist.get_rank() in ranks:
                agree(f"dist.{name}", ranks, facts(given), wait=not given.get("async_op"))
        return plain(*args, **kwargs)

    return call


def _tensor_facts(x: torch.Tensor) -> tuple[tuple[str, Any], ...]:
    return (("shape", tuple(x.shape)), ("dtype", str(x.dtype)))


def _reduction(given: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return (("reduction", str(given["op"]).rpartition(".")[2]),)


# What every member must say alike, by name of the function; what may differ between members is left out.
_GUARDED: dict[str, Callable[[Mapping[str, Any]], tuple[tuple[str, Any], ...]]] = {
    "all_reduce": lambda given: (*_tensor_facts(given["tensor"]), *_reduction(given)),
    "reduce": lambda given: (*_tensor_facts(given["tensor"]), *_reduction(given), ("dst", _peer(given, "dst"))),
    "broadcast": lambda given: (*_tensor_facts(given["tensor"]), ("src", _peer(given, "src"))),
    "all_gather": lambda given: _tensor_facts(given["tensor"]),
    "all_gather_into_tensor": lambda given: _tensor_facts(given["input_tensor"]),
    "reduce_scatter": lambda given: (("dtype", str(given["output"].dtype)), *_reduction(given)),
    "reduce_scatter_tensor": lambda given: (*_tensor_facts(given["output"]), *_reduction(given)),
    "all_to_all": lambda given: (("dtype", str(given["input_tensor_list"][0].dtype)),),
    "all_to_all_single": lambda given: (("dtype", str(given["input"].dtype)),),
    "gather": lambda given: (*_tensor_facts(given["tensor"]), ("dst", _peer(given, "dst"))),
    "scatter": lambda given: (*_tensor_facts(given["tensor"]), ("src", _peer(given, "src"))),
    "all_gather_object": lambda _given: (),
    "broadcast_object_list": lambda given: (("src", _peer(given, "src")),),
    "gather_object": lambda given: (("dst", _peer(given, "dst")),),
    "scatter_object_list": lambda given: (("src", _peer(given, "src")),),
    "barrier": lambda _given: (),
}


def _group(given: Mapping[str, Any]) -> Any:
    group = given.get("group")
    return dist.group.WORLD if group is None else group


def _peer(given: Mapping[str, Any], name: str) -> int:
    """Global rank of the root, which may be given within the group; rank 0 without either."""
    inside = given.get(f"group_{name}")
    return int(given[name] or 0 if inside is None else dist.get_global_rank(_group(given), inside))
